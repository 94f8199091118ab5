"""The one owner of production's capacity: no worker leaves service, drains or restarts without its leave, asked at that moment.

What serves is counted anew for every leave, by the router and by who answers, never from a plan; what has leave and has not come back is
counted as gone, whatever the router still says of it, so that leaves given side by side add up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from phases.base.errors import PhaseError
from phases.engines.ssh.host import Host
from phases.production.service import Service


class CapacityError(PhaseError):
    """A worker may not leave service: too few others serve."""

    stage = "capacity"


class Capacity:
    """Leaves from service.

    Args:
        floor: workers that must serve. look: who serves now; its argument says whether the router has to answer.
        below_floor: whether a person said that one worker at a time may leave all the same.
    """

    def __init__(self, floor: int, look: Callable[[bool], Service], below_floor: Callable[[], bool]) -> None:
        self.floor, self._look, self._below_floor = floor, look, below_floor
        self._away: set[str] = set()
        self._lock = threading.Lock()

    def grant(self, hosts: Sequence[Host], *, certain: bool = True) -> tuple[Host, ...]:
        """Those of the hosts that may leave together now: all that serve nobody, and of the others as many as the floor allows.

        Who hangs is no capacity for others, and goes first; but it costs as much as any other, since a full queue looks the same.

        Args:
            certain: count only those that certainly serve users, and ask the router for it; else also those that may, as a rollback does,
                which must not stand still because the router is silent.
        Raises: RouterError when the router has to answer and does not.
        """
        with self._lock:
            return self._grant(hosts, certain)

    def require(self, host: Host, *, certain: bool = True) -> None:
        """Leave for one worker, unless it has it already. Raises: CapacityError when too few others serve; RouterError as `grant`."""
        with self._lock:
            if self._grant([host], certain):
                return
        raise CapacityError(
            f"{host.name} still serves, and {self.floor} workers must, so it is not taken out.",
            hint="Bring more workers into service, or lower `production.min_available`.",
        )

    def back(self, host: Host) -> None:
        """The worker serves again, or was never taken out."""
        with self._lock:
            self._away.discard(host.name)

    def _grant(self, hosts: Sequence[Host], certain: bool) -> tuple[Host, ...]:
        names = {host.name for host in hosts}
        if names <= self._away:
            return tuple(hosts)
        service = self._look(certain)
        in_service = (service.serving if certain else service.maybe_serving) - self._away
        counted = in_service - (service.hanging - names)
        room = max(len(counted) - self.floor, 1 if self._below_floor() else 0)
        leaving = []
        for host in sorted(hosts, key=lambda host: host.name not in service.hanging):
            if host.name in counted:
                if room < 1:
                    continue
                room -= 1
            leaving.append(host)
        self._away |= {host.name for host in leaving}
        return tuple(leaving)
