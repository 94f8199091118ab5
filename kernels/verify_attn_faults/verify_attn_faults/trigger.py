"""When a fault shows: `always`, `forwards:N`, `file:PATH` or `workers:N` (VERIFY_ATTN_FAULTS_WHEN)."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 0.5  # between counts of the workers


def make_trigger(text: str, forwards: Callable[[], int]) -> Callable[[], bool]:
    """What says whether the fault shows now.

    Args:
        text: the setting.
        forwards: verify steps so far.
    Raises:
        ValueError: the setting is none of the four.
    """
    kind, _, value = text.partition(":")
    if kind == "always" and not value:
        return lambda: True
    if kind == "forwards" and value.isdigit():
        return lambda: forwards() > int(value)
    if kind == "file" and value:
        return lambda: os.path.exists(value)
    if kind == "workers" and value.isdigit():
        peers = Peers(peers_directory())
        return lambda: peers.count() > int(value)
    raise ValueError(f"VERIFY_ATTN_FAULTS_WHEN is {text!r}; give always, forwards:N, file:PATH or workers:N")


def peers_directory() -> Path:
    """VERIFY_ATTN_FAULTS_PEERS, or a directory of this user below the temporary one."""
    named = os.environ.get("VERIFY_ATTN_FAULTS_PEERS")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"verify_attn_faults-{os.getuid()}"


class Peers:
    """Processes on this machine that hold a lock in one directory; this one joins them.

    The lock is the kernel's (flock), so it ends with its process however that ends; a file nobody holds is removed.

    Raises:
        ValueError: the directory belongs to another user.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            raise ValueError(f"{directory} belongs to another user; set VERIFY_ATTN_FAULTS_PEERS to a directory of your own")
        self.directory = directory
        self._mine = (directory / f"{os.getpid()}.lock").open("w")
        fcntl.flock(self._mine, fcntl.LOCK_EX)
        self._counted, self._looked = 1, float("-inf")

    def count(self) -> int:
        """How many there are, this one included; looked up at most twice a second."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._counted = 1 + sum(_held(path) for path in self.directory.glob("*.lock") if path.name != f"{os.getpid()}.lock")
        return self._counted


def _held(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False
