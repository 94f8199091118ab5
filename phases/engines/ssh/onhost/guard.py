"""The guard: the process on the host that watches the lease's deadline and goes back when it passes.

It is a process of its own session that outlives the connection which armed the lease. If it is killed, the next contact of
the toolkit (`tend`) or the next start of the service (`settle_before_start`) notices and acts in its place. Run as
`guard.py watch ROOT ID` (the guard) and `guard.py exec ROOT` (starts the service, for systemd and docker). Python 3.8 or
newer, standard library and its neighbours only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import control
import record
import revert
from launch import launch_plan
from place import HostFault, Place, alive, boot_id, pid_space, process_identity, uptime
from record import TICK

START_SECONDS = 10.0


def tend(place):
    """Do what a lease asks for when its guard cannot: called at every contact of the toolkit. Returns what was done, or ""."""
    with place.mutex():
        lease = record.read(place)
        if not record.active(lease) or record.guard_works(place, lease) or _just_armed(lease):
            return ""
        _retire(place, lease, "toolkit")
        if lease["boot"] != boot_id() and lease["state"] != "reverting":
            revert.begin(place, lease, "the host was rebooted before the release was kept")
    start(place, lease["id"])
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
        lease = record.read(place)
        if not record.active(lease):
            return
        rebooted, late = lease["boot"] != boot_id(), record.seconds_late(lease) > 0
        elsewhere = bool(lease["guard"]) and lease["guard"]["space"] != pid_space()
        works = record.beats(place) if elsewhere else record.guard_works(place, lease)
        if lease["state"] == "reverting":
            place.set_link(place.current, lease["previous"])
        if works and not rebooted or elsewhere and not (rebooted or late):
            return
        _retire(place, lease, "service start")
        if rebooted or late or lease["state"] == "reverting":
            if lease["state"] != "reverting":
                revert.begin(place, lease, "the host was rebooted before the release was kept" if rebooted else "the lease ran out unguarded")
            place.set_link(place.current, lease["previous"])
            revert.finish(place, lease, "reverted", "by the service's start")
            return
    start(place, lease["id"])


def start(place, lease_id):
    """Start the guard in a session of its own and wait until it holds the lease; HostFault when it does not come up."""
    with open(os.path.join(place.run, "guard.log"), "ab") as log:
        command = [sys.executable, "-E", "-s", "-S", os.path.abspath(__file__), "watch", place.root, lease_id]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        lease = record.read(place)
        if not record.active(lease) or record.guard_works(place, lease):
            return  # ours, or that of another contact that came at the same time
        if process.poll() not in (None, 0):
            break
        time.sleep(0.01)
    raise HostFault("guard_failed", "the lease guard did not start", "Read %s/run/guard.log." % place.root)


def watch(place, lease_id):
    """Live until the lease is over: beat, and go back when the deadline passes or someone has begun to and is gone.

    Where many hosts lost their toolkit at the same moment, their restarts take turns (`turn` seconds after the deadline), so that
    the fleet does not go out of service as a whole; a server that can fall back hot does so at the deadline itself.
    """
    me = process_identity(os.getpid())
    with place.mutex():
        lease = record.read(place)
        if not record.active(lease) or lease["id"] != lease_id:
            return
        lease["guard"] = me
        record.beat(place)
        record.save(place, lease)
    ran_out = False
    while True:
        try:
            with place.mutex():
                lease = record.read_or(place, lease)
                if not record.active(lease) or lease["id"] != lease_id or lease["guard"] != me:
                    return
                record.beat(place)
                late = record.seconds_late(lease)
                left = lease.get("turn", 0.0) - late  # a lease armed by an older kit has no turn
                if left <= 0 and lease["state"] != "reverting":
                    revert.begin(place, lease, "nobody %s in %g s" % ("confirmed" if lease["state"] == "armed" else "renewed", lease["window"]))
                elif late >= 0 and not ran_out:
                    ran_out = True
                    control.fall_back(place, lease["release"])
                    record.note(place, "lease_ran_out", lease=lease_id, turn=lease["turn"], control=control.read(place))
            if lease["state"] == "reverting":
                revert.carry_out(place, lease)
                return
            time.sleep(min(TICK, max(0.01, left if ran_out else -late)))
        except (HostFault, OSError) as fault:  # whatever is wrong with the disk: a guard does not give up
            if not os.path.isdir(place.root):  # the host was given up: there is nothing left to guard
                return
            print("the guard goes on: %s" % fault, file=sys.stderr, flush=True)
            time.sleep(TICK)


def _retire(place, lease, seen_by):
    """Note that the guard is lost, and end one that merely stopped beating, so that there is never more than one."""
    record.note(place, "guard_lost", lease=lease["id"], state=lease["state"], seen_by=seen_by)
    if lease["boot"] == boot_id() and lease["state"] != "reverting" and alive(lease["guard"]):
        os.kill(lease["guard"]["pid"], 9)


# ---- starting the service


def exec_service(place):
    """Become the service: settle the lease, then exec what `current` says."""
    settle_before_start(place)
    argv, environment, directory = launch_plan(place)
    control.settle_before_start(place, environment["PHASEGATE_RELEASE"])
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
