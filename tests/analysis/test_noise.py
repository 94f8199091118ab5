"""False alarms of the quantile's test under every noise model of the benchmark, small; `bench_analysis.py` has more."""

import numpy as np

from phases.analysis.scores import neighbourhood
from tests.benchmarks.bench_analysis import ALPHA, MODELS, Simulation


def test_false_alarms_stay_within_alpha_under_every_noise_model():
    """Equal arms with a margin of zero (the truth lies on the margin) and of 5 %, looked at 60 times."""
    replays, edge, equal = 40, [], []
    for seed, noise in enumerate(MODELS):
        done = Simulation(
            noise, ratio=1.0, horizon=600.0, replays=replays, margins=(0.05, 0.0), seed=seed, rivals=False
        ).run()
        equal.append(np.isfinite(done.times[0.05].fail).sum())
        edge.append(np.isfinite(done.times[0.0].fail).sum())
    total = replays * len(MODELS)
    assert sum(equal) <= 1
    assert sum(edge) <= ALPHA * total + 3 * np.sqrt(ALPHA * total), dict(
        zip([m.name for m in MODELS], edge, strict=True)
    )
    assert max(edge) <= 4  # of 40: one model by itself (a probability of 1e-4 at alpha)


def test_a_slowdown_is_found_under_the_first_noise_model():
    done = Simulation(MODELS[0], ratio=1.3, horizon=400.0, replays=40, seed=1, rivals=False).run()
    assert np.isfinite(done.times[0.05].fail).mean() > 0.95


def test_the_neighbourhood_of_a_quantile_reaches_to_four_times_its_odds():
    for level in (0.5, 0.95, 0.99):
        odds = [near / (1 - near) for near in neighbourhood(level)]
        assert np.allclose(odds, [odds[1] / 4, odds[1], odds[1] * 4])
        assert neighbourhood(level)[1] == level
