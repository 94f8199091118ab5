"""Keeping leases alive while a canary bakes: from a thread of its own, so that nothing else a run does can be in the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phases.fleet.fleet import Fleet
from phases.fleet.host import Host
from phases.fleet.lease import Lease


class Renewer:
    """Renews leases from a thread of its own over connections of its own, three times a lease's length."""

    def __init__(self, workers: Sequence[Host], window: float) -> None:
        self._window, self._fleet = window, Fleet(workers)
        self._leases: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._guard, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-renewer", daemon=True)
        self._thread.start()

    def add(self, name: str, lease_id: str) -> None:
        with self._guard:
            self._leases[name] = lease_id

    def drop(self, name: str) -> None:
        with self._guard:
            self._leases.pop(name, None)
            self._lost.pop(name, None)

    def lost(self) -> dict[str, str]:
        with self._guard:
            return dict(self._lost)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=10.0)
        self._fleet.close()

    def _run(self) -> None:
        while not self._stopped.wait(self._window / 3):
            with self._guard:
                leases = dict(self._leases)
            hosts = [self._fleet[name] for name in leases]
            if not hosts:
                continue
            results = self._fleet.each(lambda session: Lease(session, "", lease_id=leases[session.host.name]).renew(self._window),
                                       hosts=hosts, deadline=self._window / 3)  # fmt: skip
            with self._guard:
                for name, result in results.items():
                    if result.ok:
                        self._lost.pop(name, None)
                    elif name in self._leases:
                        self._lost[name] = result.reason
