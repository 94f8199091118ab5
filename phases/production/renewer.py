"""Keeping leases alive while a canary bakes: from a thread of its own, so that nothing else a run does can be in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from phases.engines.ssh.errors import LeaseError
from phases.engines.ssh.fanout import HostResult
from phases.engines.ssh.fleet import Fleet
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import Lease, LeaseState
from phases.engines.ssh.session import HostSession


@dataclass(frozen=True)
class Turns:
    """How hosts whose leases all end at once, since the toolkit is gone, restart one group after another.

    Attributes:
        at_once: hosts that may be out of service together. apart: seconds a restart may take.
    """

    at_once: int
    apart: float

    def of(self, position: int) -> float:
        """Seconds after its deadline when the host that was moved as the so-manieth, from 0, restarts."""
        return position // self.at_once * self.apart


class Renewer:
    """Renews leases from a thread of its own over connections of its own, three times a lease's length.

    A lease counts as lost when its host says that it is over, or could not be asked twice in a row: a single renewal may fail, since the
    lease still lasts when the next is due.
    """

    def __init__(self, workers: Sequence[Host], window: float, turns: Turns) -> None:
        self._window, self._turns, self._fleet = window, turns, Fleet(workers)
        self._leases: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._missed: dict[str, int] = {}  # renewals in a row
        self._guard, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._thread.start()

    def add(self, name: str, lease_id: str) -> None:
        """Begin with one that has just been confirmed or renewed."""
        with self._guard:
            self._leases[name] = lease_id

    def drop(self, name: str) -> None:
        with self._guard:
            for known in (self._leases, self._lost, self._missed):
                known.pop(name, None)

    def lost(self) -> dict[str, str]:
        with self._guard:
            return dict(self._lost)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10.0)
        self._fleet.close()

    def _run(self) -> None:
        every = pause = self._window / 3
        while not self._stopped.wait(pause):
            begun = time.monotonic()
            with self._guard:
                leases = dict(self._leases)
            if leases:
                self.renew(leases, deadline=every)
            pause = max(0.0, every - (time.monotonic() - begun))

    def renew(self, leases: dict[str, str], deadline: float) -> None:
        """Once, all of them (host name to lease, in the order they were moved); in so many seconds."""
        turn = {name: self._turns.of(position) for position, name in enumerate(leases)}

        def act(session: HostSession) -> LeaseState:
            return Lease(session, "", lease_id=leases[session.host.name]).renew(self._window, turn[session.host.name])

        results = self._fleet.each(act, hosts=[self._fleet[name] for name in leases], deadline=deadline)
        with self._guard:
            for name, result in results.items():
                if self._leases.get(name) == leases[name]:  # else it has ended meanwhile, or another has begun
                    self._note(name, result)

    def _note(self, name: str, result: HostResult[LeaseState]) -> None:
        self._missed[name] = 0 if result.ok else self._missed.get(name, 0) + 1
        if result.ok:
            self._lost.pop(name, None)
        elif isinstance(result.error, LeaseError) or self._missed[name] > 1:
            self._lost[name] = result.reason
