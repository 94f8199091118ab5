"""The lease: a host-side timer that puts `current` back by itself unless someone proves, again and again, that all is well.

    armed ──confirm (new connection)──▶ confirmed ──renew …──▶ kept
      └───────── deadline, cancel, reboot ─────────┴──▶ reverting ──▶ reverted | revert_failed

The deadline counts on the clock since boot (suspend included), so setting the wall clock changes nothing; another boot id
means a reboot, and a lease that was not kept then goes back. The guard is a process of its own session that outlives the
connection which armed it. If it is killed, the next contact of the toolkit or the next start of the service notices and
acts in its place. Run as `guard.py watch ROOT ID` (the guard) and `guard.py exec ROOT` (starts the service, for systemd and
docker). Python 3.8 or newer, standard library and its neighbours only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import locks
import store
from launch import launch_plan
from place import NEVER, HostFault, Place, alive, boot_id, pid_space, process_identity, read_json, remove, uptime, write_json

ACTIVE = ("armed", "confirmed", "reverting")
OVER = {  # what to make of a lease that is over
    "kept": "The release stays.",
    "reverting": "The host is going back to its previous release; look again when it has.",
    "reverted": "The host is back on its previous release.",
    "revert_failed": "Look at the service's log and start it by hand.",
}
TICK = 0.25  # seconds between looks at the lease
STALE = 20 * TICK  # a heartbeat older than this means a stopped guard
START_SECONDS = 10.0
RESTART_ATTEMPTS = 3
RESERVE_BYTES = 64 * 1024  # given back to a full disk so that a revert can be written down


def read(place):
    return read_json(place.lease)


def active(lease):
    return bool(lease) and lease["state"] in ACTIVE


def require_active(lease, lease_id):
    """HostFault that says what became of the lease unless it is active and its time has not run out."""
    if not lease or lease["id"] != lease_id:
        raise HostFault("lease_unknown", "there is no lease %s on this host" % lease_id, "Another run has replaced it; look at the audit log.")
    if lease["state"] not in ("armed", "confirmed"):
        why = ": %s" % lease["reason"] if lease["reason"] else ""
        raise HostFault("lease_over", "the lease is already %s%s" % (lease["state"], why), OVER[lease["state"]], state=lease["state"])
    late = _seconds_late(lease)
    if late > 0:
        raise HostFault("lease_expired", "the lease ran out %.1f s ago" % late, "The host is going back to its previous release.", late=late)


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
        held = read(place)
        if active(held) and held["id"] != lease_id:
            raise HostFault("lease_active", "another lease is %s on this host" % held["state"], "Confirm, keep or cancel it first.", lease=held["id"])
        current = place.link_target(place.current)
        if current != previous:
            raise HostFault("not_current", "current is %s, not %s as the run expects" % (current[:12], previous[:12]), "Somebody else changed this host; plan again.")
        lease = {
            "id": lease_id, "state": "armed", "release": release, "previous": previous, "window": window, "boot": boot_id(),
            "deadline": uptime() + window, "armed": time.time(), "armed_via": via, "confirmed_via": "", "token": token,
            "restart": restart, "stop": stop, "command_timeout": command_timeout, "guard": None, "reason": "",
        }  # fmt: skip
        _reserve(place)
        write_json(place.lease, lease)
        place.audit("lease_armed", lease=lease_id, release=release, previous=previous, window=window)
    start_guard(place, lease_id)
    return describe(place)


def confirm(place, lease_id, window, via):
    """The toolkit came back: the lease now lasts `window` seconds from here and must be renewed or kept.

    Early (before `current` is the leased release) proves nothing and is refused, the lease stays as it is. As soon as the
    switch is made it counts, whether or not the guard has looked since. Late is refused by the clock, not by who is faster.
    """
    tend(place)
    with place.mutex():
        lease = read(place)
        require_active(lease, lease_id)
        if place.link_target(place.current) != lease["release"]:
            raise HostFault("lease_early", "current is not the leased release yet", "Switch first; the lease is still armed.")
        if via == lease["armed_via"]:
            raise HostFault("lease_same_connection", "the confirmation came over the connection that armed the lease", "Confirm over a new one: that is what it proves.")
        lease.update(state="confirmed", confirmed_via=via, deadline=uptime() + window, window=window)
        write_json(place.lease, lease)
        locks.move(place, lease["token"])
        place.audit("lease_confirmed", lease=lease_id, window=window)
    return describe(place)


def renew(place, lease_id, window):
    """Push the deadline of a confirmed lease to `window` seconds from now."""
    tend(place)
    with place.mutex():
        lease = read(place)
        require_active(lease, lease_id)
        if lease["state"] != "confirmed":
            raise HostFault("lease_unconfirmed", "an unconfirmed lease cannot be renewed", "Confirm it over a new connection first.")
        lease.update(deadline=uptime() + window, window=window)
        write_json(place.lease, lease)
        locks.move(place, lease["token"])
    return describe(place)


def keep(place, lease_id):
    """The release stays: the lease ends, and the release is the new last-good."""
    with place.mutex():
        lease = read(place)
        if lease and lease["id"] == lease_id and lease["state"] == "kept":
            return _describe(place, lease)
        require_active(lease, lease_id)
        if lease["state"] != "confirmed":
            raise HostFault("lease_unconfirmed", "an unconfirmed lease cannot be kept", "Confirm it over a new connection first.")
        place.set_link(place.last_good, lease["release"])
        lease.update(state="kept", reason="kept by the toolkit")
        write_json(place.lease, lease)
        remove(_reserve_path(place))
        place.audit("lease_kept", lease=lease_id, release=lease["release"])
    return describe(place)


def cancel(place, lease_id, reason):
    """Go back now, in this process, without waiting for the guard. A lease that already went back is left as it is."""
    with place.mutex():
        lease = read(place)
        if not lease or lease["id"] != lease_id:
            raise HostFault("lease_unknown", "there is no lease %s on this host" % lease_id)
        if not active(lease):
            return _describe(place, lease)
        _begin_revert(place, lease, reason)
    _revert(place, lease)
    return describe(place)


def tend(place):
    """Do what a lease asks for when its guard cannot: called at every contact of the toolkit. Returns what was done, or ""."""
    with place.mutex():
        lease = read(place)
        if not active(lease) or _guard_works(place, lease) or _just_armed(lease):
            return ""
        _retire_guard(place, lease, "toolkit")
        if lease["boot"] != boot_id() and lease["state"] != "reverting":
            _begin_revert(place, lease, "the host was rebooted before the release was kept")
    start_guard(place, lease["id"])
    return "guard started again"


def _just_armed(lease):
    """Its guard is about to start; whoever arms it waits for that."""
    return lease["guard"] is None and lease["boot"] == boot_id() and uptime() - (lease["deadline"] - lease["window"]) < START_SECONDS


def settle_before_start(place):
    """What the service's start does first: a lease that nothing guards any more is not trusted.

    After a reboot, or past the deadline, `current` goes back before the service starts. A guard that was killed before the
    deadline is started again, and the service starts what is current; not so in a container, where a guard could restart
    nothing and would end with the container: there the next contact of the toolkit starts it.
    """
    with place.mutex():
        lease = read(place)
        if not active(lease):
            return
        rebooted, late = lease["boot"] != boot_id(), _seconds_late(lease) > 0
        elsewhere = bool(lease["guard"]) and lease["guard"]["space"] != pid_space()
        works = _beats(place) if elsewhere else _guard_works(place, lease)
        if lease["state"] == "reverting":
            place.set_link(place.current, lease["previous"])
        if works and not rebooted or elsewhere and not (rebooted or late):
            return
        _retire_guard(place, lease, "service start")
        if rebooted or late or lease["state"] == "reverting":
            if lease["state"] != "reverting":
                _begin_revert(place, lease, "the host was rebooted before the release was kept" if rebooted else "the lease ran out unguarded")
            place.set_link(place.current, lease["previous"])
            _finish_revert(place, lease, "reverted", "by the service's start")
            return
    start_guard(place, lease["id"])


def describe(place):
    """The lease as the toolkit wants to see it; None when there never was one."""
    with place.mutex():
        lease = read(place)
        return _describe(place, lease) if lease else None


def _describe(place, lease):
    shown = {name: lease[name] for name in ("id", "state", "release", "previous", "window", "armed", "reason")}
    shown.update(
        active=active(lease), seconds_left=-_seconds_late(lease), same_boot=lease["boot"] == boot_id(),
        guard_alive=alive(lease["guard"]), guard_works=_guard_works(place, lease), current=place.link_target(place.current),
    )  # fmt: skip
    return shown


def _seconds_late(lease):
    return uptime() - lease["deadline"] if lease["boot"] == boot_id() else float(lease["window"])


# ---- the guard process


def start_guard(place, lease_id):
    """Start the guard in a session of its own and wait until it holds the lease; HostFault when it does not come up."""
    with open(os.path.join(place.run, "guard.log"), "ab") as log:
        command = [sys.executable, "-E", "-s", "-S", os.path.abspath(__file__), "watch", place.root, lease_id]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        lease = read(place)
        if not active(lease) or _guard_works(place, lease):
            return  # ours, or that of another contact that came at the same time
        if process.poll() not in (None, 0):
            break
        time.sleep(0.01)
    raise HostFault("guard_failed", "the lease guard did not start", "Read %s/run/guard.log." % place.root)


def watch(place, lease_id):
    """Live until the lease is over: beat, and go back when the deadline passes or someone has begun to and is gone."""
    me = process_identity(os.getpid())
    with place.mutex():
        lease = read(place)
        if not active(lease) or lease["id"] != lease_id:
            return
        lease["guard"] = me
        _beat(place)
        _save(place, lease)
    while True:
        try:
            with place.mutex():
                lease = _read_or(place, lease)
                if not active(lease) or lease["id"] != lease_id or lease["guard"] != me:
                    return
                _beat(place)
                late = _seconds_late(lease)
                if late >= 0 and lease["state"] != "reverting":
                    _begin_revert(place, lease, "nobody %s in %g s" % ("confirmed" if lease["state"] == "armed" else "renewed", lease["window"]))
            if lease["state"] == "reverting":
                _revert(place, lease)
                return
            time.sleep(min(TICK, max(0.01, -late)))
        except (HostFault, OSError) as fault:  # whatever is wrong with the disk: a guard does not give up
            print("the guard goes on: %s" % fault, file=sys.stderr, flush=True)
            time.sleep(TICK)


def _read_or(place, known):
    """The lease, or what was last known of it when somebody has damaged the file."""
    try:
        return read(place) or known
    except HostFault as fault:
        print("the lease cannot be read: %s" % fault, file=sys.stderr, flush=True)
        return known


def _guard_works(place, lease):
    """Alive and beating: a stopped process (SIGSTOP) counts as lost."""
    if lease["boot"] != boot_id() or not alive(lease["guard"]):
        return False
    return lease["state"] == "reverting" or _beats(place)


def _beats(place):
    try:
        with open(_beat_path(place)) as file:
            return uptime() - float(file.read() or 0) < STALE
    except (OSError, ValueError):
        return False


def _beat_path(place):
    return os.path.join(place.run, "guard.beat")


def _beat(place):
    """Say that the guard lives. A full disk must not stop it from guarding."""
    try:
        with open(_beat_path(place), "w") as file:
            file.write("%.3f" % uptime())
    except OSError as fault:
        print("cannot write the heartbeat: %s" % fault, file=sys.stderr, flush=True)


def _retire_guard(place, lease, seen_by):
    """Note that the guard is lost, and end one that merely stopped beating, so that there is never more than one."""
    _note(place, "guard_lost", lease=lease["id"], state=lease["state"], seen_by=seen_by)
    if lease["boot"] == boot_id() and lease["state"] != "reverting" and alive(lease["guard"]):
        os.kill(lease["guard"]["pid"], 9)


# ---- going back


def _begin_revert(place, lease, reason):
    """Claim the revert for this process. Mutex held."""
    remove(_reserve_path(place))
    lease.update(state="reverting", reason=reason, guard=process_identity(os.getpid()))
    _save(place, lease)
    _note(place, "lease_reverting", lease=lease["id"], release=lease["release"], to=lease["previous"], reason=reason)


def _revert(place, lease):
    """Put `current` back and restart the service; the switch first, so that any restart, even a later one, is the old release."""
    try:
        if lease["previous"] != NEVER:
            store.verify(place, lease["previous"])
        with place.mutex():
            place.set_link(place.current, lease["previous"])
        command = lease["stop"] if lease["previous"] == NEVER else lease["restart"]
        outcome, detail = _command(command, lease["command_timeout"])
    except (HostFault, OSError) as fault:
        outcome, detail = "revert_failed", str(fault)
    with place.mutex():
        _finish_revert(place, lease, outcome, detail)


def _command(argv, timeout):
    """Run the restart, a few times if need be: (state of the lease, last lines of the output)."""
    detail = ""
    for attempt in range(RESTART_ATTEMPTS):
        if not argv:
            return "reverted", "no service to restart"
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, cwd="/")
        except (OSError, subprocess.TimeoutExpired) as fault:
            detail = str(fault)
        else:
            detail = done.stdout.decode("utf-8", "replace")[-500:].strip()
            if done.returncode == 0:
                return "reverted", detail
        if attempt + 1 < RESTART_ATTEMPTS:
            time.sleep(2.0**attempt)
    return "revert_failed", "the service did not restart: %s" % detail


def _finish_revert(place, lease, outcome, detail):
    """Write down how it ended and free the lock of the run that armed the lease. Mutex held."""
    lease.update(state=outcome, reason="%s; %s" % (lease["reason"], detail) if outcome == "revert_failed" else lease["reason"])
    _save(place, lease)
    _note(place, "lease_" + outcome, lease=lease["id"], current=place.link_target(place.current), reason=lease["reason"], detail=detail)
    lock = read_json(place.lock)
    if lock and lock["token"] == lease["token"] and not (lock["boot"] == boot_id() and alive(lock["session"])):
        remove(place.lock)
        _note(place, "lock_dropped", owner=lock["owner"], purpose=lock["purpose"], why="its lease is over and its session gone")


def _save(place, lease):
    try:
        write_json(place.lease, lease)
    except OSError as fault:
        print("cannot write the lease: %s" % fault, file=sys.stderr, flush=True)


def _note(place, event, **facts):
    try:
        place.audit(event, **facts)
    except OSError as fault:
        print("cannot write the audit log: %s %s %s" % (fault, event, facts), file=sys.stderr, flush=True)


def _reserve_path(place):
    return os.path.join(place.run, "reserve")


def _reserve(place):
    with open(_reserve_path(place), "wb") as file:
        file.write(b"\0" * RESERVE_BYTES)


# ---- starting the service


def exec_service(place):
    """Become the service: settle the lease, then exec what `current` says."""
    settle_before_start(place)
    argv, environment, directory = launch_plan(place)
    os.chdir(directory)
    os.execvpe(argv[0], argv, environment)


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "watch":
        place = Place(arguments[1])
        place.prepare()
        watch(place, arguments[2])
    elif len(arguments) == 2 and arguments[0] == "exec":
        place = Place(arguments[1])
        place.prepare()
        exec_service(place)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HostFault as fault:
        print("%s %s" % (fault, fault.hint), file=sys.stderr)
        sys.exit(1)
