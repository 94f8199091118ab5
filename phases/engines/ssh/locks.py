"""The lock of a host: one run at a time, with an owner that can be asked."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass

from phases.base.processes import Life, life_of
from phases.engines.ssh.errors import HostLockedError
from phases.engines.ssh.session import HostSession, Operation, op

GONE = (
    "Its process is gone: go on with that run (the same command and `--resume`), take production back (`phase rollback`), or wait until its "
    "lease has run out: the host goes back by itself then, and its lock goes too."
)


@dataclass(frozen=True)
class LockInfo:
    """Who holds a host's lock."""

    owner: str
    purpose: str
    age: float  # seconds
    orphan: bool  # nobody stands behind it any more; the next run takes it over by itself
    token: str

    @property
    def life(self) -> Life:
        """Whether the run that took it still runs; known only on the machine it was started on."""
        return _life_of_owner(self.owner, self.age)


def _life_of_owner(owner: str, age: float) -> Life:
    named = re.fullmatch(r".*@(.+) pid (\d{1,9})", owner)
    if named is None or named[1] != socket.gethostname():
        return Life.UNKNOWN
    return life_of(int(named[2]), since=time.time() - age)


def owner_name() -> str:
    """`person@machine pid N`: who a lock or an audit entry belongs to."""
    try:
        person = getpass.getuser()
    except (KeyError, OSError):
        person = str(os.getuid())
    return f"{person}@{socket.gethostname()} pid {os.getpid()}"


class HostLock:
    """Taken with a token of one's own and released only with it. A resumed run passes the token it had.

    As a context manager it is released at the end, whatever happened; on a broken connection the host drops it by itself.
    """

    def __init__(self, session: HostSession, purpose: str, *, token: str = "", owner: str = "") -> None:
        self.session, self.purpose = session, purpose
        self.token, self.owner = token or secrets.token_hex(16), owner or owner_name()
        self.held = False

    def keeping(self) -> list[Operation]:
        """For the front of every batch that changes something: takes the lock again where a broken session has dropped it.

        Nothing once it was released, so that a change without the lock is refused by the host.
        """
        return [self.taking()] if self.held else []

    def taking(self) -> Operation:
        """`acquire` as an operation; call `acquire` to start with, and use `keeping` afterwards."""
        return op("lock.acquire", token=self.token, owner=self.owner, purpose=self.purpose)

    def acquire(self) -> None:
        """HostLockedError (with `.facts`: owner, purpose, age) when another run holds it.

        A run that was killed is not robbed of it: its lease stands behind the lock until the host has gone back, and whoever goes on with
        the run needs both. The error then says what can be done at once.
        """
        try:
            self.session.do(self.taking())
        except HostLockedError as fault:
            held = getattr(fault, "facts", {})
            if "owner" in held and _life_of_owner(held["owner"], held["age"]) is Life.GONE:
                fault.hint = GONE
            raise
        self.held = True

    def release(self) -> bool:
        """False when it was not ours any more; another's lock is never touched."""
        self.held = False
        return bool(self.session.do(op("lock.release", token=self.token))[0]["released"])

    def __enter__(self) -> HostLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.release()
        except Exception:  # noqa: BLE001 - the error that ended the block matters more
            if kind is None:
                raise


def show_lock(session: HostSession) -> LockInfo | None:
    shown = session.do(op("lock.show"))[0]
    return LockInfo(shown["owner"], shown["purpose"], shown["age"], shown["orphan"], shown["token"]) if shown else None


def superseded_by(session: HostSession, token: str) -> str:
    """Who took the host over from the holder of this token; empty when nobody did, or it never held the lock."""
    shown = session.do(op("epoch.show", token=token))[0]
    return f"{shown['owner']} ({shown['purpose'] or 'an unnamed purpose'})" if shown and shown["superseded"] else ""


def break_lock(session: HostSession, seen: LockInfo) -> bool:
    """Remove exactly the lock that was shown; HostLockedError when it has changed hands since."""
    return bool(session.do(op("lock.break", token=seen.token, by=owner_name()))[0]["broken"])


__all__ = ["HostLock", "HostLockedError", "LockInfo", "break_lock", "owner_name", "show_lock", "superseded_by"]
