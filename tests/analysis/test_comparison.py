import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phases.analysis import Comparison, TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from tests.analysis.streams import arm


def feed(comparison, *, ttft=1.0, itl=1.0, bad=0.0, seconds=400.0, seed=1):
    rng = np.random.default_rng(seed)
    requests = []
    for name in ("canary", "control"):
        slow = (ttft, itl) if name == "canary" else (1.0, 1.0)
        times, first = arm(rng, ratio=slow[0], seconds=seconds)
        _, between = arm(rng, ratio=slow[1], seconds=seconds, rate=12.0)
        for t, a, b in zip(times, first, between, strict=False):
            requests.append((t, name, {"ttft": a, "itl": b}, 500 if name == "canary" and rng.random() < bad else 200))
    requests.sort(key=lambda request: request[0])
    done = 0
    for now in np.arange(10.0, seconds + 1, 10.0):
        while done < len(requests) and requests[done][0] < now:
            t, name, metrics, status = requests[done]
            comparison.observe(name, t, metrics if status == 200 else {}, status)
            done += 1
        joint = comparison.look(float(now))
        if joint.verdict is Verdict.FAIL:
            break
    return joint


TESTS = (TestSettings(metric="ttft", quantile=0.5, margin=0.2), TestSettings(metric="itl", quantile=0.5, margin=0.2))


def by_metric(joint):
    return {decision.metric: decision.verdict for decision in joint.decisions}


def test_equal_arms_pass_only_when_every_metric_does():
    joint = feed(Comparison(TESTS))
    assert joint.verdict is Verdict.PASS and set(by_metric(joint)) == {"ttft", "itl", "5xx", "4xx"}
    short = feed(Comparison(TESTS), seconds=30.0)
    assert short.verdict is None


@pytest.mark.parametrize(("how", "metric"), [({"ttft": 2.0}, "ttft"), ({"itl": 2.0}, "itl"), ({"bad": 0.1}, "5xx")])
def test_one_bad_metric_fails_the_canary(how, metric):
    joint = feed(Comparison(TESTS), **how)
    assert joint.verdict is Verdict.FAIL and by_metric(joint)[metric] is Verdict.FAIL


def test_alpha_is_shared():
    one, many = Comparison(TESTS[:1], errors=()), Comparison(TESTS, errors=("5xx", "4xx"))
    for comparison, confidence in ((one, 0.98), (many, 0.995)):
        assert comparison.look(10.0).decisions[0].confidence == pytest.approx(confidence)


def test_the_end_leaves_nothing_open():
    assert Comparison(TESTS).finish(100.0).verdict is Verdict.INCONCLUSIVE


def test_nothing_to_compare_is_an_error():
    with pytest.raises(AnalysisError, match="nothing"):
        Comparison((), errors=())


@pytest.mark.slow
def test_the_benchmark_runs():
    script = Path(__file__).parents[1] / "benchmarks" / "bench_analysis.py"
    found = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    for heading in (
        "A/A, looked at",
        "Detection of a true slowdown",
        "PASS of an equal canary",
        "Throughput",
        "through SequentialTest",
    ):
        assert heading in found.stdout
