"""What a bake can see: from an A/A recording, the slowdown it detects, or the time it takes.

The test itself is run on resampled recordings: stretches of `BLOCK` seconds are drawn with replacement, arms swapped at random
(which makes the null exact whatever chance did in the recording), the canary's values multiplied by the slowdown in question,
and requests thinned or added up to the rate in question. So autocorrelation up to the block, batching and tails of the real
traffic are in the answer (block bootstrap, Künsch, Ann. Statist. 1989); no normal approximation is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from phases.analysis.records import ArmRecords
from phases.analysis.scores import QuantileScore, neighbourhood
from phases.analysis.settings import TestSettings
from phases.analysis.sketch import FLOOR
from phases.base.errors import AnalysisError

BLOCK = 30.0
LONGEST = 12 * 3600.0  # seconds beyond which no bake is planned
SAFETY = (
    1.5  # the live threshold has to be learnt, and a recording of minutes knows its own tail roughly: see the benchmark
)
SLOWDOWNS = np.array([1.02, 1.05, 1.07, 1.1, 1.12, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 5.0])


@dataclass(frozen=True)
class Recording:
    """An A/A run in cells of time.

    Attributes:
        cells: log values of the requests in each cell, as (arm 0, arm 1).
        cell: seconds of a cell.
    """

    cells: tuple[tuple[np.ndarray, np.ndarray], ...]
    cell: float

    @staticmethod
    def of(canary: ArmRecords, control: ArmRecords, settings: TestSettings) -> Recording:
        """Cut two arms' records into the cells of the test.

        Raises:
            AnalysisError: fewer than four blocks or 200 requests an arm: too little to resample.
        """
        parts = [
            (arm.t[arm.succeeded], np.log(np.maximum(arm.value[arm.succeeded], FLOOR))) for arm in (canary, control)
        ]
        fewest = min(len(t) for t, _ in parts)
        if fewest < 200:
            raise AnalysisError(
                f"the A/A recording has {fewest} requests in one arm.", hint="Record at least 200 of each."
            )
        start = max(t.min() for t, _ in parts)
        count = math.floor((min(t.max() for t, _ in parts) - start) / settings.cell)
        if count * settings.cell < 4 * BLOCK:
            raise AnalysisError(
                f"the arms of the A/A recording overlap for {max(count, 0) * settings.cell:g} s.",
                hint=f"Record at least {4 * BLOCK:g} s.",
            )
        columns = []
        for t, value in parts:
            order = np.argsort(t, kind="stable")
            edges = np.searchsorted(t[order], start + settings.cell * np.arange(count + 1))
            columns.append([value[order][low:high] for low, high in zip(edges[:-1], edges[1:], strict=True)])
        return Recording(tuple(zip(*columns, strict=True)), settings.cell)

    @property
    def seconds(self) -> float:
        return len(self.cells) * self.cell

    @property
    def rate(self) -> float:
        """Requests per second of an arm, mean of both."""
        return sum(len(a) + len(b) for a, b in self.cells) / 2 / self.seconds

    def log_quantile(self, level: float) -> float:
        """Of both arms together."""
        return float(np.quantile(np.concatenate([part for pair in self.cells for part in pair]), level))


def duration(
    recording: Recording,
    settings: TestSettings,
    slowdown: float,
    *,
    rate: float | None = None,
    power: float = 0.95,
    replays: int = 400,
    seed: int = 0,
    longest: float = LONGEST,
) -> float | None:
    """Seconds a bake must last so that a canary of this slowdown is decided with probability `power`.

    A slowdown over the settings' margin must FAIL, one under it must PASS. None when `longest` seconds are not enough.
    """
    times = _replay(recording, settings, slowdown, rate, replays, longest, np.random.default_rng(seed), power)
    when = float(np.sort(times)[math.ceil(power * replays) - 1])
    return when * SAFETY if math.isfinite(when) else None


def detectable(
    recording: Recording,
    settings: TestSettings,
    seconds: float,
    *,
    rate: float | None = None,
    power: float = 0.95,
    replays: int = 400,
    seed: int = 0,
) -> float | None:
    """The smallest slowdown (of SLOWDOWNS above the margin) that FAILs within `seconds` with probability `power`, or None."""
    candidates = SLOWDOWNS[settings.threshold * 1.001 < SLOWDOWNS]
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        rng = np.random.default_rng(seed)
        times = _replay(recording, settings, candidates[middle], rate, replays, seconds / SAFETY, rng, power)
        if np.mean(np.isfinite(times)) >= power:
            high = middle
        else:
            low = middle + 1
    return float(candidates[low]) if low < len(candidates) else None


@dataclass(frozen=True)
class Plan:
    """What a bake can see, from an A/A recording.

    Attributes:
        dispersion: for `TestSettings.dispersion`.
        rate: requests per second of an arm, as planned for.
        seconds_to_pass: within which an equal canary passes with 95 % probability; None for longer than was looked ahead.
        detectable: smallest slowdown that fails with 95 % probability, by minutes of bake; None for none of SLOWDOWNS.
    """

    dispersion: float
    rate: float
    seconds_to_pass: float | None
    detectable: dict[int, float | None]


def plan(
    canary: ArmRecords,
    control: ArmRecords,
    settings: TestSettings,
    *,
    minutes: tuple[int, ...] = (5, 15, 30),
    rate: float | None = None,
    longest: float = 4 * 3600.0,
    replays: int = 200,
) -> Plan:
    """Plan bakes of so many minutes from two equal arms' records of the settings' metric (a quantile is needed).

    Args:
        rate: requests per second of an arm in the bake; as recorded when absent.
        longest: seconds looked ahead for the time an equal canary needs.
    """
    recording = Recording.of(canary, control, settings)
    settings = replace(settings, dispersion=dispersion(recording, settings))
    return Plan(
        dispersion=settings.dispersion,
        rate=rate or recording.rate,
        seconds_to_pass=duration(recording, settings, 1.0, rate=rate, longest=longest, replays=replays),
        detectable={bake: detectable(recording, settings, 60.0 * bake, rate=rate, replays=replays) for bake in minutes},
    )


def dispersion(recording: Recording, settings: TestSettings, *, block: float = 60.0) -> float:
    """Variance of scores over blocks of `block` seconds, relative to independent cells: `TestSettings.dispersion`.

    1.0 unless a one-sided chi-square test at 5 % says that it is more.
    """
    level = settings.quantile if settings.quantile is not None else 0.5
    threshold = _thresholds(recording, level)
    scores = []
    for canary, control in recording.cells:
        n1, n0 = len(canary), len(control)
        x1, x0 = np.count_nonzero(canary > threshold), np.count_nonzero(control > threshold)  # over any of the three
        scores.append((n0 * x1 - n1 * x0) / max(n0 + n1, 1))
    scores = np.array(scores) - np.mean(scores)
    width = max(2, round(block / recording.cell))
    count = len(scores) // width
    if count < 3 or not scores.any():
        return 1.0
    blocks = scores[: count * width].reshape(count, width).sum(axis=1)
    ratio = float(blocks.var(ddof=1) / (width * scores.var(ddof=1)))
    return ratio if ratio * (count - 1) > stats.chi2.ppf(0.95, count - 1) else 1.0


def _replay(
    recording: Recording,
    settings: TestSettings,
    slowdown: float,
    rate: float | None,
    replays: int,
    horizon: float,
    rng: np.random.Generator,
    power: float,
) -> np.ndarray:
    """Times (s) at which replays reach the right decision, inf for never within the horizon; shape (replays,)."""
    if settings.quantile is None:
        raise AnalysisError("power is computed for quantiles.", hint="Give a quantile, 0.5 for the median.")
    if not slowdown > 0 or (rate is not None and not rate > 0):
        raise AnalysisError(f"slowdown {slowdown} or rate {rate} is not positive.", hint="Give positive numbers.")
    bins = _bins(recording, settings, math.log(slowdown))
    copies, keep = _scaling(recording.rate, rate)
    score = QuantileScore(settings.quantile, replays, histograms=replays, dispersion=settings.dispersion)
    score.set_threshold(np.repeat(_thresholds(recording, settings.quantile), replays, axis=1))
    slower = slowdown > settings.threshold
    needed = -math.log(settings.alpha)
    warm_up = 1.0 / min(settings.quantile, 1 - settings.quantile) / (rate or recording.rate)
    width = max(1, min(round(BLOCK / recording.cell), len(recording.cells) // 4))
    per_look = max(1, round(settings.window / recording.cell))
    times = np.full(replays, np.inf)
    for number in range(int((horizon - warm_up) / recording.cell)):
        if number % width == 0:
            block = rng.integers(0, len(recording.cells) - width + 1, (copies, replays))
            swapped = rng.integers(0, 2, (copies, replays))
        drawn = bins[swapped, block + number % width].sum(axis=0)
        if keep < 1:
            drawn = rng.binomial(drawn, keep)
        (n1, *x1), (n0, *x0) = np.cumsum(drawn[..., ::-1], axis=2)[..., ::-1].transpose(1, 2, 0)
        score.fold(np.array(x1), n1, np.array(x0), n0)
        if (number + 1) % per_look == 0:
            above, below = score.evidence.log_evidence()
            now = warm_up + (number + 1) * recording.cell
            times = np.where(np.isinf(times) & ((above if slower else below) >= needed), now, times)
            if np.mean(np.isfinite(times)) >= power:
                break
    return times


def _thresholds(recording: Recording, level: float) -> np.ndarray:
    """Natural logs of both arms' quantiles at the levels of the neighbourhood, shape (3, 1)."""
    return np.array([[recording.log_quantile(near)] for near in neighbourhood(level)])


def _bins(recording: Recording, settings: TestSettings, shift: float) -> np.ndarray:
    """Requests between the thresholds: shape (2 ways to assign the arms, cells, 2 arms, 4 bins upward), int."""
    assert settings.quantile is not None  # _replay refuses a mean
    threshold = _thresholds(recording, settings.quantile)[:, 0]
    edges = threshold + math.log(settings.threshold) - shift, threshold
    table = np.empty((2, len(recording.cells), 2, 4), dtype=np.int64)
    for which, pair in enumerate(recording.cells):
        for way, arms in enumerate((pair, pair[::-1])):
            for arm, (values, limits) in enumerate(zip(arms, edges, strict=True)):
                table[way, which, arm] = np.bincount(np.searchsorted(limits, values), minlength=4)
    return table


def _scaling(recorded: float, wanted: float | None) -> tuple[int, float]:
    """How many cells to add up, and which share of their requests to keep, to get from one rate to another."""
    if wanted is None:
        return 1, 1.0
    copies = math.ceil(wanted / recorded - 1e-9)
    return max(copies, 1), min(1.0, wanted / (max(copies, 1) * recorded))
