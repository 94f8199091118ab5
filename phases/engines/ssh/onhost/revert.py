"""Going back: the running server to the incumbent's attention at once, then `current` back, a restart, and how it ended.

`begin` and `finish` want the mutex held; `carry_out` takes it where it must, not while the service restarts.
"""

from __future__ import annotations

import os
import subprocess
import time

import control
import record
import store
from place import NEVER, HostFault, alive, boot_id, process_identity, read_json, remove

RESTART_ATTEMPTS = 3


def begin(place, lease, reason):
    """Fall back hot, which takes milliseconds, and claim the revert for this process. Mutex held."""
    control.fall_back(place, lease["release"])
    record.drop_reserve(place)
    lease.update(state="reverting", reason=reason, guard=process_identity(os.getpid()))
    record.save(place, lease)
    record.note(place, "lease_reverting", lease=lease["id"], release=lease["release"], to=lease["previous"], reason=reason, control=control.read(place))


def carry_out(place, lease, stop=False):
    """Put `current` back and restart the service, or stop it; the switch first, so that any restart, even a later one, is the old release."""
    try:
        if lease["previous"] != NEVER and not stop:
            store.verify(place, lease["previous"])
        with place.mutex():
            place.set_link(place.current, lease["previous"])
        command = lease["stop"] if stop or lease["previous"] == NEVER else lease["restart"]
        with place.restarting() as handle:
            outcome, detail = _command(command, lease["command_timeout"], handle)
    except (HostFault, OSError) as fault:
        outcome, detail = "revert_failed", str(fault)
    with place.mutex():
        finish(place, lease, outcome, detail)


def _command(argv, timeout, handle):
    """Run the restart, which inherits the handle, a few times if need be: (state of the lease, last lines of the output)."""
    detail = ""
    for attempt in range(RESTART_ATTEMPTS):
        if not argv:
            return "reverted", "no service to restart"
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, cwd="/",
                                  pass_fds=() if handle is None else (handle,))
        except (OSError, subprocess.TimeoutExpired) as fault:
            detail = str(fault)
        else:
            detail = done.stdout.decode("utf-8", "replace")[-500:].strip()
            if done.returncode == 0:
                return "reverted", detail
        if attempt + 1 < RESTART_ATTEMPTS:
            time.sleep(2.0**attempt)
    return "revert_failed", "the service did not restart: %s" % detail


def finish(place, lease, outcome, detail):
    """Write down how it ended and free the lock of the run that armed the lease. Mutex held."""
    lease.update(state=outcome, reason="%s; %s" % (lease["reason"], detail) if outcome == "revert_failed" else lease["reason"])
    record.save(place, lease)
    record.note(place, "lease_" + outcome, lease=lease["id"], current=place.link_target(place.current), reason=lease["reason"], detail=detail)
    lock = read_json(place.lock)
    if lock and lock["token"] == lease["token"] and not (lock["boot"] == boot_id() and alive(lock["session"])):
        remove(place.lock)
        record.note(place, "lock_dropped", owner=lock["owner"], purpose=lock["purpose"], why="its lease is over and its session gone")
