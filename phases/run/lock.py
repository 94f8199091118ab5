"""One run per playbook at a time: a token file with its owner, age and host.

The lock file appears in one step with its whole content (a link to a finished file, which fails if there is one) and is
removed only by the process whose token it holds. A lock whose owner is provably dead (same machine, same boot, no such
process or another one under its number) is taken over; any other lock blocks, whatever its age, until `phase unlock`.
A short-lived kernel lock on a neighbouring file makes look-and-act atomic and cannot be left behind by a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from phases.base.clock import Clock, age, iso
from phases.base.errors import LockedError, PhaseError
from phases.base.files import explain
from phases.base.processes import Life, life_of, start_of


@dataclass(frozen=True)
class Owner:
    """Who holds a lock. `process_start` tells a process from a later one with the same number."""

    token: str
    pid: int
    process_start: str
    boot: str
    host: str
    user: str
    purpose: str
    since: float

    def describe(self, now: float) -> str:
        return f"{self.purpose} by {self.user} (process {self.pid} on {self.host}), since {iso(self.since)}, {age(now - self.since)} ago"


class Lock:
    """The lock of one playbook in one repository's state directory."""

    def __init__(self, state: Path, name: str, clock: Clock) -> None:
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        self.path = state / "locks" / f"{safe}.json"
        self.clock = clock
        self.token = ""
        self.took_over: Owner | None = None

    def owner(self) -> Owner | None:
        """Who holds the lock now; an unreadable file is an owner of whom nothing is known."""
        try:
            owner = Owner(**json.loads(self.path.read_text()))
            if not isinstance(owner.pid, int) or not isinstance(owner.since, (int, float)):
                raise TypeError("not a process number and a time")
            return owner
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            since = self.path.stat().st_mtime
            return Owner("", 0, "", "", "an unknown host", "an unknown user", "an unreadable lock", since)

    def acquire(self, purpose: str) -> None:
        """Take the lock. Raises LockedError naming owner and age when another run holds it."""
        try:
            with self._guard():
                holder = self.owner()
                if holder and not is_dead(holder):
                    raise LockedError(
                        f"{self.path.stem} is locked: {holder.describe(self.clock.now())}.",
                        hint="Wait for it to end, or, if you know that it is gone, remove the lock with `phase unlock`.",
                    )
                if holder:
                    self.took_over = holder
                    self.path.unlink()
                self._write(_me(purpose, self.clock))
        except OSError as fault:
            message, hint = explain(fault)
            raise PhaseError(f"cannot take the lock: {message}", hint=hint) from fault

    def release(self) -> None:
        """Give the lock back if it is still ours; another's lock is left alone."""
        if not self.token:
            return
        with contextlib.suppress(OSError), self._guard():
            holder = self.owner()
            if holder and holder.token == self.token:
                self.path.unlink()
        self.token = ""

    def break_lock(self, token: str) -> Owner | None:
        """Remove the lock that holds `token` (shown to the person who decided so); None when it is gone or another's."""
        with self._guard():
            holder = self.owner()
            if holder is None or holder.token != token:
                return None
            self.path.unlink()
            return holder

    @contextlib.contextmanager
    def held(self, purpose: str) -> Iterator[Lock]:
        self.acquire(purpose)
        try:
            yield self
        finally:
            self.release()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".guard").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _write(self, owner: Owner) -> None:
        temporary = self.path.with_suffix(f".{owner.token}")
        try:
            with temporary.open("x") as handle:
                json.dump(asdict(owner), handle)
                handle.flush()
                os.fsync(handle.fileno())
            os.link(temporary, self.path)  # fails if the name is taken: the O_EXCL of a finished file
        finally:
            temporary.unlink(missing_ok=True)
        self.token = owner.token


def life(owner: Owner) -> Life:
    """Whether the owner still runs, where that can be known: on the machine it runs on."""
    if owner.host != socket.gethostname() or not owner.pid:
        return Life.UNKNOWN
    if owner.boot and owner.boot != _boot():
        return Life.GONE
    return life_of(owner.pid, owner.process_start)


def is_dead(owner: Owner) -> bool:
    """Whether the owner is certainly gone; False whenever that cannot be known from here."""
    return life(owner) is Life.GONE


def _me(purpose: str, clock: Clock) -> Owner:
    pid = os.getpid()
    return Owner(
        secrets.token_hex(16), pid, start_of(pid), _boot(), socket.gethostname(), _user(), purpose, clock.now()
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name in the environment, none in the user database
        return f"uid {os.getuid()}"


def _boot() -> str:
    """Identity of this boot, where the system tells (Linux); a container restart on the same boot keeps it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
