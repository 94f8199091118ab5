"""A phase's own verdict is a rule of its gate that no playbook can leave out, and playbook rules only add to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.base.results import (
    BenchmarkRecord,
    BuildRecord,
    Case,
    Ceiling,
    Measurement,
    ParityRecord,
    Results,
    StageEnd,
)
from phases.base.verdict import Verdict, severity, worst
from phases.gate.gate import judge
from phases.gate.own import OWN
from phases.gate.rules import parse
from phases.playbook import loader
from phases.playbook.located import Mistakes, load_text

VERDICTS = st.sampled_from(list(Verdict))
RIGHT = ParityRecord(Case("q1", "float32"), "v", "cpu", True, 0.1, 1.0)
WRONG = ParityRecord(Case("q1", "float32"), "w", "cpu", False, 9.0, 1.0, reason="error over tolerance")
REFUSED = ParityRecord(Case("q1", "float32"), "w", "cpu", False, refused="too long")
OUTPUTS = (Measurement("logprob_error", 0.0, n=9), Measurement("wrong_tokens", 0.0, n=9))


def results(phase: str, **fields: object) -> Results:
    return Results(phase, "k", **fields)  # type: ignore[arg-type]


def parsed(*texts: str) -> list[object]:
    found = [parse(load_text(text, "p.yaml", Mistakes()), Mistakes()) for text in texts]
    return [rule for rule in found if rule is not None]


@pytest.mark.parametrize("phase", ["tp8-canary", "full-rollout"])
def test_a_failed_trial_is_never_a_pass_without_any_rule_of_a_playbook(phase: str) -> None:
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR):
        ends = (StageEnd("bake", verdict, "why", 9.0), StageEnd("soak", Verdict.PASS, "well", 9.0))
        outcome = judge(phase, [], results(phase, ends=ends), stages=["bake", "soak"])
        assert outcome.verdict is verdict and outcome.rules[0].label == "bake" and outcome.rules[0].rule == OWN


STAGES: dict[str, list[str]] = {
    "tp8-canary": ["bake"],
    "full-rollout": ["wave 1", "soak"],
    "build-parity": [],
    "sglang-integration": [],
}


@pytest.mark.parametrize("phase", STAGES)
def test_a_phase_that_judged_nothing_does_not_pass(phase: str) -> None:
    generous = parsed("{rule: measurement, metric: x, at_most: 1, absent: zero}")
    assert not judge(phase, generous, results(phase), stages=STAGES[phase]).verdict.advances


@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_rollout_whose_waves_or_soak_never_came_does_not_pass(came: int) -> None:
    stages = ["wave 1", "wave 2", "soak"]
    found = results("full-rollout", ends=tuple(StageEnd(name, Verdict.PASS, "well") for name in stages[:came]))
    outcome = judge("full-rollout", [], found, stages=stages)
    assert outcome.verdict is Verdict.ERROR and outcome.rules[-1].label == "soak"
    stopped = results("full-rollout", ends=(StageEnd("wave 1", Verdict.FAIL, "slow"),))
    assert judge("full-rollout", [], stopped, stages=stages).verdict is Verdict.FAIL


def test_an_end_told_twice_is_an_error_whichever_comes_first() -> None:
    for first, second in ((Verdict.PASS, Verdict.FAIL), (Verdict.FAIL, Verdict.PASS), (Verdict.PASS, Verdict.PASS)):
        twice = results("tp8-canary", ends=(StageEnd("bake", first, "a"), StageEnd("bake", second, "b")))
        assert not judge("tp8-canary", [], twice, stages=["bake"]).verdict.advances


def test_what_was_built_and_proved_passes_alone_and_what_is_wrong_fails_whatever_the_rules_look_at() -> None:
    good = results("build-parity", build=(BuildRecord("v", "python", True),), parity=(RIGHT,))
    assert judge("build-parity", [], good).verdict is Verdict.PASS
    bad = results("build-parity", build=(BuildRecord("v", "sm_90", False, reason="no"),), parity=(RIGHT,))
    assert judge("build-parity", parsed("{rule: parity}"), bad).verdict is Verdict.FAIL
    wrong = results("build-parity", build=good.build, parity=(RIGHT, WRONG))
    narrow = parsed("{rule: parity, variants: [v]}", "{rule: parity, cases: ['q1/*']}", "{rule: build}")
    assert judge("build-parity", narrow, wrong, candidates=["v", "w"]).verdict is Verdict.FAIL
    assert judge("build-parity", [], wrong, candidates=["v"]).verdict is Verdict.PASS, "w is a baseline"
    refused = results("build-parity", build=good.build, parity=(RIGHT, REFUSED))
    assert judge("build-parity", [], refused, candidates=["v", "w"]).verdict is Verdict.PASS
    assert not judge("build-parity", [], refused, candidates=["w"]).verdict.advances, "it computed nothing"
    served = results("sglang-integration", measurements=(Measurement("candidate_ready", 1.0, n=1), *OUTPUTS))
    assert judge("sglang-integration", [], served).verdict is Verdict.PASS
    other = results("sglang-integration", measurements=(Measurement("candidate_ready", 1.0, n=1),))
    assert judge("sglang-integration", [], other).verdict is Verdict.FAIL, "outputs were never compared"


@given(
    st.lists(st.tuples(st.sampled_from(["bake", "wave 1", "wave 2", "soak"]), VERDICTS), max_size=4),
    st.lists(VERDICTS, max_size=3),
)
def test_rules_of_a_playbook_can_only_make_a_gate_stricter(
    ends: list[tuple[str, Verdict]], added: list[Verdict]
) -> None:
    for phase in ("tp8-canary", "full-rollout"):
        found = results(phase, ends=tuple(StageEnd(name, verdict, "why") for name, verdict in ends))
        alone = judge(phase, [], found, stages=STAGES[phase]).verdict
        bound = {Verdict.PASS: 1.0, Verdict.FAIL: 9.0}
        rows = tuple(Measurement(f"m{i}", bound.get(v), n=1) for i, v in enumerate(added))
        rules = parsed(
            *(f"{{rule: measurement, metric: m{i}, at_most: 5, absent: inconclusive}}" for i in range(len(added)))
        )
        both = judge(
            phase, rules, Results(phase, "k", ends=found.ends, measurements=rows), stages=STAGES[phase]
        ).verdict
        assert severity(both) >= severity(alone)
        assert not both.advances or worst(v for _, v in ends) is Verdict.PASS


def test_rules_that_stood_for_it_are_read_told_of_and_have_no_effect() -> None:
    for metric in ("canary_passed", "wave2_canary_passed", "soak_passed"):
        mistakes = Mistakes()
        assert (
            parse(
                load_text(f"{{rule: measurement, metric: {metric}, at_least: 0, absent: zero}}", "p.yaml", mistakes),
                mistakes,
            )
            is None
        )
        assert not mistakes and f"{metric} has no effect" in str(mistakes.notes[0])


def test_no_shipped_playbook_asks_for_it() -> None:
    shipped = sorted((Path(__file__).parents[2] / "playbooks").glob("*.yaml"))
    assert shipped and not [line for path in shipped for line in loader.load(path).notes]


def test_results_of_older_toolkits_say_how_their_trials_ended() -> None:
    old = Results(
        "tp8-canary", "k", facts={"bake": {"outcome": "FAIL", "seconds": 30.0, "reason": "slow"}, "wave 1": "PASS"}
    ).to_json()
    del old["ends"]
    read = Results.from_json(old)
    assert read.end_of("bake") == StageEnd("bake", Verdict.FAIL, "slow", 30.0) and read.end_of("wave 1") is not None


@pytest.mark.parametrize(
    ("times", "detail", "spread", "wanted"),
    [
        (4.0, {}, 1.0, Verdict.ERROR),
        (0.9, {}, 1.0, Verdict.PASS),
        (1.6, {}, 1.0, Verdict.PASS),  # the ceilings may have been measured beside other work
        (4.0, {"cold": False}, 1.0, Verdict.PASS),  # from a cache
        (4.0, {}, 2.5, Verdict.PASS),  # the ceiling itself was seen that much higher
    ],
)
def test_a_speed_over_the_ceiling_is_an_error_whatever_the_rules_ask(
    times: float, detail: dict[str, bool], spread: float, wanted: Verdict
) -> None:
    """Four times the measured read ceiling passed `speedup` and `bandwidth_fraction`."""
    samples = tuple(1e-3 / times * (1 + 0.01 * (i % 3)) for i in range(30))
    record = BenchmarkRecord(
        RIGHT.case, "v", "candidate", "cpu", samples, parity_after=True, roofline_seconds=1e-3, detail=dict(detail)
    )
    ceilings = (Ceiling("cpu", "read", 40e9, (40e9, 40e9 * spread)),)
    built = (BuildRecord("v", "python", True),)
    found = results("build-parity", build=built, parity=(RIGHT,), benchmark=(record,), ceilings=ceilings)
    outcome = judge("build-parity", parsed("{rule: parity}"), found, candidates=["v"])
    assert outcome.verdict is wanted, [rule.reason for rule in outcome.rules]
