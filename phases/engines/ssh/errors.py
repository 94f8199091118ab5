"""What can go wrong on a host, by kind; every message names the host and the cure."""

from __future__ import annotations

from typing import Any

from phases.base.errors import FleetError, LockedError


class UnreachableError(FleetError):
    """No connection, or the one there was is gone."""


class HostKeyError(FleetError):
    """The host does not show the key that is known for it, or none is known."""


class LoginError(FleetError):
    """The host refuses the user or key."""


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
    kind = _BY_CODE.get(code, LeaseError if code.startswith("lease_") else FleetError)
    error = kind(_sentence(fault["message"]), hint=fault["hint"], host=host)
    error.code, error.facts = code, fault["facts"]  # type: ignore[attr-defined]
    return error


def code_of(error: BaseException) -> str:
    """The host's code of an error, "" for one that did not come from a host."""
    return getattr(error, "code", "")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."
