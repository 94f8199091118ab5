"""What a phase itself concluded, as rules of its gate that no playbook can leave out."""

from __future__ import annotations

from collections.abc import Callable, Collection

from phases.base.results import Results, StageEnd
from phases.base.verdict import Verdict
from phases.gate.kernel_rules import BuildRule, ParityRule
from phases.gate.measurement_rule import MeasurementRule
from phases.gate.outcome import RuleOutcome

OWN = "phase"  # kind of these rules in gate.json
# Outputs of a served kernel: a mean of so many nats a token, and such a share of tokens worse than the incumbent's best, is another model.
OUTPUT_LIMIT, WRONG_LIMIT = 0.05, 0.05
SOAK = "soak"


def own_outcomes(phase: str, kinds: Collection[str], results: Results) -> tuple[RuleOutcome, ...]:
    """The phase's own rules on its results; none for a phase that has no verdict of its own.

    Args:
        kinds: of the playbook's rules. A rule of the same kind says more, with its own cases, so the bare one is left out.
    """
    judge = _OWN.get(phase)
    return judge(kinds, results) if judge else ()


def _build_parity(kinds: Collection[str], results: Results) -> tuple[RuleOutcome, ...]:
    bare = {"build": BuildRule(absent="fail"), "parity": ParityRule(absent="fail")}
    return tuple(_named(rule.judge(results), kind) for kind, rule in bare.items() if kind not in kinds)


def _sglang_integration(kinds: Collection[str], results: Results) -> tuple[RuleOutcome, ...]:
    rules = (
        MeasurementRule("candidate_ready", at_least=1.0, absent="fail"),
        MeasurementRule("logprob_error", at_most=OUTPUT_LIMIT, absent="fail"),
        MeasurementRule("wrong_tokens", at_most=WRONG_LIMIT, absent="fail"),
    )
    return tuple(_named(rule.judge(results), rule.metric) for rule in rules)


def _tp8_canary(kinds: Collection[str], results: Results) -> tuple[RuleOutcome, ...]:
    if not results.ends:
        return (RuleOutcome(OWN, Verdict.ERROR, "the canary was never judged", detail={"metric": "bake"}),)
    return tuple(map(_of_end, results.ends))


def _full_rollout(kinds: Collection[str], results: Results) -> tuple[RuleOutcome, ...]:
    rows = tuple(map(_of_end, results.ends))
    if all(end.verdict.advances for end in results.ends) and results.end_of(SOAK) is None:
        return (
            *rows,
            RuleOutcome(OWN, Verdict.ERROR, "the fleet was never judged as a whole", detail={"metric": SOAK}),
        )
    return rows


def _of_end(end: StageEnd) -> RuleOutcome:
    return RuleOutcome(
        OWN, end.verdict, end.reason, source=f"judged for {end.seconds:.0f} s", detail={"metric": end.stage}
    )


def _named(outcome: RuleOutcome, label: str) -> RuleOutcome:
    return RuleOutcome(**{**vars(outcome), "rule": OWN, "detail": {**outcome.detail, "metric": label}})


_OWN: dict[str, Callable[[Collection[str], Results], tuple[RuleOutcome, ...]]] = {
    "build-parity": _build_parity,
    "sglang-integration": _sglang_integration,
    "tp8-canary": _tp8_canary,
    "full-rollout": _full_rollout,
}
