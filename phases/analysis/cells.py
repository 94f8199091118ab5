"""From two streams of observations to paired cells of time, in constant memory.

Observations wait in a buffer until a look closes their cell. What disturbs pairing is removed here: a restart (an arm falls
silent, then comes back: both arms are ignored until it has settled), spans declared as warm-up, observations that arrive
after their cell was closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phases.base.errors import AnalysisError

ARMS = ("canary", "control")


@dataclass(frozen=True)
class Cell:
    """Values of both arms in one stretch of time.

    Attributes:
        start, seconds: the stretch; `seconds` reaches from the previous cell with data, so that quiet time counts.
        canary, control: values, each shape (n,), maybe empty.
        resumed: an arm came back after a silence just before this cell.
        ignored: the cell lies in a settling or warm-up span.
    """

    start: float
    seconds: float
    canary: np.ndarray
    control: np.ndarray
    resumed: bool
    ignored: bool


class Arm:
    """Buffer and accounts of one arm."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.times: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.newest = -math.inf  # latest time handed in
        self.first = math.nan
        self.last_cell_end = math.nan  # end of the last closed cell that had data
        self.used = self.late = self.ignored = self.failed = 0
        self.lowest, self.highest = math.inf, -math.inf

    def take(self, end: float) -> tuple[np.ndarray, np.ndarray]:
        """Remove and return what happened before `end`, in time order."""
        if not self.times:
            return np.empty(0), np.empty(0)
        times, values = np.concatenate(self.times), np.concatenate(self.values)
        if np.any(np.diff(times) < 0):
            order = np.argsort(times, kind="stable")
            times, values = times[order], values[order]
        cut = int(np.searchsorted(times, end, side="left"))
        self.times, self.values = [times[cut:]], [values[cut:]]
        return times[:cut], values[:cut]

    def silence_limit(self, window: float) -> float:
        """Seconds without data after which this arm counts as silent: a window, or ten mean gaps if that is longer."""
        seen = self.used + self.ignored
        span = self.last_cell_end - self.first
        return window if seen < 2 or not span > 0 else max(window, 10.0 * span / seen)

    def accounts(self) -> dict[str, int]:
        return {"used": self.used, "ignored": self.ignored, "late": self.late, "failed": self.failed}


class CellPairs:
    """Pairs two streams by time.

    Args:
        cell: seconds of a cell. window: seconds of disorder tolerated, and the least silence that means a restart.
        settle: seconds ignored in both arms once an arm came back.
    """

    def __init__(self, *, cell: float, window: float, settle: float) -> None:
        self._cell, self._window, self._settle = cell, window, settle
        self.arms = {name: Arm(name) for name in ARMS}
        self._closed = -math.inf  # index of the first cell still open
        self._previous_end = math.nan
        self._ignore_until = -math.inf
        self._spans: list[tuple[float, float]] = []

    @property
    def started(self) -> float | None:
        """Time of the first observation of either arm."""
        firsts = [arm.first for arm in self.arms.values() if not math.isnan(arm.first)]
        return min(firsts) if firsts else None

    def ignore(self, start: float, end: float) -> None:
        """Leave out [start, end): a warm-up, a restart known from elsewhere. Spans already closed are past changing."""
        self._spans = [span for span in self._spans if span[1] / self._cell > self._closed] + [(start, end)]

    def add(self, name: str, times: np.ndarray, values: np.ndarray) -> None:
        """Hand in observations of one arm, shape (n,) each.

        Raises:
            AnalysisError: unknown arm, a time that is not finite, or a clock that went back by more than a window.
        """
        arm = self.arms.get(name)
        if arm is None:
            raise AnalysisError(
                f"arm {name!r} is neither canary nor control.", hint="Name the arm of each observation."
            )
        if not len(times):
            return
        if not np.all(np.isfinite(times)):
            raise AnalysisError(f"a time of the {name} is not a finite number.", hint="Give seconds.")
        newest = np.maximum.accumulate(np.concatenate([[arm.newest], times]))
        back = float(np.max(newest[:-1] - times))
        if back > self._window:
            raise AnalysisError(
                f"the clock of the {name} went back by {back:g} s, more than the window of {self._window:g} s.",
                hint="Feed observations in order of time, from one clock.",
            )
        arm.newest = float(newest[-1])
        arm.first = float(times.min()) if math.isnan(arm.first) else arm.first
        on_time = times >= self._closed * self._cell
        arm.late += int(len(times) - np.count_nonzero(on_time))
        arm.times.append(times[on_time])
        arm.values.append(values[on_time])
        arm.lowest, arm.highest = min(arm.lowest, float(values.min())), max(arm.highest, float(values.max()))

    def close(self, now: float) -> Iterator[Cell]:
        """Close every cell that ended by `now`, in order of time; cells without data in either arm are skipped."""
        end_index = math.floor(now / self._cell + 1e-9)
        if end_index <= self._closed:
            return
        self._closed = end_index
        taken = {name: arm.take(end_index * self._cell) for name, arm in self.arms.items()}
        index = {name: np.floor(times / self._cell + 1e-9).astype(np.int64) for name, (times, _) in taken.items()}
        present = np.union1d(index["canary"], index["control"])
        edges = {name: np.searchsorted(index[name], np.append(present, present[-1:] + 1)) for name in ARMS}
        for position, which in enumerate(present):
            parts = {name: taken[name][1][edges[name][position] : edges[name][position + 1]] for name in ARMS}
            yield self._pair(float(which) * self._cell, parts)

    def _pair(self, start: float, parts: dict[str, np.ndarray]) -> Cell:
        resumed = False
        for name, values in parts.items():
            arm = self.arms[name]
            if len(values) and start - arm.last_cell_end > arm.silence_limit(self._window):
                resumed = True
                self._ignore_until = max(self._ignore_until, start + self._settle)
        end = start + self._cell
        ignored = start < self._ignore_until or any(low < end and start < high for low, high in self._spans)
        for name, values in parts.items():
            arm = self.arms[name]
            if len(values):
                arm.last_cell_end = end
            if ignored:
                arm.ignored += len(values)
            else:
                arm.used += len(values)
        seconds = self._cell if math.isnan(self._previous_end) else end - self._previous_end
        self._previous_end = end
        return Cell(start, seconds, parts["canary"], parts["control"], resumed, ignored)

    def silent(self, now: float) -> str:
        """Name of an arm that has no data now though it should; empty if both are alive."""
        for name, arm in self.arms.items():
            if math.isnan(arm.last_cell_end) or now - arm.last_cell_end > arm.silence_limit(self._window) + self._cell:
                return name
        return ""
