import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.analysis.sketch import FadingHistogram


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=200), st.floats(0.05, 0.95))
def test_quantile_is_within_a_bin_of_an_order_statistic(values, level):
    histogram = FadingHistogram(1, width=0.01)
    histogram.add(np.log(values))
    found = float(np.exp(histogram.log_quantile(level)[0]))
    ordered = np.sort(values)
    place = int(np.ceil(level * len(values) - 1e-9)) - 1
    assert ordered[place] / 1.0101 <= found <= ordered[place] * 1.0101


def test_old_values_fade():
    histogram = FadingHistogram(1, half_life=10.0)
    histogram.add(np.log(np.full(1000, 1.0)))
    histogram.fade(100.0)
    histogram.add(np.log(np.full(100, 5.0)))
    assert np.exp(histogram.log_quantile(0.5)[0]) == pytest.approx(5.0, rel=0.02)


def test_lanes_are_apart_and_an_empty_one_has_no_quantile():
    histogram = FadingHistogram(3)
    histogram.add(np.log([1.0, 2.0, 3.0, 9.0]), np.array([0, 0, 0, 2]))
    quantiles = np.exp(histogram.log_quantile(0.5))
    assert quantiles[0] == pytest.approx(2.0, rel=0.01)
    assert np.isnan(quantiles[1])
    assert quantiles[2] == pytest.approx(9.0, rel=0.01)


def test_values_out_of_range_are_kept_at_the_ends():
    histogram = FadingHistogram(1)
    histogram.add(np.log([1e-30, 1e30]))
    assert histogram.seen[0] == 2
    assert np.isfinite(histogram.log_quantile(0.9)[0])
