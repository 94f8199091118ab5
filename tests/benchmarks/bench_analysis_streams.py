"""Simulated request streams of two arms, many replays side by side, for `bench_analysis.py`.

A stream is made window by window: `window(k)` returns, for each arm, the replay each request belongs to, its time inside
the window and its natural-log latency in log seconds. Everything an arm shares with the other (load, arrival rate) is drawn
once per replay; everything else is drawn per arm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

WINDOW = 10.0
CELLS = 4


@dataclass(frozen=True)
class Noise:
    """One noise model.

    Attributes:
        name: as printed.
        rate: requests per second of an arm.
        sigma: sd of the log latency of a request.
        load_sd, load_tau: AR(1) log load shared by both arms: sd, and time constant in seconds.
        arm_sd, arm_tau: the same, of each arm by itself.
        tail: share of requests multiplied by a Pareto variable of index 1.2 (no finite variance).
        long: share of requests that take 3.3 times as long (e to the 1.2): a mixture of two kinds.
        batch_sd: sd of the log delay that all requests of an arm's one-second batch share.
        burst: factor on rate of both arms in bursts (a tenth of the windows, in runs of about three).
        diurnal: amplitude of a two-hour wave in log load, with as much linear drift on top.
        stall: factor on latency in an arm's own 3 s stalls, one in five minutes on average.
        restart: one arm is silent for 40 s at a random time and five times slower in the 20 s after it.
        canary_share: canary's request rate as a fraction of the control's.
    """

    name: str
    rate: float = 10.0
    sigma: float = 0.5
    load_sd: float = 0.2
    load_tau: float = 60.0
    arm_sd: float = 0.0
    arm_tau: float = 30.0
    tail: float = 0.0
    long: float = 0.0
    batch_sd: float = 0.0
    burst: float = 1.0
    diurnal: float = 0.0
    stall: float = 1.0
    restart: bool = False
    canary_share: float = 1.0


REQUIRED = Noise("lognormal, AR(1) load")
MODELS = (
    REQUIRED,
    Noise("the same, 1 req/s", rate=1.0),
    Noise("the same, 50 req/s", rate=50.0),
    Noise("heavy tail (Pareto 1.2)", tail=0.1),
    Noise("batches of 1 s", batch_sd=0.5),
    Noise("bursts x5 in both arms", burst=5.0, load_sd=0.3, load_tau=20.0),
    Noise("diurnal x4 and drift", diurnal=0.7),
    Noise("stalls of one arm", stall=5.0),
    Noise("restart of one arm", restart=True),
    Noise("canary 1 : control 7", rate=35.0, canary_share=1 / 7),
    Noise("all of it", tail=0.05, batch_sd=0.3, burst=3.0, diurnal=0.3, stall=3.0),
)
# Not exchangeable even over half a minute: what a noisy neighbour of one arm does. Shown with and without `dispersion`.
HARD = (
    Noise("own AR(1), sd 5 %, 30 s", arm_sd=0.05),
    Noise("own AR(1), sd 10 %, 30 s", arm_sd=0.10),
)

# Made after the method was chosen, so hard that the one before it (each level by itself, nine bets) took 100, 240 and 170 s for 1.3x.
HELD_OUT = (
    Noise("held out: lognormal", sigma=0.62),
    Noise("held out: mixture", sigma=0.68, load_sd=0.0, long=0.2),
    Noise("held out: bursty", sigma=0.73, rate=7.0, load_sd=0.35, load_tau=20.0, burst=5.0),
)


class Stream:
    """Replays of one noise model.

    Args:
        noise: the model.
        replays: how many side by side.
        horizon: seconds one replay lasts.
        ratio: true slowdown of the canary.
        seed: of the generator.
    """

    def __init__(self, noise: Noise, replays: int, horizon: float, ratio: float, seed: int) -> None:
        self.noise, self.replays, self.ratio = noise, replays, ratio
        self._rng = np.random.default_rng(seed)
        draw = self._rng.standard_normal
        self._load, self._own = draw(replays) * noise.load_sd, draw((2, replays)) * noise.arm_sd
        self._bursting = self._rng.random(replays) < 0.1
        self._phase = self._rng.random(replays)
        self._stall_until = np.full((2, replays), -1.0)
        self._down = self._rng.uniform(120.0, max(121.0, min(horizon, 7200.0) - 120.0), replays)
        self._down_arm = self._rng.integers(0, 2, replays)

    def window(self, number: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Requests of window `number` for canary and control: (replay, seconds inside the window, log latency)."""
        noise, rng, start = self.noise, self._rng, number * WINDOW
        self._load = _ar1(self._load, noise.load_sd, noise.load_tau, rng)
        self._own = _ar1(self._own, noise.arm_sd, noise.arm_tau, rng)
        flip = rng.random(self.replays)
        self._bursting = np.where(self._bursting, flip > 1 / 3, flip < 1 / 27)
        wave = noise.diurnal * (np.sin(2 * np.pi * (start / 7200.0 + self._phase)) + start / 7200.0)
        common = self._load + wave + np.log(noise.burst) * 0.3 * self._bursting
        rate = noise.rate * np.where(self._bursting, noise.burst, 1.0)
        return [self._arm(arm, start, common, rate) for arm in (0, 1)]

    def _arm(self, arm: int, start: float, common: np.ndarray, rate: np.ndarray):
        noise, rng = self.noise, self._rng
        share = noise.canary_share if arm == 0 else 1.0
        lane = np.repeat(np.arange(self.replays), rng.poisson(rate * share * WINDOW))
        inside = rng.random(len(lane), dtype=np.float32) * np.float32(WINDOW)
        base = common + self._own[arm] + (np.log(self.ratio) if arm == 0 else 0.0)
        value = noise.sigma * rng.standard_normal(len(lane), dtype=np.float32) + base.astype(np.float32)[lane]
        if noise.long:
            value = value + np.where(rng.random(len(lane), dtype=np.float32) < noise.long, np.float32(1.2), np.float32(0))
        if noise.tail:
            hit = rng.random(len(lane), dtype=np.float32) < noise.tail
            value = value + np.where(hit, rng.standard_exponential(len(lane), dtype=np.float32) / np.float32(1.2), np.float32(0))
        if noise.batch_sd:
            delay = rng.standard_normal((self.replays, int(WINDOW)), dtype=np.float32) * np.float32(noise.batch_sd)
            value = value + delay[lane, inside.astype(np.int64)]
        if noise.stall > 1:
            value = value + self._stalled(arm, start, lane, inside)
        if noise.restart:
            since = start + inside - np.where(self._down_arm == arm, self._down, np.inf)[lane]
            value = value + np.where((since >= 40) & (since < 60), np.float32(np.log(5.0)), np.float32(0))
            alive = (since < 0) | (since >= 40)
            lane, inside, value = lane[alive], inside[alive], value[alive]
        return lane, inside, value

    def _stalled(self, arm: int, start: float, lane: np.ndarray, inside: np.ndarray) -> np.ndarray:
        begins = self._rng.random(self.replays) < WINDOW / 300.0
        at = np.where(begins, start + self._rng.random(self.replays) * WINDOW, -1e9)
        previous = self._stall_until[arm]
        now = start + inside
        during = ((now >= at[lane]) & (now < at[lane] + 3.0)) | (now < previous[lane])
        self._stall_until[arm] = np.where(begins, at + 3.0, previous)
        return np.where(during, np.float32(np.log(self.noise.stall)), np.float32(0))

    def ignored(self, start: float, settle: float) -> np.ndarray:
        """Replays in which a cell starting at `start` is left out, as `cells.CellPairs` would: silence and settling."""
        if not self.noise.restart:
            return np.zeros(self.replays, dtype=bool)
        return (start >= self._down + 40.0 - WINDOW / CELLS) & (start < self._down + 40.0 + settle)


def _ar1(state: np.ndarray, sd: float, tau: float, rng: np.random.Generator) -> np.ndarray:
    if not sd:
        return state
    keep = np.exp(-WINDOW / tau)
    return keep * state + np.sqrt(1 - keep * keep) * sd * rng.standard_normal(state.shape)


Make = Callable[[int, float, float, int], Stream]
