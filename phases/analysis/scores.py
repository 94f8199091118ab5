"""Scores that compare two arms in one unit of time, and the tests they feed.

A *cell* is a short stretch of time (a quarter of a window). Cells are merged into a *unit* until both arms hold enough
requests; each unit gives one score per lane to `SymmetricEvidence`. Lanes are candidate ratios in production and replays
in a simulation: the same code is what the benchmark measures.
"""

from __future__ import annotations

import numpy as np

from phases.analysis.evidence import QuantileEvidence, SymmetricEvidence
from phases.analysis.sketch import FadingHistogram

# Arms whose request counts differ by more than this give skewed scores, so units must hold more requests.
BALANCED = 2.0
SKEWED_FACTOR = 4.0
NEAR = 4.0  # how far the neighbourhood of a quantile reaches, as a factor on its odds


def neighbourhood(level: float) -> tuple[float, float, float]:
    """Levels around a quantile and, in the middle, its own: 0.95 has 0.826 and 0.987."""
    odds = level / (1.0 - level)
    return odds / (NEAR + odds), level, NEAR * odds / (1.0 + NEAR * odds)


class QuantileScore:
    """Does more of the canary than of the control exceed the control's quantile, after division by a candidate ratio?

    Score of a unit: `(n₀ X₁ − n₁ X₀) / (n₀ + n₁)`, with X the requests over the threshold and n all requests of canary
    (1) and control (0): the observed minus the expected count of the Mantel–Haenszel test, stratified by unit. The
    threshold is the control's running quantile from *earlier* units. The same is asked at its `neighbourhood`'s levels.

    Args:
        level: quantile in (0, 1), 0.95 for p95.
        lanes: tests side by side.
        histograms: threshold histograms side by side: 1 when all lanes share the data, else `lanes`.
        dispersion: known variance inflation (see `evidence`).
        sketch: histogram of the control arm, for other ranges or resolutions than the default.
    """

    REFRESH = 4  # cells between two settings of the threshold

    def __init__(
        self,
        level: float,
        lanes: int,
        *,
        histograms: int = 1,
        dispersion: float = 1.0,
        sketch: FadingHistogram | None = None,
    ) -> None:
        self.evidence = QuantileEvidence(lanes, dispersion=dispersion)
        self.levels = neighbourhood(level)
        self._sketch = sketch or FadingHistogram(histograms)
        self._needed = 1.0 / min(level, 1.0 - level)
        self._threshold = np.full((3, histograms), np.nan)
        self._cells = 0
        self._over = np.zeros(
            (7, lanes)
        )  # canary over (at least), control over, three levels each; canary over the quantile (at most)
        self._count = np.zeros((2, histograms))

    @property
    def log_threshold(self) -> np.ndarray:
        """Natural logs of the thresholds the next cell is scored at, shape (3, histograms); NaN while still unknown."""
        return self._threshold

    def fold(
        self,
        canary_over: np.ndarray,
        canary: np.ndarray,
        control_over: np.ndarray,
        control: np.ndarray,
        canary_over_high: np.ndarray | None = None,
    ) -> None:
        """Add one cell's counts: over the three thresholds, shape (3, lanes), and of all requests, shape (histograms,).

        `canary_over_high`, of shape (lanes,), is given when buckets only bound the canary's counts from both sides.
        """
        ready = np.isfinite(self._threshold).all(axis=0)
        self._over[:3] += canary_over * ready
        self._over[3:6] += control_over * ready
        self._over[6] += (canary_over[1] if canary_over_high is None else canary_over_high) * ready
        self._count[0] += canary * ready
        self._count[1] += control * ready
        few, many = self._count.min(axis=0), self._count.max(axis=0)
        closed = few >= self._needed * np.where(many > BALANCED * few, SKEWED_FACTOR, 1.0)
        if not closed.any():
            return
        (n1, n0), low, x0, top = self._count, self._over[:3], self._over[3:6], self._over[6]
        total = np.maximum(n0 + n1, 1.0)
        lanes = self._over.shape[1]
        closed_lanes = closed if len(closed) == lanes else np.full(lanes, closed[0])
        self.evidence.update_levels(
            (n0 * low - n1 * x0) / total,
            closed_lanes,
            high=None if canary_over_high is None else (n0 * top - n1 * x0[1]) / total,
        )
        self._over[:, closed_lanes] = 0.0
        self._count[:, closed] = 0.0

    def learn(self, log_values: np.ndarray, seconds: float, histogram: np.ndarray | None = None) -> None:
        """After a cell was folded: let the control's values of that cell, `seconds` long, move the threshold."""
        self._sketch.fade(seconds)
        self._sketch.add(log_values, histogram)
        self._cells += 1
        if np.isfinite(self._threshold).all() and self._cells % self.REFRESH:
            return
        quantiles = np.stack([self._sketch.log_quantile(level) for level in self.levels])
        self.set_threshold(np.where(self._sketch.seen >= self._needed, quantiles, np.nan))

    def set_threshold(self, log_threshold: np.ndarray) -> None:
        """Use other thresholds, shape (3, histograms), from the next cell on (bucket edges)."""
        self._threshold = log_threshold

    def drop_open_unit(self) -> None:
        """Forget the unfinished unit: what it holds of one arm has no partner in the other."""
        self._over[:] = 0.0
        self._count[:] = 0.0


class MeanScore:
    """Mean log ratio of the arms per unit, standardised by its spread in earlier units.

    Score: `√(n₀n₁/(n₀+n₁)) · (mean log canary − mean log control − log r) / s`, symmetric about zero when r is the true
    ratio and the arms are exchangeable. The spread s only sets the stake, so its error costs power, not validity.

    Args:
        log_ratios: log of each candidate ratio, shape (lanes,).
        needed: values of each arm that make a unit.
        dispersion: known variance inflation (see `evidence`).
    """

    CALIBRATION = 4  # first units, used for the spread only
    CLIP = 4.0  # spreads

    def __init__(self, log_ratios: np.ndarray, *, needed: int = 5, dispersion: float = 1.0) -> None:
        self.evidence = SymmetricEvidence(len(log_ratios), dispersion=dispersion)
        self._log_ratios, self._needed = log_ratios, needed
        self._sums, self._counts = np.zeros(2), np.zeros(2)
        self._moments = np.zeros(3)  # units, mean, sum of squared deviations of the weighted log ratio

    def fold(self, canary_sum: float, canary: int, control_sum: float, control: int) -> None:
        """Add one cell: sums of log values and counts of both arms."""
        self._sums += (canary_sum, control_sum)
        self._counts += (canary, control)
        if self._counts.min() < self._needed:
            return
        weight = np.sqrt(self._counts.prod() / self._counts.sum())
        ratio = float(self._sums[0] / self._counts[0] - self._sums[1] / self._counts[1])
        units, mean, squares = self._moments
        if units >= self.CALIBRATION:
            spread = max(np.sqrt(squares / (units - 1)), 1e-6)
            # Clipping is odd, so symmetry is kept, and one outlier cannot drown a whole block.
            self.evidence.update(np.clip(weight * (ratio - self._log_ratios) / spread, -self.CLIP, self.CLIP))
        delta = weight * ratio - mean
        mean += delta / (units + 1)
        self._moments[:] = units + 1, mean, squares + delta * (weight * ratio - mean)
        self.drop_open_unit()

    def drop_open_unit(self) -> None:
        self._sums[:] = 0.0
        self._counts[:] = 0.0
