"""What can go wrong on a host, by kind; every message names the host and the cure."""

from __future__ import annotations

import errno
from typing import Any

from phases.base.errors import FleetError, LockedError


class UnreachableError(FleetError):
    """No connection, or the one there was is gone."""


class HostKeyError(FleetError):
    """The host does not show the key that is known for it, or none is known."""


class LoginError(FleetError):
    """The host refuses the user or key."""


class SshConfigError(FleetError):
    """The ssh configuration cannot be read, or asks for what the toolkit cannot do."""


class SilentHostError(UnreachableError):
    """The host stopped answering within the time given."""


class CommandError(FleetError):
    """A program on the host failed."""


class ReleaseError(FleetError):
    """A release cannot be pushed, verified or switched to."""


class DiskFullError(ReleaseError):
    """There is not enough space on the host."""


class LeaseError(FleetError):
    """The lease is not in the state the run relies on; `code` says how."""


class ServiceError(FleetError):
    """The service did not start, stop or become ready."""


class RouterError(FleetError):
    """The router does not answer, or does not do what it was asked."""

    stage = "router"


class HostLockedError(LockedError, FleetError):
    """Another run holds the host's lock; `facts` has owner, purpose and age."""


class TakenOverError(FleetError):
    """Somebody took the host over after this run, which may change nothing there any more; `facts` has owner, purpose and since."""


_BY_CODE: dict[str, type[FleetError]] = {
    "disk_full": DiskFullError,
    "corrupt": ReleaseError,
    "incomplete": ReleaseError,
    "bad_digest": ReleaseError,
    "bad_manifest": ReleaseError,
    "offset": ReleaseError,
    "cut_off": ReleaseError,
    "nothing_current": ReleaseError,
    "old_python": UnreachableError,
    "not_current": ReleaseError,
    "locked": HostLockedError,
    "taken_over": TakenOverError,
    "lock_lost": HostLockedError,
    "lock_changed": HostLockedError,
    "guard_failed": LeaseError,
    "died": ServiceError,
    "not_started": ServiceError,
    "not_ready": ServiceError,
    "no_value": ServiceError,
    "port_taken": ServiceError,
    "command_failed": CommandError,
    "command_timeout": CommandError,
    "no_program": CommandError,
}


def from_host(host: str, fault: dict[str, Any]) -> FleetError:
    """The exception for a fault the host reported; `.code` and `.facts` keep what it said."""
    code = fault["code"]
    if code == "os":
        return _of_system(host, fault)
    kind = _BY_CODE.get(code, LeaseError if code.startswith("lease_") else FleetError)
    error = kind(_sentence(fault["message"]), hint=fault["hint"], host=host)
    error.code, error.facts = code, fault["facts"]  # type: ignore[attr-defined]
    return error


# What to do about what the system of a host refused; {path} is what it was about.
_CURES: dict[int, tuple[type[FleetError], str]] = {
    errno.ENOSPC: (
        DiskFullError,
        "Free some space there (`df -h {path}`) or, if there is some, inodes (`df -i {path}`).",
    ),
    errno.EDQUOT: (
        DiskFullError,
        "The quota of this user is used up: free some space there, or have it raised (`quota`).",
    ),
    errno.EFBIG: (
        DiskFullError,
        "A file there may not get that large: see `ulimit -f` and the file system's own limit.",
    ),
    errno.EROFS: (
        FleetError,
        "It is mounted read-only: see /proc/mounts and `dmesg` (a disk with errors is remounted so), or set another `root`.",
    ),
    errno.EACCES: (FleetError, "Give this user the directory, or set `sudo` to who has it."),
    errno.EPERM: (
        FleetError,
        "Give this user the directory, or set `sudo` to who has it; SELinux and `lsattr` may forbid it too.",
    ),
    errno.EIO: (FleetError, "The disk has errors: see `dmesg` there, and take the host out of the fleet."),
    errno.ESTALE: (FleetError, "A network file system has lost it: mount it again there."),
    errno.ENOTDIR: (FleetError, "Something that is no directory is in the way: remove it, or set another `root`."),
    errno.ELOOP: (FleetError, "A link points to itself: remove it, or set another `root`."),
    errno.ENAMETOOLONG: (FleetError, "Set a shorter `root`."),
    errno.ENOMEM: (FleetError, "The host has no memory left: see `free` and the limits of this user there."),
    errno.EAGAIN: (
        FleetError,
        "No further process can be started there: see `ulimit -u` and the pids limit of the user's slice.",
    ),
    errno.EMFILE: (FleetError, "Too many open files: raise `ulimit -n` for this user there."),
    errno.ENFILE: (FleetError, "Too many open files on the whole host: see fs.file-max there."),
}


def _of_system(host: str, fault: dict[str, Any]) -> FleetError:
    number, path = fault["facts"].get("errno"), fault["facts"].get("path", "")
    kind, cure = _CURES.get(number, (FleetError, "See what the host's log says about it (`dmesg`, journalctl)."))
    name = errno.errorcode.get(number, "")
    what = f"{path or 'the system'}: {fault['message']}" + (f" ({name})" if name else "")
    error = kind(_sentence(what), hint=cure.format(path=path or "/"), host=host)
    error.code, error.facts = "os", fault["facts"]  # type: ignore[attr-defined]
    return error


def code_of(error: BaseException) -> str:
    """The host's code of an error, "" for one that did not come from a host."""
    return getattr(error, "code", "")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
