"""How a trial ended: one type for bake, switchback and soak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phases.analysis.decision import Decision
from phases.base.results import StageEnd
from phases.base.verdict import Verdict
from phases.trial.looks import Looks, name_of
from phases.trial.reference import Level


@dataclass(frozen=True)
class Fault:
    """Why a bake was cut short: a worker is down, restarted by itself, or not what it should be."""

    worker: str
    reason: str
    incumbent: bool  # the incumbent is what is sick: swapping would not help


@dataclass(frozen=True)
class TrialEnd:
    """How a bake ended.

    Attributes:
        verdict: PASS, FAIL or INCONCLUSIVE; FAIL also for a fault of the canary.
        reference: the control's own latencies, for watching after a rollout, when no control is left.
        requests: answers by arm.
        agreements: comparisons of outputs with the incumbent's, as JSON.
        looks: what each look found, by test name.
    """

    verdict: Verdict
    decisions: tuple[Decision, ...]
    looks: Looks
    seconds: float
    fault: Fault | None = None
    reference: tuple[Level, ...] = ()
    requests: dict[str, float] = field(default_factory=dict)
    agreements: tuple[dict[str, Any], ...] = ()

    @property
    def reason(self) -> str:
        if self.fault:
            return f"{self.fault.worker}: {self.fault.reason}"
        telling = [d for d in self.decisions if d.verdict is self.verdict] or list(self.decisions)
        return "; ".join(f"{name_of(d)}: {d.reason}" for d in telling[:3])

    def stage(self, name: str) -> StageEnd:
        """What the gate judges of it, whatever the playbook asks for."""
        return StageEnd(name, self.verdict, self.reason, self.seconds)

    def facts(self) -> list[dict[str, Any]]:
        """results.facts["sequential"]: what the report draws, one entry a test."""
        return [
            {
                "name": name_of(d),
                "unit": d.unit,
                "margin": (d.threshold or 1.0) - (1.0 if d.unit == "ratio" else 0.0),
                "looks": self.looks.rows.get(name_of(d), []),
                "decided_at": self.looks.decided.get(name_of(d)),
                "verdict": d.word,
                "reason": d.reason,
            }
            for d in self.decisions
        ]
