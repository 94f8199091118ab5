"""The rules a playbook may name: reading them, judging them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

from phases.base.results import Results
from phases.gate.kernel_rules import BandwidthFractionRule, BuildRule, LongestPrefixRule, ParityRule, SpeedupRule
from phases.gate.measurement_rule import MeasurementRule
from phases.gate.outcome import RuleOutcome, label_of, terms_of
from phases.playbook.located import Mistakes, Node, nearest
from phases.playbook.typed import json_schema, read


class Judge(Protocol):
    """What every rule kind offers."""

    def judge(self, results: Results) -> RuleOutcome: ...


_RETIRED = re.compile(
    r"(wave\d+_)?canary_passed|soak_passed"
)  # what stood for a phase's own verdict before gates held it
_KINDS: dict[str, type[Any]] = {
    "build": BuildRule,
    "parity": ParityRule,
    "speedup": SpeedupRule,
    "longest_prefix": LongestPrefixRule,
    "bandwidth_fraction": BandwidthFractionRule,
    "measurement": MeasurementRule,
}


@dataclass(frozen=True)
class Rule:
    """One rule of a playbook."""

    kind: str
    judge_by: Judge
    where: str  # file:line

    @property
    def label(self) -> str:
        """As its outcome will be called."""
        return label_of(self.kind, vars(self.judge_by))

    @property
    def terms(self) -> str:
        """Its thresholds and whatever else it asks, in words."""
        return terms_of(vars(self.judge_by))

    def judge(self, results: Results) -> RuleOutcome:
        return self.judge_by.judge(results)


def known() -> dict[str, type[Any]]:
    """Every kind of rule: its name and the dataclass whose fields are its parameters."""
    return dict(_KINDS)


def parse(node: Node, mistakes: Mistakes) -> Rule | None:
    """Read `{rule: KIND, parameter: value, ...}`; adds every mistake, None when the kind is not known or has been retired."""
    kind = node.get("rule")
    at = f"{node.path}: " if node.path else ""
    metric = node.get("metric")
    if metric is not None and _RETIRED.fullmatch(str(metric.value)):
        mistakes.note(
            node, f"{at}{metric.value} has no effect: a phase's own verdict is always a rule of its gate; leave it out"
        )
        return None
    if kind is None:
        mistakes.add(node, f"{at}a rule needs the key 'rule', one of {', '.join(_KINDS)}")
        return None
    if kind.kind != "text" or kind.value not in _KINDS:
        mistakes.add(kind, f"{at}unknown rule: {kind.describe()}{nearest(str(kind.value), _KINDS)}")
        return None
    return Rule(kind.value, read(_KINDS[kind.value], node.without("rule"), mistakes), str(node.where))


def rule_schema() -> dict[str, Any]:
    """JSON Schema of one rule, for editors."""
    variants = []
    for name, kind in _KINDS.items():
        schema = json_schema(kind)
        schema["properties"] = {"rule": {"const": name}, **schema["properties"]}
        schema["required"] = ["rule", *schema.get("required", [])]
        variants.append(schema)
    return {"oneOf": variants}
