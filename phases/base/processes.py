"""Whether a process of this machine still runs, told from a later one that got its number."""

from __future__ import annotations

import os
import time
from enum import Enum
from pathlib import Path


class Life(Enum):
    """What can be known from here of the process behind a lock; the value is how people are told."""

    ALIVE = "its process is alive"
    GONE = "its process is gone"
    UNKNOWN = "whether its process is alive cannot be known from here"

    @property
    def alive(self) -> bool | None:
        return {Life.ALIVE: True, Life.GONE: False}.get(self)


def life_of(pid: int, start: str = "", *, since: float | None = None) -> Life:
    """Of a process on this machine.

    Args:
        start: what `start_of` said of it; empty where that was not recorded.
        since: seconds since the epoch at which it was seen running: one that began later is another.
    """
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return Life.GONE
    except PermissionError:  # somebody else's, but there
        pass
    state, began = _stat(pid)
    if not began:
        return Life.UNKNOWN
    later = since is not None and _began_at(began) > since + 2.0
    return Life.GONE if state in "ZX" or (start and began != start) or later else Life.ALIVE


def start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot (field 22 of /proc/<pid>/stat); empty where unknown."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _began_at(ticks: str) -> float:
    """Seconds since the epoch, as the wall clock stands now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")
