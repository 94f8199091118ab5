"""Distribution-free confidence intervals for medians and ratios of medians of timing samples.

A median's interval comes from order statistics: the number of samples under the true median is Binomial(n, 1/2),
whatever the distribution (David & Nagaraja, Order Statistics, 3rd ed., section 7.1). A ratio's interval divides two such
intervals, each at half the error (Bonferroni), which is conservative and needs no assumption about the tails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """An estimate between two bounds; bounds are infinite where the samples are too few to give any."""

    estimate: float
    low: float
    high: float


def median_interval(samples: Sequence[float], confidence: float = 0.99) -> Interval:
    """Interval of the median of independent samples.

    Args:
        samples: values in any unit, at least one, finite.
        confidence: two-sided coverage in (0, 1).

    Raises:
        ValueError: no samples, a sample that is not finite, or a confidence outside (0, 1).
    """
    from scipy.stats import binom

    if not samples or not all(math.isfinite(value) for value in samples):
        raise ValueError("a median needs at least one sample, all finite")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence} is not between 0 and 1")
    ordered = sorted(samples)
    n = len(ordered)
    middle = n // 2
    estimate = ordered[middle] if n % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    # Largest rank r with P(Binomial(n, 1/2) < r) <= alpha/2: the r-th smallest and r-th largest bound the median.
    rank = int(binom.ppf((1 - confidence) / 2, n, 0.5))
    if binom.cdf(rank, n, 0.5) > (1 - confidence) / 2:
        rank -= 1
    if rank < 0:
        return Interval(estimate, -math.inf, math.inf)
    return Interval(estimate, ordered[rank], ordered[n - 1 - rank])


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], confidence: float = 0.99) -> Interval:
    """Interval of median(numerator) / median(denominator) of positive samples; see `median_interval`."""
    each = 1 - (1 - confidence) / 2
    top, bottom = median_interval(numerator, each), median_interval(denominator, each)
    if bottom.estimate <= 0 or top.estimate <= 0:
        raise ValueError("a ratio of timings needs positive samples")
    low = max(top.low, 0.0) / bottom.high if math.isfinite(bottom.high) else 0.0
    high = top.high / bottom.low if bottom.low > 0 else math.inf
    return Interval(top.estimate / bottom.estimate, low, high)
