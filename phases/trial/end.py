"""How a trial ended: one type for bake, switchback and soak."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from phases.analysis.decision import Decision
from phases.base.results import StageEnd
from phases.base.verdict import Verdict
from phases.trial.looks import Looks, name_of
from phases.trial.reference import Level, Traffic
from phases.trial.served import Served


@dataclass(frozen=True)
class Fault:
    """Why a trial was cut short: a worker is down, restarted by itself, or not what it should be.

    Attributes:
        incumbent: the incumbent is what is sick: swapping would not help.
        untried: there was nothing to judge yet, such as servers that cannot be switched.
    """

    worker: str
    reason: str
    incumbent: bool
    untried: bool = False

    @property
    def verdict(self) -> Verdict:
        return Verdict.INCONCLUSIVE if self.incumbent or self.untried else Verdict.FAIL


@dataclass(frozen=True)
class TrialEnd:
    """How a bake ended.

    Attributes:
        verdict: PASS, FAIL or INCONCLUSIVE; FAIL also for a fault of the canary.
        reference: the control's own latencies, for watching after a rollout, when no control is left.
        requests: answers by arm.
        agreements: comparisons of outputs with the incumbent's, as JSON.
        looks: what each look found, by test name.
        traffic: what the workers of the reference served.
        served: what each arm served, in absolute numbers.
        withheld: why nothing could pass beside the tests: too few users, not their share, a reference that is too old.
    """

    verdict: Verdict
    decisions: tuple[Decision, ...]
    looks: Looks
    seconds: float
    fault: Fault | None = None
    reference: tuple[Level, ...] = ()
    requests: dict[str, float] = field(default_factory=dict)
    agreements: tuple[dict[str, Any], ...] = ()
    withheld: tuple[str, ...] = ()
    traffic: Traffic | None = None
    served: tuple[Served, ...] = ()

    @property
    def reason(self) -> str:
        if self.fault:
            return f"{self.fault.worker}: {self.fault.reason}"
        telling = [d for d in self.decisions if d.verdict is self.verdict]
        if not telling:
            telling = [d for d in self.decisions if d.verdict is not Verdict.PASS] or list(self.decisions)
        if self.withheld and self.verdict is Verdict.INCONCLUSIVE:
            telling = [d for d in telling if d.verdict is not Verdict.PASS]
        tests = [f"{name_of(d)}: {d.reason}{self._longer(d)}" for d in telling[: max(1, 3 - len(self.withheld))]]
        return "; ".join([*self.withheld, *tests])

    def _longer(self, decision: Decision) -> str:
        """For what is open: how much more of the same it needs."""
        if decision.verdict is Verdict.PASS or self.verdict is not Verdict.INCONCLUSIVE:
            return ""
        factor = times_as_long(decision)
        return "" if factor is None else f"; about {self.seconds * (factor - 1):.0f} s more of the same would tell"

    def stage(self, name: str) -> StageEnd:
        """What the gate judges of it, whatever the playbook asks for."""
        return StageEnd(name, self.verdict, self.reason, self.seconds)

    def facts(self) -> list[dict[str, Any]]:
        """results.facts["sequential"]: what the report draws, one entry a test."""
        return [
            {
                "name": name_of(d),
                "metric": d.metric,
                "statistic": d.statistic,
                "unit": d.unit,
                "margin": (d.threshold or 1.0) - (1.0 if d.unit == "ratio" else 0.0),
                "looks": self.looks.rows.get(name_of(d), []),
                "decided_at": self.looks.decided.get(name_of(d)),
                "verdict": d.word,
                "reason": d.reason,
            }
            for d in self.decisions
        ]


def times_as_long(decision: Decision) -> float | None:
    """How many times as much data would bring the upper bound within the limit, at the estimate as it is: widths go with the root of n.

    None where nothing tells: no estimate or bound, an estimate over the limit, or a bound within it.
    """
    high, limit = decision.high, decision.threshold
    middle = decision.estimate
    if decision.unit == "ratio":
        if middle is None and decision.low and high:
            middle = math.sqrt(decision.low * high)
        if not (middle and high and limit and middle > 0):
            return None
        middle, high, limit = math.log(middle), math.log(high), math.log(limit)
    if middle is None or high is None or limit is None or not (middle < limit < high) or not math.isfinite(high):
        return None
    return ((high - middle) / (limit - middle)) ** 2
