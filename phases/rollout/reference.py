"""What latencies were when all was well: recorded from the control of a bake, held against the fleet when no control is left.

This is before against after, which drifts with the load; it is used only where nothing better exists, and by whole histogram
buckets: the level now is called worse only if even the lower edge of its bucket is over the margin above the upper edge then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phases.analysis.decision import Decision, Outcome
from phases.analysis.histograms import HistogramWindows
from phases.analysis.scrape import Buckets, Scrape
from phases.rollout.settings import MetricSettings


@dataclass(frozen=True)
class Level:
    """A latency quantile as histogram buckets know it: between two edges, in seconds, from n observations."""

    metric: str
    quantile: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any]) -> Level:
        return Level(**row)


class Recorder:
    """Sums up histograms of any number of workers."""

    def __init__(self, metrics: Sequence[MetricSettings]) -> None:
        self._metrics = tuple(metrics)
        self._windows = {m.metric: HistogramWindows(m.metric) for m in metrics}
        self._buckets: dict[str, Buckets] = {}

    def add(self, scrape: Scrape) -> None:
        """Fold in one scrape of one worker; the first of each is the starting point."""
        for name, windows in self._windows.items():
            buckets, _ = windows.add(scrape)
            if buckets is not None:
                self._buckets[name] = self._buckets[name] + buckets if name in self._buckets else buckets

    def levels(self) -> tuple[Level, ...]:
        """The level of each metric that was observed at all."""
        found = []
        for metric in self._metrics:
            buckets = self._buckets.get(metric.metric)
            bounds = buckets.quantile_bounds(metric.quantile) if buckets is not None else None
            if buckets is not None and bounds is not None:
                found.append(Level(metric.metric, metric.quantile, bounds[0], min(bounds[1], 1e9), int(buckets.total)))
        return tuple(found)


def against(reference: Sequence[Level], now: Sequence[Level], margins: Sequence[MetricSettings], min_samples: int, at: float) -> list[Decision]:
    """One decision a metric: FAIL, PASS, or CONTINUE while there are too few observations or no reference."""
    then = {(level.metric, level.quantile): level for level in reference}
    seen = {(level.metric, level.quantile): level for level in now}
    return [_decide(then.get((m.metric, m.quantile)), seen.get((m.metric, m.quantile)), m, min_samples, at) for m in margins]


def _decide(then: Level | None, now: Level | None, metric: MetricSettings, min_samples: int, at: float) -> Decision:
    statistic, limit = f"p{metric.quantile * 100:g}", 1 + metric.margin
    if then is None or now is None or now.n < min_samples or then.high <= 0:
        reason = "no reference was recorded" if then is None else f"{now.n if now else 0} of the {min_samples} requests that are needed"
        return Decision(Outcome.CONTINUE, metric.metric, statistic, reason, threshold=limit, n=now.n if now else 0, at=at)
    low, high = now.low / then.high, now.high / then.low if then.low > 0 else None
    outcome = Outcome.FAIL if low > limit else Outcome.PASS
    reason = f"{statistic} lies in {now.low:.4g}–{now.high:.4g} s, the reference in {then.low:.4g}–{then.high:.4g} s"
    middle = (now.low + now.high) / (then.low + then.high)
    return Decision(outcome, metric.metric, statistic, reason, middle, low, high, limit, now.n, at=at, source="reference of an earlier bake")
