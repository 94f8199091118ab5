"""The playbook's `notify` section.

notify:
  webhooks:
    - url_env: SLACK_WEBHOOK_URL            # the address is a secret: it stays out of the playbook
    - url_file: /etc/phasegate/pager.url
      token_env: PAGER_TOKEN                # sent as `Authorization: Bearer …`
      events: [gate-failed, rollback-started, rollback-ended, regression]
  hooks:
    - run: [/usr/local/bin/page-oncall, --team, inference]     # the message as JSON on stdin
      events: [rollback-started, rollback-ended]
      timeout: 15s
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from phases.notify.message import Event
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting

_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class HookSettings:
    """A program that is started for each message: the message is JSON on its stdin, PHASE_EVENT, PHASE_TEXT and others in its environment."""

    run: tuple[str, ...] = setting(
        help="argv; no shell looks at it",
        not_empty=True,
        examples=(["/usr/local/bin/page-oncall", "--team", "inference"],),
    )
    events: tuple[Event, ...] = setting((), help="which events; none: all")
    timeout: float = setting(
        15.0, help="it is stopped after this, with its process group", duration=True, above=0, at_most=600
    )
    retries: int = setting(0, help="how often it is started again when it fails", at_least=0, at_most=10)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if not self.run[0].strip() or any("\0" in part for part in self.run):
            mistakes.add(node.get("run") or node, f"{node.path}: `run` must begin with a program")


@dataclass(frozen=True)
class WebhookSettings:
    """An address that gets each message as a JSON body by POST; its `text` is what Slack and Mattermost show."""

    url: str = setting("", help="the address (http:// or https://), where it is no secret")
    url_env: str = setting("", help="environment variable that holds the address")
    url_file: Path | None = setting(None, help="file whose first line is the address; from the playbook's directory")
    token_env: str = setting("", help="environment variable that holds a token, sent as `Authorization: Bearer`")
    token_file: Path | None = setting(None, help="file whose first line is that token")
    events: tuple[Event, ...] = setting((), help="which events; none: all")
    timeout: float = setting(10.0, help="time an attempt may take", duration=True, above=0, at_most=120)
    retries: int = setting(
        3, help="further attempts when it does not answer, or answers 429 or 5xx", at_least=0, at_most=10
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if sum((bool(self.url), bool(self.url_env), self.url_file is not None)) != 1:
            mistakes.add(node, f"{node.path}: give exactly one of url, url_env and url_file")
        if self.token_env and self.token_file is not None:
            mistakes.add(node, f"{node.path}: give one of token_env and token_file")
        for key in ("url_env", "token_env"):
            if (value := getattr(self, key)) and not _ENV.fullmatch(value):
                mistakes.add(
                    node.get(key) or node,
                    f"{node.path}: `{key}` must be the name of an environment variable, which holds the secret itself",
                )
        if self.url_file is not None and ":/" in str(self.url_file):
            mistakes.add(
                node.get("url_file") or node,
                f"{node.path}: `url_file` must be the path of a file, which holds the address itself",
            )
        if self.url and (problem := _address_problem(self.url)):
            mistakes.add(node.get("url") or node, f"{node.path}: {problem}")


def _address_problem(url: str) -> str:
    """What is wrong with an address, without showing it: it may hold a secret."""
    try:
        parts = urlsplit(url)
        if parts.username or parts.password:
            return "a password does not belong into the playbook; use url_env or url_file"
        fine = parts.scheme in ("http", "https") and parts.hostname and not any(char.isspace() for char in url)
    except ValueError:
        fine = False
    return "" if fine else "`url` is no address that begins with http:// or https://"


@dataclass(frozen=True)
class NotifySettings:
    """Who is told of gates, rollbacks and regressions."""

    hooks: tuple[HookSettings, ...] = setting((), help="programs")
    webhooks: tuple[WebhookSettings, ...] = setting((), help="addresses")
    flush: float = setting(
        20.0,
        help="time a command waits at its end for messages still under way",
        duration=True,
        at_least=0,
        at_most=300,
    )
