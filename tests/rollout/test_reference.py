"""Latencies against a recorded reference: whole buckets, no false precision."""

from __future__ import annotations

import pytest

from phases.analysis.decision import Outcome
from phases.rollout.reference import Level, against
from phases.rollout.settings import MetricSettings

METRIC = MetricSettings("e2e", 0.95, 0.2)
THEN = Level("e2e", 0.95, 0.9, 1.0, 1000)


@pytest.mark.parametrize(
    ("low", "high", "n", "outcome"),
    [
        (0.9, 1.0, 1000, Outcome.PASS),
        (1.1, 1.3, 1000, Outcome.PASS),  # its lower edge is within the margin: not called worse
        (1.21, 1.3, 1000, Outcome.FAIL),
        (5.0, 6.0, 99, Outcome.CONTINUE),  # too few to tell
        (0.1, 0.2, 1000, Outcome.PASS),
    ],
)
def test_only_a_whole_bucket_over_the_margin_is_worse(low: float, high: float, n: int, outcome: Outcome) -> None:
    (decision,) = against([THEN], [Level("e2e", 0.95, low, high, n)], [METRIC], 100, at=0.0)
    assert decision.outcome is outcome


def test_without_a_reference_nothing_is_decided() -> None:
    (decision,) = against([], [THEN], [METRIC], 100, at=0.0)
    assert decision.outcome is Outcome.CONTINUE and decision.reason == "no reference was recorded"


def test_levels_survive_json() -> None:
    assert Level.from_json(THEN.to_json()) == THEN
