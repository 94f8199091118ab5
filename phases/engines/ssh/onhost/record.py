"""The record of the lease, `<root>/lease.json`: what it says, whether it still counts, and whether its guard is alive.

    armed ──confirm (new connection)──▶ confirmed ──renew …──▶ kept
      └───────── deadline, cancel, reboot ─────────┴──▶ reverting ──▶ reverted | revert_failed

The deadline counts on the clock since boot (suspend included), so setting the wall clock changes nothing; another boot id
means a reboot, and a lease that was not kept then goes back. Who changes the record: `lease` (the toolkit's requests),
`guard` (the process that watches the deadline), `revert` (going back).
"""

from __future__ import annotations

import os
import sys

from place import HostFault, alive, boot_id, read_json, remove, uptime, write_json

ACTIVE = ("armed", "confirmed", "reverting")
OVER = {  # what to make of a lease that is over
    "kept": "The release stays.",
    "reverting": "The host is going back to its previous release; look again when it has.",
    "reverted": "The host is back on its previous release.",
    "revert_failed": "Look at the service's log and start it by hand.",
}
TICK = 0.25  # seconds between two looks of the guard at the lease, and between its heartbeats
STALE = 20 * TICK  # a heartbeat older than this means a stopped guard
RESERVE_BYTES = 64 * 1024  # given back to a full disk so that a revert can be written down


def read(place):
    return read_json(place.lease)


def read_or(place, known):
    """The lease, or what was last known of it when somebody has damaged the file."""
    try:
        return read(place) or known
    except HostFault as fault:
        print("the lease cannot be read: %s" % fault, file=sys.stderr, flush=True)
        return known


def active(lease):
    return bool(lease) and lease["state"] in ACTIVE


def require_active(lease, lease_id):
    """HostFault that says what became of the lease unless it is active and its time has not run out."""
    if not lease or lease["id"] != lease_id:
        raise HostFault("lease_unknown", "there is no lease %s on this host" % lease_id, "Another run has replaced it; look at the audit log.")
    if lease["state"] not in ("armed", "confirmed"):
        why = ": %s" % lease["reason"] if lease["reason"] else ""
        raise HostFault("lease_over", "the lease is already %s%s" % (lease["state"], why), OVER[lease["state"]], state=lease["state"])
    late = seconds_late(lease)
    if late > 0:
        raise HostFault("lease_expired", "the lease ran out %.1f s ago" % late, "The host is going back to its previous release.", late=late)


def save(place, lease):
    """Write the lease. A full disk is reported, not raised: going back goes on in memory."""
    try:
        write_json(place.lease, lease)
    except OSError as fault:
        print("cannot write the lease: %s" % fault, file=sys.stderr, flush=True)


def note(place, event, **facts):
    """Write to the audit log; a full disk is reported, not raised."""
    try:
        place.audit(event, **facts)
    except OSError as fault:
        print("cannot write the audit log: %s %s %s" % (fault, event, facts), file=sys.stderr, flush=True)


def reserve(place):
    """Hold some disk back, so that a revert can be written down when the disk is full."""
    with open(_reserve_path(place), "wb") as file:
        file.write(b"\0" * RESERVE_BYTES)


def drop_reserve(place):
    remove(_reserve_path(place))


def _reserve_path(place):
    return os.path.join(place.run, "reserve")


def seconds_late(lease):
    """Seconds past the deadline, negative before it; after a reboot it is past."""
    return uptime() - lease["deadline"] if lease["boot"] == boot_id() else float(lease["window"])


def describe(place):
    """The lease as the toolkit wants to see it; None when there never was one."""
    with place.mutex():
        lease = read(place)
        return facts(place, lease) if lease else None


def facts(place, lease):
    """`describe` of a lease at hand. Mutex held."""
    shown = {name: lease[name] for name in ("id", "state", "release", "previous", "window", "armed", "reason")}
    shown.update(
        active=active(lease), seconds_left=-seconds_late(lease), same_boot=lease["boot"] == boot_id(),
        guard_alive=alive(lease["guard"]), guard_works=guard_works(place, lease), current=place.link_target(place.current),
    )
    return shown


def guard_works(place, lease):
    """Alive and beating: a stopped process (SIGSTOP) counts as lost."""
    if lease["boot"] != boot_id() or not alive(lease["guard"]):
        return False
    return lease["state"] == "reverting" or beats(place)


def beats(place):
    """Whether the heartbeat is fresh, whoever writes it."""
    try:
        with open(_beat_path(place)) as file:
            return uptime() - float(file.read() or 0) < STALE
    except (OSError, ValueError):
        return False


def beat(place):
    """Say that the guard lives. A full disk must not stop it from guarding."""
    try:
        with open(_beat_path(place), "w") as file:
            file.write("%.3f" % uptime())
    except OSError as fault:
        print("cannot write the heartbeat: %s" % fault, file=sys.stderr, flush=True)


def _beat_path(place):
    return os.path.join(place.run, "guard.beat")
