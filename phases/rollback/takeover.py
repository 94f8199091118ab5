"""Somebody else at the same production: a rollback by hand that took hosts over from this run while it was at work, or two at once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from phases.base.errors import FleetError
from phases.engines.ssh.deploy import PUT_BACK
from phases.engines.ssh.errors import HostLockedError
from phases.engines.ssh.host import Host
from phases.engines.ssh.lease import read_lease
from phases.engines.ssh.locks import show_lock
from phases.production.production import ROLLBACK, Production

TAKEN_SECONDS = 1.0  # between two looks at whether somebody else still holds a host
CLAIM_SECONDS = 60.0  # for the locks of all hosts


def taken_over(production: Production) -> str:
    """Who holds a host that this run had locked, such as a rollback by hand from another terminal; empty when nobody does."""
    fleet = production.fleet
    for host in production.workers:
        lock = production.locks.get(host.name)
        try:
            seen = show_lock(fleet.session(host)) if lock else None
        except FleetError:
            continue
        if lock and seen is not None and seen.token != lock.token:
            return f"{host.name} by {seen.owner} ({seen.purpose})"
    return ""


def put_back_by_others(production: Production) -> str:
    """A worker under this run's lease that somebody else has rolled back, and is done with; empty when there is none."""
    fleet = production.fleet
    for name, lease in list(production.leases.items()):
        try:
            state = read_lease(fleet.session(fleet[name]))
        except FleetError:
            continue
        if state is not None and state.id == lease.id and not state.active and state.reason == PUT_BACK:
            return f"{name}, which has been rolled back from elsewhere"
    return ""


def let_others_finish(production: Production) -> None:
    """Wait while somebody else who took production over is at it, at most as long as a restart takes; what they left is then ours to do."""
    service = production.fleet_settings.service
    until = production.clock.monotonic() + service.ready + service.drain + 60.0
    taken = taken_over(production)
    if taken:
        production.progress(f"waiting for who took over {taken}")
    while taken and production.clock.monotonic() < until:
        production.clock.sleep(TAKEN_SECONDS)
        taken = taken_over(production)


def claim(production: Production) -> bool:
    """Lock every host that can be reached before a rollback changes anything, so that two of them (two people on call, or a watch and a
    person) never work on one fleet: each would count the floor for itself, and they may have different goals.

    Waits as long as another rollback is at work. Returns whether it has waited: then the other one has decided where to go.
    """
    waited = False
    while other := _claim_all(production):
        if not waited:
            production.progress(
                f"waiting for the rollback that is at work already, by {other['owner']} ({other['purpose']})"
            )
        waited = True
        production.clock.sleep(TAKEN_SECONDS)
    return waited


def _claim_all(production: Production) -> dict[str, Any] | None:
    """All locks, or none and who holds one for a rollback: one that waits must not be in the way of the one it waits for.

    The first host that can be reached decides between two that begin at the same moment.
    """
    first, *others = production.workers
    held = _claim(production, [first]) or _claim(production, others)
    if held is not None:
        for lock in production.locks.values():
            with contextlib.suppress(FleetError):
                lock.release()
        production.locks.clear()
    return held


def _claim(production: Production, hosts: Sequence[Host]) -> dict[str, Any] | None:
    """Owner and purpose of who holds one of them for a rollback. What cannot be locked for another reason is met again when it is to be changed."""
    if not hosts:
        return None
    results = production.fleet.each(production.take_lock, hosts=hosts, deadline=CLAIM_SECONDS)
    blocked = [
        getattr(result.error, "facts", {}) for result in results.bad if isinstance(result.error, HostLockedError)
    ]
    return next((who for who in blocked if str(who.get("purpose")).startswith(ROLLBACK)), None)
