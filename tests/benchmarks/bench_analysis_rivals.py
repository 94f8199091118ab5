"""What other rollout tools do, written from their published behaviour, for comparison on the same streams only.

Threshold with a failure limit (Flagger, Argo Rollouts): each minute compare the canary's quantile with a limit (here the
control's quantile times 1 + margin, which is kinder than their fixed number) and fail after a count of failed checks.
Flagger's documented examples use interval 1 m and threshold 5; Argo's default failureLimit is 0.

Repeated Mann-Whitney (Kayenta): each minute run the rank test on the per-minute series so far, confidence 0.98; the metric is
High when the lower confidence limit of the Hodges-Lehmann shift exceeds 0.25 of that shift (NetflixACAJudge's values).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

MINUTE = 60.0


class Threshold:
    """Failure-limit check on per-minute quantiles; `fail_at` holds the time of failure per replay (inf for none)."""

    def __init__(self, replays: int, failures: int, margin: float) -> None:
        self._limit, self._factor = failures, 1 + margin
        self._failed = np.zeros(replays, dtype=int)
        self.fail_at = np.full(replays, np.inf)

    def minute(self, end: float, canary: np.ndarray, control: np.ndarray) -> None:
        """One check of per-minute quantiles, shape (replays,) each."""
        self._failed += np.nan_to_num(canary) > np.nan_to_num(control, nan=np.inf) * self._factor
        self.fail_at = np.where((self._failed >= self._limit) & np.isinf(self.fail_at), end, self.fail_at)


class MannWhitney:
    """Kayenta's classifier on the per-minute series so far, looked at every minute."""

    CONFIDENCE, TOLERANCE = 0.98, 0.25

    def __init__(self, replays: int, longest: int = 60) -> None:
        self._canary: list[np.ndarray] = []
        self._control: list[np.ndarray] = []
        self._longest = longest  # minutes of an analysis; a longer run starts the next analysis
        self.fail_at = np.full(replays, np.inf)

    def minute(self, end: float, canary: np.ndarray, control: np.ndarray) -> None:
        if len(self._canary) >= self._longest:
            self._canary, self._control = [], []
        self._canary.append(canary)
        self._control.append(control)
        if len(self._canary) < 5:
            return
        # Shift differences of all pairs; the limits are order statistics of them (R's wilcox.test, normal approximation).
        differences = np.stack(self._canary)[:, None] - np.stack(self._control)[None, :]
        n = len(self._canary)
        ordered = np.sort(differences.reshape(n * n, -1), axis=0)
        spread = np.sqrt(n * n * (2 * n + 1) / 12)
        rank = int(np.clip(np.floor(n * n / 2 - stats.norm.ppf(0.5 + self.CONFIDENCE / 2) * spread), 1, n * n // 2))
        estimate = np.median(ordered, axis=0)
        high = ordered[rank - 1] > self.TOLERANCE * np.abs(estimate)
        self.fail_at = np.where(high & np.isinf(self.fail_at), end, self.fail_at)
