"""Gates and metrics as they failed others: what is missing, broken or noisy never passes by itself. No server, no host."""

from __future__ import annotations

import math

import pytest

from phases.analysis.counters import CounterWindows
from phases.analysis.histograms import HistogramTest
from phases.analysis.scrape import Scrape
from phases.base.results import Measurement, Results, StageEnd
from phases.base.verdict import Verdict
from phases.full_rollout.settings import RolloutSettings
from phases.gate.gate import judge
from phases.gate.rules import parse
from phases.playbook.located import Mistakes, load_text
from phases.production.settings import Amount
from phases.trial.settings import JudgeSettings, MetricSettings
from tests.production.test_bake import SimulatedTime, SimulatedWorkers, bake


def verdict(rules: list[str], *measured: Measurement) -> Verdict:
    mistakes = Mistakes()
    parsed = [parse(load_text(rule, "playbook.yaml", mistakes), mistakes) for rule in rules]
    mistakes.raise_if_any("playbook")
    bake_passed = (
        StageEnd("bake", Verdict.PASS, "within its limits"),
    )  # what is tested is what the playbook's rules add
    results = Results("tp8-canary", "k", measurements=measured, ends=bake_passed)
    return judge("tp8-canary", [rule for rule in parsed if rule], results).verdict


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
@pytest.mark.parametrize(
    ("answer", "n", "wanted"),
    [
        ("inconclusive", 0, Verdict.INCONCLUSIVE),
        ("fail", 100, Verdict.FAIL),
        ("zero", 0, Verdict.PASS),
        ("zero", 100, Verdict.INCONCLUSIVE),  # a number that is none of 100 samples is broken, not absent
    ],
)
def test_no_number_has_the_answer_the_playbook_gives(value: float | None, answer: str, n: int, wanted: Verdict) -> None:
    measured = Measurement("errors", value, value, value, n=n)
    assert verdict([f"{{rule: measurement, metric: errors, at_most: 1, absent: {answer}}}"], measured) is wanted
    nothing = Verdict.PASS if answer == "zero" else wanted
    assert verdict([f"{{rule: measurement, metric: errors, at_most: 1, absent: {answer}}}"]) is nothing


def test_without_an_answer_missing_data_is_inconclusive_not_a_pass() -> None:
    assert verdict(["{rule: measurement, metric: errors, at_most: 1}"]) is Verdict.INCONCLUSIVE


def test_rules_that_all_break_are_no_success() -> None:
    twice = [
        Measurement("errors", 0.0, n=1),
        Measurement("errors", 0.0, n=1),
    ]  # two of one name: the rule cannot tell which
    assert verdict(["{rule: measurement, metric: errors, at_most: 1, absent: zero}"] * 5, *twice) is Verdict.ERROR
    assert not Verdict.ERROR.advances and not Verdict.ABORTED.advances and not Verdict.INCONCLUSIVE.advances


def test_an_error_beside_passes_is_worse_than_all_of_them() -> None:
    good = Measurement("latency", 1.0, 0.9, 1.1, n=50)
    rules = ["{rule: measurement, metric: latency, at_most: 2, absent: fail}"] * 4 + [
        "{rule: measurement, metric: nowhere, at_most: 2, absent: fail}"
    ]
    assert verdict(rules, good) is Verdict.FAIL


def test_a_bake_says_one_line_a_look_and_no_more() -> None:
    clock, lines = SimulatedTime(), []
    made = bake(SimulatedWorkers(clock, rate=0.0), deadline=600.0)
    made.on_look = lambda elapsed, decisions: lines.append(elapsed)
    made.run()
    assert len(lines) <= 600.0 / made.settings.window + 2


def test_a_single_spike_in_a_long_bake_is_no_regression() -> None:
    """It may cost the PASS, which needs the bound over all of the bake to be within the limit; the recent part shows that it is over."""
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    started, plain = clock.at, workers.read

    def read(url: str) -> str:
        workers.slowdown = {"canary": 50.0} if 200 <= clock.at - started < 211 else {}  # one window of a whole bake
        return plain(url)

    made = bake(workers, bake=900.0)
    made.read = read
    end = made.run()
    assert end.verdict is not Verdict.FAIL
    (recent,) = (decision for decision in end.decisions if decision.statistic.endswith("_recent"))
    assert recent.verdict is Verdict.PASS


def test_both_arms_slower_together_is_no_regression_of_the_canary() -> None:
    """A neighbour's heat, a backup, a reference build that moved as well: the control moves too."""
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    started, plain = clock.at, workers.read

    def read(url: str) -> str:
        workers.slowdown = dict.fromkeys(("canary", "control"), 3.0) if clock.at - started > 120 else {}
        return plain(url)

    made = bake(workers, bake=600.0)
    made.read = read
    assert made.run().verdict is not Verdict.FAIL


@pytest.mark.parametrize("share", [0.7, 0.8])
def test_a_canary_a_hundred_times_slower_most_of_the_time_never_passes(share: float) -> None:
    """Seven of ten samples at a hundredfold once passed elsewhere, and the eighth turned it over."""
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock)
    started, plain = clock.at, workers.read

    def read(url: str) -> str:
        workers.slowdown = {"canary": 100.0} if (clock.at - started) // 10 % 10 < share * 10 else {}
        return plain(url)

    made = bake(workers, deadline=1200.0)
    made.read = read
    assert made.run().verdict is Verdict.FAIL


def test_a_counter_born_at_one_counts() -> None:
    """An `increase()` over a series that begins at 1 is 0 for ever; ours takes the first value of a series born later in full."""
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock, errors={"canary": 0.2})
    plain = workers.read

    def read(url: str) -> str:  # a series that does not exist until it has counted something
        return (
            "\n".join(
                line
                for line in plain(url).splitlines()
                if not (line.startswith("sglang:http_responses_total") and line.endswith(" 0"))
            )
            + "\n"
        )

    made = bake(workers)
    made.read = read
    verdict = made.run()
    assert verdict.verdict is Verdict.FAIL and "5xx" in verdict.reason


def test_seldom_errors_of_the_canary_alone_fail_where_the_control_has_no_series_at_all() -> None:
    clock = SimulatedTime()
    workers = SimulatedWorkers(clock, errors={"canary": 0.03})
    plain = workers.read
    made = bake(workers, deadline=3600.0)
    made.read = lambda url: (
        "\n".join(line for line in plain(url).splitlines() if not (url == "control" and 'status_code="500"' in line))
        + "\n"
    )
    assert made.run().verdict is Verdict.FAIL


def test_a_quantile_of_nothing_is_no_number() -> None:
    test = HistogramTest(JudgeSettings((MetricSettings("ttft", 0.95, 0.05),)).test(MetricSettings("ttft", 0.95, 0.05)))
    empty = 'sglang:time_to_first_token_seconds_bucket{le="+Inf"} 0\n'
    for at in (0.0, 10.0, 20.0):
        for arm in ("canary", "control"):
            test.add(arm, Scrape.parse(empty, t=at, source=arm))
    decision = test.look(20.0)
    assert decision.estimate is None and decision.verdict is None


def test_budgets_and_waves_count_the_fleet_as_count_or_percent() -> None:
    assert [Amount(percent=1).of(n) for n in (1, 100, 101)] == [1, 1, 2]  # a share of the fleet, not of a batch
    assert [Amount(count=0).of(8), Amount(percent=0).of(8), Amount(percent=100).of(8)] == [
        0,
        0,
        8,
    ]  # nothing is "unset", all is all
    assert [wave.of(10) for wave in RolloutSettings(JudgeSettings((MetricSettings("ttft"),))).waves] == [3, 5, 10]


def test_accept_length_is_weighted_by_verify_calls_not_a_mean_of_gauges() -> None:
    def scrape(t: float, tokens: float, calls: float) -> Scrape:
        text = f"sglang:generation_tokens_total {tokens}\nsglang:spec_verify_calls_total {calls}\n"
        return Scrape.parse(
            text + 'sglang:http_responses_total{endpoint="/generate",status_code="200"} 1\n', t=t, source="w"
        )

    windows = CounterWindows()
    windows.add(scrape(0.0, 0, 0))
    steps = [windows.add(scrape(1.0, 400, 100)), windows.add(scrape(2.0, 410, 110))]  # 4 a call under load, 1 in a lull
    assert [step.accept_length for step in steps if step] == [4.0, 1.0]  # a gauge's mean would say 2.5
    whole = CounterWindows()
    whole.add(scrape(0.0, 0, 0))
    over_both = whole.add(scrape(2.0, 410, 110))
    assert over_both and over_both.accept_length == pytest.approx(410 / 110)
