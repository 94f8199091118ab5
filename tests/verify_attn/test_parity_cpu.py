"""The parity grid on the CPU, and what holds for every run: bits of reruns, threads, instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from verify_attn import cases

from tests.verify_attn.helpers import TOLERANCE, error, of_case, problem, run

GRID = [c for c in cases.nasty("float32") + cases.nasty("bfloat16") + cases.small_models("float32") + cases.small_models("bfloat16")]


def _id(case: dict) -> str:
    return f"{case['name']}/{case['dtype']}"


@pytest.mark.parametrize("case", GRID, ids=_id)
def test_cpu_matches_float64_and_reruns_are_identical(case):
    p = of_case(case)
    live = sum(case["params"]["q"])
    first = run(p)
    assert error(p, live) <= TOLERANCE[p.q.dtype]
    assert first[0][live:].isnan().all() and first[1][live:].isnan().all(), "padding rows were written"
    again = run(p)
    assert torch.equal(first[0][:live], again[0][:live]) and torch.equal(first[1][:live], again[1][:live])


@pytest.mark.parametrize("variant", ["naive", "torch_gemm"])
@pytest.mark.parametrize("case", [c for c in GRID if c["dtype"] == "float32" and not cases.full(c)["chunk"]], ids=_id)
def test_torch_variants_match_float64(variant, case):
    p = of_case(case)
    run(p, variant)
    assert error(p, sum(case["params"]["q"])) <= TOLERANCE[torch.float32]


def test_half_precision():
    p = problem([9, 17], [300, 33], dtype="float16", page=16)
    run(p)
    assert error(p) <= TOLERANCE[torch.float16]


def test_any_number_of_splits_gives_the_same_numbers():
    p = problem(9, 3000, heads=8)
    run(p, num_splits=1)
    for splits in (2, 7, 64, 5000):
        run(p, num_splits=splits, threads=3)
        assert error(p) <= TOLERANCE[torch.float32], splits


PROGRAM = """
import hashlib, sys, torch
from tests.verify_attn.helpers import problem, run, error
from verify_attn import cpu
worst = 0.0
for params in ({}, {"dtype": "bfloat16"}, {"dtype": "float16", "page": 16}, {"latent": 20, "rope": 7}, {"chunk": 128}):
    p = problem([9, 33], [300, 70], heads=8, **params)
    run(p)
    worst = max(worst, error(p) / {torch.float32: 2e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}[p.q.dtype])
print(cpu.isa(), worst)
"""


@pytest.mark.parametrize("isa", ["v4", "v3", "portable"])
def test_every_instruction_set_of_the_object(isa):
    flags = open("/proc/cpuinfo").read() if os.path.exists("/proc/cpuinfo") else ""
    if (isa == "v4" and "avx512vl" not in flags) or (isa == "v3" and "avx2" not in flags):
        pytest.skip(f"this processor has no {isa}")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "VERIFY_ATTN_ISA": isa, "PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    used, worst = done.stdout.split()
    assert used == isa and float(worst) <= 1.0


def test_an_instruction_set_the_processor_lacks_is_refused():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "VERIFY_ATTN_ISA": "v9", "PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True, timeout=400)
    assert done.returncode != 0 and "VERIFY_ATTN_ISA names an instruction set this processor does not have" in done.stderr
