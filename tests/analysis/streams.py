"""Small simulated streams for the tests."""

from __future__ import annotations

import numpy as np

from phases.analysis import Decision, SequentialTest, TestSettings


def arm(rng, *, ratio=1.0, rate=10.0, seconds=600.0, start=0.0, sigma=0.5):
    """Completion times and lognormal latencies around 0.1 s, shape (n,) each."""
    times = np.sort(rng.uniform(start, start + seconds, rng.poisson(rate * seconds)))
    return times, 0.1 * ratio * np.exp(sigma * rng.standard_normal(len(times)))


def run(settings: TestSettings, canary, control, *, until: float, first: float = 0.0) -> list[Decision]:
    """Feed both arms window by window, look after each, stop at FAIL."""
    test, looks = SequentialTest(settings), []
    for now in np.arange(first + settings.window, until + settings.window / 2, settings.window):
        for name, (times, values) in (("canary", canary), ("control", control)):
            part = (times >= now - settings.window) & (times < now)
            test.observe_many(name, times[part], values[part])
        looks.append(test.look(float(now)))
    return looks
