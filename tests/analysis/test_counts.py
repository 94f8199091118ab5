import numpy as np
import pytest

from phases.analysis import ErrorTest
from phases.analysis.counts import clean_requests, kind_of
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict


def feed(test, *, canary, control, seconds=300.0, rate=10.0, seed=0):
    """Requests of both arms with independent error probabilities; look each window, return all decisions."""
    rng, looks = np.random.default_rng(seed), []
    for now in np.arange(10.0, seconds + 1, 10.0):
        for name, chance in (("canary", canary), ("control", control)):
            times = np.sort(rng.uniform(now - 10, now, rng.poisson(10 * rate)))
            test.observe_many(name, times, np.where(rng.random(len(times)) < chance, 500, 200))
        looks.append(test.look(float(now)))
    return looks


def test_statuses_are_kept_apart():
    assert [kind_of(status) for status in (200, 204, 404, 429, 500, 503, 0)] == [
        "",
        "",
        "4xx",
        "4xx",
        "5xx",
        "5xx",
        "5xx",
    ]


def test_errors_against_none_fail():
    looks = feed(ErrorTest("5xx"), canary=0.02, control=0.0)
    decision = looks[-1]
    assert decision.verdict is Verdict.FAIL
    assert decision.counts["control"]["errors"] == 0
    assert decision.seconds_to_decide < 120
    assert decision.low <= decision.estimate <= decision.high


def test_no_errors_pass_and_few_requests_do_not():
    looks = feed(ErrorTest("5xx"), canary=0.0, control=0.0)
    assert looks[-1].verdict is Verdict.PASS and looks[-1].high <= 0.01
    assert looks[0].verdict is None


@pytest.mark.parametrize("tolerance", [0.01, 0.05, 0.2])
def test_how_many_requests_without_an_error_pass(tolerance):
    needed = clean_requests(tolerance, 0.01)
    for requests, outcome in ((needed - 1, None), (needed, Verdict.PASS)):
        test = ErrorTest("5xx", tolerance=tolerance, alpha=0.01, min_samples=1)
        for arm in ("canary", "control"):
            test.add(arm, 1.0, requests=requests, errors=0)
        assert test.look(10.0).verdict is outcome
    assert clean_requests(0.0, 0.01) is None


def test_4xx_are_not_5xx():
    test = ErrorTest("5xx")
    for k in range(3000):
        test.observe("canary", k * 0.1, 404)
        test.observe("control", k * 0.1, 200)
    assert test.look(300.0).verdict is Verdict.PASS
    test = ErrorTest("4xx")
    for k in range(3000):
        test.observe("canary", k * 0.1, 404)
        test.observe("control", k * 0.1, 200)
    assert test.look(300.0).verdict is Verdict.FAIL


def test_one_crash_is_one_incident():
    """Forty requests cut off by one event are no evidence that the release errs more."""
    test = ErrorTest("5xx")
    for k in range(2000):
        test.observe("control", k * 0.1, 200)
        test.observe("canary", k * 0.1, 200)
        if k == 1000:
            test.add("canary", 100.0, requests=40, errors=40)
        decision = test.look(k * 0.1)
        assert decision.verdict is not Verdict.FAIL
    assert decision.counts["canary"] == {"requests": 2040, "errors": 40, "incidents": 1}


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.2])
def test_equal_error_rates_seldom_fail_at_any_look(rate):
    runs = 150
    wrong = sum(
        any(
            look.verdict is Verdict.FAIL
            for look in feed(ErrorTest("5xx", alpha=0.05), canary=rate, control=rate, seconds=200, rate=3, seed=seed)
        )
        for seed in range(runs)
    )
    assert wrong <= 0.05 * runs + 3 * np.sqrt(0.05 * runs)


def test_unequal_traffic_is_taken_into_account():
    test = ErrorTest("5xx")
    rng = np.random.default_rng(3)
    for now in np.arange(10.0, 1000.0, 10.0):
        test.add("canary", now - 1, requests=10, errors=int(rng.random() < 0.1))
        test.add("control", now - 1, requests=70, errors=int(rng.random() < 0.5))
        assert test.look(now).verdict is not Verdict.FAIL


def test_only_one_arm_with_traffic_never_passes():
    test = ErrorTest("5xx")
    for k in range(5000):
        test.observe("canary", k * 0.1, 200)
    assert test.look(500.0).verdict is None
    assert test.finish(500.0).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "wrong", [{"requests": 1, "errors": 2}, {"requests": float("nan"), "errors": 0}, {"requests": 5, "errors": -1}]
)
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(AnalysisError):
        ErrorTest("5xx").add("canary", 1.0, **wrong)
    with pytest.raises(AnalysisError):
        ErrorTest("3xx")


@pytest.mark.parametrize("tolerance", [0, 1e-15, 1e-300])
def test_a_tolerance_nobody_can_show_says_never(tolerance):
    assert clean_requests(tolerance, 0.002) is None


def test_a_pass_is_not_kept_when_its_bound_is_lost() -> None:
    """600 of 18000 failed "within 0.01": clean for long, PASS early, then failures in both arms' noise until the bound denies it."""
    test = ErrorTest("5xx", tolerance=0.01, alpha=0.0025, window=10.0)
    seen = []
    for second in range(0, 1800):
        late = second >= 1500
        test.add("canary", float(second), requests=10, errors=2.0 if late else 0.0)
        test.add("control", float(second), requests=10, errors=1.9 if late else 0.0)
        if second % 10 == 9:
            seen.append(test.look(second + 1.0))
    assert Verdict.PASS in [look.verdict for look in seen[:150]]
    last = test.finish(1800.0)
    assert last.counts["canary"] == {"requests": 18000, "errors": 600, "incidents": 300}
    assert last.verdict is not Verdict.PASS and last.high is not None and last.high > 0.01
    for look in seen:
        assert look.verdict is not Verdict.PASS or (look.high is not None and look.high <= 0.01)
