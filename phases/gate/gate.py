"""Judging a phase: every rule, each on its own, the worst decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from phases.base.results import Results
from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.gate.own import own_outcomes
from phases.gate.rules import Rule


def judge(
    phase: str, rules: Iterable[Rule], results: Results, *, candidates: Collection[str] = (), stages: Sequence[str] = ()
) -> GateOutcome:
    """The verdict on a phase's results.

    The phase's own verdict comes first and is no playbook's to leave out; what the playbook asks for can only add to it. A rule
    that breaks is an ERROR with its reason, not a crash: the other rules' numbers still reach the reviewer. A gate that
    evaluated nothing is an ERROR.

    Args:
        candidates, stages: as `phases.gate.own.own_outcomes` takes them.
    """
    outcomes = (*own_outcomes(phase, results, candidates, stages), *(_judge_one(rule, results) for rule in rules))
    if not outcomes:
        outcomes = (
            RuleOutcome("gate", Verdict.ERROR, f"the playbook names no rule for {phase}: nothing was evaluated"),
        )
    return GateOutcome(phase=phase, rules=outcomes)


def _judge_one(rule: Rule, results: Results) -> RuleOutcome:
    try:
        return rule.judge(results)
    except Exception as fault:  # whatever a rule trips over is its verdict, named, and blocks the gate
        return RuleOutcome(
            rule.kind, Verdict.ERROR, f"rule at {rule.where} could not be evaluated: {type(fault).__name__}: {fault}"
        )
