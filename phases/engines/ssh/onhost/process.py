"""The service as a plain process group: no root, no systemd. `process.py start|stop|restart|restarting|status|logs ROOT [SECONDS|LINES]`.

The service runs in a session of its own, so that a signal reaches all its workers, and writes to <root>/run/service.log.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import control
import guard
from launch import launch_plan
from place import HostFault, Place, alive, pid_space, process_identity, read_json, remove, uptime, write_json

LOG_BYTES = 64 << 20  # a larger log is turned over at the next start
EARLY_DEATH_SECONDS = 0.05
POLL = 0.02
RECORDED = {"process", "group", "release", "started"}


def start(place):
    """Start the service from `current`; does nothing when it runs. HostFault with its last lines when it dies at once."""
    if status(place)["running"]:
        return status(place)
    guard.settle_before_start(place)
    argv, environment, directory = launch_plan(place)
    _require_free_port(place)
    control.settle_before_start(place, environment["PHASEGATE_RELEASE"])
    path = _log_path(place)
    if os.path.exists(path) and os.path.getsize(path) > LOG_BYTES:
        os.replace(path, path + ".1")
    with open(path, "ab") as log:
        try:
            process = subprocess.Popen(argv, env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as fault:
            raise HostFault("not_started", "cannot start %s: %s" % (argv[0], fault.strerror), "Check the launch arguments of the release.")
    identity = process_identity(process.pid)
    record = {"process": identity, "group": process.pid, "release": environment["PHASEGATE_RELEASE"], "started": time.time()}
    try:
        write_json(_record_path(place), record)
    except OSError:  # a full disk, say: nobody could stop what is not recorded, and it would keep the port from whoever starts next
        _end_group(process.pid)
        raise
    try:
        process.wait(EARLY_DEATH_SECONDS)
    except subprocess.TimeoutExpired:
        return status(place)
    raise HostFault("died", "the service ended at once (exit status %d)" % process.returncode, "Its last lines: %s" % logs(place, 5)["text"].strip())


def _require_free_port(place):
    """Somebody else on the worker's port would answer the health check in its place, and the wrong release would seem ready."""
    port = (read_json(place.host_file) or {}).get("port")
    if not port:
        return
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if probe.connect_ex(("127.0.0.1", int(port))) == 0:
            raise HostFault("port_taken", "port %s already answers, and it is not this service" % port, "End what listens there, then try again.")


def stop(place, drain=30.0):
    """Ask the service to finish its requests (SIGTERM), wait up to `drain` seconds, then end the whole group."""
    record = _service(place)
    if not record:
        remove(_record_path(place))
        return {"running": False, "killed": False}
    killed = False
    if alive(record["process"]):
        os.kill(record["process"]["pid"], signal.SIGTERM)
        until = time.monotonic() + drain
        while alive(record["process"]) and time.monotonic() < until:
            _reap(record["process"]["pid"])
            time.sleep(POLL)
        killed = alive(record["process"])
        _end_group(record["group"])
    remove(_record_path(place))
    return {"running": False, "killed": killed}


def _service(place):
    """The record of the service; where that is lost or damaged, what its process itself tells. None when there is neither."""
    try:
        record = read_json(_record_path(place))
    except HostFault:
        record = None
    return record if _is_record(record) else _unrecorded(place)


def _is_record(record):
    """Whether `start` wrote it, of a process that ran: what it names as a group is killed, so that no other than the process's own may stand there."""
    if not isinstance(record, dict) or not RECORDED <= set(record):
        return False
    process = record["process"]
    known = isinstance(process, dict) and isinstance(process.get("pid"), int) and isinstance(process.get("start"), int)
    return known and record["group"] == process["pid"] and isinstance(record["release"], str) and isinstance(record["started"], (int, float))


def _unrecorded(place):
    """A running service that no record names: it leads a session of its own, and has in its environment this root and a release, as only
    `start` gives them. None when no process shows that. Of several, such as ranks with sessions of their own, the oldest is the service."""
    mine, found = ("PHASEGATE_ROOT=%s" % place.root).encode(), []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                given = file.read().split(b"\0")
            leads = os.getsid(pid) == pid and os.readlink("/proc/%d/ns/pid" % pid) == pid_space()
        except OSError:  # ended meanwhile, or another user's
            continue
        release = [entry.partition(b"=")[2].decode("utf-8", "replace") for entry in given if entry.startswith(b"PHASEGATE_RELEASE=")]
        identity = process_identity(pid)
        if leads and mine in given and release and identity:
            begun = time.time() - uptime() + identity["start"] / os.sysconf("SC_CLK_TCK")
            found.append({"process": identity, "group": pid, "release": release[0], "started": begun})
    return min(found, key=lambda record: record["started"]) if found else None


def _end_group(group):
    """Kill what is left of the group and wait until nothing of it runs, so that its port and memory are free."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            return
        _reap(group)
        if not _members(group):
            return  # only zombies, which their parent may collect whenever it likes
        time.sleep(POLL)


def _members(group):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(process_identity(int(name))):
            try:
                if os.getpgid(int(name)) == group:
                    found.append(int(name))
            except OSError:
                continue
    return found


def _reap(pid):
    """Collect the exit of a child of ours; a service started by another process is not one."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        pass


def restart(place, drain=30.0):
    with place.restarting():
        stop(place, drain)
        return start(place)


def status(place):
    """{running, pid, release, started}: from the process itself, not from what a file says."""
    record = _service(place)
    if not record or not alive(record["process"]):
        return {"running": False, "pid": 0, "release": "", "started": 0.0}
    return {"running": True, "pid": record["process"]["pid"], "release": record["release"], "started": record["started"]}


def logs(place, lines=50):
    """The last lines the service wrote."""
    try:
        with open(_log_path(place), "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            return {"text": "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])}
    except FileNotFoundError:
        return {"text": ""}


def _log_path(place):
    return os.path.join(place.run, "service.log")


def _record_path(place):
    return os.path.join(place.run, "service.json")


def restarting(place):
    """Whether a restart is under way, whoever began it: what is stopped now would be started by it."""
    return {"restarting": place.restarts()}


ACTIONS = {"restarting": restarting, "start": start, "stop": stop, "restart": restart, "status": status, "logs": logs}


def act(place, action, number=None):
    """One of ACTIONS; `number` is the drain time in seconds, or the number of lines."""
    if action in ("stop", "restart") and number is not None:
        return ACTIONS[action](place, float(number))
    return logs(place, int(number)) if action == "logs" and number is not None else ACTIONS[action](place)


def main(arguments):
    if len(arguments) not in (2, 3) or arguments[0] not in ACTIONS:
        print(__doc__, file=sys.stderr)
        return 2
    place = Place(arguments[1])
    place.prepare()
    print(json.dumps(act(place, arguments[0], *arguments[2:])))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HostFault as fault:
        print("%s %s" % (fault, fault.hint), file=sys.stderr)
        sys.exit(1)
