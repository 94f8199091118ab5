"""Input that must never end in PASS."""

import numpy as np
import pytest

from phases.analysis import SequentialTest, TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from tests.analysis.streams import arm, run

EASY = TestSettings(quantile=0.5, margin=0.5, min_samples=20)  # equal arms would pass within minutes


def test_the_easy_setting_does_pass_equal_arms():
    """Otherwise nothing below would mean anything."""
    rng = np.random.default_rng(1)
    assert run(EASY, arm(rng), arm(rng), until=300)[-1].verdict is Verdict.PASS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.1])
def test_a_value_that_is_no_latency_is_refused(value):
    test = SequentialTest(EASY)
    with pytest.raises(AnalysisError, match="ttft|e2e"):
        test.observe_many("canary", [1.0, 2.0], [0.1, value])


@pytest.mark.parametrize("t", [float("nan"), float("inf")])
def test_a_time_that_is_no_time_is_refused(t):
    with pytest.raises(AnalysisError):
        SequentialTest(EASY).observe("canary", t, 0.1)
    with pytest.raises(AnalysisError):
        SequentialTest(EASY).look(t)


def test_a_clock_that_goes_back_is_refused():
    test = SequentialTest(EASY)
    test.observe_many("canary", [100.0, 101.0], [0.1, 0.1])
    with pytest.raises(AnalysisError, match="went back"):
        test.observe("canary", 50.0, 0.1)
    with pytest.raises(AnalysisError, match="went back"):
        SequentialTest(EASY).observe_many("canary", [100.0, 50.0], [0.1, 0.1])


def test_an_unknown_arm_is_refused():
    with pytest.raises(AnalysisError, match="neither canary nor control"):
        SequentialTest(EASY).observe("baseline", 1.0, 0.1)


@pytest.mark.parametrize("silent", ["canary", "control"])
def test_an_arm_without_data_never_passes(silent):
    rng = np.random.default_rng(2)
    nothing = (np.empty(0), np.empty(0))
    pair = [nothing if name == silent else arm(rng) for name in ("canary", "control")]
    looks = run(EASY, *pair, until=600)
    assert {look.verdict for look in looks} == {None}
    assert looks[-1].n == 0


def test_an_arm_that_falls_silent_before_the_decision_does_not_pass():
    rng = np.random.default_rng(3)
    dead = tuple(part[:80] for part in arm(rng))
    looks = run(EASY, dead, arm(rng), until=600)
    assert Verdict.PASS not in {look.verdict for look in looks}
    assert "silent" in looks[-1].reason or "needed" in looks[-1].reason


def test_a_pass_is_withdrawn_when_the_canary_dies():
    rng = np.random.default_rng(4)
    canary = arm(rng, seconds=300)
    looks = run(EASY, canary, arm(rng), until=600)
    assert looks[29].verdict is Verdict.PASS
    assert looks[-1].verdict is None and "silent" in looks[-1].reason


@pytest.mark.parametrize("level", [0.0, 0.1])
def test_values_that_are_all_equal_prove_nothing(level):
    times = np.arange(0.0, 600.0, 0.1)
    stuck = (times, np.full(len(times), level))
    assert Verdict.PASS not in {look.verdict for look in run(EASY, stuck, stuck, until=600)}
    rng = np.random.default_rng(5)
    assert Verdict.PASS not in {look.verdict for look in run(EASY, stuck, arm(rng), until=600)}


def test_a_stuck_canary_that_is_slower_fails():
    times = np.arange(0.0, 600.0, 0.1)
    looks = run(EASY, (times, np.full(len(times), 0.9)), arm(np.random.default_rng(6)), until=600)
    assert looks[-1].verdict is Verdict.FAIL


def test_one_window_of_a_million_requests_decides_nothing():
    rng = np.random.default_rng(7)
    for ratio in (1.0, 5.0):
        test = SequentialTest(EASY)
        for name, scale in (("canary", ratio), ("control", 1.0)):
            test.observe_many(name, np.sort(rng.uniform(0, 2.4, 1_000_000)), scale * rng.lognormal(size=1_000_000))
        assert test.look(10.0).verdict is None


def test_one_window_of_a_million_requests_does_not_drown_the_others():
    """A storm on one arm, with a hundredfold latency, inside an otherwise equal run."""
    rng = np.random.default_rng(8)
    times, values = arm(rng)
    storm = np.sort(rng.uniform(100.0, 102.0, 1_000_000))
    merged = np.concatenate([times, storm])
    order = np.argsort(merged)
    canary = (merged[order], np.concatenate([values, np.full(len(storm), 10.0)])[order])
    looks = run(TestSettings(quantile=0.5), canary, arm(rng), until=600)
    assert Verdict.FAIL not in {look.verdict for look in looks}


def test_late_observations_spoil_a_pass():
    rng = np.random.default_rng(9)
    (times, values), control = arm(rng), arm(rng)
    test = SequentialTest(EASY)
    for now in np.arange(10.0, 600.0, 10.0):
        late = (times >= now - 18.0) & (times < now - 8.0)
        test.observe_many("canary", times[late], values[late])
        part = (control[0] >= now - 10.0) & (control[0] < now)
        test.observe_many("control", control[0][part], control[1][part])
        decision = test.look(float(now))
        assert decision.verdict is not Verdict.PASS
    assert "too late" in decision.reason


def test_seven_of_ten_samples_at_a_hundredfold_never_pass():
    """A published judge calls this a pass and flips at the eighth."""
    for bad in range(5, 11):
        values = np.array([10.0] * bad + [0.1] * (10 - bad))
        times = np.arange(10) * 10.0 + 5.0
        canary = (times, np.random.default_rng(bad).permutation(values))
        looks = run(TestSettings(quantile=0.5), canary, (times, np.linspace(0.09, 0.11, 10)), until=110)
        assert Verdict.PASS not in {look.verdict for look in looks}


def test_a_restart_and_its_warm_up_do_not_fool_it():
    """The canary is gone for 40 s and ten times slower in the 25 s after it."""
    rng = np.random.default_rng(10)
    times, values = arm(rng, seconds=1200)
    up = (times < 300) | (times >= 340)
    times, values = times[up], np.where((times >= 340) & (times < 365), 10.0, 1.0)[up] * values[up]
    looks = run(TestSettings(quantile=0.5, margin=0.1), (times, values), arm(rng, seconds=1200), until=1200)
    assert Verdict.FAIL not in {look.verdict for look in looks}
    assert looks[-1].verdict is Verdict.PASS
    assert looks[-1].counts["control"]["ignored"] > 200
    assert looks[-1].high > 0.9


def test_a_warm_up_known_to_the_caller_is_left_out():
    rng = np.random.default_rng(11)
    times, values = arm(rng)
    slow = (times, np.where(times < 120, 5.0, 1.0) * values)
    control = arm(rng)
    assert run(EASY, slow, control, until=600)[11].verdict is Verdict.FAIL
    test = SequentialTest(EASY)
    test.ignore(0.0, 120.0)
    test.observe_many("canary", *slow)
    test.observe_many("control", *control)
    assert test.look(600.0).verdict is Verdict.PASS


def test_load_that_triples_in_both_arms_does_not_fool_it():
    rng = np.random.default_rng(12)
    pair = []
    for _ in range(2):
        times, values = arm(rng, seconds=1200)
        pair.append((times, values * (1 + 2 * times / 1200) * np.where((times % 300) < 60, 2.0, 1.0)))
    looks = run(TestSettings(quantile=0.5), *pair, until=1200)
    assert Verdict.FAIL not in {look.verdict for look in looks}
    assert looks[-1].low < 1.0 < looks[-1].high


def test_clock_jumps_ahead_cost_no_time():
    test = SequentialTest(EASY)
    test.observe_many("canary", [1.0, 1e12], [0.1, 0.2])
    test.observe_many("control", [1.0, 1e12], [0.1, 0.2])
    assert test.look(2e12).verdict is None
