"""The lease: a host-side timer that puts `current` back by itself unless someone proves, again and again, that all is well.

What the toolkit asks for: arm, confirm, renew, keep, cancel. The states are drawn in `record`, the timer is `guard`.
"""

from __future__ import annotations

import time

import guard
import locks
import record
import revert
import store
from place import NEVER, HostFault, alive, boot_id, uptime, write_json


def arm(place, lease_id, release, previous, window, token, restart, stop, via, command_timeout=120.0):
    """Start the timer before a switch. Refused when another lease is active or the way back is not a good release.

    Args:
        window: seconds until the host goes back if nobody confirms.
        previous: digest to go back to; NEVER where there was none: then going back means `stop` and no `current`.
        restart, stop: argv that restart and stop the service.
        via: names the connection that arms; a confirmation must come over another one.
    """
    if previous != NEVER:
        store.verify(place, previous)
    store.verify(place, release)
    if previous == release:
        raise HostFault("lease_pointless", "release %s is what the host would go back to" % release[:12], "There is nothing to switch.")
    with place.mutex():
        locks.require(place, token)
        held = record.read(place)
        if record.active(held) and held["id"] != lease_id:
            raise HostFault("lease_active", "another lease is %s on this host" % held["state"], "Confirm, keep or cancel it first.", lease=held["id"])
        current = place.link_target(place.current)
        if current != previous:
            raise HostFault("not_current", "current is %s, not %s as the run expects" % (current[:12], previous[:12]), "Somebody else changed this host; plan again.")
        lease = {
            "id": lease_id, "state": "armed", "release": release, "previous": previous, "window": window, "boot": boot_id(),
            "deadline": uptime() + window, "turn": 0.0, "armed": time.time(), "armed_via": via, "confirmed_via": "", "token": token,
            "restart": restart, "stop": stop, "command_timeout": command_timeout, "guard": None, "reason": "",
        }
        record.reserve(place)
        write_json(place.lease, lease)
        place.audit("lease_armed", lease=lease_id, release=release, previous=previous, window=window)
    guard.start(place, lease_id)
    return record.describe(place)


def confirm(place, lease_id, window, via, turn=0.0):
    """The toolkit came back: the lease now lasts `window` seconds from here and must be renewed or kept.

    Args:
        turn: seconds after the deadline until the service is restarted, so that hosts do not all do so at once.

    Early (before `current` is the leased release) proves nothing and is refused, the lease stays as it is. As soon as the
    switch is made it counts, whether or not the guard has looked since. Late is refused by the clock, not by who is faster.
    """
    guard.tend(place)
    with place.mutex():
        lease = record.read(place)
        record.require_active(lease, lease_id)
        locks.require_newest(place, lease["token"])
        if place.link_target(place.current) != lease["release"]:
            raise HostFault("lease_early", "current is not the leased release yet", "Switch first; the lease is still armed.")
        if via == lease["armed_via"]:
            raise HostFault("lease_same_connection", "the confirmation came over the connection that armed the lease", "Confirm over a new one: that is what it proves.")
        lease.update(state="confirmed", confirmed_via=via, deadline=uptime() + window, window=window, turn=turn)
        write_json(place.lease, lease)
        locks.move(place, lease["token"])
        place.audit("lease_confirmed", lease=lease_id, window=window)
    return record.describe(place)


def renew(place, lease_id, window, turn=0.0):
    """Push the deadline of a confirmed lease to `window` seconds from now; `turn` as in `confirm`."""
    guard.tend(place)
    with place.mutex():
        lease = record.read(place)
        record.require_active(lease, lease_id)
        locks.require_newest(place, lease["token"])
        if lease["state"] != "confirmed":
            raise HostFault("lease_unconfirmed", "an unconfirmed lease cannot be renewed", "Confirm it over a new connection first.")
        lease.update(deadline=uptime() + window, window=window, turn=turn)
        write_json(place.lease, lease)
        locks.move(place, lease["token"])
    return record.describe(place)


def keep(place, lease_id):
    """The release stays: the lease ends, and the release is the new last-good, if it still is `current`, the lease confirmed and unexpired,
    and nobody has taken over since."""
    with place.mutex():
        lease = record.read(place)
        if lease and lease["id"] == lease_id:
            locks.require_newest(place, lease["token"])
        if lease and lease["id"] == lease_id and lease["state"] == "kept":
            return record.facts(place, lease)
        record.require_active(lease, lease_id)
        if place.link_target(place.current) != lease["release"]:
            raise HostFault("not_current", "current is not the leased release any more", "Somebody else changed this host; look at it again.")
        if lease["state"] != "confirmed":
            raise HostFault("lease_unconfirmed", "an unconfirmed lease cannot be kept", "Confirm it over a new connection first.")
        store.set_good(place, lease["release"])
        lease.update(state="kept", reason="kept by the toolkit")
        write_json(place.lease, lease)
        record.drop_reserve(place)
        place.audit("lease_kept", lease=lease_id, release=lease["release"])
    return record.describe(place)


def cancel(place, lease_id, reason, stop=False):
    """Go back now, in this process, without waiting for the guard. A lease that already went back is left as it is.

    Args:
        stop: the host is given up: its service is stopped rather than restarted. HostFault `lease_going_back` where somebody is in the
            middle of a restart, whose service would come after the stop.
    """
    with place.mutex():
        lease = record.read(place)
        if not lease or lease["id"] != lease_id:
            raise HostFault("lease_unknown", "there is no lease %s on this host" % lease_id)
        if not record.active(lease):
            return record.facts(place, lease)
        if stop and (place.restarts() or lease["state"] == "reverting" and alive(lease["guard"])):
            raise HostFault("lease_going_back", "the service is being restarted just now. %s" % lease["reason"], "Wait until it has been.")
        revert.begin(place, lease, reason)
    revert.carry_out(place, lease, stop)
    return record.describe(place)
