import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phases.analysis.evidence import BETS, WEIGHTS, QuantileEvidence, SymmetricEvidence

scores = st.floats(-50, 50)


@given(st.lists(scores, max_size=30), scores)
def test_evidence_is_a_martingale_under_symmetry(past, score):
    """Whatever happened before, the mean over the two signs of the next score is the evidence so far."""
    evidence = SymmetricEvidence(3, scales=1)
    for value in past:
        evidence.update(np.full(3, value))
    before = evidence.log_evidence()
    up, down = SymmetricEvidence(1, scales=1), SymmetricEvidence(1, scales=1)
    for value in past:
        up.update(np.array([value]))
        down.update(np.array([value]))
    up.update(np.array([score]))
    down.update(np.array([-score]))
    for side in (0, 1):
        mean = np.logaddexp(up.log_evidence()[side], down.log_evidence()[side]) - np.log(2)
        assert mean[0] == pytest.approx(before[side][0], abs=1e-6)


@given(st.lists(scores, min_size=1, max_size=80), st.integers(0, 79), st.floats(0, 20))
def test_evidence_is_monotone_in_every_score(values, which, more):
    """So the rejected candidate ratios form one side, and the interval is an interval."""
    low, high = SymmetricEvidence(1, min_blocks=4), SymmetricEvidence(1, min_blocks=4)
    for number, value in enumerate(values):
        low.update(np.array([value]))
        high.update(np.array([value + (more if number == which else 0.0)]))
    assert high.log_evidence()[0][0] >= low.log_evidence()[0][0] - 1e-9
    assert high.log_evidence()[1][0] <= low.log_evidence()[1][0] + 1e-9


def plain(values, *, scales, min_blocks):
    """The definition, without any streaming."""
    result = []
    for sign in (1, -1):
        least = np.inf
        for scale in range(scales):
            blocks = [sum(values[i : i + 2**scale]) for i in range(0, len(values) - 2**scale + 1, 2**scale)]
            if scale == 0 or len(blocks) >= min_blocks:
                wealth = [np.prod([1 + np.tanh(sign * bet * block) for block in blocks]) for bet in BETS]
                least = min(least, np.log(np.dot(WEIGHTS, wealth)))
        result.append(least)
    return result


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=70))
def test_streaming_equals_the_definition(values):
    evidence = SymmetricEvidence(1, scales=4, min_blocks=4)
    for value in values:
        evidence.update(np.array([value]))
    assert [side[0] for side in evidence.log_evidence()] == pytest.approx(
        plain(values, scales=4, min_blocks=4), abs=1e-6
    )


@given(st.lists(st.tuples(scores, st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_lanes_that_close_at_different_times_do_not_disturb_one_another(steps):
    together = SymmetricEvidence(2, min_blocks=3)
    alone = [SymmetricEvidence(1, min_blocks=3), SymmetricEvidence(1, min_blocks=3)]
    for score, first, second in steps:
        together.update(np.array([score, -score]), np.array([first, second]))
        for lane, (closed, value) in enumerate(((first, score), (second, -score))):
            if closed:
                alone[lane].update(np.array([value]))
    for side in (0, 1):
        assert together.log_evidence()[side] == pytest.approx([one.log_evidence()[side][0] for one in alone], abs=1e-9)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: rng.standard_cauchy(n),
        lambda rng, n: rng.choice([-1.0, 1.0], n) * rng.pareto(0.7, n),
        lambda rng, n: rng.choice([-1.0, 0.0, 1.0], n, p=[0.02, 0.96, 0.02]),
        lambda rng, n: rng.standard_normal(n) * np.exp(3 * rng.standard_normal()),
    ],
)
def test_false_alarms_at_any_look_stay_within_alpha(draw):
    """Symmetric scores of any tail, scaled by what came before; 4000 runs of 400 looks at alpha 5 %."""
    rng, lanes, alpha = np.random.default_rng(3), 4000, 0.05
    evidence = SymmetricEvidence(lanes)
    alarmed, memory = np.zeros((2, lanes), dtype=bool), np.ones(lanes)
    for _ in range(400):
        score = draw(rng, lanes) * memory
        memory = np.clip(0.9 * memory + 0.1 * np.abs(score), 0.05, 3.0)
        evidence.update(score)
        alarmed |= np.stack(evidence.log_evidence()) >= -np.log(alpha)
    # Three standard errors above the level: a broken martingale exceeds it many times over.
    assert (alarmed.mean(axis=1) <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / lanes)).all()


def test_a_lasting_difference_is_found_under_heavy_tails():
    rng = np.random.default_rng(4)
    evidence = SymmetricEvidence(200)
    for _ in range(300):
        evidence.update(rng.standard_t(3, 200) + 0.7)
    assert (evidence.log_evidence()[0] > np.log(100)).mean() > 0.95


def test_blocks_protect_against_dependence_shorter_than_themselves():
    """Scores in runs of eight with one sign: units alone would cry wolf, blocks do not."""
    rng, lanes = np.random.default_rng(5), 2000
    naive, guarded = SymmetricEvidence(lanes, scales=1), SymmetricEvidence(lanes)
    alarms = np.zeros((2, lanes), dtype=bool)
    for step in range(1600):
        if step % 8 == 0:
            sign = rng.choice([-1.0, 1.0], lanes)
        for evidence in (naive, guarded):
            evidence.update(0.3 * sign)
        if step > 8 * 16:  # from here on the block of eight is in force
            alarms[0] |= naive.log_evidence()[0] > np.log(100)
            alarms[1] |= guarded.log_evidence()[0] > np.log(100)
    assert alarms[0].mean() > 0.05
    assert alarms[1].mean() <= 0.02


def test_bounds_give_less_evidence_than_the_exact_score_both_ways():
    exact, bounded = SymmetricEvidence(1), SymmetricEvidence(1)
    for value in np.random.default_rng(6).standard_normal(100):
        exact.update(np.array([value]))
        bounded.update(np.array([value - 0.2]), high=np.array([value + 0.3]))
    for side in (0, 1):
        assert bounded.log_evidence()[side][0] <= exact.log_evidence()[side][0]


def test_known_dispersion_tempers_the_evidence():
    plain_evidence, tempered = SymmetricEvidence(1), SymmetricEvidence(1, dispersion=3.0)
    for _ in range(40):
        plain_evidence.update(np.array([1.0]))
        tempered.update(np.array([1.0]))
    assert 0 < tempered.log_evidence()[0][0] < plain_evidence.log_evidence()[0][0] / 2


def quantile_evidence(scores: np.ndarray) -> QuantileEvidence:
    """Fed with scores of three levels, shape (units, 3, lanes)."""
    evidence = QuantileEvidence(scores.shape[2])
    for score in scores:
        evidence.update_levels(score, np.ones(scores.shape[2], dtype=bool))
    return evidence


def test_the_neighbourhood_adds_to_what_the_quantile_shows_and_nothing_to_a_pass():
    rng, shift = np.random.default_rng(7), 0.4
    scores = rng.standard_normal((60, 3, 200)) + shift
    both, alone = quantile_evidence(scores), SymmetricEvidence(200)
    for score in scores:
        alone.update(score[1])
    assert np.median(both.log_evidence()[0]) > 1.3 * np.median(alone.log_evidence()[0])
    assert both.log_evidence()[1] == pytest.approx(alone.log_evidence()[1])
    assert both.total == pytest.approx(alone.total)


def test_what_happens_around_a_quantile_cannot_fail_it_alone():
    """The quantile is where it should be, its neighbourhood far off: at most √alpha, here 10 %, alarms."""
    rng, lanes, alpha = np.random.default_rng(8), 2000, 0.01
    evidence, alarmed = QuantileEvidence(lanes), np.zeros(lanes, dtype=bool)
    for _ in range(300):
        evidence.update_levels(
            rng.standard_normal((3, lanes)) + np.array([[2.0], [0.0], [2.0]]), np.ones(lanes, dtype=bool)
        )
        alarmed |= evidence.log_evidence()[0] >= -np.log(alpha)
    assert 0.01 < alarmed.mean() <= np.sqrt(alpha) + 3 * np.sqrt(0.1 * 0.9 / lanes)


def test_equal_arms_seldom_alarm_through_the_neighbourhood():
    """Three levels of the same requests, so correlated; 4000 runs of 300 looks at alpha 5 %."""
    rng, lanes, alpha = np.random.default_rng(9), 4000, 0.05
    evidence, alarmed = QuantileEvidence(lanes), np.zeros((2, lanes), dtype=bool)
    for _ in range(300):
        shared = rng.standard_normal(lanes)
        evidence.update_levels(shared + 0.5 * rng.standard_normal((3, lanes)), np.ones(lanes, dtype=bool))
        alarmed |= np.stack(evidence.log_evidence()) >= -np.log(alpha)
    assert (alarmed.mean(axis=1) <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / lanes)).all()


def test_the_mixture_is_a_mean():
    assert WEIGHTS.sum() == pytest.approx(1.0) and len(WEIGHTS) == len(BETS)
