import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phases.analysis import SequentialTest, TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from tests.analysis.streams import arm, run


def outcome(looks):
    return looks[-1].verdict


def test_a_slow_canary_fails_and_says_so_with_numbers():
    rng = np.random.default_rng(1)
    looks = run(TestSettings(), arm(rng, ratio=1.3), arm(rng), until=600)
    decision = looks[-1]
    assert decision.verdict is Verdict.FAIL and decision.verdict is Verdict.FAIL
    assert decision.low > decision.threshold == 1.05
    assert decision.low < decision.estimate < decision.high
    assert decision.estimate == pytest.approx(1.3, rel=0.08)
    assert decision.seconds_to_decide < 300
    assert decision.n > 4000 and decision.confidence == pytest.approx(0.98)
    assert decision.measurement().estimate == decision.estimate


def test_an_equal_canary_passes_with_the_bound_under_the_margin():
    rng = np.random.default_rng(2)
    looks = run(TestSettings(quantile=0.5), arm(rng, seconds=3600), arm(rng, seconds=3600), until=3600)
    assert outcome(looks) is Verdict.PASS
    assert looks[-1].high < 1.05


@pytest.mark.parametrize("ratio", [0.06, 0.15, 40.0])
def test_a_canary_many_times_faster_or_slower_has_an_estimate(ratio):
    """At 16,000 tokens of context an attention kernel may well take a sixth of the time."""
    rng = np.random.default_rng(6)
    look = run(TestSettings(quantile=0.5), arm(rng, ratio=ratio), arm(rng), until=600)[-1]
    assert look.verdict is (Verdict.PASS if ratio < 1 else Verdict.FAIL)
    assert look.low < ratio < look.high and look.estimate == pytest.approx(ratio, rel=0.1)


def test_fail_is_final_and_pass_can_still_turn_to_fail():
    rng = np.random.default_rng(3)
    settings_ = TestSettings(quantile=0.5, margin=0.5, min_samples=50)
    good, bad = arm(rng, seconds=100), arm(rng, ratio=4.0, seconds=1500, start=100)
    canary = tuple(np.concatenate(parts) for parts in zip(good, bad, strict=True))
    looks = run(settings_, canary, arm(rng, seconds=1600), until=1600)
    outcomes = [look.verdict for look in looks]
    assert outcomes[9] is Verdict.PASS and outcomes[-1] is Verdict.FAIL
    first = outcomes.index(Verdict.FAIL)
    assert set(outcomes[first:]) == {Verdict.FAIL}
    assert looks[-1].since == looks[first].since


def test_the_mean_log_ratio_is_covered_and_found():
    rng = np.random.default_rng(4)
    looks = run(TestSettings(quantile=None), arm(rng, ratio=1.15), arm(rng), until=600)
    assert outcome(looks) is Verdict.FAIL
    assert looks[-1].low < 1.15 < looks[-1].high


def test_less_throughput_is_a_slowdown():
    rng = np.random.default_rng(5)
    settings_ = TestSettings(metric="throughput", quantile=None, min_samples=20)
    test = SequentialTest(settings_)
    for k in range(120):
        shared = np.exp(0.2 * rng.standard_normal())
        test.observe("control", 10.0 * k + 5, 100 * shared * np.exp(0.05 * rng.standard_normal()))
        test.observe("canary", 10.0 * k + 5, 80 * shared * np.exp(0.05 * rng.standard_normal()))
        decision = test.look(10.0 * k + 10)
    assert decision.verdict is Verdict.FAIL
    assert decision.estimate == pytest.approx(100 / 80, rel=0.02)


@settings(max_examples=25)
@given(
    st.integers(0, 10_000), st.lists(st.floats(0.5, 60), min_size=1, max_size=12), st.sampled_from([0.5, 0.95, None])
)
def test_streaming_in_any_pieces_equals_one_batch(seed, gaps, quantile):
    """Any chunks, any looks in between, disorder inside a chunk: the same numbers to the last bit."""
    rng = np.random.default_rng(seed)
    data = {name: arm(rng, rate=4, seconds=200.0, ratio=1.2) for name in ("canary", "control")}
    chosen = TestSettings(quantile=quantile)
    batch, stream = SequentialTest(chosen), SequentialTest(chosen)
    for name, (times, values) in data.items():
        batch.observe_many(name, times, values)
    now = 0.0
    for gap in [*gaps, 200.0]:
        upto = min(now + gap, 200.0)
        for name, (times, values) in data.items():
            part = np.flatnonzero((times >= now) & (times < upto))
            for piece in np.array_split(part, 3):
                piece = rng.permutation(piece) if len(piece) and np.ptp(times[piece]) < chosen.window else piece
                stream.observe_many(name, times[piece], values[piece])
        stream.look(upto)
        now = upto
    one, other = batch.look(200.0), stream.look(200.0)
    assert (one.low, one.high, one.n, one.counts) == (other.low, other.high, other.n, other.counts)
    assert one.estimate == pytest.approx(other.estimate, rel=1e-12) if one.estimate else other.estimate is None


@pytest.mark.parametrize("quantile", [0.5, 0.95, None])
def test_the_interval_covers_the_truth_at_every_look(quantile):
    """120 runs under shared load, true ratio 1.1, alpha 2 % a side: the interval may miss at any look in at most 4 %."""
    missed = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        load = np.repeat(np.exp(0.3 * np.cumsum(rng.standard_normal(30)) / np.sqrt(30)), 10)
        pair = []
        for ratio in (1.1, 1.0):
            times, values = arm(rng, ratio=ratio, rate=5, seconds=300)
            pair.append((times, values * load[times.astype(int)]))
        looks = run(TestSettings(quantile=quantile, alpha=0.02), *pair, until=300)
        missed += any((look.low or 0) > 1.1 or (look.high or 99) < 1.1 for look in looks)
    assert missed <= 0.04 * 120 + 3 * np.sqrt(0.04 * 120)


def test_memory_does_not_grow():
    rng = np.random.default_rng(6)
    test, sizes = SequentialTest(TestSettings()), []
    tracemalloc.start()
    for k in range(600):
        for name in ("canary", "control"):
            test.observe_many(name, 10 * k + np.linspace(0, 9.9, 50), rng.lognormal(size=50))
        test.look(10.0 * k + 10)
        if k in (100, 599):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < sizes[0] + 20_000


def test_the_deadline_makes_an_open_test_inconclusive():
    rng = np.random.default_rng(7)
    looks = run(TestSettings(deadline=100.0), arm(rng), arm(rng), until=130)
    assert [look.verdict for look in looks[:8]] == [None] * 8
    assert outcome(looks) is Verdict.INCONCLUSIVE and looks[-1].verdict is Verdict.INCONCLUSIVE


def test_failed_requests_have_no_latency():
    test = SequentialTest(TestSettings())
    test.observe_many("canary", [1.0, 2.0], [0.1, float("nan")], [200, 500])
    assert test.look(10.0).counts["canary"] == {"used": 1, "ignored": 0, "late": 0, "failed": 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantile": 1.0},
        {"margin": -0.1},
        {"alpha": 0.0},
        {"window": 0.0},
        {"metric": "latency"},
        {"dispersion": 0.5},
        {"metric": "throughput", "quantile": 0.5},
        {"deadline": 0.0},
        {"settle": -1.0},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(AnalysisError):
        TestSettings(**wrong)


def test_a_rolling_test_finds_a_slowdown_that_comes_after_hours():
    from phases.analysis import RollingTest

    rng = np.random.default_rng(8)
    test = RollingTest(TestSettings(quantile=0.5, margin=0.1), span=600.0)
    failed_at = None
    for k in range(720):
        for name in ("canary", "control"):
            times, values = arm(rng, seconds=10.0, start=10.0 * k, ratio=1.6 if name == "canary" and k >= 540 else 1.0)
            test.observe_many(name, times, values)
        if test.look(10.0 * k + 10).verdict is Verdict.FAIL:
            failed_at = failed_at or 10.0 * k + 10
    assert failed_at is not None and 5400 < failed_at < 5400 + 450
    assert test.look(7300.0).verdict is Verdict.FAIL
    test.reset()
    assert test.look(7300.0).verdict is None


def test_no_pass_is_shown_beside_a_bound_over_the_limit() -> None:
    """p95 ten times slower in the last five of thirty minutes: PASS was reached in between, and is not kept."""
    rng = np.random.default_rng(11)
    test, looks = SequentialTest(TestSettings(metric="ttft", quantile=0.95, margin=0.1, alpha=0.0033, window=10.0)), []
    for start in range(0, 1800, 10):
        for side in ("canary", "control"):
            t = np.sort(rng.uniform(start, start + 10, 100))
            slow = np.where(rng.random(100) < 0.06, 10.0, 1.0) if side == "canary" and start >= 1500 else 1.0
            test.observe_many(side, t, 0.1 * np.exp(0.3 * rng.standard_normal(100)) * slow)
        looks.append(test.look(start + 10.0))
    assert Verdict.PASS in {look.verdict for look in looks[:150]} and looks[-1].verdict is not Verdict.PASS
    for look in looks:
        assert look.verdict is not Verdict.PASS or (look.high is not None and look.high <= look.threshold)
