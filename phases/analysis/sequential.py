"""The sequential test of one metric: feed observations, look whenever you like.

    test = SequentialTest(TestSettings(metric="ttft", quantile=0.95, margin=0.05))
    test.observe("canary", t=12.3, value=0.041, status=200)
    test.observe("control", t=12.4, value=0.039, status=200)
    decision = test.look(now=20.0)

The decision is one of non-inferiority: PASS when the upper bound of the slowdown is under 1 + margin, FAIL when the lower
bound is over it, no verdict yet otherwise, INCONCLUSIVE at the deadline. The bounds hold at all looks together (`evidence`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phases.analysis.cells import Cell, CellPairs
from phases.analysis.decision import Decision
from phases.analysis.evidence import SymmetricEvidence
from phases.analysis.scores import MeanScore, QuantileScore
from phases.analysis.settings import HIGHER_IS_BETTER, TestSettings, candidate_ratios
from phases.analysis.sketch import FLOOR
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict

MAX_LATE = 0.01  # share of observations that may arrive after their cell was closed without spoiling a PASS


class SequentialTest:
    """An always-valid test of canary against control on request records.

    Args:
        settings: what is compared and how strictly.
        source: where the observations come from, for the record.

    Memory does not grow with the length of the run: observations are kept until the next look only.
    """

    def __init__(self, settings: TestSettings, *, source: str = "") -> None:
        self.settings, self._source = settings, source
        self._pairs = CellPairs(cell=settings.cell, window=settings.window, settle=settings.settle)
        self._ratios = candidate_ratios(settings.threshold)
        self._log_ratios = np.log(self._ratios)
        lanes = len(self._ratios)
        if settings.quantile is None:
            needed = 1 if settings.metric in HIGHER_IS_BETTER else 5  # those are one value per window already
            self._score = MeanScore(self._log_ratios, needed=needed, dispersion=settings.dispersion)
        else:
            self._score = QuantileScore(settings.quantile, lanes, dispersion=settings.dispersion)
        self._reached: tuple[Verdict, float] | None = None
        self._finished = False

    def observe(self, arm: str, t: float, value: float, status: int = 200) -> None:
        """Hand in one request that *completed* at `t` seconds; see `observe_many`."""
        self.observe_many(arm, [t], [value], [status])

    def observe_many(
        self, arm: str, t: Sequence[float], value: Sequence[float], status: Sequence[int] | None = None
    ) -> None:
        """Hand in requests of one arm, shape (n,) each: completion time (s), value (s for a latency), HTTP status.

        Requests that did not succeed have no latency: they are counted as failed and belong to `counts.ErrorTest`.

        Raises:
            AnalysisError: unknown arm; a value that is NaN, infinite or negative; a clock that goes back.
        """
        times, values = np.asarray(t, dtype=float), np.asarray(value, dtype=float)
        if times.shape != values.shape or times.ndim != 1:
            raise AnalysisError(f"{times.shape} times do not match {values.shape} values.", hint="Give two flat lists.")
        if status is not None:
            succeeded = (np.asarray(status) >= 200) & (np.asarray(status) < 300)
            if arm in self._pairs.arms:
                self._pairs.arms[arm].failed += int(len(times) - np.count_nonzero(succeeded))
            times, values = times[succeeded], values[succeeded]
        wrong = ~np.isfinite(values) | (values < 0)
        if wrong.any():
            raise AnalysisError(
                f"{self.settings.metric} of the {arm} at t={times[wrong][0]:g} is {values[wrong][0]}: not a latency.",
                hint="Drop requests without a value, or give their status.",
            )
        self._pairs.add(arm, times, values)

    def ignore(self, start: float, end: float) -> None:
        """Leave out [start, end) in both arms, such as a warm-up known to the caller."""
        self._pairs.ignore(start, end)

    def look(self, now: float) -> Decision:
        """Close the cells that ended by `now` and say where the test stands. FAIL is final; PASS holds only while the bound does."""
        if not math.isfinite(now):
            raise AnalysisError(f"the time of the look is {now}.", hint="Give seconds.")
        for cell in self._pairs.close(now):
            self._fold(cell)
        return self._decide(now)

    def finish(self, now: float) -> Decision:
        """The last look: what is undecided is INCONCLUSIVE."""
        self._finished = True
        return self.look(now)

    def _fold(self, cell: Cell) -> None:
        if cell.resumed:
            self._score.drop_open_unit()
        if cell.ignored:
            return
        canary, control = (np.log(np.maximum(part, FLOOR)) * self.settings.sign for part in (cell.canary, cell.control))
        if isinstance(self._score, MeanScore):
            self._score.fold(canary.sum(), len(canary), control.sum(), len(control))
            return
        threshold = self._score.log_threshold
        if np.isfinite(threshold).all():
            lanes = len(self._ratios)
            # Bin k holds the values over exactly the first k candidate thresholds, which ascend with the ratio.
            bin_of = np.searchsorted(self._log_ratios, canary - threshold) + np.arange(3)[:, None] * (lanes + 1)
            bins = np.bincount(bin_of.ravel(), minlength=3 * (lanes + 1)).reshape(3, -1)
            self._score.fold(
                len(canary) - np.cumsum(bins, axis=1)[:, :-1],
                np.array([len(canary)]),
                np.count_nonzero(control > threshold, axis=1)[:, None],
                np.array([len(control)]),
            )
        self._score.learn(control, cell.seconds)

    def _decide(self, now: float) -> Decision:
        settings, started, arms = self.settings, self._pairs.started, self._pairs.arms
        over = settings.deadline is not None and started is not None and now - started >= settings.deadline
        self._finished = self._finished or over
        decision, self._reached = conclude(
            settings,
            self._ratios,
            self._score.evidence,
            now=now,
            reached=self._reached,
            finished=self._finished,
            spoiled=self._spoiled(now),
            started=started,
            n=min(arm.used for arm in arms.values()),
            counts={name: arm.accounts() for name, arm in arms.items()},
            source=self._source,
            exact=True,
        )
        return decision

    def _spoiled(self, now: float) -> str:
        """Why the data cannot support a PASS, or an empty text."""
        for name, arm in self._pairs.arms.items():
            if arm.used < self.settings.min_samples:
                return f"{name} has {arm.used} of the {self.settings.min_samples} requests that are needed"
            if arm.late > MAX_LATE * (arm.used + arm.late):
                return f"{arm.late} observations of the {name} came too late for their window"
            if arm.lowest == arm.highest:
                return f"all values of the {name} equal {arm.lowest:g}: a stuck source proves nothing"
        silent = self._pairs.silent(now)
        return f"{silent} is silent" if silent else ""


def conclude(
    settings: TestSettings,
    ratios: np.ndarray,
    evidence: SymmetricEvidence,
    *,
    now: float,
    reached: tuple[Verdict, float] | None,
    finished: bool,
    spoiled: str,
    started: float | None,
    n: int,
    counts: dict[str, dict[str, int]],
    source: str,
    exact: bool,
) -> tuple[Decision, tuple[Verdict, float] | None]:
    """Read the decision off the evidence for all candidate ratios.

    Args:
        ratios: candidate ratios, ascending, shape (lanes,), one of them settings.threshold.
        reached: FAIL of an earlier look, or PASS of the last one, and since when.
        finished: whether there will be no more data.
        spoiled: why the data cannot support a PASS, or empty.
        exact: whether the scores give a point estimate.

    Returns:
        The decision, and what is reached now.
    """
    above, below = evidence.log_evidence()
    needed = -math.log(settings.alpha)
    here = int(np.searchsorted(ratios, settings.threshold))
    if above[here] >= needed and not (reached and reached[0] is Verdict.FAIL):
        reached = (Verdict.FAIL, now)
    if not (reached and reached[0] is Verdict.FAIL):  # what shows no slowdown may stop showing it: only FAIL is kept
        within = below[here] >= needed and not spoiled
        reached = (reached or (Verdict.PASS, now)) if within else None
    verdict = reached[0] if reached else Verdict.INCONCLUSIVE if finished else None
    low, high = _bound(ratios, above >= needed, -1), _bound(ratios, below >= needed, 0)
    decision = Decision(
        verdict=verdict,
        metric=settings.metric,
        statistic=settings.statistic,
        reason=_reason(verdict, settings.threshold, low, high, spoiled),
        estimate=_estimate(ratios, evidence) if exact else None,
        low=low,
        high=high,
        threshold=settings.threshold,
        n=n,
        counts=counts,
        confidence=1.0 - 2.0 * settings.alpha,
        at=now,
        since=reached[1] if reached and verdict is reached[0] else None,
        started=started,
        source=source,
    )
    return decision, reached


def _reason(verdict: Verdict | None, threshold: float, low: float | None, high: float | None, spoiled: str) -> str:
    limit = f"{threshold:g}"
    if verdict is Verdict.FAIL:
        bound = f"{low:.3f}" if low is not None and low >= threshold else limit
        return f"the slowdown is at least {bound}, over the limit of {limit}"
    if verdict is Verdict.PASS:
        return f"the slowdown is at most {high:.3f}, within the limit of {limit}"
    if spoiled:
        return spoiled
    span = f"between {low or 0:.3f} and {'unknown' if high is None else f'{high:.3f}'}"
    return f"the slowdown is {span}, the limit {limit} not excluded yet"


def _estimate(ratios: np.ndarray, evidence: SymmetricEvidence) -> float | None:
    """The candidate ratio at which the scores balance, interpolated in log."""
    total = evidence.total
    if not evidence.units[0] or total[0] <= 0 or total[-1] >= 0:
        return None
    after = int(np.argmax(total < 0))
    logs, before = np.log(ratios), after - 1
    share = total[before] / (total[before] - total[after])
    return float(np.exp(logs[before] + share * (logs[after] - logs[before])))


def _bound(ratios: np.ndarray, excluded: np.ndarray, which: int) -> float | None:
    """The last (-1) or first (0) excluded ratio: evidence is monotone in the ratio, so the excluded ones are one side."""
    places = np.flatnonzero(excluded)
    return float(ratios[places[which]]) if len(places) else None
