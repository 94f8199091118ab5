"""A running quantile in constant memory: a log-spaced histogram that forgets.

The threshold a unit is scored at must be known *before* the unit (else the score is not symmetric given the past) and
must follow a load that drifts. So the control arm's values are kept as counts in bins of equal width in log seconds, old
counts fading with a half-life. Bins of relative width w bound the error of a quantile by w, as in DDSketch (Masson, Rim,
Lee, VLDB 2019); here the error only moves the level that is tested a little, never its validity.
"""

from __future__ import annotations

import numpy as np

FLOOR, CEILING = 1e-6, 1e5  # seconds; values outside fall into the first or last bin


class FadingHistogram:
    """Log-spaced histograms in parallel lanes, with exponential forgetting.

    Args:
        lanes: histograms held side by side.
        width: relative width of a bin.
        half_life: seconds after which an old count weighs half.
        floor, ceiling: range in seconds.
    """

    def __init__(
        self,
        lanes: int,
        *,
        width: float = 0.01,
        half_life: float = 600.0,
        floor: float = FLOOR,
        ceiling: float = CEILING,
    ) -> None:
        self._origin, self._step = np.log(floor), np.log1p(width)
        self._bins = int(np.ceil((np.log(ceiling) - self._origin) / self._step)) + 1
        self._half_life = half_life
        self._counts = np.zeros((lanes, self._bins))
        self._seen = np.zeros(lanes)

    @property
    def seen(self) -> np.ndarray:
        """Values added so far (not faded), shape (lanes,)."""
        return self._seen

    def add(self, log_values: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Count values given as natural logs, shape (n,); `lanes` (n,) says which histogram each goes to (default 0)."""
        position = np.clip((log_values - self._origin) / self._step, 0, self._bins - 1).astype(np.int64)
        size = self._counts.size
        if lanes is None:
            self._counts[0] += np.bincount(position, minlength=self._bins)
            self._seen[0] += len(log_values)
            return
        self._counts += np.bincount(lanes * self._bins + position, minlength=size).reshape(self._counts.shape)
        self._seen += np.bincount(lanes, minlength=len(self._seen))

    def fade(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._counts *= 0.5 ** (seconds / self._half_life)

    def log_quantile(self, level: float) -> np.ndarray:
        """Natural log of the upper edge of the bin holding the quantile, shape (lanes,); NaN where nothing was counted."""
        cumulative = np.cumsum(self._counts, axis=1)
        total = cumulative[:, -1]
        target = level * total
        position = np.argmax(cumulative >= target[:, None], axis=1)
        below = np.where(position > 0, cumulative[np.arange(len(total)), np.maximum(position - 1, 0)], 0.0)
        inside = cumulative[np.arange(len(total)), position] - below
        with np.errstate(invalid="ignore", divide="ignore"):
            fraction = np.where(inside > 0, (target - below) / inside, 1.0)
        return np.where(total > 0, self._origin + (position + fraction) * self._step, np.nan)
