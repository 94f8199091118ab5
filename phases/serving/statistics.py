"""Intervals of the quantities Phase 2 measures: bootstrap over prompts, since tokens of one prompt go together.

Percentile bootstrap (Efron & Tibshirani 1993, chapter 13), resampling whole prompts with a fixed seed, 95 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
SEED = 20240229


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float
    high: float


def bootstrap(clusters: int, statistic: Callable[[np.ndarray], float]) -> Interval:
    """Interval of `statistic(indices)`, where indices choose clusters (with repetition).

    Args:
        clusters: how many there are; with one the interval is its single value.
        statistic: of an int array of cluster numbers.
    """
    if clusters < 1:
        raise ValueError("an interval needs at least one cluster")
    everything = np.arange(clusters)
    random = np.random.default_rng(SEED)
    drawn = [statistic(random.integers(0, clusters, clusters)) for _ in range(RESAMPLES if clusters > 1 else 1)]
    low, high = np.quantile(drawn, [0.025, 0.975]) if clusters > 1 else (statistic(everything),) * 2
    return Interval(float(statistic(everything)), float(low), float(high))


def clustered_mean(groups: Sequence[Sequence[float]]) -> Interval:
    """Mean over all values, the groups being the clusters."""
    sums = np.array([float(np.sum(group)) for group in groups])
    counts = np.array([len(group) for group in groups], dtype=float)
    return bootstrap(len(groups), lambda chosen: float(sums[chosen].sum() / counts[chosen].sum()))


def ratio_of_sums(above: Sequence[tuple[float, float]], below: Sequence[tuple[float, float]]) -> Interval:
    """(sum a / sum b of `above`) / (sum a / sum b of `below`), paired by position."""
    a, b = np.array(above, dtype=float), np.array(below, dtype=float)

    def ratio(chosen: np.ndarray) -> float:
        return float((a[chosen, 0].sum() / a[chosen, 1].sum()) / (b[chosen, 0].sum() / b[chosen, 1].sum()))

    return bootstrap(len(a), ratio)


def median_ratio(candidate: Sequence[float], incumbent: Sequence[float]) -> Interval:
    """Median of the pairwise ratios candidate / incumbent."""
    logs = np.log(np.array(candidate, dtype=float)) - np.log(np.array(incumbent, dtype=float))
    inner = bootstrap(len(logs), lambda chosen: float(np.median(logs[chosen])))
    return Interval(*(float(np.exp(value)) for value in (inner.estimate, inner.low, inner.high)))
