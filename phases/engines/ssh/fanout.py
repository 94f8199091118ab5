"""The same thing on many hosts: a bounded number at once, a result for each, a deadline for all."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from phases.base.errors import FleetError, PhaseError
from phases.engines.ssh.host import Host

T = TypeVar("T")


class Outcome(Enum):
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"  # was running when the deadline came; what it did is not known
    NOT_STARTED = "not started"  # never began; the host is untouched


@dataclass(frozen=True)
class HostResult(Generic[T]):
    host: Host
    outcome: Outcome
    value: T | None = None
    error: PhaseError | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.DONE

    @property
    def reason(self) -> str:
        return "" if self.ok else str(self.error or self.outcome.value)

    @property
    def told(self) -> str:
        """`reason` for where the host is named anyway."""
        return self.error.told if self.error else self.reason


class FanOutError(FleetError):
    """Some hosts failed; `results` has every host's result."""

    def __init__(self, results: Results[object]) -> None:
        bad = results.bad
        lines = "".join(f"\n  {result.host.name}: {result.outcome.value}: {result.reason}" for result in bad)
        super().__init__(f"{len(bad)} of {len(results)} hosts did not succeed:{lines}", hint="")
        self.results = results


class Results(Mapping[str, HostResult[T]]):
    """Results by host name, in the order the hosts were given."""

    def __init__(self, results: Sequence[HostResult[T]]) -> None:
        self._by_name = {result.host.name: result for result in results}

    def __getitem__(self, name: str) -> HostResult[T]:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def ok(self) -> bool:
        """Every host succeeded, and there was at least one."""
        return bool(self._by_name) and not self.bad

    @property
    def bad(self) -> list[HostResult[T]]:
        return [result for result in self._by_name.values() if not result.ok]

    def check(self) -> dict[str, T]:
        """Values by host name; FanOutError naming every host that failed, a single host's own error when it is the only one."""
        if len(self.bad) == 1 and self.bad[0].error:
            raise self.bad[0].error
        if self.bad:
            raise FanOutError(self)  # type: ignore[arg-type]
        return {name: result.value for name, result in self._by_name.items()}  # type: ignore[misc]


def fan_out(
    hosts: Sequence[Host],
    act: Callable[[Host], T],
    *,
    limit: int = 16,
    deadline: float | None = None,
    abandon: Callable[[Host], None] = lambda host: None,
    on_result: Callable[[HostResult[T]], None] = lambda result: None,
) -> Results[T]:
    """Call `act` for every host, at most `limit` at once, and return when all are done or `deadline` seconds have passed.

    A host that hangs does not keep the others waiting: when the deadline comes, `abandon(host)` is called (close its
    connection) and its result is TIMED_OUT; hosts not begun are NOT_STARTED. Ctrl-C abandons likewise and re-raises.
    `on_result` is called in the calling thread. Errors are results, not raised; any other exception becomes a FleetError
    that names the host and the place in the code, the exception itself being its cause.
    """
    run = _Run(hosts, act)
    for _ in range(min(max(1, limit), len(hosts))):
        threading.Thread(target=run.work, name="fan-out", daemon=True).start()
    until = None if deadline is None else time.monotonic() + deadline
    reported = 0
    try:
        while True:
            with run.changed:
                run.changed.wait_for(
                    lambda seen=reported: len(run.order) > seen or len(run.order) == len(hosts), _remaining(until)
                )
                ready, finished = run.order[reported:], len(run.order) == len(hosts)
            for result in ready:
                on_result(result)
            reported += len(ready)
            if finished and not ready or reported == len(hosts):
                break
            if until is not None and time.monotonic() >= until:
                break
    except BaseException:
        _abandon(run.close(), abandon)
        raise
    late = run.close()
    _abandon(late, abandon)
    for result in run.order[reported:]:
        on_result(result)
    by_name = {result.host.name: result for result in run.order}
    return Results([by_name[host.name] for host in hosts])


def _bug(host: Host, fault: Exception) -> FleetError:
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    error = FleetError(
        f"{type(fault).__name__}: {fault} ({os.path.basename(frame.filename)}:{frame.lineno}).",
        hint="This is a bug of the toolkit: report it. The other hosts are not concerned.",
        host=host.name,
    )
    error.__cause__ = fault
    return error


def _remaining(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _abandon(hosts: Sequence[Host], abandon: Callable[[Host], None]) -> None:
    """Abandon each in a thread of its own: closing a stuck connection may itself take a moment."""
    for host in hosts:
        threading.Thread(target=abandon, args=(host,), daemon=True).start()


class _Run(Generic[T]):
    """What the workers share. `order` has results as they came; after `close` nothing is added any more."""

    def __init__(self, hosts: Sequence[Host], act: Callable[[Host], T]) -> None:
        self.act, self.waiting = act, list(reversed(hosts))
        self.running: dict[str, tuple[Host, float]] = {}
        self.order: list[HostResult[T]] = []
        self.changed = threading.Condition()
        self.closed = False

    def work(self) -> None:
        while True:
            with self.changed:
                if self.closed or not self.waiting:
                    return
                host = self.waiting.pop()
                started = time.monotonic()
                self.running[host.name] = (host, started)
            value: T | None = None
            error: PhaseError | None = None
            try:
                value = self.act(host)
            except PhaseError as fault:
                error = fault
            except Exception as fault:  # noqa: BLE001 - one host's bug must not lose the others' results
                error = _bug(host, fault)
            with self.changed:
                if self.closed:
                    return
                del self.running[host.name]
                outcome = Outcome.FAILED if error else Outcome.DONE
                self.order.append(HostResult(host, outcome, value, error, time.monotonic() - started))
                self.changed.notify_all()

    def close(self) -> list[Host]:
        """Take no more results; whatever is missing gets one. Returns the hosts that were still running."""
        with self.changed:
            self.closed = True
            late = [host for host, _ in self.running.values()]
            for host, started in self.running.values():
                self.order.append(HostResult(host, Outcome.TIMED_OUT, seconds=time.monotonic() - started))
            self.order.extend(HostResult(host, Outcome.NOT_STARTED) for host in reversed(self.waiting))
            self.running, self.waiting = {}, []
        return late
