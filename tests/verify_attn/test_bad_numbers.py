"""The C interface, called without the Python checks: numbers that are no batch give its error code and a reason, and end no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verify_attn import build, cpu

from tests.verify_attn.helpers import has_nvcc

TOP = Path(__file__).parents[2]
NUMBERS = {"heads": -1, "max_q": -9, "streams": -1, "tokens": -3, "max_prefix": -1, "page_size": 0, "latent_dim": 0, "rope_dim": -64, "num_splits": -2, "chunk": -128}
REASONS = ("streams, tokens, heads, max_q or max_prefix is negative", "streams, tokens, max_q or max_prefix is negative", "a dimension is not positive",
           "num_splits or chunk is negative")  # fmt: skip
# In a process of its own, since a division by zero ends it. A line for each number: what _refuse says, what _run returns, its error.
ASK = """
import sys
from verify_attn import abi
from tests.verify_attn.helpers import problem

path, name, *asked = sys.argv[1:]
variant = abi.Variant(abi.open_library(path), name)
for field, value in (pair.split("=") for pair in asked):
    p = problem(9, 200, dtype="bfloat16", heads=8, latent=512, rope=64)
    params = abi.params_of(p, threads=2)
    setattr(params, field, int(value))
    variant.workspace_bytes(params)  # of no meaning then, but it returns
    print(field, variant.refuse(params), variant._run(params), variant._error().decode(), sep="|", flush=True)
"""


def ask(path: str, name: str, numbers: dict[str, int]) -> list[list[str]]:
    argv = [sys.executable, "-c", ASK, path, name, *(f"{field}={value}" for field, value in numbers.items())]
    paths = [str(TOP), str(TOP / "kernels" / "verify_attn")]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, timeout=200, check=False)
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [row[0] for row in rows] == list(numbers), (done.returncode, done.stdout, done.stderr)
    return rows


def test_the_cpu_kernel_refuses_them_and_does_not_run() -> None:
    for field, refusal, status, error in ask(cpu.built().path, "cpu", {**NUMBERS, "heads": 0}):
        assert refusal in REASONS and (status, error) == ("1", refusal), field


def test_the_cpu_kernel_refuses_masks_that_it_would_read_past() -> None:
    for numbers in ({"mask_kind": 9}, {"mask_kind": -1}):
        [(_, refusal, status, error)] = ask(cpu.built().path, "cpu", numbers)
        assert (refusal, status, error) == ("mask_kind is none of the four", "1", refusal)
    [(_, refusal, status, error)] = ask(cpu.built().path, "cpu", {"mask_words": 0})
    assert (refusal, status, error) == ("a bit mask row is shorter than max_q", "1", refusal)


def test_the_cpu_kernel_does_not_run_past_the_masks_it_made_room_for() -> None:
    [(_, refusal, status, error)] = ask(cpu.built().path, "cpu", {"max_q": 0})
    assert (refusal, status, error) == ("", "1", "stream 0 has more than max_q = 0 queries")


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="no nvcc")
@pytest.mark.parametrize("name", ["naive", "per_head", "tensor_core", "hopper", "hopper_rows"])
def test_cuda_kernels_refuse_them_and_launch_nothing(name: str) -> None:
    symbol = {"naive": "cuda_naive"}.get(name, name)
    for field, refusal, status, error in ask(build.build(name, ("sm_90a",) if name.startswith("hopper") else ("sm_90",)).path, symbol, NUMBERS):
        assert refusal in REASONS and (status, error) == ("1", f"{symbol}: {refusal}"), field
