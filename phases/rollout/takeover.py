"""Somebody else at the same production: a rollback by hand, say, that took hosts over from this run while it was at work."""

from __future__ import annotations

from phases.errors import FleetError
from phases.fleet.deploy import PUT_BACK
from phases.fleet.lease import read_lease
from phases.fleet.locks import show_lock
from phases.rollout.production import Production

TAKEN_SECONDS = 1.0  # between two looks at whether somebody else still holds a host


def taken_over(production: Production) -> str:
    """Who holds a host that this run had locked, such as a rollback by hand from another terminal; empty when nobody does."""
    fleet = production.fleet
    for name, lock in list(production.locks.items()):
        try:
            seen = show_lock(fleet.session(fleet[name]))
        except FleetError:
            continue
        if seen is not None and seen.token != lock.token:
            return f"{name} by {seen.owner} ({seen.purpose})"
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
