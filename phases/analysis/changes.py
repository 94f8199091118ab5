"""A change inside a bake: the canary was well, and is so no more. A sequential change-point test on the windows' ratios.

A test over all data since the start has evidence *for* the canary that a later slowdown must first undo. Here every window may be the one
at which it began: the Shiryaev–Roberts sum, over all starts, of the evidence since.

**Method.** Window n has x, the log of canary's quantile over the control's, less log(1 + margin). Under the null (the canary is within the
margin, arms exchangeable) x is symmetric about something not above 0 given the past, so for any scale known before the window

    E[1 + tanh(λ x / s)] ≤ 1,    R_n(λ) = (1 + R_{n-1}(λ)) (1 + tanh(λ x_n / s_n)).

R_n - n is then a supermartingale that starts at 0, R is not negative, and so P(R reaches c within N windows) ≤ N / c (Doob's inequality,
after Ville; Shin, Ramdas, Rinaldo, "E-detectors", 2024). With c = N / alpha a bake of N windows has at most alpha false alarms. The mean over λ
keeps that. Buckets give bounds instead of a quantile: the canary's lower over the control's upper end only takes evidence away.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from phases.analysis.decision import Decision
from phases.base.verdict import Verdict

BETS = np.array([0.5, 1.0, 2.0, 4.0])
SCALE = 0.1  # of log ratios, before any was seen
KEPT = 64  # windows the scale is taken from
LEAST = 0.01  # a scale below 1 % would bet on rounding


class ChangeTest:
    """One metric's test.

    Args:
        metric, statistic: as the main test's. margin: slowdown that is acceptable.
        alpha: chance of a false alarm in `horizon` windows.
    """

    def __init__(self, metric: str, statistic: str, *, margin: float, alpha: float, horizon: int) -> None:
        self.metric, self.statistic, self.margin, self.alpha = metric, statistic, margin, alpha
        self._needed = max(1, horizon) / alpha
        self._sums = np.zeros(len(BETS))
        self._scales: deque[float] = deque(maxlen=KEPT)
        self._run: list[tuple[float, float]] = []  # (time, log ratio) since the likeliest start
        self._log = 0.0
        self._found: Decision | None = None

    def add(self, t: float, canary: float, control: float, n: int = 0) -> None:
        """One window that ended at `t`: quantiles in seconds, of the canary at least and of the control at most; n requests of the smaller arm."""
        if self._found or not (canary > 0 and control > 0 and math.isfinite(canary) and math.isfinite(control)):
            return
        ratio = math.log(canary / control)
        x = ratio - math.log1p(self.margin)
        scale = max(LEAST, float(np.median(self._scales))) if len(self._scales) >= 4 else SCALE
        self._scales.append(abs(ratio))
        factors = 1 + np.tanh(BETS * x / scale)
        self._sums = (1 + self._sums) * factors
        step = math.log(max(float(factors.mean()), 1e-12))
        if self._log + step <= 0:  # whatever came before speaks against a change: it would begin later
            self._run, self._log = [], 0.0
        else:
            self._run.append((t, ratio))
            self._log += step
        if self._sums.mean() >= self._needed:
            self._found = self._decision(t, n)

    @property
    def evidence(self) -> float:
        """The sum, over what is needed: 1 is an alarm."""
        return float(self._sums.mean() / self._needed)

    def found(self) -> Decision | None:
        """The alarm: a FAIL, from when on, and how slow it has been since. None without one."""
        return self._found

    def _decision(self, t: float, n: int) -> Decision:
        since = self._run[0][0] if self._run else t
        ratio = math.exp(float(np.median([value for _, value in self._run]))) if self._run else None
        limit = 1 + self.margin
        shown = f"about {ratio:.2f} times the control" if ratio else "slower"
        return Decision(
            Verdict.FAIL,
            self.metric,
            f"{self.statistic}_change",
            f"it became {shown} in the windows since {t - since:.0f} s ago, over the limit of {limit:g}",
            estimate=ratio,
            low=limit,
            threshold=limit,
            n=n,
            confidence=1 - self.alpha,
            at=t,
            since=since,
            source="ratios of windows, each a possible start",
        )
