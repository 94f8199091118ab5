"""Mask layouts, head sizes and dtypes of the CPU backend; see cpu_layouts.py for what is run in the serving environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.sglang.conftest import KERNEL

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


def test_kernel_and_torch_agree_on_every_layout(serving_environment):
    done = subprocess.run(
        [str(serving_environment.python), str(Path(__file__).with_name("cpu_layouts.py"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(KERNEL), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 12
    for case, error in report.items():
        assert error < (1e-5 if "float32" in case else 1e-2), (case, error)
