"""What is live where, asked within a bounded time: hosts, workers and router side by side, each in threads nobody waits for.

`Production.observe` is for acting and insists on the router. This is for looking: whatever cannot be asked is said to be so.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phases.base.clock import SystemClock
from phases.base.errors import PhaseError
from phases.engines.embedded import taken_down
from phases.engines.embedded.taken_down import TakenDown
from phases.engines.ssh.fanout import Results, fan_out
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import read_lease
from phases.engines.ssh.placing import AddressBook, Routed
from phases.engines.ssh.releases import NEVER, read_inventory
from phases.engines.ssh.router import make_router
from phases.engines.ssh.settings import FleetSettings
from phases.ledger.repository import repository_of
from phases.playbook.schema import Playbook
from phases.serving.client import Client

AT_ONCE = 128  # hosts asked at the same time, so that some that hang keep no other waiting


@dataclass(frozen=True)
class WorkerView:
    """One worker. `in_service` and `serving` are None where that could not be asked."""

    name: str
    url: str
    current: str = ""
    last_good: str = ""
    lease: str = ""
    serving: bool | None = None
    in_service: bool | None = None
    problem: str = ""
    kernel: str = ""  # what its ranks run of the release: candidate or incumbent (fell back hot); empty where that cannot be switched


@dataclass(frozen=True)
class FleetLook:
    """The fleet at one moment. `note` says why there is nothing to see, or what could not be asked."""

    workers: tuple[WorkerView, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def last_good(self) -> str:
        """The one release every reachable worker would go back to; empty when they differ or none was asked."""
        found = {worker.last_good for worker in self.workers if worker.last_good}
        return found.pop() if len(found) == 1 else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": [asdict(worker) for worker in self.workers],
            "note": self.note,
            "seconds": round(self.seconds, 2),
        }


class FleetWatcher:
    """Looks at a playbook's fleet again and again over connections it keeps. Use as a context manager."""

    def __init__(self, playbook: Playbook) -> None:
        self.settings, self.why_not = _settings(playbook)
        self._playbook = playbook
        self._fleet = Fleet(self.settings.workers(), limit=AT_ONCE) if self.settings else None
        hosts, router = (self.settings.workers(), self.settings.router.url) if self.settings else ((), "")
        self._book = AddressBook.of(hosts, SystemClock(), router=router)

    def look(self, seconds: float) -> FleetLook:
        """Ask everything; what has not answered within so many seconds is told as such."""
        if self._fleet is None or self.settings is None:
            return FleetLook(note=self.why_not)
        from phases.production import hot  # brings scipy, which a playbook without a fleet need not wait for

        begun, hosts, router = time.monotonic(), self._fleet.hosts, self.settings.router
        health = _begin(
            lambda: fan_out(
                hosts,
                lambda host: Client(host.url, host.name).health(min(5.0, seconds)),
                limit=AT_ONCE,
                deadline=seconds,
            )
        )
        routed = _begin(lambda: self._book.place(make_router(router, SystemClock()).workers()))
        found = self._fleet.each(
            lambda session: (read_inventory(session), read_lease(session), hot.kernel_of(session)), deadline=seconds
        )
        left = lambda: max(0.5, seconds + 0.5 - (time.monotonic() - begun))  # noqa: E731
        healthy, in_service = health(left()), routed(left())
        workers = tuple(_worker(host, found, healthy, in_service) for host in hosts)
        down = taken_down.of_playbook(self._playbook)
        if down and down.ended is None or down and down.is_down and not any(worker.serving for worker in workers):
            return FleetLook(
                () if down.is_down else workers, _said(down), time.monotonic() - begun
            )  # of one cut short, what is left
        return FleetLook(workers, self._note(in_service), time.monotonic() - begun)

    def _note(self, in_service: _Answer) -> str:
        """What the router keeps from being told; empty where it tells all."""
        if in_service.value is not None:
            told = in_service.value.told()
            return f"{told[0].upper()}{told[1:]}" if told else ""
        router = self.settings.router if self.settings else None
        return f"The router cannot be asked: {in_service.reason}" if router and (router.url or router.observe) else ""

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def __enter__(self) -> FleetWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    reason: str = ""


def _begin(call: Callable[[], Any]) -> Callable[[float], _Answer]:
    """Start a call in a thread nobody joins; the returned function gives its answer, or says that there is none yet."""
    answers: queue.Queue[_Answer] = queue.Queue()

    def work() -> None:
        try:
            answers.put(_Answer(call()))
        except PhaseError as fault:
            answers.put(_Answer(reason=fault.message))
        except Exception as fault:  # noqa: BLE001 - one part that breaks must not take the others' answers with it
            answers.put(_Answer(reason=type(fault).__name__))

    threading.Thread(target=work, name="status", daemon=True).start()

    def answer(seconds: float) -> _Answer:
        try:
            return answers.get(timeout=seconds)
        except queue.Empty:
            return _Answer(reason="no answer in time.")

    return answer


def _settings(playbook: Playbook) -> tuple[FleetSettings | None, str]:
    """The fleet to ask, or why there is none. An embedded fleet that was never started is not made by looking."""
    embedded = playbook.sections.get("embedded_fleet")
    if embedded is None:
        return playbook.sections.get("fleet"), "This playbook has no fleet."
    from phases.engines.embedded.fleet import fleet_of, was_started

    repo = repository_of(playbook.path)
    if not was_started(repo, playbook.name):
        down = taken_down.of_playbook(playbook)
        return None, _said(
            down
        ) if down and down.started is None else "The embedded fleet is not running; Phase 3 starts it."
    return fleet_of(embedded, repo, playbook.name), ""


def _said(down: TakenDown) -> str:
    text = down.describe()
    return f"{text[0].upper()}{text[1:]}{'; Phase 3 starts it again' if down.is_down else ''}."


def _worker(host: Host, found: Results[Any], healthy: _Answer, in_service: _Answer) -> WorkerView:
    routed: Routed = in_service.value or Routed(silent=in_service.reason or "it did not answer")
    served = routed.in_service(host.name)
    well = healthy.value[host.name].value if healthy.value and healthy.value[host.name].ok else None
    result = found[host.name]
    if not result.ok:
        reason = (
            result.error.message
            if isinstance(result.error, PhaseError)
            else "no answer in time"
            if result.error is None
            else type(result.error).__name__
        )
        return WorkerView(host.name, host.url, serving=well, in_service=served, problem=reason)
    inventory, lease, kernel = result.value
    left = f"{lease.seconds_left:.0f} s left" if lease and lease.seconds_left > 0 else "ran out: goes back"
    held = f"{lease.state}, {left}" if lease and lease.active else ""
    problem = _problem(inventory, well, served, "" if routed.silent else routed.doubt(host.name))
    return WorkerView(
        host.name, host.url, _none(inventory.current), _none(inventory.last_good), held, well, served, problem, kernel
    )


def _problem(inventory: Any, well: bool | None, served: bool | None, doubt: str) -> str:
    problems: Sequence[tuple[bool, str]] = (
        (well is False, "does not answer"),
        (served is False, "gets no traffic"),
        (bool(doubt), doubt),
        (inventory.last_good == NEVER, "nothing to go back to"),
    )
    return ", ".join(text for holds, text in problems if holds)


def _none(digest: str) -> str:
    return "" if digest == NEVER else digest
