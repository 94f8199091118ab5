"""The CUDA backend's seam in the serving environment, without a GPU: see cuda_seam.py for what is run there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.conftest import KERNEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def report(serving_environment) -> dict:
    done = subprocess.run(
        [str(serving_environment.python), str(Path(__file__).with_name("cuda_seam.py"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(KERNEL), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_layouts_reach_the_kernel_unchanged(report, mode):
    assert report[f"{mode} error"] < 1e-5
    assert report[f"{mode} chain error"] < 1e-5


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_forward_is_counted_once_and_planned_once(report, mode):
    assert report[f"{mode} count"] == 1
    assert report[f"{mode} plans"] == 1
    assert report[f"{mode} engine calls"] == 0


def test_prefill_and_the_incumbent_go_on_to_the_engine(report):
    assert report["handed on"] == 2
    assert report["incumbent_calls"] == 3
