"""A change inside a bake: found soon, from when on; seldom where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phases.analysis.changes import ChangeTest
from phases.base.verdict import Verdict


def _windows(rng: np.random.Generator, n: int, count: int, slow: float, level: float) -> tuple[np.ndarray, np.ndarray]:
    canary, control = (np.quantile(np.exp(0.6 * rng.standard_normal((count, n))), level, axis=1) for _ in range(2))
    return canary * slow, control


@pytest.mark.parametrize("slow", [1.0, 1.05])
@pytest.mark.parametrize("n", [8, 40])
def test_equal_arms_and_those_at_the_limit_seldom_alarm(n: int, slow: float) -> None:
    """alpha 0.1 over 180 windows: of 300 runs at most so many as chance allows (99.9 %)."""
    alarms = 0
    for seed in range(300):
        test = ChangeTest("ttft", "p95", margin=0.05, alpha=0.1, horizon=180)
        for at, (ours, theirs) in enumerate(
            zip(*_windows(np.random.default_rng(seed), n, 180, slow, 0.95), strict=True)
        ):
            test.add(10.0 * at, ours, theirs)
        alarms += test.found() is not None
    assert alarms <= 300 * 0.1 + 3.1 * math.sqrt(300 * 0.1 * 0.9)


@pytest.mark.parametrize("slow", [2.0, 10.0])
def test_a_slowdown_in_the_last_minutes_is_found_and_dated(slow: float) -> None:
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        test = ChangeTest("ttft", "p95", margin=0.05, alpha=0.0007, horizon=180)
        parts = [_windows(rng, 50, 150, 1.0, 0.95), _windows(rng, 50, 30, slow, 0.95)]
        for at, (ours, theirs) in enumerate(zip(*(np.concatenate(side) for side in zip(*parts)), strict=True)):  # noqa: B905
            test.add(10.0 * at, ours, theirs)
        found.append(test.found())
    assert all(found)
    for decision in found:
        assert decision is not None and decision.verdict is Verdict.FAIL and decision.statistic == "p95_change"
        assert 1300 <= decision.since <= 1540 and decision.at <= 1790 and decision.low == pytest.approx(1.05)
        assert decision.estimate == pytest.approx(slow, rel=0.4)


def test_a_fast_start_does_not_hide_a_slow_end() -> None:
    """Evidence for the canary is no credit that a later slowdown must first use up."""
    test = ChangeTest("e2e", "p50", margin=0.05, alpha=0.001, horizon=1000)
    for at in range(900):
        test.add(float(at), 0.8, 1.0)
    for at in range(900, 940):
        test.add(float(at), 1.6, 1.0)
    decision = test.found()
    assert decision is not None and decision.since == 900.0


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan, -1.0])
def test_windows_that_say_nothing_change_nothing(bad: float) -> None:
    test = ChangeTest("e2e", "p50", margin=0.05, alpha=0.5, horizon=1)
    for _ in range(50):
        test.add(1.0, bad, 1.0)
        test.add(1.0, 2.0, bad)
    assert test.found() is None and test.evidence == 0
