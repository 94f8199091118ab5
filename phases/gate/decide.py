"""From an interval and a threshold to a verdict, the same way in every rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from phases.base.verdict import Verdict
from phases.gate.intervals import Interval
from phases.gate.outcome import RuleOutcome


@dataclass(frozen=True)
class Quantity:
    """What a rule tested: the number with its interval, where it came from, and on how many samples it rests."""

    rule: str
    judged: Interval
    n: int
    unit: str
    source: str
    detail: dict[str, Any]

    def outcome(self, verdict: Verdict, reason: str, threshold: float | None) -> RuleOutcome:
        bounds = {name: _json(getattr(self.judged, name)) for name in ("estimate", "low", "high")}
        return RuleOutcome(
            self.rule,
            verdict,
            reason,
            n=self.n,
            threshold=threshold,
            unit=self.unit,
            source=self.source,
            detail=self.detail,
            **bounds,
        )


def at_least(quantity: Quantity, threshold: float) -> RuleOutcome:
    """PASS when the lower bound reaches the threshold, FAIL when the upper bound does not, otherwise INCONCLUSIVE."""
    judged = quantity.judged
    if _unusable(judged):
        verdict, reason = Verdict.INCONCLUSIVE, "the estimate is not a number"
    elif judged.low >= threshold:
        verdict, reason = Verdict.PASS, f"lower bound {judged.low:.4g} reaches {threshold:.4g} {quantity.unit}"
    elif judged.high < threshold:
        verdict, reason = Verdict.FAIL, f"upper bound {judged.high:.4g} is under {threshold:.4g} {quantity.unit}"
    else:
        verdict, reason = Verdict.INCONCLUSIVE, _straddles(quantity, threshold)
    return quantity.outcome(verdict, reason.rstrip(), threshold)


def at_most(quantity: Quantity, threshold: float) -> RuleOutcome:
    """PASS when the upper bound stays at or under the threshold, FAIL when the lower bound is over it."""
    judged = quantity.judged
    if _unusable(judged):
        verdict, reason = Verdict.INCONCLUSIVE, "the estimate is not a number"
    elif judged.high <= threshold:
        verdict, reason = Verdict.PASS, f"upper bound {judged.high:.4g} is within {threshold:.4g} {quantity.unit}"
    elif judged.low > threshold:
        verdict, reason = Verdict.FAIL, f"lower bound {judged.low:.4g} is over {threshold:.4g} {quantity.unit}"
    else:
        verdict, reason = Verdict.INCONCLUSIVE, _straddles(quantity, threshold)
    return quantity.outcome(verdict, reason.rstrip(), threshold)


def absent(
    quantity: Quantity, answer: str, why: str, *, floor: float | None = None, ceiling: float | None = None
) -> RuleOutcome:
    """The playbook's explicit answer for missing data.

    Args:
        answer: `fail`, `inconclusive`, or `zero`, which judges the number 0 against the threshold. What was measured too seldom
            is not nothing: then `zero` is inconclusive.
        floor: threshold of an at-least rule; ceiling: of an at-most rule.
    """
    threshold = ceiling if floor is None else floor
    if answer == "zero" and not quantity.n:
        zero = replace(quantity, judged=Interval(0.0, 0.0, 0.0), source="absent: zero")
        judged = at_most(zero, ceiling) if floor is None and ceiling is not None else at_least(zero, floor or 0.0)
        return replace(judged, reason=f"{why}, counted as zero: {judged.reason}")
    answer = "inconclusive" if answer == "zero" else answer
    verdict = Verdict.FAIL if answer == "fail" else Verdict.INCONCLUSIVE
    nothing = replace(quantity, judged=Interval(math.nan, math.nan, math.nan), source=f"absent: {answer}")
    return nothing.outcome(verdict, why, threshold)


def _unusable(judged: Interval) -> bool:
    return not math.isfinite(judged.estimate) or math.isnan(judged.low) or math.isnan(judged.high)


def _straddles(quantity: Quantity, threshold: float) -> str:
    return f"interval {quantity.judged.low:.4g} to {quantity.judged.high:.4g} includes {threshold:.4g} {quantity.unit}"


def _json(value: float) -> float | None:
    """JSON has no infinity: an unbounded side is written as null."""
    return value if math.isfinite(value) else None
