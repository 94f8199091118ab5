"""Which attention serves tree verify: one byte of a memory-mapped file decides, at every forward.

The file is VERIFY_ATTN_CONTROL. Its first byte is `c` for the candidate (our kernel); anything else is the incumbent (the
engine's own attention), and so are a file that is missing, empty or unreadable: what is damaged must lead to what is known to
work. Without the variable there is nothing to follow and the candidate serves.

A forward looks at the byte once, when it begins, so that all its layers run the same kernel. A thread of the fact file looks
too, so that a switch is acknowledged at once on an idle server, and notices a file that was replaced. Write the byte in place
(`os.pwrite`, or `phase rollback --hot`): a shell's `>` cuts the file to nothing first, and a forward that looks at that very
moment ends with SIGBUS, as with any mapped file.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from dataclasses import dataclass

CANDIDATE, INCUMBENT = "candidate", "incumbent"
BYTES = {CANDIDATE: b"c", INCUMBENT: b"i"}
_CANDIDATE_BYTE = BYTES[CANDIDATE][0]
_NOTHING = -1  # in place of a byte: there is no file, or nothing in it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Acknowledgement:
    """What this rank has made of the control byte.

    Attributes:
        choice: what the next forward runs.
        from_forward: number of the first forward that the choice holds for (forwards are counted from 1).
        at: when it was noticed, seconds since the epoch.
        confirmed: number of the first forward that has begun with it; None until one has.
        why: where the choice comes from.
    """

    choice: str
    from_forward: int
    at: float
    confirmed: int | None
    why: str


class Control:
    """Follows the control file of one rank.

    Args:
        path: the file; None: always the candidate.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.changed = threading.Event()  # set when there is something new to acknowledge
        self.tripped = ""
        self.forward = 0  # the latest one that has begun
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._inode: tuple[int, int] | None = None
        self._byte = _CANDIDATE_BYTE
        self._candidate = True
        self._unconfirmed = True
        self.acknowledged = Acknowledgement(CANDIDATE, 1, time.time(), None, "at the start")
        if path:
            self.follow()

    @classmethod
    def from_environment(cls) -> Control:
        return cls(os.environ.get("VERIFY_ATTN_CONTROL"))

    @property
    def choice(self) -> str:
        """What the next forward runs."""
        return CANDIDATE if self._candidate else INCUMBENT

    def decide(self, forward: int) -> bool:
        """Whether the forward of this number, which begins now, runs our kernel. Called once a forward; no system call."""
        mapped = self._map
        if mapped is not None and mapped[0] != self._byte:
            self._take(mapped[0], forward)
        self.forward = forward
        if self._unconfirmed:
            self._confirm(forward)
        return self._candidate

    def follow(self) -> None:
        """Look at the file itself: a new, replaced or removed one too. For a thread that does so a few times a second."""
        if not self.path:
            return
        try:
            found = os.stat(self.path)
            inode = (found.st_dev, found.st_ino) if found.st_size else None
        except OSError:
            inode = None
        if inode != self._inode:
            self._map, self._inode = self._open() if inode else (None, None)
        mapped = self._map
        self._take(_NOTHING if mapped is None else mapped[0], self.forward + 1)

    def trip(self, reason: str) -> None:
        """Fall back to the incumbent by ourselves, and put it into the file, so that all ranks of this host follow.

        It holds until the byte is set to the candidate anew; where the file cannot be written, until the server's end.
        """
        with self._lock:
            self.tripped = reason
            self._set(False, self.forward + 1, f"tripped: {reason}")
        if not self.path:
            return
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, BYTES[INCUMBENT], 0)
            finally:
                os.close(handle)
        except OSError as fault:
            log.error("verify_attn: cannot write %s (%s); only this rank has fallen back", self.path, fault.strerror)

    def _open(self) -> tuple[mmap.mmap | None, tuple[int, int] | None]:
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except OSError:
            return None, None
        try:
            found = os.fstat(handle)
            return mmap.mmap(handle, 1, prot=mmap.PROT_READ), (found.st_dev, found.st_ino)
        except (OSError, ValueError):  # cut off or removed since it was looked at
            return None, None
        finally:
            os.close(handle)

    def _take(self, byte: int, forward: int) -> None:
        with self._lock:
            if byte == self._byte:
                return
            self._byte = byte
            candidate = byte == _CANDIDATE_BYTE
            if candidate:
                self.tripped = ""  # somebody has decided anew
            why = f"the control byte is {chr(byte)!r}" if byte >= 0 else "there is no control byte"
            self._set(candidate, forward, why)

    def _set(self, candidate: bool, forward: int, why: str) -> None:
        """Lock held."""
        if candidate != self._candidate:
            log.warning("verify_attn: from forward %d on tree verify runs the %s: %s", forward, CANDIDATE if candidate else INCUMBENT, why)
            self._candidate = candidate
            self.acknowledged = Acknowledgement(self.choice, forward, time.time(), None, why)
            self._unconfirmed = True
            self.changed.set()

    def _confirm(self, forward: int) -> None:
        with self._lock:
            self._unconfirmed = False
            known = self.acknowledged
            if known.confirmed is None:
                self.acknowledged = Acknowledgement(known.choice, known.from_forward, known.at, max(forward, known.from_forward), known.why)
                self.changed.set()
