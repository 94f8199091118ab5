"""The audit log of a root: JSON lines, appended by several processes, bounded in size, read by byte offset.

Offsets count from the log's very first byte, whatever has been put away since. When `audit.log` has grown to LIMIT it
becomes `audit.log.1` (the one before is dropped) and a new one begins, whose first line says at which offset. The new file
takes the name in one rename, so that there is a log at every instant; cut off before it, the rotation is simply begun again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time

LIMIT = 4 << 20  # bytes; two files of about this size at most
CHUNK = 4 << 20  # bytes read at a time
ROTATED = "log_rotated"
PATIENCE = 2.0  # seconds to wait for a rotation going on; longer means that its process was stopped


def append(path, entry):
    """Add one entry, durable when this returns: a single write on O_APPEND, so that lines of several processes never mix."""
    line = (json.dumps(entry, sort_keys=True) + "\n").encode()
    with _locked(path, fcntl.LOCK_SH, PATIENCE):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
            os.fsync(handle)
            full = os.fstat(handle).st_size >= LIMIT
        finally:
            os.close(handle)
    if full:
        with contextlib.suppress(OSError):  # a full disk, say: the entry is written, and the next one tries again
            _rotate(path, {name: entry[name] for name in ("time", "uptime", "boot")})


def read(path, offset):
    """{"entries": [...], "offset": to go on from}. What is not kept any more shows as one entry `log_dropped`.

    A line that is not finished is left for later; one that is not JSON is shown as text.
    """
    try:
        log = open(path, "rb")
    except FileNotFoundError:
        return {"entries": [], "offset": offset}
    with log:
        base = _base(log)
        if base <= offset <= base + os.fstat(log.fileno()).st_size:
            return _part(log, base, offset)
        with contextlib.suppress(FileNotFoundError), open(path + ".1", "rb") as old:
            first = _base(old)
            if offset < base and first < base:  # else it is this very log, whose rotation was cut off
                return _part(old, first, offset, closed=True) if offset >= first else _part(old, first, first, closed=True, dropped=offset)
        return _part(log, base, base, dropped=offset)


def _part(file, base, offset, closed=False, dropped=None):
    """A chunk from an offset on. To a file put away nothing is written any more, so its last line is whole."""
    file.seek(offset - base)
    data = file.read(CHUNK)
    whole = data if closed and len(data) < CHUNK else data[: data.rfind(b"\n") + 1]
    lost = [] if dropped is None else [{"event": "log_dropped", "from": dropped, "to": offset}]
    return {"entries": lost + [_entry(line) for line in whole.splitlines()], "offset": offset + len(whole)}


def _base(file):
    """The offset at which a log file begins, as its first line says; 0 for the first of all."""
    first = _entry(file.readline(4096))
    return first["base"] if first.get("event") == ROTATED else 0


def _entry(line):
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    return entry if isinstance(entry, dict) else {"event": "unreadable", "text": line.decode("utf-8", "replace")[:200]}


def _rotate(path, when):
    """Put the log away and begin a new one. Not now if somebody else is writing: whoever writes next tries again."""
    with _locked(path, fcntl.LOCK_EX, 0.0) as alone:
        if not alone or os.stat(path).st_size < LIMIT:
            return
        with open(path, "rb") as file:
            base = _base(file) + os.fstat(file.fileno()).st_size
        fresh, old = path + ".new", path + ".old"
        with open(fresh, "wb") as file:
            file.write((json.dumps(dict(when, event=ROTATED, base=base), sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
        os.link(path, old)
        os.replace(old, path + ".1")
        os.replace(fresh, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)  # it stays where `.1` was this very file already: renaming one onto the other does nothing


@contextlib.contextmanager
def _locked(path, how, patience):
    """Hold the log's lock; yields whether it is held. The kernel frees it when the holder dies."""
    handle = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
                held = True
                break
            except OSError:
                held = False
                if time.monotonic() >= until:
                    break
                time.sleep(0.005)
        yield held
    finally:
        os.close(handle)
