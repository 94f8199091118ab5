"""Router drivers: put workers into and out of service, and see what really gets requests.

sglang-router answers 202 to an addition or removal and does it later, also for a worker that is dead or known already, so
everything is observed afterwards. It has no weights: the share of a set of workers is its share of the healthy workers. A
removal stops new requests at once and lets those in flight finish; only the worker itself can tell when they have.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import requests

from phases.base.clock import Clock
from phases.engines.ssh.errors import RouterError

POLL_SECONDS = 0.2
HTTP_SECONDS = 10.0


@dataclass(frozen=True)
class RoutedWorker:
    """A worker as the router sees it."""

    url: str
    healthy: bool
    id: str = ""
    load: int = 0


class RouterDriver(Protocol):
    name: str

    def workers(self) -> tuple[RoutedWorker, ...]:
        """Workers in service, from the router itself. RouterError when it cannot be asked."""
        ...

    def add(self, url: str) -> None:
        """Put into service; returns when the router has it and finds it healthy. Nothing to do if it has it already."""
        ...

    def remove(self, url: str) -> None:
        """Take out of service; returns when the router does not list it any more. Nothing to do if it does not."""
        ...


def share(workers: Sequence[RoutedWorker], urls: Collection[str]) -> float:
    """Share of new requests that go to `urls`, 0 to 1: their share of the healthy workers (an alias counts again).

    RouterError when no worker is healthy: there is nothing to have a share of.
    """
    wanted = {_plain(url) for url in urls}
    healthy = [worker for worker in workers if worker.healthy]
    if not healthy:
        raise RouterError(
            "no worker behind the router is healthy.", hint="Start one before anything else; users get errors now."
        )
    return sum(_plain(worker.url) in wanted for worker in healthy) / len(healthy)


def drain(router: RouterDriver, url: str, running: Callable[[], float | None], clock: Clock, timeout: float) -> bool:
    """Remove a worker and wait until it has no requests left.

    Args:
        running: asks the worker itself how many it is working on; None when it does not answer, which counts as done
            only for a worker that has been removed (it is gone, and so are they).
    Returns: True when it was seen empty, False when requests were still running after `timeout` seconds.
    """
    router.remove(url)
    until = clock.monotonic() + timeout
    while True:
        left = running()
        if not left:
            return True
        if clock.monotonic() >= until:
            return False
        clock.sleep(POLL_SECONDS)


class SglangRouter:
    """sglang-router's HTTP interface."""

    name = "sglang"

    def __init__(self, url: str, clock: Clock, *, timeout: float = 60.0, api_key: str = "") -> None:
        self.url, self.clock, self.timeout = _plain(url), clock, timeout
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy between us and the router would hide which worker is which
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def workers(self) -> tuple[RoutedWorker, ...]:
        listed = self._call("GET", "/workers")
        try:
            return tuple(
                RoutedWorker(_plain(w["url"]), bool(w["is_healthy"]), str(w["id"]), int(w.get("load", 0)))
                for w in listed["workers"]
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise RouterError(
                f"{self.url}/workers answers in a form not known here ({fault!r}).",
                hint="Is this an sglang-router 0.3?",
            ) from None

    def add(self, url: str) -> None:
        url = _plain(url)
        found = self._find(url)
        identity = found.id if found else ""
        if not found:
            identity = str(self._call("POST", "/workers", {"url": url}).get("worker_id", ""))
        if not self._until(lambda: (worker := self._find(url)) is not None and worker.healthy):
            why = self._why(identity)
            if not found:
                self._withdraw(identity)
            raise RouterError(
                f"{self.url} did not take {url} into service within {self.timeout:g} s{why}.",
                hint="Look at the worker's log and whether the router can reach that address; it gets no requests.",
            )

    def remove(self, url: str) -> None:
        url = _plain(url)
        while_listed = [worker for worker in self.workers() if worker.url == url]
        for worker in while_listed:
            self._call("DELETE", f"/workers/{worker.id}", missing_is_fine=True)
        if not self._until(lambda: self._find(url) is None):
            raise RouterError(
                f"{self.url} still lists {url} after {self.timeout:g} s.",
                hint="It may still send it requests: stop the worker, or restart the router.",
            )

    def _find(self, url: str) -> RoutedWorker | None:
        return next((worker for worker in self.workers() if worker.url == url), None)

    def _until(self, true: Callable[[], bool]) -> bool:
        until = self.clock.monotonic() + self.timeout
        while not true():
            if self.clock.monotonic() >= until:
                return False
            self.clock.sleep(POLL_SECONDS)
        return True

    def _why(self, identity: str) -> str:
        """What the router says about an addition that does not get through; "" when it says nothing."""
        try:
            job = self._call("GET", f"/workers/{identity}").get("job_status") or {}
        except RouterError:
            return ""
        return f" ({job.get('message') or job.get('status')})" if job else ""

    def _withdraw(self, identity: str) -> None:
        """The router goes on trying to add a dead worker; call that off, as far as it lets us."""
        try:
            self._call("DELETE", f"/workers/{identity}", missing_is_fine=True)
        except RouterError:
            return

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, missing_is_fine: bool = False
    ) -> dict[str, Any]:
        try:
            answer = self._session.request(method, self.url + path, json=body, timeout=HTTP_SECONDS)
        except requests.RequestException as fault:
            raise RouterError(
                f"{self.url} does not answer ({type(fault).__name__}).",
                hint="Is the router running, and is its `url` right?",
            ) from None
        if answer.status_code == 404 and missing_is_fine:
            return {}
        if answer.status_code in (401, 403):
            raise RouterError(
                f"{self.url} refuses us ({answer.status_code}).",
                hint="Set `router.api_key_env` to the variable that holds its key.",
            )
        if answer.status_code not in (200, 202):
            raise RouterError(
                f"{method} {self.url}{path} gave {answer.status_code}: {answer.text[:200]}",
                hint="Look at the router's log.",
            )
        try:
            return dict(answer.json())
        except (ValueError, TypeError):
            raise RouterError(f"{self.url}{path} does not answer JSON.", hint="Is this really sglang-router?") from None


class HookRouter:
    """For a fleet behind something else: argv hooks run on this machine, {url} filled in.

    Without hooks nothing is in service as far as we know, and every change is refused.
    """

    name = "none"

    def __init__(
        self, add: Sequence[str], remove: Sequence[str], observe: Sequence[str], clock: Clock, *, timeout: float = 60.0
    ) -> None:
        self._add, self._remove, self._observe = tuple(add), tuple(remove), tuple(observe)
        self.clock, self.timeout = clock, timeout

    def workers(self) -> tuple[RoutedWorker, ...]:
        """URLs that `observe` prints, as a JSON list or one a line; each counts as healthy."""
        out = self._run(self._observe, "observe", "").strip()
        try:
            urls = (
                json.loads(out) if out.startswith("[") else [line.strip() for line in out.splitlines() if line.strip()]
            )
        except ValueError:
            raise RouterError(
                f"the observe hook printed neither a JSON list nor lines: {out[:100]!r}.", hint="Print one URL a line."
            ) from None
        return tuple(RoutedWorker(_plain(str(url)), True) for url in urls)

    def add(self, url: str) -> None:
        self._change(self._add, "add", url, True)

    def remove(self, url: str) -> None:
        self._change(self._remove, "remove", url, False)

    def _change(self, hook: tuple[str, ...], name: str, url: str, wanted: bool) -> None:
        url = _plain(url)
        if self._has(url) is wanted:
            return
        self._run(hook, name, url)
        until = self.clock.monotonic() + self.timeout
        while self._has(url) is not wanted:
            if self.clock.monotonic() >= until:
                state = "not in service" if wanted else "still in service"
                raise RouterError(
                    f"{url} is {state} {self.timeout:g} s after the {name} hook ran.",
                    hint="Check the hooks against each other.",
                )
            self.clock.sleep(POLL_SECONDS)

    def _has(self, url: str) -> bool:
        return any(worker.url == url for worker in self.workers())

    def _run(self, hook: tuple[str, ...], name: str, url: str) -> str:
        if not hook:
            raise RouterError(
                f"there is no `{name}` hook.",
                hint="Give `router` the hooks add, remove and observe, or `kind: sglang`.",
            )
        argv = [part.replace("{url}", url) for part in hook]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.timeout, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise RouterError(f"the {name} hook {argv[0]} cannot be run: {fault}.", hint="Check its path.") from None
        if done.returncode != 0:
            raise RouterError(
                f"the {name} hook ended with status {done.returncode}: {done.stderr.strip()[-200:]}",
                hint="Run it by hand.",
            )
        return done.stdout


def make_router(settings: Any, clock: Clock) -> RouterDriver:
    """The driver for `phases.engines.ssh.settings.RouterSettings`."""
    if settings.kind.value == "sglang":
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        return SglangRouter(settings.url, clock, timeout=settings.timeout, api_key=key)
    return HookRouter(settings.add, settings.remove, settings.observe, clock, timeout=settings.timeout)


def _plain(url: str) -> str:
    return url.rstrip("/")
