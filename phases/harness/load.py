"""What else this machine is doing while something is timed: the share of its cores that others take, and the hypervisor."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from phases.base.results import Ceiling

# From here on timings of one thing differ by as much as kernels do.
OTHERS, STOLEN, SPREAD, WAITING = 0.15, 0.05, 0.15, 0.5
LOOK_SECONDS = 1.0  # how long a machine is looked at before something is timed on it


@dataclass(frozen=True)
class Load:
    """What was seen over a while.

    Attributes:
        cores: of the whole machine, of which every share is one.
        average: processes that ran or wanted to, a mean over the last minute; ours are among them.
        others: share of the cores' time that processes took which are not ours, 0 to 1; None where the system does not tell.
        stolen: share that the hypervisor gave to other machines; None as above.
    """

    cores: int
    average: float
    others: float | None = None
    stolen: float | None = None

    def __str__(self) -> str:
        seen = [f"load {self.average:.1f} on {self.cores} {'core' if self.cores == 1 else 'cores'}"]
        if self.others is not None and self.stolen is not None:
            seen += [f"{self.others:.0%} of their time used by others", f"{self.stolen:.0%} stolen"]
        return ", ".join(seen)

    def spoils(self) -> tuple[str, ...]:
        """What of it makes timings doubtful, each as a clause; empty on a quiet machine."""
        if self.others is None or self.stolen is None:
            busy = self.average > WAITING * self.cores
            return (f"the load is {self.average:.1f} on {self.cores} cores",) if busy else ()
        told = (
            (self.others >= OTHERS, f"others use {self.others:.0%} of this machine's cores"),
            (self.stolen >= STOLEN, f"the hypervisor takes {self.stolen:.0%} of them"),
        )
        return tuple(clause for is_so, clause in told if is_so)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class Meter:
    """Sees the load from its making to `read`.

    Time of our own children counts as ours once they have ended and been waited for.

    Args:
        stat: /proc/stat, or a file like it; where there is none, only the load average is known.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._begun = self._now()

    def read(self) -> Load:
        cores, average = os.cpu_count() or 1, os.getloadavg()[0]
        begun, ended = self._begun, self._now()
        if begun is None or ended is None or ended[0] <= begun[0]:
            return Load(cores, average)
        total, busy, stolen, own = (late - early for late, early in zip(ended, begun, strict=True))
        return Load(cores, average, max(0.0, busy - own) / total, max(0.0, stolen) / total)

    def _now(self) -> tuple[float, float, float, float] | None:
        """Seconds of all cores since boot: in all, busy, stolen; and our own. None where the system does not tell."""
        try:
            first = self._stat.read_text().split("\n", 1)[0].split()
            user, nice, system, idle, waiting, irq, soft, stolen = (int(value) for value in first[1:9])
        except (OSError, ValueError):
            return None
        tick = os.sysconf("SC_CLK_TCK")
        busy = user + nice + system + irq + soft  # guests are counted in user and nice
        return (busy + idle + waiting + stolen) / tick, busy / tick, stolen / tick, sum(os.times()[:4])


def spread(ceilings: tuple[Ceiling, ...]) -> float | None:
    """How far samples of the same ceiling lie apart, the worst kind: distance of the quartiles over the median; None without any."""
    widths = []
    for ceiling in ceilings:
        if len(ceiling.samples) > 3:
            low, middle, high = quantiles(ceiling.samples, n=4)
            widths.append((high - low) / middle)
    return max(widths, default=None)
