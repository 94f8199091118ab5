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

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from phases.notify.message import Event
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting

_ENV = r"|[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class HookSettings:
    """A program that is started for each message: the message is JSON on its stdin, PHASE_EVENT, PHASE_TEXT and others in its environment."""

    run: tuple[str, ...] = setting(help="argv; no shell looks at it", not_empty=True, examples=(["/usr/local/bin/page-oncall", "--team", "inference"],))
    events: tuple[Event, ...] = setting((), help="which events; none: all")
    timeout: float = setting(15.0, help="it is stopped after this, with everything it started", duration=True, above=0, at_most=600)
    retries: int = setting(0, help="how often it is started again when it fails", at_least=0, at_most=10)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if not self.run[0].strip() or any("\0" in part for part in self.run):
            mistakes.add(node.get("run") or node, f"{node.path}: `run` must begin with a program")


@dataclass(frozen=True)
class WebhookSettings:
    """An address that gets each message as a JSON body by POST; its `text` is what Slack and Mattermost show."""

    url: str = setting("", help="the address, where it is no secret", pattern=r"|https?://\S+")
    url_env: str = setting("", help="environment variable that holds the address", pattern=_ENV)
    url_file: Path | None = setting(None, help="file whose first line is the address")
    token_env: str = setting("", help="environment variable that holds a token, sent as `Authorization: Bearer`", pattern=_ENV)
    token_file: Path | None = setting(None, help="file whose first line is that token")
    events: tuple[Event, ...] = setting((), help="which events; none: all")
    timeout: float = setting(10.0, help="time an attempt may take", duration=True, above=0, at_most=120)
    retries: int = setting(3, help="further attempts when it does not answer, or answers 429 or 5xx", at_least=0, at_most=10)

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if sum((bool(self.url), bool(self.url_env), self.url_file is not None)) != 1:
            mistakes.add(node, f"{node.path}: give exactly one of url, url_env and url_file")
        if self.token_env and self.token_file is not None:
            mistakes.add(node, f"{node.path}: give one of token_env and token_file")
        where = node.get("url") or node
        try:
            parts = urlsplit(self.url)
            if parts.username or parts.password:
                mistakes.add(where, f"{node.path}: a password does not belong into the playbook; use url_env or url_file")
            elif self.url and not parts.hostname:
                mistakes.add(where, f"{node.path}: the address names no host")
        except ValueError:
            mistakes.add(where, f"{node.path}: `url` is no address")


@dataclass(frozen=True)
class NotifySettings:
    """Who is told of gates, rollbacks and regressions."""

    hooks: tuple[HookSettings, ...] = setting((), help="programs")
    webhooks: tuple[WebhookSettings, ...] = setting((), help="addresses")
    flush: float = setting(20.0, help="time a command waits at its end for messages still under way", duration=True, at_least=0, at_most=300)
