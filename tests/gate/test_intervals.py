"""The intervals cover what they promise to cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.gate.intervals import median_interval, ratio_interval

positive = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60)


@given(positive, st.sampled_from([0.8, 0.95, 0.99]))
def test_the_estimate_lies_between_the_bounds(samples: list[float], confidence: float) -> None:
    interval = median_interval(samples, confidence)
    assert interval.low <= interval.estimate <= interval.high


@given(positive, positive)
def test_a_ratio_turned_over_has_the_bounds_turned_over(a: list[float], b: list[float]) -> None:
    one, other = ratio_interval(a, b), ratio_interval(b, a)
    assert one.estimate == pytest.approx(1 / other.estimate)
    if math.isfinite(one.high):
        assert one.high == pytest.approx(1 / other.low)


@pytest.mark.parametrize("draw", ["lognormal", "pareto", "two points"])
@pytest.mark.parametrize("n", [6, 15, 60])
def test_coverage_of_the_median(draw: str, n: int) -> None:
    generator = np.random.default_rng(5)
    sample = {
        "lognormal": lambda: (generator.lognormal(0, 1, (4000, n)), 1.0),
        "pareto": lambda: (generator.pareto(1.1, (4000, n)) + 1, 2 ** (1 / 1.1)),
        "two points": lambda: (generator.choice([1.0, 3.0], (4000, n)), None),
    }[draw]
    rows, median = sample()
    intervals = [median_interval(list(row), 0.9) for row in rows]
    truth = [1.0, 3.0] if median is None else [median]
    covered = np.mean([any(i.low <= t <= i.high for t in truth) for i in intervals])
    assert covered >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / len(rows))


def test_too_few_samples_have_no_bounds() -> None:
    assert median_interval([1.0, 2.0], 0.99).low == -math.inf
    assert ratio_interval([1.0], [2.0]).high == math.inf and ratio_interval([1.0], [2.0]).low == 0.0


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf]])
def test_bad_samples_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="all finite"):
        median_interval(bad)
