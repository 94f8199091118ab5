"""The directory a worker lives in on a host, and the few primitives everything there is built on.

Files in this directory run on the fleet's hosts: Python 3.8 or newer, standard library only, no import from the toolkit.

    <root>/releases/<digest>/   immutable bundles          <root>/lease.json   the armed revert timer
    <root>/current              symlink to one of them     <root>/audit.log    JSON lines, what happened here (see audit)
    <root>/last-good            symlink, last kept one     <root>/control      hot fallback of the serving process
    <root>/lock.json            who is changing things     <root>/host.json    values for {name} in launch arguments
    <root>/epoch.json           who took over last         <root>/good.json    every release that was ever last-good here
    <root>/bin/<digest>/        these scripts              <root>/run/         pid files, logs, the mutex
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

import audit

BOOT_ID = "/proc/sys/kernel/random/boot_id"
MUTEX_SECONDS = 30.0
NEVER = "none"  # what stands for "no release" where a digest is expected


class HostFault(Exception):
    """A refusal or failure on the host: `code` for programs, text for people, `facts` for the message the toolkit makes."""

    def __init__(self, code, message, hint="", **facts):
        super().__init__(message)
        self.code, self.hint, self.facts = code, hint, facts

    def to_json(self):
        return {"code": self.code, "message": str(self), "hint": self.hint, "facts": self.facts}


class Place:
    """Paths below one root, and atomic changes to them."""

    def __init__(self, root):
        self.root = os.path.abspath(root)
        self.releases = os.path.join(self.root, "releases")
        self.run = os.path.join(self.root, "run")
        self.current = os.path.join(self.root, "current")
        self.last_good = os.path.join(self.root, "last-good")
        self.lease = os.path.join(self.root, "lease.json")
        self.lock = os.path.join(self.root, "lock.json")
        self.epoch = os.path.join(self.root, "epoch.json")
        self.good = os.path.join(self.root, "good.json")
        self.control = os.path.join(self.root, "control")
        self.audit_log = os.path.join(self.root, "audit.log")
        self.host_file = os.path.join(self.root, "host.json")

    def prepare(self):
        """Make the directories."""
        for path in (self.releases, self.run):
            os.makedirs(path, exist_ok=True)

    def release(self, digest):
        if not digest or not all(c in "0123456789abcdef" for c in digest) or len(digest) != 64:
            raise HostFault("bad_digest", "%r is not a release digest" % digest)
        return os.path.join(self.releases, digest)

    @contextlib.contextmanager
    def mutex(self):
        """Exclusive among all processes of this root; freed by the kernel when the holder dies. Not reentrant."""
        handle = os.open(os.path.join(self.run, "mutex"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(handle, self.root)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def restarting(self):
        """Held, beside others, while the service is restarted: a handle for the command that does it to inherit, so that this lasts as long as
        that command, also where who began it is killed. None where the disk refuses: a restart does not fail for it."""
        try:
            handle = os.open(os.path.join(self.run, "restarting"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            yield None
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield handle
        finally:
            os.close(handle)

    def restarts(self):
        """Whether somebody is restarting the service just now."""
        try:
            handle = os.open(os.path.join(self.run, "restarting"), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(handle)

    def audit(self, event, **facts):
        """Add an entry to the audit log, durable when this returns."""
        entry = {"time": round(time.time(), 3), "uptime": round(uptime(), 3), "boot": boot_id(), "event": event}
        entry.update(facts)
        audit.append(self.audit_log, entry)

    def link_target(self, link):
        """The digest a link points to, or NEVER."""
        try:
            return os.path.basename(os.readlink(link))
        except FileNotFoundError:
            return NEVER

    def set_link(self, link, digest):
        """Point a link at a release with one rename: a reader sees the old or the new target, never none."""
        if digest == NEVER:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
        else:
            self.release(digest)
            temporary = "%s.%d.tmp" % (link, os.getpid())
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            os.symlink(os.path.join("releases", digest), temporary)
            os.replace(temporary, link)
        sync_directory(self.root)


def _flock(handle, root):
    deadline = time.monotonic() + MUTEX_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise HostFault("busy", "another process has held %s/run/mutex for %g s" % (root, MUTEX_SECONDS), "Look for a stopped process.")
            time.sleep(0.005)


def write_json(path, value):
    """Replace a file atomically and durably."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(os.path.dirname(path))


def read_json(path):
    """The file's JSON object, None when there is no such file; HostFault when it cannot be understood."""
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:
        raise HostFault("damaged", "%s is not valid JSON" % path, "Look at it, move it away, and try again.")


def remove(path):
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_directory(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def uptime():
    """Seconds since boot, counting suspend; no wall clock change moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id():
    with open(BOOT_ID) as file:
        return file.read().strip()


def pid_space():
    """Which process numbers are meant: a container has its own, and cannot see the host's."""
    return os.readlink("/proc/self/ns/pid")


def process_identity(pid):
    """{pid, start, space}: unique on this boot even when pids are reused; None when there is no such process or it is a zombie.

    A process whose first thread has ended shows as a zombie while other threads still do: it counts until the last has, since
    until then its port answers and its memory is taken.
    """
    try:
        with open("/proc/%d/stat" % pid) as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return None if ended else {"pid": pid, "start": int(fields[19]), "space": pid_space()}


def alive(identity):
    """Whether that very process runs; False for one of another container, which cannot be seen from here.

    Only what was recorded is compared: a record may be older than this toolkit and know less.
    """
    now = process_identity(identity["pid"]) if identity else None
    return now is not None and all(now.get(key) == value for key, value in identity.items())
