"""The session the toolkit holds on a host: requests as JSON lines on standard input, one JSON line back for each.

A request is {"do": [{"op": name, ...arguments}, ...]}; its operations run in order and stop at the first that fails. The
reply is {"results": [...], "error": null or {code, message, hint, facts}}. One connection, one Python start, few round
trips. When the connection ends or stays silent for too long, the locks this session stands behind are dropped.
"""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
import time

import audit
import control
import guard
import lease
import locks
import process
import record
import store
from place import HostFault, Place, boot_id, process_identity, uptime, write_json

IDLE_SECONDS = 300.0


class Input:
    """Standard input with a limit on silence, and an acknowledgement for every so many bytes of a request's body.

    Where it is a terminal, its hanging up is an input error, and who forwards to it may end it with a ^D.
    """

    def __init__(self, handle, say, idle, buffer=b""):
        self.handle, self.say, self.idle, self.buffer = handle, say, idle, buffer
        self.every, self.taken = 0, 0

    def _more(self, count):
        if not select.select([self.handle], [], [], self.idle)[0]:
            return b""
        try:
            return os.read(self.handle, count)
        except OSError as fault:
            if fault.errno == errno.EIO:
                return b""
            raise

    def read(self, count):
        """Up to `count` bytes of a body; b"" when the other side is gone or silent."""
        if self.buffer:
            data, self.buffer = self.buffer[:count], self.buffer[count:]
        else:
            data = self._more(count)
        self.taken += len(data)
        while self.every and self.taken >= self.every:
            self.say("+")
            self.taken -= self.every
        return data

    def line(self):
        while b"\n" not in self.buffer:
            data = self._more(1 << 16)
            if not data or (not self.buffer and data[:1] == b"\x04"):
                return b""
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line


class Agent:
    """The operations by name: `lock.acquire` is lock_acquire."""

    def __init__(self, root, source):
        self.place, self.source, self.receiving = Place(root), source, False
        me = process_identity(os.getpid())
        self.via = os.environ.get("SSH_CONNECTION") or "local %d %d" % (me["pid"], me["start"])

    def handle(self, request):
        results = []
        self.receiving = any(item["op"] == "release.receive" for item in request["do"])
        try:
            for item in request["do"]:
                arguments = dict(item)
                operation = getattr(self, arguments.pop("op").replace(".", "_"))
                results.append(operation(**arguments))
        except HostFault as fault:
            return {"results": results, "error": fault.to_json()}
        except OSError as fault:
            return {"results": results, "error": _os_fault(fault).to_json()}
        except Exception as fault:  # a mistake in here must not look like a lost connection
            import traceback  # here: every connection pays for what is imported at the top

            traceback.print_exc()
            what = HostFault("bug", "%s in the host-side scripts: %s" % (type(fault).__name__, fault), "This is a bug of the toolkit: report it.")
            return {"results": results, "error": what.to_json()}
        return {"results": results, "error": None}

    def hello(self):
        """Make the root usable and do what a lost guard left undone."""
        self.place.prepare()
        return {"tended": guard.tend(self.place), "boot": boot_id(), "uptime": uptime(), "time": time.time(), "via": self.via}

    def facts(self):
        uname = os.uname()
        release = {}
        try:
            with open("/etc/os-release", encoding="utf-8", errors="replace") as file:
                release = dict(line.rstrip().split("=", 1) for line in file if "=" in line)
        except OSError:
            pass
        return {
            "hostname": uname.nodename, "kernel": uname.release, "machine": uname.machine, "os": release.get("PRETTY_NAME", "").strip('"'),
            "python": "%d.%d.%d" % sys.version_info[:3], "time": time.time(), "free": store.free_bytes(self.place), "uid": os.getuid(),
            "gpus": _gpus(), "kills_user_processes": _kills_user_processes(),
        }

    def describe(self, values):
        """Write host.json, the values for {name} in launch arguments."""
        write_json(self.place.host_file, values)

    def lock_acquire(self, token, owner, purpose=""):
        return locks.acquire(self.place, token, owner, purpose)

    def lock_release(self, token):
        return locks.release(self.place, token)

    def lock_break(self, token, by):
        return locks.break_lock(self.place, token, by)

    def lock_show(self):
        return locks.show(self.place)

    def epoch_show(self, token=""):
        return locks.show_epoch(self.place, token)

    def release_begin(self, digest, manifest, token):
        return store.begin(self.place, digest, manifest, token)

    def release_receive(self, digest, offset, token):
        return store.receive(self.place, digest, offset, self.source.read, token)

    def release_verify(self, digest):
        return store.verify(self.place, digest)

    def release_switch(self, digest, token, lease=""):
        return store.switch(self.place, digest, token, lease)

    def release_good(self, digest, token):
        return store.mark_good(self.place, digest, token)

    def release_collect(self, token, keep=(), newest=2):
        return store.collect(self.place, token, keep, newest)

    def inventory(self):
        return store.inventory(self.place)

    def lease_arm(self, **arguments):
        return lease.arm(self.place, via=self.via, **arguments)

    def lease_confirm(self, lease_id, window, turn=0.0):
        return lease.confirm(self.place, lease_id, window, self.via, turn)

    def lease_renew(self, lease_id, window, turn=0.0):
        return lease.renew(self.place, lease_id, window, turn)

    def lease_keep(self, lease_id):
        return lease.keep(self.place, lease_id)

    def lease_cancel(self, lease_id, reason, stop=False):
        return lease.cancel(self.place, lease_id, reason, stop)

    def lease_show(self):
        return record.describe(self.place)

    def control_switch(self, **arguments):
        return control.switch(self.place, **arguments)

    def control_show(self):
        return control.show(self.place)

    def audit_note(self, event, facts):
        self.place.audit(event, **facts)

    def audit_read(self, offset=0):
        """Entries from a byte offset on, across rotations."""
        return audit.read(self.place.audit_log, offset)

    def service(self, action, number=None):
        """The process driver, in this process."""
        return process.act(self.place, action, number)

    def command(self, argv, timeout, check=True):
        """Run a program: {code, out, err}; the drivers of other services are made of these."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout, cwd="/")
        except subprocess.TimeoutExpired:
            raise HostFault("command_timeout", "%s did not end in %g s" % (" ".join(argv), timeout))
        except FileNotFoundError:
            raise HostFault("no_program", "%s is not installed" % argv[0], "Install it, or choose another driver.")
        result = {"code": done.returncode, "out": done.stdout.decode("utf-8", "replace"), "err": done.stderr.decode("utf-8", "replace")}
        if check and done.returncode != 0:
            raise HostFault("command_failed", "%s: exit status %d: %s" % (" ".join(argv), done.returncode, result["err"][-300:].strip()))
        return result

    def wait_ready(self, port, path="/health", timeout=60.0, driver=""):
        import probe

        watch = (lambda: process.status(self.place)) if driver == "process" else None
        return probe.wait_ready(port, path, timeout=timeout, status=watch)


def _gpus():
    """[{name, driver, capability}] as nvidia-smi lists them; [] without one, a text when it fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        return "nvidia-smi hangs"
    text = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode != 0:
        return text.splitlines()[-1] if text else "nvidia-smi fails"
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [dict(zip(("name", "driver", "capability"), row)) for row in rows if len(row) == 3]


def _kills_user_processes():
    """Whether logind ends what a user left running, a lease guard too, when the last session closes."""
    found = False
    for path in ("/etc/systemd/logind.conf", *sorted(_listed("/etc/systemd/logind.conf.d"))):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    name, _, value = line.strip().partition("=")
                    if name.strip() == "KillUserProcesses":
                        found = value.strip().lower() in ("yes", "true", "1", "on")
        except OSError:
            continue
    return found and os.getuid() != 0


def _listed(directory):
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except OSError:
        return []


def _os_fault(fault):
    """The toolkit knows the cure for each errno; here is only what and where."""
    return HostFault("os", fault.strerror or str(fault), errno=fault.errno, path=str(fault.filename or ""))


def serve(root, token, idle=IDLE_SECONDS, begun=b""):
    """Answer requests until the other side is gone; `begun` was read already. Each reply begins with the token, so that it
    is told from what others print on the same stream."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(text):
        replies.write((token + text + "\n").encode())
        replies.flush()

    source = Input(0, say, idle, begun)
    agent = Agent(root, source)
    try:
        while True:
            line = source.line()
            if not line:
                return
            request = json.loads(line)
            source.every, source.taken = request.get("ack", 0), 0
            reply = agent.handle(request)
            say(json.dumps(reply))
            if reply["error"] and agent.receiving:
                return  # what may still be on the way is payload, not a request
    except BrokenPipeError:
        return
    finally:
        if os.path.isdir(agent.place.run):
            locks.leave(agent.place)
