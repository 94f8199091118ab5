"""Timings that leave a rule undecided are taken again, with the error of every look counted, and a busy machine is named."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from phases.base.results import BenchmarkRecord, Case, Results
from phases.base.verdict import Verdict
from phases.gate.kernel_rules import SpeedupRule, undecided
from phases.harness.benchmark import merged
from tests.build_parity.test_fail_fast import SCRIPT, Heard, results
from tests.run.conftest import Repository

RULE = SpeedupRule(baseline="torch", candidate="mine", at_least=1.0)


def timed(variant: str, samples: list[float], name: str = "a", **more: object) -> BenchmarkRecord:
    record = BenchmarkRecord(Case(name, "float32"), variant, "candidate", "cpu", tuple(samples), parity_after=True)
    return dataclasses.replace(record, **more)


def test_a_rule_is_named_by_what_it_compares() -> None:
    quick, slow = [1.0 + i / 1000 for i in range(12)], [2.0 + i / 1000 for i in range(12)]
    told = Results("build-parity", "k", benchmark=(timed("torch", slow), timed("mine", quick)))
    assert RULE.judge(told).label == "speedup mine / torch"
    assert dataclasses.replace(RULE, on="median").judge(told).label == "speedup mine / torch, median of cases"


def test_a_case_that_straddles_the_limit_is_undecided_and_one_that_does_not_is_not() -> None:
    close = [1.0 + i / 100 for i in range(-6, 7)]
    rows = (
        timed("torch", close),
        timed("mine", close),
        timed("torch", [2 * value for value in close], "b"),
        timed("mine", close, "b"),
    )
    outcome = RULE.judge(Results("build-parity", "k", benchmark=rows))
    assert outcome.verdict is Verdict.INCONCLUSIVE and undecided(outcome) == ({"torch", "mine"}, {"a/float32"})
    decided = RULE.judge(Results("build-parity", "k", benchmark=rows[2:]))
    assert decided.verdict is Verdict.PASS and undecided(decided) == (set(), set())
    nothing = RULE.judge(Results("build-parity", "k"))  # nothing was timed: more samples of it decide nothing
    assert nothing.verdict is Verdict.INCONCLUSIVE and undecided(nothing) == (set(), set())


def test_a_verdict_that_needed_a_busy_machine_to_be_quiet_says_so() -> None:
    close = [1.0 + i / 100 for i in range(-6, 7)]
    facts = {"benchmark_load": {"spoils": ["others use 64% of this machine's cores"]}}
    rows = (timed("torch", close), timed("mine", close))
    assert RULE.judge(Results("build-parity", "k", benchmark=rows, facts=facts)).reason.endswith(
        ", while others use 64% of this machine's cores"
    )
    rows = (timed("torch", [2 * value for value in close]), timed("mine", close))
    assert "others" not in RULE.judge(Results("build-parity", "k", benchmark=rows, facts=facts)).reason


@pytest.mark.parametrize("most", [1, 3])
def test_looking_again_gives_no_more_wrong_verdicts_than_the_rule_allows(most: int) -> None:
    """Two variants of the same speed, looked at until a verdict: at 80 % confidence at most a fifth may end in one. (The intervals are
    conservative, so it is fewer; without counting the looks it is more than with one.)"""
    chance = random.Random(7)
    rule = dataclasses.replace(RULE, confidence=0.8)
    ended = 0
    for _ in range(300):
        both: dict[str, list[float]] = {"torch": [], "mine": []}
        for taken in range(1, most + 1):
            for samples in both.values():
                samples += [math.exp(chance.gauss(0, 0.2)) for _ in range(20)]
            rows = tuple(timed(name, samples) for name, samples in both.items())
            looks = {"taken": taken, "most": most}
            outcome = rule.judge(Results("build-parity", "k", benchmark=rows, facts={"looks": looks}))
            if outcome.verdict is not Verdict.INCONCLUSIVE:
                ended += 1
                break
    assert ended <= 60


def test_every_look_spends_its_share_of_the_error() -> None:
    """A half, a quarter and the rest, and all of it where there is one look: the intervals are those of the rule's confidence so narrowed."""
    chance = random.Random(3)
    rows = tuple(timed(name, [chance.uniform(1, 2) for _ in range(200)]) for name in ("torch", "mine"))

    def width(confidence: float, **looks: int) -> float:
        facts = {"looks": looks} if looks else {}
        outcome = dataclasses.replace(RULE, confidence=confidence).judge(Results("p", "k", benchmark=rows, facts=facts))
        return outcome.high - outcome.low

    assert width(0.96) == width(0.96, taken=1, most=1)
    assert width(0.92, taken=1, most=3) == width(0.96)
    assert width(0.92, taken=2, most=3) == width(0.92, taken=3, most=3) == width(0.98)


def test_samples_of_a_later_run_are_added_and_one_that_lost_its_number_has_none() -> None:
    first = (timed("mine", [1.0, 1.0, 1.0], bandwidth_fraction=0.5), timed("torch", [1.0, 1.0, 1.0]))
    again = (timed("mine", [2.0] * 5, bandwidth_fraction=0.25), timed("torch", [], reason="outputs are wrong"))
    mine, torch = merged(first, again)
    assert mine.samples == (1.0,) * 3 + (2.0,) * 5 and mine.detail["runs"] == [3, 5]
    assert mine.bandwidth_fraction == pytest.approx(0.25)  # of the median of all, which is 2
    assert torch.samples == () and torch.reason == "outputs are wrong"
    assert merged(first, again[:1])[1] == first[1]


def test_a_rule_that_cannot_tell_is_timed_again_up_to_its_limit(tmp_path) -> None:
    """A variant against itself is never faster: the real harness times it once, then as often again as the playbook allows."""
    repository = Repository(tmp_path / "mine")
    path = repository.path / "playbook.yaml"
    path.write_text(
        path.read_text().replace(
            "    gate:\n",
            "    benchmark: {seconds: 0.05, min_samples: 12, cases: ['4096x64/*'], variants: [vectorised], retries: 1}\n    gate:\n",
        )
        + "        - {rule: speedup, baseline: vectorised, candidate: vectorised, at_least: 1.0}\n"
    )
    repository.git("commit", "-qam", "itself")
    heard = Heard()
    outcome = repository.run(script=SCRIPT, watcher=heard)
    told = results(repository)
    assert outcome.verdict is Verdict.INCONCLUSIVE and told.facts["looks"] == {"taken": 2, "most": 2}
    (record,) = told.benchmark
    assert len(record.detail["runs"]) == 2 and sum(record.detail["runs"]) == len(record.samples)
    assert any(line.startswith("undecided: speedup vectorised / vectorised") for line in heard.lines["benchmark"])
    assert any(line.startswith("this machine: load") for line in heard.lines["measure ceilings"])
    assert {"others", "stolen", "spread"} <= set(told.facts["ceilings_load"]) and "average" in told.facts[
        "benchmark_load"
    ]
