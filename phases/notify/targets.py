"""Where a message goes: a program, or an address. One attempt at a time; who retries is `phases.notify.notifier`.

What went wrong is told in words made here, never in those of a library or a server: they would hold addresses and tokens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from phases.base.errors import PhaseError
from phases.notify.message import Event, Message, escaped
from phases.notify.settings import HookSettings, NotifySettings, WebhookSettings

THREADS = "notify"  # names of the threads that deliver begin with it
_RETRIED = {408, 425, 429, *range(500, 600)}
_MAX_SECRET = 8192  # bytes of a url_file or token_file
_MOST_HANGING = 4  # attempts at one address that are over for us and not yet for its server


class DeliveryError(PhaseError):
    """One attempt failed. `again` says whether another may help; `after` how long the target asked to be left alone, in seconds."""

    stage = "notify"

    def __init__(self, message: str, *, again: bool, after: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.again, self.after = again, after


class Target(Protocol):
    """A place messages go to."""

    @property
    def name(self) -> str:
        """What people call it by; no secret."""
        ...

    @property
    def events(self) -> tuple[Event, ...]: ...

    @property
    def retries(self) -> int: ...

    def ready(self) -> None:
        """DeliveryError when it lacks something that can be seen without sending."""
        ...

    def deliver(self, message: Message) -> None:
        """One attempt; DeliveryError."""
        ...

    def abandon(self) -> None:
        """End an attempt under way in another thread."""
        ...


def targets_of(
    settings: NotifySettings, base: Path, environment: Mapping[str, str] | None = None
) -> tuple[Target, ...]:
    """All targets of a playbook; relative files are looked for from `base`."""
    env = os.environ if environment is None else environment
    return (*(Webhook(one, base, env) for one in settings.webhooks), *(Hook(one, base) for one in settings.hooks))


class _Configured:
    """What targets take from their settings as it is."""

    settings: HookSettings | WebhookSettings

    @property
    def events(self) -> tuple[Event, ...]:
        return self.settings.events

    @property
    def retries(self) -> int:
        return self.settings.retries


@dataclass
class Hook(_Configured):
    """A program, started for each message in a session of its own so that it can be ended with its process group."""

    settings: HookSettings
    base: Path
    output: int = subprocess.DEVNULL  # it may print what is none of a log's business
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def name(self) -> str:
        return f"hook {Path(self.settings.run[0]).name}"

    def ready(self) -> None:
        import shutil

        program = self.settings.run[0]
        if shutil.which(program if "/" not in program else str(self.base / program)) is None:
            raise DeliveryError(
                "there is no such program, or it may not be run.",
                again=False,
                hint="Give `run` a path, and the file its x bit.",
            )

    def deliver(self, message: Message) -> None:
        body = json.dumps(message.to_json()).encode()
        try:
            with self._lock:
                self._process = subprocess.Popen(
                    self.settings.run,
                    stdin=subprocess.PIPE,
                    stdout=self.output,
                    stderr=self.output,
                    cwd=self.base,
                    env={**os.environ, **message.environment()},
                    start_new_session=True,
                )
        except OSError as fault:
            raise DeliveryError(
                f"it cannot be started ({fault.strerror}).",
                again=False,
                hint="Give `run` a path, and the file its x bit.",
            ) from None
        process = self._process
        try:
            process.communicate(body, timeout=self.settings.timeout)
        except subprocess.TimeoutExpired:
            self.abandon()
            raise DeliveryError(
                f"it took longer than {self.settings.timeout:g} s and was stopped.", again=True
            ) from None
        except OSError:  # it does not read its stdin: its exit code says whether that was meant
            process.wait()
        if process.returncode:
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            raise DeliveryError(f"it failed ({how}).", again=True, hint="See its output with `phase notify test`.")

    def abandon(self) -> None:
        with self._lock:
            process = self._process
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


@dataclass
class Webhook(_Configured):
    """An address. Redirects are not followed: a POST that turns into a GET elsewhere would look delivered."""

    settings: WebhookSettings
    base: Path
    environment: Mapping[str, str]
    _attempts: list[threading.Thread] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        if self.settings.url_env:
            return f"webhook ${self.settings.url_env}"
        if self.settings.url_file is not None:
            return f"webhook of {self.settings.url_file.name}"
        return f"webhook {urlsplit(self.settings.url).hostname}"

    def ready(self) -> None:
        self._address()
        self._token()

    def in_the_clear(self) -> bool:
        """Whether a token would be sent over a network unencrypted. DeliveryError when address or token are not there."""
        try:
            parts = urlsplit(self._address())
            host = parts.hostname or ""
        except ValueError:  # no address at all: what delivering says
            return False
        return (
            bool(self._token())
            and parts.scheme == "http"
            and host not in ("localhost", "::1")
            and not host.startswith("127.")
        )

    def deliver(self, message: Message) -> None:
        import requests

        _quiet_urllib3()
        address, token = self._address(), self._token()
        body = message.to_json()
        body["text"] = escaped(body["text"])
        try:
            answer = self._bounded(
                lambda: requests.post(
                    address,
                    json=body,
                    timeout=self.settings.timeout,
                    allow_redirects=False,
                    auth=_Bearer(token),
                    stream=True,
                )
            )
        except (requests.Timeout, queue.Empty):
            raise DeliveryError(f"it did not answer within {self.settings.timeout:g} s.", again=True) from None
        except requests.exceptions.SSLError:
            raise DeliveryError(
                "its certificate is not trusted.", again=False, hint="See REQUESTS_CA_BUNDLE."
            ) from None
        except requests.ConnectionError:
            raise DeliveryError("no connection: refused, broken off, or an unknown host.", again=True) from None
        except (requests.RequestException, ValueError):  # ValueError: an address with a port of letters, say
            raise DeliveryError("its address is not one that can be sent to.", again=False) from None
        except OSError:
            raise DeliveryError(
                "the file of trusted certificates is not there.", again=False, hint="See REQUESTS_CA_BUNDLE."
            ) from None
        with answer:  # the body is not read: it might echo the address, and might never end
            _require_taken(answer.status_code, answer.headers.get("Retry-After", ""))

    def abandon(self) -> None:
        """Its socket has a timeout of its own, and its thread does not keep the process alive."""

    def _bounded(self, post: Callable[[], Any]) -> Any:
        """What `post` returns or raises, queue.Empty when it takes longer than the timeout.

        The timeout of requests is that of one read, so that a server which sends a byte now and then, or a name that is looked up
        for minutes, would keep an attempt going.
        """
        self._attempts = [thread for thread in self._attempts if thread.is_alive()]
        if len(self._attempts) >= _MOST_HANGING:
            raise DeliveryError(f"{_MOST_HANGING} earlier attempts still hang.", again=True)
        ended: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def attempt() -> None:
            try:
                ended.put((post(), None))
            except Exception as fault:  # noqa: BLE001 - raised again by who waits
                ended.put((None, fault))

        self._attempts.append(threading.Thread(target=attempt, name=f"{THREADS}-attempt", daemon=True))
        self._attempts[-1].start()
        answer, fault = ended.get(timeout=self.settings.timeout)
        if fault:
            raise fault
        return answer

    def _address(self) -> str:
        settings = self.settings
        found = settings.url or self._secret(settings.url_env, settings.url_file, "address")
        if not found.startswith(("http://", "https://")) or any(ch.isspace() for ch in found):
            raise DeliveryError("what it is given as address is not one (http:// or https://).", again=False)
        return found

    def _token(self) -> str:
        return self._secret(self.settings.token_env, self.settings.token_file, "token")

    def _secret(self, variable: str, file: Path | None, what: str) -> str:
        """A secret where the playbook says it is; empty where it names no place."""
        if variable:
            found = self.environment.get(variable, "").strip()
            if not found:
                raise DeliveryError(f"the environment variable {variable} with its {what} is not set.", again=False)
        elif file is not None:
            try:
                with open(self.base / file.expanduser(), encoding="utf-8", opener=_without_waiting) as handle:
                    found = handle.read(_MAX_SECRET).partition("\n")[0].strip()
            except (OSError, UnicodeError) as fault:
                why = fault.strerror if isinstance(fault, OSError) else "not UTF-8"
                raise DeliveryError(f"the file {file} with its {what} cannot be read ({why}).", again=False) from None
            if not found:
                raise DeliveryError(f"the file {file} with its {what} is empty.", again=False)
        else:
            return ""
        if not found.isascii() or not found.isprintable():
            raise DeliveryError(f"its {what} holds characters that no {what} has.", again=False)
        return found


class _Bearer:
    """Sets the token, or nothing; given as `auth`, so that requests does not look into ~/.netrc and send what it finds there."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, request: Any) -> Any:
        if self.token:
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe that nobody writes to at once, as an empty file: a rollback reads this too, and must not wait for it."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _require_taken(status: int, retry_after: str) -> None:
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise DeliveryError(
            f"it redirects (status {status}), which is not followed.", again=False, hint="Give the final address."
        )
    after = min(float(retry_after), 60.0) if retry_after.isdecimal() else 0.0
    raise DeliveryError(f"it answered with status {status}.", again=status in _RETRIED, after=after)


def _quiet_urllib3() -> None:
    """Keep the paths of addresses out of a debug log: urllib3 writes every request it sends there."""
    for name in ("urllib3.connectionpool", "urllib3.util.retry"):
        logger = logging.getLogger(name)
        if _not_from_here not in logger.filters:
            logger.addFilter(_not_from_here)


def _not_from_here(record: logging.LogRecord) -> bool:
    return not (record.threadName or "").startswith(THREADS)
