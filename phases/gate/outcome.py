"""What a gate concluded, rule by rule: exactly the quantities it tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phases.base.verdict import Verdict, worst


def label_of(kind: str, said: Mapping[str, Any]) -> str:
    """What people call a rule, by its parameters or by what its outcome says of them: `speedup cpu / torch_gemm`, or the metric
    where a kind judges any."""
    if metric := said.get("metric"):
        return str(metric)
    whom = said.get("candidate") or said.get("variant")
    against = f" / {said['baseline']}" if said.get("baseline") else ""
    return f"{kind} {whom}{against}{', median of cases' if said.get('on') == 'median' else ''}" if whom else kind


def terms_of(said: Mapping[str, Any]) -> str:
    """The parameters of a rule that its label does not tell, thresholds first: `at least 1.05, min samples 10, absent fail`."""
    named = ("metric", "candidate", "variant", "baseline")
    told = {name: value for name, value in said.items() if name not in named and value not in (None, (), "")}
    first = sorted(told, key=lambda name: name not in ("at_least", "at_most"))
    return ", ".join(f"{name.replace('_', ' ')} {_plain(told[name])}" for name in first)


def _plain(value: Any) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, (tuple, list))
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


@dataclass(frozen=True)
class RuleOutcome:
    """One rule's verdict and the numbers it rests on."""

    rule: str  # kind of the rule as the playbook names it: parity, speedup ...
    verdict: Verdict
    reason: str  # one sentence a reviewer understands
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    threshold: float | None = None
    unit: str = ""
    source: str = ""  # which records or which query
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What people call it: by what it compares."""
        return label_of(self.rule, self.detail)


@dataclass(frozen=True)
class GateOutcome:
    """All rules of one gate; the worst decides."""

    phase: str
    rules: tuple[RuleOutcome, ...]

    @property
    def verdict(self) -> Verdict:
        return worst(rule.verdict for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        rules = [{**dataclasses.asdict(rule), "verdict": rule.verdict.value} for rule in self.rules]
        return {"schema": "phasegate/gate/v1", "phase": self.phase, "verdict": self.verdict.value, "rules": rules}

    @staticmethod
    def from_json(data: dict[str, Any]) -> GateOutcome:
        rules = tuple(RuleOutcome(**{**rule, "verdict": Verdict(rule["verdict"])}) for rule in data["rules"])
        return GateOutcome(phase=data["phase"], rules=rules)
