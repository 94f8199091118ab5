"""The toolkit's side of the lease: arm, come back over a new connection, keep renewing, keep or cancel.

The states and what happens by itself on the host are described in `onhost/record.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phases.engines.ssh.session import HostSession, Operation, op


@dataclass(frozen=True)
class LeaseState:
    """A lease as the host has it. `seconds_left` counts on the host's clock since boot."""

    id: str
    state: str  # armed | confirmed | kept | reverting | reverted | revert_failed
    release: str
    previous: str
    current: str
    seconds_left: float
    guard_works: bool
    active: bool
    reason: str


class Lease:
    """One lease on one host."""

    def __init__(self, session: HostSession, token: str, *, lease_id: str = "") -> None:
        self.session, self.token, self.id = session, token, lease_id or secrets.token_hex(8)

    def arming(
        self,
        release: str,
        previous: str,
        window: float,
        restart: Sequence[str],
        stop: Sequence[str],
        command_timeout: float = 120.0,
    ) -> Operation:
        """`arm` as an operation: put it in one batch with the switch and the restart.

        Args:
            window: seconds until the host goes back unless it is confirmed.
            restart, stop: argv on the host, from the service driver.
        """
        return op(
            "lease.arm",
            lease_id=self.id,
            release=release,
            previous=previous,
            window=window,
            token=self.token,
            restart=list(restart),
            stop=list(stop),
            command_timeout=command_timeout,
        )

    def arm(
        self,
        release: str,
        previous: str,
        window: float,
        restart: Sequence[str],
        stop: Sequence[str],
        command_timeout: float = 120.0,
    ) -> LeaseState:
        return _state(self.session.do(self.arming(release, previous, window, restart, stop, command_timeout))[0])

    def confirm(self, window: float, turn: float = 0.0) -> LeaseState:
        """Confirm over a new connection, which then replaces the old one in `session`.

        Args:
            window: seconds the lease lasts from here. turn: seconds after its deadline until the host restarts its service, so that
                hosts whose leases end together do not; a server that can fall back hot does so at the deadline.
        Raises: LeaseError when it is too late (the host goes back or has gone back), too early (not switched yet), or the
            connection is the one that armed; UnreachableError when the host cannot be reached anew: then let it go back.
        """
        session = self.session.fresh()
        try:
            state = _state(session.do(op("lease.confirm", lease_id=self.id, window=window, turn=turn))[0])
        except BaseException:
            session.close()
            raise
        self.session.close()
        self.session = session
        return state

    def renew(self, window: float, turn: float = 0.0) -> LeaseState:
        """Push the deadline `window` seconds from now; `turn` as in `confirm`. LeaseError when the lease is over; the guard is revived if it was killed."""
        return _state(self.session.do(op("lease.renew", lease_id=self.id, window=window, turn=turn))[0])

    def keep(self) -> LeaseState:
        """The release stays and becomes last-good."""
        return _state(self.session.do(op("lease.keep", lease_id=self.id))[0])

    def cancel(self, reason: str, timeout: float = 300.0, *, stop: bool = False) -> LeaseState:
        """Go back now; returns when the host has (state `reverted`) or has failed to (`revert_failed`, with the reason).

        Args:
            stop: leave the service stopped rather than restart it; LeaseError while the host is in the middle of a restart.
        """
        return _state(
            self.session.do(op("lease.cancel", lease_id=self.id, reason=reason, stop=stop), timeout=timeout)[0]
        )

    def observe(self) -> LeaseState | None:
        return read_lease(self.session)


def read_lease(session: HostSession) -> LeaseState | None:
    """The host's latest lease, active or not."""
    shown = session.do(op("lease.show"))[0]
    return _state(shown) if shown else None


def _state(shown: dict[str, Any]) -> LeaseState:
    names = LeaseState.__dataclass_fields__
    return LeaseState(**{name: shown[name] for name in names})
