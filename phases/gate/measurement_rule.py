"""The generic rule on one measured scalar: accept length, latency ratio, error count, share ..."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from phases.base.results import Measurement, Results
from phases.base.verdict import Verdict
from phases.gate.decide import Quantity, absent, at_least, at_most
from phases.gate.intervals import Interval
from phases.gate.kernel_rules import absent_setting
from phases.gate.outcome import RuleOutcome
from phases.playbook.typed import setting


@dataclass(frozen=True)
class MeasurementRule:
    """One measured quantity against a floor or a ceiling, by its interval."""

    metric: str = setting(help="name of the measurement", not_empty=True)
    at_least: float | None = setting(None, help="floor the lower bound must reach")
    at_most: float | None = setting(None, help="ceiling the upper bound must stay within")
    min_samples: int = setting(1, at_least=1, help="fewest samples the verdict may rest on")
    absent: str = absent_setting()

    def check(self, node: Any, mistakes: Any) -> None:
        if (self.at_least is None) == (self.at_most is None):
            mistakes.add(node, f"{node.path}: give exactly one of at_least and at_most")

    def judge(self, results: Results) -> RuleOutcome:
        found = [m for m in results.measurements if m.metric == self.metric]
        if len(found) > 1:
            raise ValueError(f"{len(found)} measurements are called {self.metric!r}")
        measured = found[0] if found else Measurement(self.metric, None, source="nothing recorded")
        quantity = Quantity(
            "measurement",
            _interval(measured),
            measured.n,
            measured.unit,
            measured.source,
            {**measured.detail, "metric": self.metric, "bound": "at_most" if self.at_least is None else "at_least"},
        )
        missing = self._missing(measured)
        if missing:
            return absent(quantity, self.absent, missing, floor=self.at_least, ceiling=self.at_most)
        if self.at_least is not None:
            return at_least(quantity, self.at_least)
        if self.at_most is not None:
            return at_most(quantity, self.at_most)
        return quantity.outcome(Verdict.ERROR, f"rule on {self.metric} has neither at_least nor at_most", None)

    def _missing(self, measured: Measurement) -> str:
        known = f"{self.metric} (source: {measured.source or 'unknown'})"
        if measured.estimate is None or not math.isfinite(measured.estimate):
            return f"{known} has no value"
        if measured.n < self.min_samples:
            return f"{known} rests on {measured.n} samples, {self.min_samples} needed"
        return ""


def _interval(measured: Measurement) -> Interval:
    """A side that was not measured is unbounded; without both sides the number counts as exact."""
    if measured.estimate is None:
        return Interval(math.nan, math.nan, math.nan)
    if measured.low is None and measured.high is None:
        return Interval(measured.estimate, measured.estimate, measured.estimate)
    low = -math.inf if measured.low is None else measured.low
    high = math.inf if measured.high is None else measured.high
    return Interval(measured.estimate, low, high)
