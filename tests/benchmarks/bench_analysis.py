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
from bench_analysis_streams import CELLS, HARD, HELD_OUT, MODELS, REQUIRED, WINDOW, Noise, Stream

from phases.analysis import power, sources
from phases.base.verdict import Verdict
from phases.analysis.records import ArmRecords
from phases.analysis.replay import replay_records
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
            # The first thresholds are learnt cell by cell, as in production; then they change once a window.
            for cells in [[0], [1], [2], [3]] if number < 2 else [[0, 1, 2, 3]]:
                self._cells(number * WINDOW, cells, arms)
            now = (number + 1) * WINDOW
            for margin, score in zip(self._margins, self._scores, strict=True):
                self.times[margin].look(score, now)
            if self._few:
                self._rivals(now, arms)
        return self

    def _cells(self, start: float, cells: list[int], arms) -> None:
        """Fold these cells of a window in, all scored at one threshold, then learn from them."""
        replays, width = self._stream.replays, WINDOW / CELLS
        keep = np.stack([~self._stream.ignored(start + cell * width, SETTLE) for cell in cells])
        parts = []
        for lane, inside, value in arms:
            cell = (inside / np.float32(width)).astype(np.int64)
            if len(cells) < CELLS:
                here = cell == cells[0]
                lane, value, cell = lane[here], value[here], cell[here]
            if not keep.all():
                here = keep[cell - cells[0], lane]
                lane, value, cell = lane[here], value[here], cell[here]
            parts.append((lane, value, (cell - cells[0]) * replays + lane))
        (lane1, value1, key1), (lane0, value0, key0) = parts
        threshold = self._scores[0].log_threshold
        known = np.where(np.isfinite(threshold), threshold, np.inf).astype(np.float32)
        n1, n0 = (self._count(key, cells) for key in (key1, key0))
        x0 = self._over(value0, lane0, key0, known, cells)
        for margin, score in zip(self._margins, self._scores, strict=True):
            x1 = self._over(value1, lane1, key1, known + np.float32(np.log1p(margin)), cells)
            for place in range(len(cells)):
                score.fold(x1[:, place], n1[place], x0[:, place], n0[place])
        self._scores[0].REFRESH = 1 if len(cells) == CELLS else QuantileScore.REFRESH
        self._scores[0].learn(value0, width * len(cells), lane0)
        for score in self._scores[1:]:
            score.set_threshold(self._scores[0].log_threshold)

    def _over(self, value, lane, key, thresholds: np.ndarray, cells: list[int]) -> np.ndarray:
        """Requests over each of the ascending thresholds, shape (3, cells, replays)."""
        counts = []
        for threshold in thresholds:
            here = value > threshold[lane]
            value, lane, key = value[here], lane[here], key[here]  # what is not over this one is over no later one
            counts.append(self._count(key, cells))
        return np.stack(counts)

    def _count(self, keys: np.ndarray, cells: list[int]) -> np.ndarray:
        return np.bincount(keys, minlength=len(cells) * self._stream.replays).reshape(len(cells), -1)

    def _rivals(self, now: float, arms) -> None:
        for arm, (lane, _, value) in enumerate(arms):
            few = int(np.searchsorted(lane, self._few))
            self._minute[arm].append((lane[:few], value[:few]))
        if now % MINUTE:
            return
        series = [_quantiles(parts, self._few, self._quantile) for parts in self._minute]
        self._minute = [[], []]
        for rival in self.rivals.values():
            rival.minute(now, *series)


def _quantiles(parts, replays: int, level: float) -> np.ndarray:
    """Quantile of each replay; log values lie within ±500, so one sort of replay · 1000 + value orders all."""
    lane, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    ordered = np.sort(lane * 1000.0 + value)
    counts = np.bincount(lane, minlength=replays)
    place = np.clip(np.cumsum(counts) - 1 - np.floor((1 - level) * counts).astype(int), 0, len(ordered) - 1)
    return np.where(counts > 0, np.exp(ordered[place] - np.arange(replays) * 1000.0), np.nan)


def _share(times: np.ndarray, within: float = np.inf) -> str:
    return f"{100 * np.mean(np.isfinite(times) & (times <= within)):.1f}%"


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


def print_product(replays: int) -> None:
    """The same streams through `SequentialTest`, one replay at a time: the simulation above must agree with it."""
    for ratio, horizon in ((1.30, 600.0), (1.0, 600.0)):
        times = []
        for seed in range(replays):
            stream, test, found = Stream(REQUIRED, 1, horizon, ratio, 1000 + seed), SequentialTest(TestSettings()), np.inf
            for number in range(int(horizon / WINDOW)):
                for name, (_, inside, value) in zip(("canary", "control"), stream.window(number), strict=True):
                    test.observe_many(name, number * WINDOW + np.sort(inside.astype(float)), np.exp(value.astype(float)))
                if test.look((number + 1) * WINDOW).verdict is Verdict.FAIL:
                    found = (number + 1) * WINDOW
                    break
            times.append(found)
        times = np.array(times)
        print(f"through SequentialTest itself, {REQUIRED.name}, {ratio}x, {replays} replays: FAIL {_share(times)} within "
              f"{horizon:.0f} s, median {_at(times, 0.5)} s")  # fmt: skip


def _record(noise: Noise, seconds: float, seed: int) -> power.Recording:
    stream = Stream(noise, 1, seconds, 1.0, seed)
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    for number in range(int(seconds / WINDOW)):
        for arm, (_, inside, value) in enumerate(stream.window(number)):
            parts[arm].append((number * WINDOW + inside.astype(float), np.exp(value.astype(float))))
    arms = []
    for part in parts:
        t, value = (np.concatenate(column) for column in zip(*part, strict=True))
        arms.append(ArmRecords(t, value, np.full(len(t), 200)))
    return power.Recording.of(*arms, TestSettings())


def print_plan(replays: int, models, minutes: float, recordings: int) -> None:
    """How often an equal canary passes within the time predicted from an A/A recording of so many minutes."""
    print(f"\nPASS of an equal canary, margin 5 %, p95: predicted from {recordings} A/A recordings of {minutes:g} min, then measured")
    print(f"{'noise':26} {'predicted, s (each recording)':40} {'PASS within':>20}")
    for noise in models:
        predicted = [power.duration(_record(noise, 60 * minutes, 100 + seed), TestSettings(), 1.0, longest=4 * 3600)
                     for seed in range(recordings)]  # fmt: skip
        known = [time for time in predicted if time is not None]
        if not known:
            print(f"{noise.name:26} longer than 4 h")
            continue
        done = Simulation(noise, ratio=1.0, horizon=max(known), replays=replays, seed=5, rivals=False).run()
        shares = [_share(done.times[0.05].passed, within=time) for time in known]
        print(f"{noise.name:26} {', '.join(f'{time:.0f}' for time in known):40} {', '.join(shares):>20}", flush=True)


def print_throughput(observations: int) -> None:
    rng, each = np.random.default_rng(0), observations // 2
    span = each / 50.0
    arms = {name: (np.sort(rng.uniform(0, span, each)), rng.lognormal(0, 0.5, each)) for name in ("canary", "control")}
    started, used = time.perf_counter(), time.process_time()
    test = SequentialTest(TestSettings())
    for name, (t, value) in arms.items():
        test.observe_many(name, t, value)
    test.look(span)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    print(f"\nThroughput: {observations} observations (50 req/s an arm, {span:.0f} s) folded in {seconds:.2f} s, of which "
          f"{used:.2f} s on the processor")  # fmt: skip
    sizes = []
    for length in (100, 1000):
        tracemalloc.start()
        test = SequentialTest(TestSettings())
        for number in range(length):
            for name in arms:
                test.observe_many(name, number * WINDOW + np.linspace(0.1, 9.9, 100), rng.lognormal(0, 0.5, 100))
            test.look((number + 1) * WINDOW)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    print(f"Memory held after 100 and after 1000 windows: {sizes[0] / 1024:.0f} KiB, {sizes[1] / 1024:.0f} KiB")


def print_recorded(folder: Path) -> None:
    """The test on what two real servers served (made by record_two_servers.py)."""
    files = sorted(folder.glob("two-servers-x*.jsonl.gz"))
    if not files:
        print(f"\nno recordings of real servers in {folder}")
        return
    print("\nTwo real SGLang servers, the canary's forward passes slowed by a known factor; margin 5 %")
    print(f"{'recording':28} {'metric':6} {'stat':5} {'verdict':13} {'estimate':>8} {'low':>7} {'high':>7} {'n':>6} {'after':>7}")
    for path in files:
        recorded = sources.read([str(path)]).records
        for metric in sorted(recorded):
            for quantile in (0.5, 0.95, None):
                found = replay_records(recorded, TestSettings(metric=metric, quantile=quantile), source=path.name).latency
                cells = ["-" if value is None else f"{value:.3f}" for value in (found.estimate, found.low, found.high)]
                after = "-" if found.seconds_to_decide is None else f"{found.seconds_to_decide:.0f} s"
                print(f"{path.name:28} {metric:6} {found.statistic:5} {found.verdict.value:13} {cells[0]:>8} {cells[1]:>7} "
                      f"{cells[2]:>7} {found.n:>6} {after:>7}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few replays of a few minutes: does it run, not what it reaches")
    parser.add_argument("--replays", type=int, default=2000)
    options = parser.parse_args()
    started = time.perf_counter()
    if options.quick:
        print_a_a(20, 600.0, MODELS[:2])
        print_detection(20, (REQUIRED,), shrink=0.05)
        print_product(3)
        print_plan(20, (Noise("50 req/s", rate=50.0),), minutes=4, recordings=1)
        print_throughput(20_000)
    else:
        print_a_a(options.replays, 7200.0, (*MODELS, *HELD_OUT))
        print_a_a(options.replays, 7200.0, (REQUIRED,), quantiles=(0.5, 0.99))
        print_a_a(options.replays, 7200.0, HARD)
        for noise in HARD:
            known = power.dispersion(_record(noise, 1800.0, 7), TestSettings())
            print(f"\nthe same with dispersion {known:.2f}, measured in a 30 min A/A recording:", end="")
            print_a_a(options.replays, 7200.0, (noise,), dispersion=known)
        print_detection(options.replays, (*MODELS, *HELD_OUT))
        print_detection(options.replays, (REQUIRED,), quantiles=(0.5, 0.99))
        print_product(100)
        print_plan(options.replays // 4, (REQUIRED, MODELS[2]), minutes=20, recordings=3)
        print_throughput(1_000_000)
    print_recorded(Path(__file__).parents[1] / "analysis" / "data")
    print(f"\ntook {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
