"""What a phase itself concluded, as rules of its gate that no playbook can leave out or loosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from phases.base.results import BuildRecord, ParityRecord, Results, StageEnd
from phases.base.verdict import Verdict
from phases.gate.intervals import median_interval
from phases.gate.measurement_rule import MeasurementRule
from phases.gate.outcome import RuleOutcome, terms_of

OWN = "phase"  # kind of these rules in gate.json
# Outputs of a served kernel: a mean of so many nats a token, and such a share of tokens worse than the incumbent's best, is another model.
OUTPUT_LIMIT, WRONG_LIMIT = 0.05, 0.05
# Times the fastest sample of a ceiling that nothing on cold inputs can be. Twice, since a busy machine may slow the ceilings and not the kernel.
IMPOSSIBLE = 2.0
CONFIDENCE = 0.99
_SHOWN = 20  # failures listed in a rule's detail; the results hold them all


def own_outcomes(
    phase: str, results: Results, candidates: Collection[str] = (), stages: Sequence[str] = ()
) -> tuple[RuleOutcome, ...]:
    """The phase's own rules on its results; none for a phase that has no verdict of its own.

    Args:
        candidates: variants that must be built and right; empty: every variant there is a record of.
        stages: what must have been judged, in order. One that is missing is an ERROR unless an earlier one stopped the phase.
    """
    judge = _OWN.get(phase)
    return (*(judge(results, candidates) if judge else ()), *_stages(results, stages))


_SERVED = (
    MeasurementRule("candidate_ready", at_least=1.0, absent="fail"),
    MeasurementRule("logprob_error", at_most=OUTPUT_LIMIT, absent="fail"),
    MeasurementRule("wrong_tokens", at_most=WRONG_LIMIT, absent="fail"),
)


def own_labels(phase: str, stages: Sequence[str] = ()) -> tuple[str, ...]:
    """What `own_outcomes` will judge, with its thresholds, for a plan."""
    limits = {rule.metric: f": {terms_of(vars(rule))}" for rule in _SERVED}
    labels = (f"{OWN} {name}{limits.get(name, '')}" for name in _LABELS.get(phase, ()))
    return (*labels, *(f"{OWN} {stage}" for stage in stages))


def _build_parity(results: Results, candidates: Collection[str]) -> tuple[RuleOutcome, ...]:
    """Every object of a candidate compiled; no case that a candidate computed is wrong, and it computed one. What it may refuse is for
    the playbook's rules to say."""
    built = [record for record in results.build if not candidates or record.variant in candidates]
    built = built or list(results.build)  # an object may serve several variants by a name of its own
    unbuilt = [f"{r.variant}/{r.arch}: {r.reason.splitlines()[0] if r.reason else 'failed'}" for r in built if not r.ok]
    computed = [r for r in results.parity if (not candidates or r.variant in candidates) and not r.refused]
    wrong = [f"{r.variant} {r.case.key}: {r.reason or 'error over tolerance'}" for r in computed if not r.ok]
    return (
        _counted("build", built, unbuilt, "objects built"),
        _counted("parity", computed, wrong, "cases right"),
        *_possible(results, candidates),
    )


def _possible(results: Results, candidates: Collection[str]) -> tuple[RuleOutcome, ...]:
    """No candidate is faster than this device can be. Only cold inputs are judged: a cache may be faster than any ceiling."""
    timed = [
        record
        for record in results.benchmark
        if record.samples and record.roofline_seconds and record.detail.get("cold") is not False
        if not candidates or record.variant in candidates
    ]
    if not timed:
        return ()
    spread = max((max(c.samples) / c.value for c in results.ceilings if c.samples and c.value > 0), default=1.0)
    told = []
    for record in timed:
        slowest = median_interval(record.samples, CONFIDENCE).high
        times = (record.roofline_seconds or 0.0) / slowest if slowest > 0 else math.inf
        if times > IMPOSSIBLE * max(1.0, spread):
            told.append(f"{record.variant} {record.case.key}: {times:.3g} times what this device was measured to reach")
    detail = {"metric": "possible speed", "failed": told[:_SHOWN]}
    if not told:
        return (RuleOutcome(OWN, Verdict.PASS, f"{len(timed)} times are possible here", n=len(timed), detail=detail),)
    reason = f"the clock or the work is wrong in {len(told)} of {len(timed)}, or the ceilings were measured while others used the machine; first: {told[0]}"
    return (RuleOutcome(OWN, Verdict.ERROR, reason, n=len(timed), detail=detail),)


def _sglang_integration(results: Results, candidates: Collection[str]) -> tuple[RuleOutcome, ...]:
    return tuple(_named(rule.judge(results), rule.metric) for rule in _SERVED)


def _stages(results: Results, stages: Sequence[str]) -> tuple[RuleOutcome, ...]:
    """Each end as it was told; a stage that never came, or was told of twice, is an ERROR of its own."""
    told = [end.stage for end in results.ends]
    twice = sorted({stage for stage in told if told.count(stage) > 1})
    missing = [stage for stage in stages if stage not in told]
    stopped = any(not end.verdict.advances for end in results.ends)
    return (
        *map(_of_end, results.ends),
        *(_error(stage, "its end is told more than once") for stage in twice),
        *(_error(stage, "it was never judged") for stage in (missing if not stopped else ())),
    )


def _of_end(end: StageEnd) -> RuleOutcome:
    return RuleOutcome(
        OWN, end.verdict, end.reason, source=f"judged for {end.seconds:.0f} s", detail={"metric": end.stage}
    )


def _error(stage: str, reason: str) -> RuleOutcome:
    return RuleOutcome(OWN, Verdict.ERROR, reason, detail={"metric": stage})


def _counted(
    label: str, records: Sequence[BuildRecord] | Sequence[ParityRecord], failed: list[str], what: str
) -> RuleOutcome:
    detail = {"metric": label, "failed": failed[:_SHOWN]}
    if failed:
        reason = f"{len(failed)} of {len(records)} failed; first: {failed[0]}"
        return RuleOutcome(OWN, Verdict.FAIL, reason, n=len(records), detail=detail)
    if not records:
        return RuleOutcome(OWN, Verdict.FAIL, "nothing was done for any candidate", detail=detail)
    return RuleOutcome(OWN, Verdict.PASS, f"{len(records)} {what}", n=len(records), detail=detail)


def _named(outcome: RuleOutcome, label: str) -> RuleOutcome:
    return RuleOutcome(**{**vars(outcome), "rule": OWN, "detail": {**outcome.detail, "metric": label}})


_OWN: dict[str, Callable[[Results, Collection[str]], tuple[RuleOutcome, ...]]] = {
    "build-parity": _build_parity,
    "sglang-integration": _sglang_integration,
}
_LABELS = {
    "build-parity": ("build", "parity", "possible speed"),
    "sglang-integration": ("candidate_ready", "logprob_error", "wrong_tokens"),
}
