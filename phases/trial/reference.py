"""What latencies were when all was well: recorded from the control of a bake, held against the fleet when no control is left.

This is before against after, which drifts with the load; it is used only where nothing better exists, and by the range in which
the true quantile lies: the order statistics a 99 % interval ends at, and their whole histogram buckets. The level now is called worse
only if even the lower end of its range is over the margin above the upper end then, and well only if the upper end is within the margin of the
lower end then. Workers are compared with their own kind. A reference has an age and a provenance, and speaks of the traffic it was taken under.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phases.analysis.counters import CounterWindows
from phases.analysis.decision import Decision
from phases.analysis.histograms import HistogramWindows
from phases.analysis.scrape import Buckets, Scrape
from phases.base.clock import age
from phases.base.verdict import Verdict
from phases.trial.settings import MetricSettings, ReferenceSettings

Z = 2.576  # standard normal quantile of a two-sided 99 % interval


@dataclass(frozen=True)
class Level:
    """A latency quantile as n observations in histogram buckets know it: between two edges, in seconds.

    Attributes:
        kind: of the workers, such as `tp 2`; empty where all are alike.
    """

    metric: str
    quantile: float
    low: float
    high: float
    n: int
    kind: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any]) -> Level:
        return Level(**row)


@dataclass(frozen=True)
class Traffic:
    """What a worker served on average.

    Attributes:
        rate: users' requests a second. prompt, answer: mean tokens a request; None where the workers do not say.
    """

    rate: float
    prompt: float | None = None
    answer: float | None = None

    def __str__(self) -> str:
        lengths = [
            f"{n:.0f} {what} tokens" for n, what in ((self.prompt, "prompt"), (self.answer, "answer")) if n is not None
        ]
        return ", ".join([f"{self.rate:.2g} requests/s a worker", *lengths])

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Reference:
    """Recorded levels, and where they are from.

    Attributes:
        checkpoint, kernel: of the canary whose control they are. recorded_at: seconds since the epoch.
        traffic: what they were taken under; None where that was not recorded.
    """

    levels: tuple[Level, ...] = ()
    checkpoint: str = ""
    kernel: str = ""
    recorded_at: float | None = None
    traffic: Traffic | None = None

    def describe(self, now: float) -> str:
        """Provenance and age, for people; empty where there is none."""
        if not self.checkpoint:
            return ""
        old = "of unknown age" if self.recorded_at is None else f"{age(max(0.0, now - self.recorded_at))} old"
        under = f"under {self.traffic}" if self.traffic else "under traffic that was not recorded"
        return f"the reference of {self.checkpoint} ({self.kernel}), {old}, {under}"

    def unfit(self, now: float, traffic: Traffic | None, settings: ReferenceSettings) -> tuple[str, ...]:
        """Why it says nothing of today: it is too old, or was taken under other traffic."""
        if not self.levels:
            return ("no reference was recorded: a canary that passes records one",)
        said = []
        if self.recorded_at is None or now - self.recorded_at > settings.max_age:
            said.append(f"{self.describe(now)}, is older than {age(settings.max_age)}")
        if self.traffic is None:
            said.append(f"{self.describe(now)}: nothing says whether today's is like it")
        elif traffic is not None:
            for what in ("rate", "prompt", "answer"):
                then, today = getattr(self.traffic, what), getattr(traffic, what)
                if then and today and not 1 / settings.traffic <= today / then <= settings.traffic:
                    said.append(
                        f"today's {NAMES[what]} is {today:.3g}, {then:.3g} in {self.checkpoint}: "
                        f"more than {settings.traffic:g} times apart"
                    )
        return tuple(said)


NAMES = {"rate": "rate of requests", "prompt": "mean prompt length", "answer": "mean answer length"}


class Recorder:
    """Sums up histograms of any number of workers, by their kind."""

    def __init__(self, metrics: Sequence[MetricSettings]) -> None:
        self._metrics = tuple(metrics)
        self._windows = {m.metric: HistogramWindows(m.metric) for m in metrics}
        self._buckets: dict[tuple[str, str], Buckets] = {}
        self._counters, self._all = CounterWindows(), HistogramWindows("e2e")
        self._sums = dict.fromkeys(("seconds", "requests", "prompt", "answer", "ended"), 0.0)

    def add(self, scrape: Scrape, kind: str = "") -> None:
        """Fold in one scrape of one worker; the first of each is the starting point."""
        for name, windows in self._windows.items():
            buckets, _ = windows.add(scrape)
            if buckets is not None:
                key = (kind, name)
                self._buckets[key] = self._buckets[key] + buckets if key in self._buckets else buckets
        ended, _ = self._all.add(scrape)
        step = self._counters.add(scrape)
        if step is not None and not step.restarted:
            more = (step.seconds, step.requests, step.prompt_tokens, step.tokens, ended.total if ended else 0.0)
            for name, value in zip(self._sums, more, strict=True):
                self._sums[name] += value

    def traffic(self) -> Traffic | None:
        """What a worker served; None before anything was."""
        seconds, requests, prompt, answer, ended = self._sums.values()
        if not (seconds and ended):
            return None
        return Traffic(requests / seconds, prompt / ended if prompt else None, answer / ended if answer else None)

    def levels(self, times: float = 1.0) -> tuple[Level, ...]:
        """The level of each kind and metric that was observed at all; `times`: if so many times as much like it had been."""
        kinds = sorted({kind for kind, _ in self._buckets})
        found = []
        for kind in kinds:
            for metric in self._metrics:
                buckets = self._buckets.get((kind, metric.metric))
                if buckets is not None:
                    buckets = Buckets(buckets.edges, buckets.counts * times)
                    low, high = _range(buckets, metric.quantile)
                    found.append(Level(metric.metric, metric.quantile, low, high, int(buckets.total), kind))
        return tuple(found)


def _range(buckets: Buckets, quantile: float) -> tuple[float, float]:
    """Bucket edges between which the true quantile lies with 99 % confidence, by order statistics (normal approximation)."""
    spread = Z * math.sqrt(quantile * (1 - quantile) / buckets.total)
    low, high = (
        buckets.quantile_bounds(min(max(level, 1e-9), 1.0)) for level in (quantile - spread, quantile + spread)
    )
    assert low and high, "buckets are kept only with observations in them"
    return low[0], min(high[1], 1e9)


def against(
    reference: Sequence[Level], now: Sequence[Level], margins: Sequence[MetricSettings], min_samples: int, at: float
) -> list[Decision]:
    """One decision a kind and metric: FAIL, PASS, or none while its range holds the limit, or there is too little to tell."""
    then, seen = _by_key(reference), _by_key(now)
    kinds = sorted({level.kind for level in (*reference, *now)}) or [""]
    return [
        _decide(
            then.get((kind, m.metric, m.quantile)), seen.get((kind, m.metric, m.quantile)), m, kind, min_samples, at
        )
        for kind in kinds
        for m in margins
    ]


def _by_key(levels: Sequence[Level]) -> dict[tuple[str, str, float], Level]:
    return {(level.kind, level.metric, level.quantile): level for level in levels}


def _decide(
    then: Level | None, now: Level | None, metric: MetricSettings, kind: str, min_samples: int, at: float
) -> Decision:
    statistic, limit = f"p{metric.quantile * 100:g}" + (f" of {kind}" if kind else ""), 1 + metric.margin
    if then is None or now is None or min(then.n, now.n) < min_samples or then.high <= 0:
        few = f"{now.n if now else 0} requests now, {then.n if then else 0} in the reference, {min_samples} of each are needed"
        reason = "no reference was recorded" if then is None else few
        return Decision(None, metric.metric, statistic, reason, threshold=limit, n=now.n if now else 0, at=at)
    low, high = now.low / then.high, now.high / then.low if then.low > 0 else None
    verdict = Verdict.FAIL if low > limit else Verdict.PASS if high is not None and high <= limit else None
    reason = f"{statistic} lies in {now.low:.3g}–{now.high:.3g} s, in the reference in {then.low:.3g}–{then.high:.3g} s"
    if verdict is None:
        reason += f": {low:.2f} to {'unknown' if high is None else f'{high:.2f}'} times as long, the limit {limit:g} not excluded yet"
    middle = (
        math.sqrt((now.low * now.high) / (then.low * then.high))
        if then.low > 0 and now.low > 0
        else (now.low + now.high) / (then.low + then.high)
    )
    return Decision(
        verdict,
        metric.metric,
        statistic,
        reason,
        middle,
        low,
        high,
        limit,
        now.n,
        at=at,
        source="reference of an earlier bake",
    )
