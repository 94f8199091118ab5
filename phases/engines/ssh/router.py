"""Router drivers: put workers into and out of service, and see what really gets requests.

sglang-router answers 202 to an addition or removal and does it later, also for a worker that is dead or known already, so
everything is observed afterwards. It has no weights: the share of a set of workers is its share of the healthy workers. A
removal stops new requests at once and lets those in flight finish; only the worker itself can tell when they have.

A worker may have several entries: one for each rank behind a router started with --dp-aware, or other spellings of its address. They move
together (`placing`): it is out when none is listed and none is left that may be it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import requests

from phases.base.clock import Clock
from phases.engines.ssh.errors import RouterError
from phases.engines.ssh.host import Host
from phases.engines.ssh.placing import CURE, AddressBook, RoutedWorker, entries_of
from phases.serving.address import Names, WorkerAddress, canonical
from phases.serving.in_flight import InFlight

POLL_SECONDS = 0.2
HTTP_SECONDS = 10.0
RANK_SECONDS = 1.0  # for the removal of single ranks to be seen, before all are removed in another way
ADDING_SECONDS = 10.0  # for an addition of what is there already to end


class RouterDriver(Protocol):
    name: str

    def workers(self) -> tuple[RoutedWorker, ...]:
        """Workers in service, from the router itself. RouterError when it cannot be asked."""
        ...

    def add(self, url: str) -> None:
        """Put into service; returns when the router finds all of its entries healthy. Nothing to do if it has it already."""
        ...

    def remove(self, url: str) -> None:
        """Take out of service; returns when the router does not list it any more, under any name. Nothing to do if it does not.

        RouterError also where an entry is left that may be it.
        """
        ...


def share(workers: Sequence[RoutedWorker], urls: Collection[str]) -> float:
    """Share of new requests that go to `urls`, 0 to 1: their share of the healthy workers (an alias counts again).

    RouterError when no worker is healthy: there is nothing to have a share of.
    """
    wanted = set(map(canonical, urls))
    healthy = [worker for worker in workers if worker.healthy]
    if not healthy:
        raise RouterError(
            "no worker behind the router is healthy.", hint="Start one before anything else; users get errors now."
        )
    return sum(canonical(worker.url) in wanted for worker in healthy) / len(healthy)


def drain(router: RouterDriver, url: str, left: Callable[[], InFlight], clock: Clock, timeout: float) -> str:
    """Remove a worker and wait until it has no requests left, neither running nor queued.

    Args:
        left: asks the worker itself.
    Returns: empty when it was seen without any, twice in a row: what the router sent last may not be in a queue yet at the first look. Else
        what it still had after `timeout` seconds, or why that is not known.
    """
    router.remove(url)
    until = clock.monotonic() + timeout
    empty = 0
    while True:
        seen = left()
        empty = empty + 1 if seen.empty else 0
        if empty == 2:
            return ""
        if clock.monotonic() >= until:
            return "" if seen.empty else str(seen)
        clock.sleep(POLL_SECONDS)


class SglangRouter:
    """sglang-router's HTTP interface."""

    name = "sglang"

    def __init__(
        self, url: str, clock: Clock, *, timeout: float = 60.0, api_key: str = "", book: AddressBook | None = None
    ) -> None:
        self.url, self.clock, self.timeout = _plain(url), clock, timeout
        self.book = book or AddressBook({}, Names(clock.monotonic))
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
        there, _ = self._entries(url)
        identity = there[0].id if there else ""
        if not there:
            identity = str(self._call("POST", "/workers", {"url": url}).get("worker_id", ""))
        if not self._until(lambda: bool(seen := self._entries(url)[0]) and all(entry.healthy for entry in seen)):
            why = self._why(identity)
            if not there:
                self._withdraw(identity)
            raise RouterError(
                f"{self.url} did not take {url} into service within {self.timeout:g} s{why}.",
                hint="Look at the worker's log and whether the router can reach that address; it gets no requests.",
            )

    def remove(self, url: str) -> None:
        url = _plain(url)
        there, _ = self._entries(url)
        for entry in there:
            self._call("DELETE", f"/workers/{entry.id}", missing_is_fine=True)
        ranked = [address for entry in there if (address := _base_of_rank(entry.url))]
        if ranked and not self._until(lambda: not self._entries(url)[0], RANK_SECONDS):
            for base in dict.fromkeys(ranked):
                self._remove_ranks(base)
        if not self._until(lambda: not self._entries(url)[0]):
            raise RouterError(
                f"{self.url} still lists {', '.join(e.url for e in self._entries(url)[0]) or url} after {self.timeout:g} s.",
                hint="It may still send it requests: stop the worker, or restart the router.",
            )
        require_out(self._entries(url)[1], url)

    def _remove_ranks(self, base: str) -> None:
        """All ranks of a worker at once. A router of version 0.3 takes the removal of `URL@RANK` and does nothing (mended in its successor:
        smg-project/smg#2522); it removes by the id it keeps for `URL`, which only an addition tells. That one has to end first, or it
        would bring the worker in again."""
        identity = str(self._call("POST", "/workers", {"url": base}).get("worker_id", ""))
        self._until(lambda: not self._adding(identity), ADDING_SECONDS)
        self._call("DELETE", f"/workers/{identity}", missing_is_fine=True)

    def _adding(self, identity: str) -> bool:
        """Whether an addition is still under way; the router forgets one that has ended."""
        job = self._call("GET", f"/workers/{identity}", missing_is_fine=True).get("job_status") or {}
        return job.get("status") not in (None, "failed", "completed")

    def _entries(self, url: str) -> tuple[list[RoutedWorker], str]:
        """The worker's entries, and what is in doubt about them."""
        return entries_of(self.book, self.workers(), url)

    def _until(self, true: Callable[[], bool], seconds: float | None = None) -> bool:
        until = self.clock.monotonic() + (self.timeout if seconds is None else seconds)
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
        self,
        add: Sequence[str],
        remove: Sequence[str],
        observe: Sequence[str],
        clock: Clock,
        *,
        timeout: float = 60.0,
        book: AddressBook | None = None,
    ) -> None:
        self._add, self._remove, self._observe = tuple(add), tuple(remove), tuple(observe)
        self.clock, self.timeout = clock, timeout
        self.book = book or AddressBook({}, Names(clock.monotonic))

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
        """The hook is run for every spelling that `observe` has of the worker."""
        self._change(self._remove, "remove", url, False)
        require_out(entries_of(self.book, self.workers(), _plain(url))[1], _plain(url))

    def _change(self, hook: tuple[str, ...], name: str, url: str, wanted: bool) -> None:
        url = _plain(url)
        there = self._spelled(url)
        if bool(there) is wanted:
            return
        for spelled in there or [url]:
            self._run(hook, name, spelled)
        until = self.clock.monotonic() + self.timeout
        while bool(self._spelled(url)) is not wanted:
            if self.clock.monotonic() >= until:
                state = "not in service" if wanted else "still in service"
                raise RouterError(
                    f"{url} is {state} {self.timeout:g} s after the {name} hook ran.",
                    hint="Check the hooks against each other.",
                )
            self.clock.sleep(POLL_SECONDS)

    def _spelled(self, url: str) -> list[str]:
        """How a worker in service is written: its own address first."""
        there = {entry.url for entry in entries_of(self.book, self.workers(), url)[0]}
        return sorted(there, key=lambda spelled: (spelled != url, spelled))

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


def make_router(settings: Any, clock: Clock, hosts: Sequence[Host] = ()) -> RouterDriver:
    """The driver for `phases.engines.ssh.settings.RouterSettings`, which knows the fleet's workers by any name."""
    book = AddressBook.of(hosts, clock, router=settings.url)
    if settings.kind.value == "sglang":
        key = os.environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        return SglangRouter(settings.url, clock, timeout=settings.timeout, api_key=key, book=book)
    return HookRouter(settings.add, settings.remove, settings.observe, clock, timeout=settings.timeout, book=book)


def require_out(doubt: str, url: str) -> None:
    """RouterError when an entry is left that may be the worker."""
    if doubt:
        raise RouterError(f"whether {url} is out of service is not known: {doubt}.", hint=CURE)


def _base_of_rank(url: str) -> str:
    """`URL` of `URL@RANK`, spelled as it is; empty for an entry without a rank."""
    try:
        address = WorkerAddress.parse(url)
    except ValueError:
        return ""
    return address.written if address.rank is not None else ""


def _plain(url: str) -> str:
    return url.rstrip("/")
