"""Latencies against a recorded reference: whole buckets, no false precision."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from phases.analysis.scrape import Buckets
from phases.base.verdict import Verdict
from phases.trial.reference import Level, _range, against
from phases.trial.settings import MetricSettings

METRIC = MetricSettings("e2e", 0.95, 0.2)
THEN = Level("e2e", 0.95, 0.9, 1.0, 1000)  # at most 1.08 s are within the margin for certain


@pytest.mark.parametrize(
    ("low", "high", "n", "outcome"),
    [
        (0.9, 1.0, 1000, Verdict.PASS),
        (0.9, 1.07, 1000, Verdict.PASS),
        (0.9, 1.09, 1000, None),  # its upper edge is not within the margin: not proven worse is not well
        (1.1, 1.3, 1000, None),
        (1.21, 1.3, 1000, Verdict.FAIL),
        (5.0, 6.0, 99, None),  # too few to tell
        (0.1, 0.2, 1000, Verdict.PASS),
    ],
)
def test_only_a_whole_bucket_over_the_margin_is_worse(low: float, high: float, n: int, outcome: Verdict) -> None:
    (decision,) = against([THEN], [Level("e2e", 0.95, low, high, n)], [METRIC], 100, at=0.0)
    assert decision.verdict is outcome


def test_without_a_reference_nothing_is_decided() -> None:
    (decision,) = against([], [THEN], [METRIC], 100, at=0.0)
    assert decision.verdict is None and decision.reason == "no reference was recorded"


def test_workers_are_compared_with_their_own_kind() -> None:
    large = dataclasses.replace(THEN, kind="tp 8", low=2.0, high=2.2)
    now = [dataclasses.replace(large, kind="tp 1"), large]  # the small ones are as slow as only the large ones were
    small, big = against([dataclasses.replace(THEN, kind="tp 1"), large], now, [METRIC], 100, at=0.0)
    assert (small.verdict, big.verdict) == (Verdict.FAIL, Verdict.PASS) and small.statistic == "p95 of tp 1"
    (alone,) = against([THEN], [large], [METRIC], 100, at=0.0)[1:]
    assert alone.verdict is None  # that kind was not there then


def test_a_level_is_as_wide_as_few_observations_make_it() -> None:
    values = np.random.default_rng(1).exponential(1.0, 4000)
    widths = []
    for n in (40, 4000):
        edges = np.array([*np.geomspace(0.01, 10, 200), np.inf])
        counts = np.bincount(np.searchsorted(edges, values[:n]), minlength=len(edges)).astype(float)
        low, high = _range(Buckets(edges, counts), 0.5)
        assert low < np.log(2) < high
        widths.append(high / low)
    assert widths[0] > 1.5 and widths[1] < 1.15


def test_levels_survive_json() -> None:
    assert Level.from_json(THEN.to_json()) == THEN
