"""What the sequential test reaches, against known truth: run `python tests/benchmarks/bench_analysis.py`.

Prints false alarms of A/A runs looked at every window for two hours, detection times of known slowdowns, passes within the time
`power` predicted, the rivals on the same streams, and throughput. `--quick` shrinks everything to seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from bench_analysis_rivals import MINUTE, MannWhitney, Threshold
from bench_analysis_streams import CELLS, HARD, MODELS, REQUIRED, WINDOW, Noise, Stream

from phases.analysis.scores import QuantileScore
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings
from phases.analysis.sketch import FadingHistogram

ALPHA = 0.01
SETTLE = 30.0
RIVAL_REPLAYS = 200


@dataclass
class Times:
    """Time of the first FAIL and the first PASS of each replay, seconds, inf for never."""

    fail: np.ndarray
    passed: np.ndarray

    def look(self, score: QuantileScore, now: float) -> None:
        above, below = score.evidence.log_evidence()
        needed = -np.log(ALPHA)
        self.fail = np.where((above >= needed) & np.isinf(self.fail), now, self.fail)
        self.passed = np.where((below >= needed) & np.isinf(self.passed) & np.isinf(self.fail), now, self.passed)


class Simulation:
    """Replays of one noise model, tested at several margins at once, with the rivals beside."""

    def __init__(
        self, noise: Noise, *, ratio: float, horizon: float, replays: int, quantile: float = 0.95,
        margins: tuple[float, ...] = (0.05,), dispersion: float = 1.0, seed: int = 1, rivals: bool = True,
    ) -> None:  # fmt: skip
        self._stream = Stream(noise, replays, horizon, ratio, seed)
        self._horizon, self._quantile, self._margins = horizon, quantile, margins
        sketch = FadingHistogram(replays, width=0.03, floor=5e-3, ceiling=1e3)
        self._scores = [
            QuantileScore(quantile, replays, histograms=replays, dispersion=dispersion, sketch=sketch) for _ in margins
        ]
        self.times = {margin: Times(np.full(replays, np.inf), np.full(replays, np.inf)) for margin in margins}
        few = min(replays, RIVAL_REPLAYS) if rivals else 0
        self.rivals = {"threshold x5": Threshold(few, 5, 0.05), "threshold x1": Threshold(few, 1, 0.05),
                       "Mann-Whitney": MannWhitney(few)}  # fmt: skip
        self._minute: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
        self._few = few

    def run(self) -> Simulation:
        for number in range(int(self._horizon / WINDOW)):
            arms = self._stream.window(number)
            for cell in range(CELLS):
                self._cell(number * WINDOW + cell * WINDOW / CELLS, cell, arms)
            now = (number + 1) * WINDOW
            for margin, score in zip(self._margins, self._scores, strict=True):
                self.times[margin].look(score, now)
            if self._few:
                self._rivals(now, arms)
        return self

    def _cell(self, start: float, cell: int, arms) -> None:
        replays = self._stream.replays
        parts = []
        keep = ~self._stream.ignored(start, SETTLE)
        for lane, inside, value in arms:
            here = (inside >= cell * WINDOW / CELLS) & (inside < (cell + 1) * WINDOW / CELLS)
            parts.append((lane[here], value[here]))
        (lane1, value1), (lane0, value0) = parts
        if not keep.all():
            (lane1, value1), (lane0, value0) = ((a[keep[a]], v[keep[a]]) for a, v in parts)
        threshold = self._scores[0].log_threshold
        known = np.where(np.isfinite(threshold), threshold, np.inf)
        n1, n0 = np.bincount(lane1, minlength=replays), np.bincount(lane0, minlength=replays)
        x0 = np.bincount(lane0[value0 > known[lane0]], minlength=replays)
        for margin, score in zip(self._margins, self._scores, strict=True):
            x1 = np.bincount(lane1[value1 - np.log1p(margin) > known[lane1]], minlength=replays)
            score.fold(x1, n1, x0, n0)
        self._scores[0].learn(value0, WINDOW / CELLS, lane0)
        for score in self._scores[1:]:
            score.set_threshold(self._scores[0].log_threshold)

    def _rivals(self, now: float, arms) -> None:
        for arm, (lane, _, value) in enumerate(arms):
            self._minute[arm].append((lane[lane < self._few], value[lane < self._few]))
        if now % MINUTE:
            return
        series = [_quantiles(parts, self._few, self._quantile) for parts in self._minute]
        self._minute = [[], []]
        for rival in self.rivals.values():
            rival.minute(now, *series)


def _quantiles(parts, replays: int, level: float) -> np.ndarray:
    lane, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((value, lane))
    counts = np.bincount(lane, minlength=replays)
    last = np.cumsum(counts) - 1
    place = np.clip(last - np.floor((1 - level) * counts).astype(int), 0, len(order) - 1)
    return np.where(counts > 0, np.exp(value[order][place]), np.nan)


def _share(times: np.ndarray, within: float = np.inf) -> str:
    return f"{100 * np.mean(times[np.isfinite(times)] <= within) * np.mean(np.isfinite(times)) if len(times) else 0:.1f}%" \
        if np.isfinite(times).any() else "0.0%"  # fmt: skip


def _at(times: np.ndarray, level: float) -> str:
    value = np.quantile(times, level, method="higher")
    return f"{value:.0f}" if np.isfinite(value) else "-"


def print_a_a(replays: int, horizon: float, models, quantiles=(0.95,), dispersion: float = 1.0) -> None:
    print(f"\nA/A, looked at every {WINDOW:g} s for {horizon / 3600:g} h, {replays} replays (rivals {min(replays, RIVAL_REPLAYS)})")
    print("'at margin': the truth lies exactly on the margin, the hardest null; both errors must stay near 1 %")
    head = f"{'noise':26} {'stat':4} {'FAIL A/A':>8} {'at margin':>9} {'PASS at m':>9} {'PASS A/A':>8} {'50%':>6} {'95%':>6}"
    print(head + "   rivals' false FAIL: thr x5, thr x1, Mann-Whitney")
    for noise in models:
        for quantile in quantiles:
            done = Simulation(noise, ratio=1.0, horizon=horizon, replays=replays, quantile=quantile,
                              margins=(0.05, 0.0), dispersion=dispersion).run()  # fmt: skip
            a_a, edge = done.times[0.05], done.times[0.0]
            others = ", ".join(_share(rival.fail_at) for rival in done.rivals.values())
            print(f"{noise.name:26} p{quantile * 100:<3g} {_share(a_a.fail):>8} {_share(edge.fail):>9} {_share(edge.passed):>9} "
                  f"{_share(a_a.passed):>8} {_at(a_a.passed, 0.5):>6} {_at(a_a.passed, 0.95):>6}   {others}", flush=True)  # fmt: skip


DETECTIONS = ((1.30, 0.05, 600.0), (1.15, 0.05, 900.0), (1.05, 0.0, 7200.0))


def print_detection(replays: int, models, quantiles=(0.95,), shrink: float = 1.0) -> None:
    print(f"\nDetection of a true slowdown, seconds, {replays} replays")
    print(f"{'noise':26} {'stat':4} {'truth':>5} {'margin':>6} {'within':>6} {'power':>7} {'50%':>6} {'90%':>6} {'99%':>6}"
          "   rivals' power (50%): thr x5, thr x1, Mann-Whitney")  # fmt: skip
    for noise in models:
        for quantile in quantiles:
            for ratio, margin, horizon in DETECTIONS:
                horizon = max(120.0, horizon * shrink)
                count = replays if horizon <= 900 else max(20, replays // 4)
                done = Simulation(noise, ratio=ratio, horizon=horizon, replays=count, quantile=quantile,
                                  margins=(margin,), rivals=margin > 0).run()  # fmt: skip
                fail = done.times[margin].fail
                others = ", ".join(f"{_share(r.fail_at)} ({_at(r.fail_at, 0.5)})" for r in done.rivals.values() if margin > 0)
                print(f"{noise.name:26} p{quantile * 100:<3g} {ratio:>5} {margin:>6} {horizon:>6.0f} {_share(fail):>7} "
                      f"{_at(fail, 0.5):>6} {_at(fail, 0.9):>6} {_at(fail, 0.99):>6}   {others}", flush=True)  # fmt: skip
