"""Each rule kind on results whose right verdict is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from phases.base.results import BenchmarkRecord, BuildRecord, Case, Measurement, ParityRecord, Results
from phases.base.verdict import Verdict
from phases.gate import rules
from phases.gate.gate import judge
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.playbook.located import Mistakes, load_text

FAST = tuple(1e-3 + 1e-6 * (i % 7) for i in range(40))
SLOW = tuple(5e-3 + 1e-6 * (i % 5) for i in range(40))


def case(q: int = 9, prefix: int = 1024) -> Case:
    return Case(f"q{q}/{prefix}/s1", "float32", {"heads": 64, "prefix": prefix})


def timed(variant: str, samples: tuple[float, ...] = FAST, prefix: int = 1024, **changes: Any) -> BenchmarkRecord:
    role = "baseline" if variant == "naive" else "candidate"
    record = BenchmarkRecord(
        case(prefix=prefix), variant, role, "cpu", samples=samples, parity_after=True, roofline_seconds=5e-4
    )
    return dataclasses.replace(record, **changes)


def results(**parts: Any) -> Results:
    return Results("build-parity", "verify_attn", **parts)


def rule(text: str) -> rules.Rule:
    mistakes = Mistakes()
    parsed = rules.parse(load_text(text, "gate.yaml", mistakes), mistakes)
    mistakes.raise_if_any()
    assert parsed is not None
    return parsed


SPEEDUP = "rule: speedup\nbaseline: naive\ncandidate: cpu\nat_least: 4.2\n"


def test_speedup_passes_by_its_lower_bound() -> None:
    outcome = rule(SPEEDUP).judge(results(benchmark=(timed("naive", SLOW), timed("cpu"))))
    assert outcome.verdict is Verdict.PASS
    assert 4.2 <= outcome.low <= outcome.estimate <= outcome.high
    assert outcome.n == 40 and outcome.threshold == 4.2 and "q9/1024/s1" in outcome.source


def test_speedup_judges_the_worst_case_or_the_median() -> None:
    records = [timed("naive", SLOW, prefix=p) for p in (1024, 2048, 4096)] + [
        timed("cpu", prefix=p) for p in (1024, 2048)
    ]
    records.append(timed("cpu", SLOW, prefix=4096))
    assert rule(SPEEDUP).judge(results(benchmark=tuple(records))).verdict is Verdict.FAIL
    assert rule(SPEEDUP + "on: median\n").judge(results(benchmark=tuple(records))).verdict is Verdict.PASS


def test_speedup_within_the_noise_is_inconclusive() -> None:
    noisy = tuple(5e-3 * (0.5 + i / 20) for i in range(20))
    outcome = rule(SPEEDUP).judge(results(benchmark=(timed("naive", noisy), timed("cpu"))))
    assert outcome.verdict is Verdict.INCONCLUSIVE and outcome.low < 4.2 < outcome.high


@pytest.mark.parametrize(
    "broken",
    [
        {"parity_after": False},
        {"parity_after": None},
        {"samples": (), "reason": "parity failed"},
        {"reason": "timer was patched"},
    ],
)
def test_no_number_without_parity_after_timing(broken: dict[str, Any]) -> None:
    outcome = rule(SPEEDUP).judge(results(benchmark=(timed("naive", SLOW), timed("cpu", **broken))))
    assert outcome.verdict is Verdict.FAIL and "no honest timing" in outcome.reason and outcome.estimate is None


def test_a_refused_baseline_is_skipped_and_said() -> None:
    refused = timed("naive", (), prefix=65536, parity_after=None, refused="score row exceeds shared memory")
    records = (timed("naive", SLOW), timed("cpu"), refused, timed("cpu", prefix=65536))
    outcome = rule(SPEEDUP).judge(results(benchmark=records))
    assert outcome.verdict is Verdict.PASS
    assert outcome.detail["skipped"] == ["naive q9/65536/s1/h64/float32: score row exceeds shared memory"]


@pytest.mark.parametrize(
    ("answer", "verdict"), [("fail", Verdict.FAIL), ("inconclusive", Verdict.INCONCLUSIVE), ("zero", Verdict.FAIL)]
)
def test_missing_data_has_the_playbooks_answer(answer: str, verdict: Verdict) -> None:
    outcome = rule(SPEEDUP + f"absent: {answer}\n").judge(results())
    assert outcome.verdict is verdict and "0 cases timed" in outcome.reason


def test_too_few_samples_are_missing_data() -> None:
    outcome = rule(SPEEDUP).judge(results(benchmark=(timed("naive", SLOW[:9]), timed("cpu", FAST[:9]))))
    assert outcome.verdict is Verdict.INCONCLUSIVE and "fewest samples 9, 10 needed" in outcome.reason


def parity(ok: bool = True, **changes: Any) -> ParityRecord:
    return dataclasses.replace(ParityRecord(case(), "cpu", "cpu", ok, error=1e-6, tolerance=1e-5), **changes)


def test_parity() -> None:
    assert rule("rule: parity").judge(results(parity=(parity(),))).verdict is Verdict.PASS
    wrong = rule("rule: parity").judge(results(parity=(parity(), parity(False, reason="error 0.3 over 1e-05"))))
    assert wrong.verdict is Verdict.FAIL and "1 of 2 cases are wrong" in wrong.reason and "0.3" in wrong.reason


def test_parity_refusals_count_unless_allowed() -> None:
    refused = parity(False, refused="only float32", error=None)
    assert rule("rule: parity").judge(results(parity=(parity(), refused))).verdict is Verdict.FAIL
    assert rule("rule: parity\nmay_refuse: [cpu]").judge(results(parity=(parity(), refused))).verdict is Verdict.PASS
    assert rule("rule: parity\nmay_refuse: [cpu]").judge(results(parity=(refused,))).verdict is Verdict.INCONCLUSIVE


def test_parity_of_a_named_variant_that_never_ran() -> None:
    outcome = rule("rule: parity\nvariants: [cpu, hopper]").judge(results(parity=(parity(),)))
    assert outcome.verdict is Verdict.INCONCLUSIVE and "hopper" in outcome.reason


def test_build_names_what_is_missing() -> None:
    built = BuildRecord("cpu", "x86-64-v4", True)
    broken = BuildRecord("naive", "sm_90", False, reason="ptxas error: out of registers\nmore")
    assert rule("rule: build\narchs: [x86-64-v4]").judge(results(build=(built, broken))).verdict is Verdict.PASS
    outcome = rule("rule: build\narchs: [x86-64-v4, sm_90, sm_120]").judge(results(build=(built, broken)))
    assert outcome.verdict is Verdict.FAIL
    assert outcome.reason == "naive/sm_90: ptxas error: out of registers; sm_120: not built"


def test_longest_prefix() -> None:
    text = "rule: longest_prefix\nvariant: cpu\nat_least: 65536\n"
    assert rule(text).judge(results(benchmark=(timed("cpu"), timed("cpu", prefix=65536)))).verdict is Verdict.PASS
    refused = timed("cpu", (), prefix=65536, refused="too long")
    outcome = rule(text).judge(results(benchmark=(timed("cpu"), refused)))
    assert outcome.verdict is Verdict.FAIL and outcome.detail["refused"] == ["cpu 65536: too long"]


def test_bandwidth_fraction_is_the_roofline_over_the_time() -> None:
    outcome = rule("rule: bandwidth_fraction\nvariant: cpu\nat_least: 0.4\n").judge(results(benchmark=(timed("cpu"),)))
    assert outcome.verdict is Verdict.PASS and outcome.estimate == pytest.approx(0.5, abs=0.01)


MEASURED = "rule: measurement\nmetric: accept_length_ratio\nat_least: 0.98\nmin_samples: 30\n"


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (Measurement("accept_length_ratio", 1.0, 0.99, 1.01, 100), Verdict.PASS),
        (Measurement("accept_length_ratio", 0.9, 0.88, 0.92, 100), Verdict.FAIL),
        (Measurement("accept_length_ratio", 0.98, 0.96, 1.0, 100), Verdict.INCONCLUSIVE),
        (Measurement("accept_length_ratio", 1.0, 0.99, None, 100), Verdict.PASS),
        (Measurement("accept_length_ratio", 1.0, None, 1.1, 100), Verdict.INCONCLUSIVE),
        (Measurement("accept_length_ratio", float("nan"), 0.99, 1.0, 100), Verdict.INCONCLUSIVE),
        (Measurement("accept_length_ratio", 1.0, float("nan"), 1.0, 100), Verdict.INCONCLUSIVE),
        (Measurement("accept_length_ratio", 1.0, 0.99, 1.01, 29), Verdict.INCONCLUSIVE),
        (Measurement("accept_length_ratio", None, n=0), Verdict.INCONCLUSIVE),
        (Measurement("something_else", 1.0, 0.99, 1.01, 100), Verdict.INCONCLUSIVE),
    ],
)
def test_measurement(measured: Measurement, verdict: Verdict) -> None:
    assert rule(MEASURED).judge(results(measurements=(measured,))).verdict is verdict


def test_zero_answer_on_a_ceiling_passes() -> None:
    text = "rule: measurement\nmetric: errors_5xx\nat_most: 0\nabsent: zero\n"
    assert rule(text).judge(results()).verdict is Verdict.PASS
    assert rule(text).judge(results(measurements=(Measurement("errors_5xx", 3.0, n=100),))).verdict is Verdict.FAIL


def test_a_rule_is_called_by_the_measurement_it_names() -> None:
    said = Measurement(
        "5xx_excess_rate", 0.0, 0.0, 0.01, n=900, detail={"metric": "5xx"}
    )  # as a sequential test describes itself
    judged = rule("rule: measurement\nmetric: 5xx_excess_rate\nat_most: 0.05\n").judge(results(measurements=(said,)))
    assert judged.label == "5xx_excess_rate"


def test_the_worst_rule_decides_and_a_broken_one_is_an_error() -> None:
    twice = results(parity=(parity(),), measurements=(Measurement("x", 1.0, n=1), Measurement("x", 2.0, n=1)))
    chosen = [rule("rule: parity"), rule("rule: measurement\nmetric: x\nat_least: 0")]
    outcome = judge("another", chosen, twice)
    assert [r.verdict for r in outcome.rules] == [Verdict.PASS, Verdict.ERROR]
    assert outcome.verdict is Verdict.ERROR and "2 measurements are called 'x'" in outcome.rules[1].reason


def test_a_gate_without_rules_is_an_error() -> None:
    assert judge("another", [], results()).verdict is Verdict.ERROR
    assert judge("build-parity", [], results()).verdict is Verdict.FAIL  # the phase's own: nothing was built
    assert GateOutcome("x", ()).verdict is Verdict.ERROR


def test_outcome_survives_json() -> None:
    outcome = GateOutcome("p", (RuleOutcome("parity", Verdict.FAIL, "no", estimate=1.0, detail={"a": [1]}),))
    assert GateOutcome.from_json(outcome.to_json()) == outcome


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rule: speed\n", "unknown rule: the text 'speed' (did you mean 'speedup'?)"),
        ("rule: [speedup]\n", "unknown rule: a list"),
        ("rule: {kind: speedup}\n", "unknown rule: a mapping"),
        ("baseline: x\n", "needs the key 'rule'"),
        (SPEEDUP + "absent: pass\n", "must be one of fail, inconclusive, zero"),
        (SPEEDUP + "confidence: 1.5\n", "must be at most 0.999999"),
        ("rule: measurement\nmetric: x\n", "give exactly one of at_least and at_most"),
        ("rule: measurement\nmetric: x\nat_least: .nan\n", "must be a finite number"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    mistakes = Mistakes()
    rules.parse(load_text(text, "gate.yaml", mistakes), mistakes)
    assert said in "\n".join(map(str, mistakes))


def test_the_schema_accepts_what_the_parser_accepts() -> None:
    import jsonschema

    schema = rules.rule_schema()
    jsonschema.validate({"rule": "speedup", "baseline": "naive", "candidate": "cpu", "at_least": 4.2}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {"rule": "speedup", "baseline": "naive", "candidate": "cpu", "at_least": 4.2, "onn": "worst"}, schema
        )


def test_what_was_measured_too_seldom_is_never_counted_as_zero() -> None:
    """40 failures of 50 passed a rule that wanted 100 samples."""
    judge_by = rule("rule: measurement\nmetric: failed\nat_most: 0.1\nmin_samples: 100\nabsent: zero\n")
    few = Results("p", "k", measurements=(Measurement("failed", 0.8, 0.7, 0.9, n=50),))
    assert judge_by.judge(few).verdict is Verdict.INCONCLUSIVE
