import numpy as np
import pytest

from phases.analysis.scores import MeanScore, QuantileScore
from phases.analysis.sketch import FadingHistogram

ALPHA = 0.02


def alarms(score, fold, cells):
    """Whether the evidence ever exceeds 1/alpha, for and against."""
    hit = np.zeros((2, len(score.evidence.units)), dtype=bool)
    for _ in range(cells):
        fold()
        hit |= np.stack(score.evidence.log_evidence()) >= -np.log(ALPHA)
    return hit.mean(axis=1)


@pytest.mark.parametrize(("level", "share"), [(0.5, 1.0), (0.95, 1.0), (0.95, 1 / 7), (0.95, 5.0), (0.99, 1.0)])
def test_equal_arms_seldom_alarm_whatever_the_quantile_and_the_traffic_split(level, share):
    rng, lanes = np.random.default_rng(1), 1500
    sketch = FadingHistogram(lanes, width=0.05, floor=1e-2, ceiling=1e2)
    score = QuantileScore(level, lanes, histograms=lanes, sketch=sketch)

    def fold():
        # Exceedances by their binomial law: a threshold at the true quantile, load hidden in its level.
        n1, n0 = rng.poisson(25 * share, lanes), rng.poisson(25, lanes)
        over = np.clip((1 - level) * np.exp(0.3 * rng.standard_normal(lanes)), 0, 1)
        score.fold(nested(n1, over), n1, nested(n0, over), n0)

    def nested(n, over):
        lower, middle, upper = (np.clip((1 - near) / (1 - level) * over, 0, 1) for near in score.levels)
        widest = rng.binomial(n, lower)
        own = rng.binomial(widest, middle / lower)
        return np.stack([widest, own, rng.binomial(own, upper / middle)])

    score.set_threshold(np.zeros((3, lanes)))
    assert (alarms(score, fold, 400) <= ALPHA + 3 * np.sqrt(ALPHA / lanes)).all()


def test_the_threshold_waits_for_enough_of_the_control_and_never_sees_its_own_cell():
    score = QuantileScore(0.95, 3)
    score.learn(np.log(np.full(19, 0.1)), 1.0)
    assert np.isnan(score.log_threshold).all()
    score.fold(np.full((3, 3), 5), np.array([100]), np.full((3, 1), 5), np.array([100]))
    assert score.evidence.units.tolist() == [0, 0, 0]
    score.learn(np.log(np.full(19, 0.1)), 1.0)
    assert np.exp(score.log_threshold[:, 0]) == pytest.approx([0.1] * 3, rel=0.02)


def test_an_open_unit_is_forgotten_when_pairing_broke():
    score = QuantileScore(0.5, 1)
    score.set_threshold(np.zeros((3, 1)))
    one, none = np.ones((3, 1)), np.zeros((3, 1))
    score.fold(one, np.array([1]), none, np.array([1]))
    score.drop_open_unit()
    score.fold(none, np.array([2]), one, np.array([2]))
    assert score.evidence.units[0] == 1 and score.evidence.total[0] == -0.5


@pytest.mark.parametrize("heavy", [False, True])
def test_the_mean_of_equal_arms_seldom_alarms(heavy):
    wrong, runs = np.zeros(2), 150
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        score, load = MeanScore(np.zeros(1)), 0.0

        def fold():
            nonlocal load
            load = 0.9 * load + 0.2 * rng.standard_normal()
            n1, n0 = rng.poisson(6, 2)
            draw = (lambda n: 0.5 * rng.standard_t(2, n)) if heavy else (lambda n: 0.5 * rng.standard_normal(n))
            score.fold((load + draw(n1)).sum(), n1, (load + draw(n0)).sum(), n0)

        wrong += alarms(score, fold, 120)
    assert (wrong <= ALPHA * runs + 3 * np.sqrt(ALPHA * runs)).all()
