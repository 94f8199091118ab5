import numpy as np
import pytest

from phases.analysis import power
from phases.analysis.records import ArmRecords
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError
from tests.analysis.streams import arm

SETTINGS = TestSettings(quantile=0.5)


def recording(seed=1, *, seconds=600.0, rate=10.0, own=0.0):
    rng = np.random.default_rng(seed)
    arms = []
    for _ in range(2):
        times, values = arm(rng, seconds=seconds, rate=rate)
        if own:  # a load of this arm alone that changes every 20 s
            values = values * np.exp(own * rng.standard_normal(int(seconds / 20) + 1))[(times / 20).astype(int)]
        arms.append(ArmRecords(times, values, np.full(len(times), 200)))
    return power.Recording.of(*arms, SETTINGS)


def test_a_larger_slowdown_takes_less_time():
    found = recording()
    times = [power.duration(found, SETTINGS, ratio, replays=60, longest=3600) for ratio in (1.15, 1.3, 2.0)]
    assert times[0] > times[1] > times[2] > 0


def test_an_equal_canary_needs_longer_than_a_grossly_slow_one_and_the_margin_itself_for_ever():
    found = recording()
    assert power.duration(found, SETTINGS, 1.0, replays=60) > power.duration(found, SETTINGS, 2.0, replays=60)
    assert power.duration(found, SETTINGS, 1.05, replays=60, longest=1200) is None


def test_longer_bakes_and_more_traffic_detect_less():
    found = recording()
    assert power.detectable(found, SETTINGS, 1800, replays=60) < power.detectable(found, SETTINGS, 120, replays=60)
    slow, fast = (power.duration(found, SETTINGS, 1.3, rate=rate, replays=60, longest=7200) for rate in (2.0, 40.0))
    assert fast < slow
    assert power.detectable(found, SETTINGS, 12, replays=60) is None


def test_the_inverse_agrees():
    found = recording()
    seconds = power.duration(found, SETTINGS, 1.3, replays=100)
    assert power.detectable(found, SETTINGS, seconds, replays=100) <= 1.3


def test_dispersion_is_one_for_independent_requests_and_more_for_an_arm_with_a_load_of_its_own():
    assert np.median([power.dispersion(recording(seed), SETTINGS) for seed in range(5)]) == 1.0
    assert power.dispersion(recording(own=0.3, seconds=1200), SETTINGS) > 1.5


def test_noise_of_one_arm_costs_time():
    quiet, noisy = recording(seconds=1200), recording(own=0.3, seconds=1200)
    times = [power.duration(found, SETTINGS, 1.4, replays=60, longest=7200) for found in (quiet, noisy)]
    assert times[1] is None or times[1] > times[0]


def test_too_little_to_resample_is_refused():
    with pytest.raises(AnalysisError, match="200"):
        recording(seconds=5)
    with pytest.raises(AnalysisError, match="overlap"):
        recording(seconds=60)
    with pytest.raises(AnalysisError):
        power.duration(recording(), SETTINGS, 0.0)
