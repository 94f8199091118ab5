"""Releases on hosts: push once, verify by hash, switch with one rename, remove what nobody needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phases.base.errors import FleetError
from phases.engines.ssh.bundle import Bundle
from phases.engines.ssh.errors import ReleaseError, code_of
from phases.engines.ssh.locks import HostLock
from phases.engines.ssh.session import HostSession, Operation, op

NEVER = "none"  # what a host answers where there is no release
PUSH_ATTEMPTS = 2
DISK_RATE = 20e6  # bytes/s a slow disk hashes and syncs; the host answers after that
UNKNOWN_SIZE_SECONDS = 300.0  # for releases whose size is not known here


@dataclass(frozen=True)
class Inventory:
    """What is on a host."""

    releases: tuple[str, ...]  # digests of complete releases
    incomplete: tuple[str, ...]
    current: str
    last_good: str
    lease: dict[str, Any] | None
    free: int  # bytes
    facts: dict[str, Any] = field(default_factory=dict)  # of the current release: what it was built for


@dataclass(frozen=True)
class Pushed:
    digest: str
    sent: int  # bytes that travelled; 0 when the release was already there
    resumed_at: int


class ReleaseStore:
    """The releases of one host. Everything that changes something needs the host's lock."""

    def __init__(self, session: HostSession, lock: HostLock) -> None:
        self.session, self.lock = session, lock

    def push(self, bundle: Bundle, *, first: Sequence[Operation] = ()) -> Pushed:
        """Bring a release onto the host; continues an upload that was cut off, does nothing when it is there and whole.

        Args:
            first: operations to run before, in the same round trip.
        Raises: DiskFullError before anything is sent, when it will not fit; ReleaseError when what arrived twice does
            not hash to what was sent.
        """
        limit = self.session.host.timeouts.command + bundle.size / DISK_RATE
        for attempt in range(PUSH_ATTEMPTS):
            begin = op("release.begin", digest=bundle.digest, manifest=bundle.manifest, token=self.lock.token)
            answer = self.session.do(*self.lock.keeping(), *first, begin, timeout=limit)[-1]
            if answer["complete"]:
                return Pushed(bundle.digest, 0, 0)
            offset = answer["offset"]
            try:
                receive = op("release.receive", digest=bundle.digest, offset=offset, token=self.lock.token)
                self.session.do(receive, body=bundle.payload(offset), timeout=limit)
                return Pushed(bundle.digest, bundle.size - offset, offset)
            except ReleaseError as fault:
                if code_of(fault) not in ("corrupt", "offset") or attempt + 1 == PUSH_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def verify(self, digest: str) -> None:
        """Prove on the host that the release is complete and every file hashes right; ReleaseError otherwise."""
        self.session.do(op("release.verify", digest=digest), timeout=UNKNOWN_SIZE_SECONDS)

    def switch(self, digest: str, *, lease: str = "") -> str:
        """Verify and make it current; returns the digest that was current before (NEVER if none)."""
        done = self.session.do(*self.lock.keeping(), self.switching(digest, lease=lease), timeout=UNKNOWN_SIZE_SECONDS)
        return str(done[-1]["previous"])

    def switching(self, digest: str, *, lease: str = "") -> Operation:
        """`switch` as an operation, for a batch."""
        return op("release.switch", digest=digest, token=self.lock.token, lease=lease)

    def mark_good(self, digest: str) -> None:
        """Record what a rollback goes to."""
        self.session.do(*self.lock.keeping(), op("release.good", digest=digest, token=self.lock.token))

    def collect(self, *, keep: Sequence[str] = (), newest: int = 2) -> list[str]:
        """Remove old releases except current, last-good and the one before it, both ends of a lease, `keep` and the newest few.

        Returns the digests of what was removed.
        """
        collect = op("release.collect", token=self.lock.token, keep=list(keep), newest=newest)
        return list(self.session.do(*self.lock.keeping(), collect, timeout=UNKNOWN_SIZE_SECONDS)[-1]["removed"])


def read_inventory(session: HostSession) -> Inventory:
    return parse_inventory(session.do(op("inventory"))[0])


def parse_inventory(found: dict[str, Any]) -> Inventory:
    """The answer to the operation `inventory`, where it was part of a batch."""
    by_state = {
        state: tuple(r["digest"] for r in found["releases"] if r["complete"] is state) for state in (True, False)
    }
    return Inventory(
        by_state[True],
        by_state[False],
        found["current"],
        found["last_good"],
        found["lease"],
        found["free"],
        found["facts"],
    )


def read_audit(session: HostSession, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """What happened on the host since a byte offset of its audit log: (entries, offset to go on from)."""
    entries: list[dict[str, Any]] = []
    while True:
        part = session.do(op("audit.read", offset=offset))[0]
        entries += part["entries"]
        if part["offset"] == offset or not part["entries"]:
            return entries, offset
        offset = part["offset"]


def rollback_target(inventory: Inventory, host: str) -> str:
    """The release a rollback goes to: the recorded last-good one, never just the second newest; FleetError when there is none."""
    if inventory.last_good == NEVER:
        raise FleetError(
            "no release has been recorded as good.",
            hint="There is nothing to go back to; push and keep one first.",
            host=host,
        )
    if inventory.last_good not in inventory.releases:
        raise ReleaseError(
            f"the last good release {inventory.last_good[:12]} is not complete.", hint="Push it again.", host=host
        )
    return inventory.last_good
