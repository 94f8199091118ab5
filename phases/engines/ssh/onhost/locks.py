"""The lock of a root: one run at a time may change things here.

A lock has an owner as long as something stands behind it: the session that took it (a process on this host that ends
with its connection), or an active lease, whose guard removes it when it is done. A lock with neither is an orphan: the
next to ask takes it over, and the audit log says so. A lock is only ever released with its own token.

Beside the lock lies the epoch, which nothing removes: a number that every new holder raises. Who held the lock before and comes back late
(suspended, cut off, slow) finds a higher one and is refused, whether or not the lock is free by then.
"""

from __future__ import annotations

import os
import time

import record
from place import HostFault, alive, boot_id, process_identity, read_json, remove, uptime, write_json

PAST = 200  # tokens remembered: more than there are runs that could still wake up


def acquire(place, token, owner, purpose=""):
    """Take the lock, or keep it where the token already holds it. HostFault `locked` names whose it is."""
    with place.mutex():
        lock = read_json(place.lock)
        if lock and lock["token"] != token:
            if not orphaned(place, lock):
                raise blocked(lock)
            place.audit("lock_orphan_taken", owner=lock["owner"], purpose=lock["purpose"], age=age(lock), by=owner)
            lock = None
        since = {"since": time.time(), "since_uptime": uptime(), "boot": boot_id()}
        epoch = raise_epoch(place, token, owner, purpose)
        session = process_identity(os.getpid())
        fresh = dict(lock or since, token=token, owner=owner, purpose=purpose, session=session)
        if fresh != lock:
            write_json(place.lock, fresh)
    return dict(describe(fresh), epoch=epoch)


def raise_epoch(place, token, owner, purpose):
    """The epoch of this token, a new one where it is new here. HostFault `taken_over` where another has come after it. Mutex held."""
    held = read_json(place.epoch) or {"epoch": 0, "token": "", "past": []}
    if held["token"] == token:
        return held["epoch"]
    if token in held["past"]:
        raise taken_over(held)
    past = [*held["past"], held["token"]][-PAST:] if held["token"] else []
    now = {"epoch": held["epoch"] + 1, "token": token, "owner": owner, "purpose": purpose, "since": time.time(), "past": past}
    write_json(place.epoch, now)
    return now["epoch"]


def require_newest(place, token):
    """HostFault `taken_over` unless this token was the last to take the lock. Mutex held."""
    held = read_json(place.epoch)
    if held and held["token"] != token:
        raise taken_over(held)


def taken_over(held):
    facts = {name: held[name] for name in ("epoch", "owner", "purpose", "since")}
    ago = max(0, int(time.time() - held["since"]))
    return HostFault(
        "taken_over",
        "taken over by %s for %s, %d s ago: what came before has no say here any more" % (held["owner"], held["purpose"] or "an unnamed purpose", ago),
        "Nothing was changed. Look at `phase status`, and begin anew.",
        **facts
    )


def show_epoch(place, token=""):
    """Who took over last; `superseded`: the token held the lock once and another came after it."""
    with place.mutex():
        held = read_json(place.epoch)
        if not held:
            return None
        return dict({name: held[name] for name in ("epoch", "owner", "purpose", "since")}, superseded=token in held["past"])


def require(place, token):
    """HostFault unless this token holds the lock. Call with the mutex held, so that nobody takes it in between."""
    lock = read_json(place.lock)
    if not lock:
        require_newest(place, token)
        raise HostFault("lock_lost", "the lock of %s is not held any more" % place.root, "Take it again and look at what changed.")
    if lock["token"] != token:
        raise blocked(lock)


def move(place, token):
    """This session stands behind the run's lock from now on: the run came over a new connection. Mutex held."""
    lock, session = read_json(place.lock), process_identity(os.getpid())
    if lock and lock["token"] == token and lock["session"] != session:
        write_json(place.lock, dict(lock, session=session, boot=boot_id()))


def release(place, token):
    """Remove the lock if it is ours; someone else's is left alone and reported."""
    with place.mutex():
        lock = read_json(place.lock)
        if lock and lock["token"] == token:
            remove(place.lock)
            return {"released": True}
    return {"released": False, "held_by": describe(lock) if lock else None}


def break_lock(place, token, by):
    """Remove the lock a person has looked at: only the very one shown to them, named by its token."""
    with place.mutex():
        lock = read_json(place.lock)
        if not lock:
            return {"broken": False}
        if lock["token"] != token:
            raise HostFault("lock_changed", "the lock has changed hands since it was shown", "Look again before breaking it.", **describe(lock))
        place.audit("lock_broken", owner=lock["owner"], purpose=lock["purpose"], age=age(lock), by=by)
        remove(place.lock)
    return {"broken": True}


def show(place):
    with place.mutex():
        lock = read_json(place.lock)
        return dict(describe(lock), orphan=orphaned(place, lock), token=lock["token"]) if lock else None


def leave(place):
    """The session ends: drop the locks it stands behind, unless a lease has taken them over."""
    with place.mutex():
        lock = read_json(place.lock)
        if lock and lock["session"] == process_identity(os.getpid()) and not record.active(read_json(place.lease)):
            place.audit("lock_dropped", owner=lock["owner"], purpose=lock["purpose"], age=age(lock), why="its session ended")
            remove(place.lock)


def orphaned(place, lock):
    if lock["boot"] == boot_id() and alive(lock["session"]):
        return False
    lease = read_json(place.lease)
    return not (record.active(lease) and lease["token"] == lock["token"])


def blocked(lock):
    facts = describe(lock)
    return HostFault(
        "locked",
        "locked by %(owner)s for %(purpose)s, %(age)d s ago" % dict(facts, purpose=facts["purpose"] or "an unnamed purpose"),
        "Wait for it, or `phase unlock` after making sure that run is over.",
        **facts
    )


def age(lock):
    """Seconds since it was taken, by a clock nobody can set; 0 if the host has been rebooted since and clocks disagree."""
    since_boot = uptime() - lock["since_uptime"] if lock["boot"] == boot_id() else time.time() - lock["since"]
    return max(0, int(since_boot))


def describe(lock):
    return {"owner": lock["owner"], "purpose": lock["purpose"], "age": age(lock), "since": lock["since"]}
