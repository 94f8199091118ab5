"""What the host decides for the CUDA variants before anything is launched; no GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verify_attn import InputError, RefusedError, build, cuda

from tests.verify_attn.helpers import has_nvcc

TOP = Path(__file__).parents[2]
# What _run says of a workspace that is missing, too small, and not aligned. In a process of its own; nothing is launched.
ASK = """
import sys
from verify_attn import abi
from tests.verify_attn.helpers import problem

path, name = sys.argv[1:]
variant = abi.Variant(abi.open_library(path), name)
params = abi.params_of(problem(9, 200, dtype="bfloat16", heads=8, latent=512, rope=64))
need = variant.workspace_bytes(params)
print(need > 65536)
for params.workspace, params.workspace_bytes in ((None, need), (4096, need - 1), (4096 + 8, need)):
    print(variant._run(params), variant._error().decode().replace(str(need), "NEED").replace(str(need - 1), "LESS"))
"""


@pytest.mark.parametrize(
    ("workspace", "why"),
    [
        (torch.zeros(64, dtype=torch.uint8, device="meta"), "workspace is on meta but q on cpu"),
        (torch.zeros(8, 8, dtype=torch.uint8).T[:, :4], "workspace is not contiguous"),
        (torch.zeros(80, dtype=torch.uint8)[8:], "does not start at a multiple of 16 bytes"),
        (torch.zeros(63, dtype=torch.uint8), "workspace has 63 bytes, this call needs 64"),
    ],
)
def test_a_workspace_that_cannot_be_used_is_refused(workspace, why):
    with pytest.raises(InputError, match=why):
        cuda.check_workspace(workspace, torch.device("cpu"), 64)


def test_a_workspace_of_any_dtype_counts_in_bytes():
    cuda.check_workspace(torch.zeros(16, dtype=torch.float32), torch.device("cpu"), 64)


@pytest.fixture
def kernels(monkeypatch):
    """Variants that refuse by the numbers they are asked with, as the real ones do."""
    limits = {"first": ("max_prefix", 70_000), "second": ("streams", 1 << 20)}
    monkeypatch.setattr(cuda, "variants", lambda: limits)

    def refusal(name, problem, **changed):
        field, most = limits[name]
        return f"over {most} {field}" if {**vars(problem), **changed}[field] > most else ""

    monkeypatch.setattr(cuda, "_refusal", refusal)


def test_the_invariant_modes_kernel_does_not_depend_on_the_batch(kernels):
    def batch(streams: int, prefix: int) -> SimpleNamespace:
        return SimpleNamespace(chunk=64, streams=streams, max_prefix=prefix)

    assert {cuda.choose(batch(streams, prefix)) for streams in (1, 500) for prefix in (0, 1000, 70_000)} == {("first", 0)}
    with pytest.raises(RefusedError, match="first: over 70000 max_prefix. In batch-invariant mode auto takes no other variant"):
        cuda.choose(batch(2, 70_001))


def test_the_invariant_mode_skips_a_kernel_that_does_no_batch(kernels, monkeypatch):
    inner = cuda._refusal
    monkeypatch.setattr(cuda, "_refusal", lambda name, problem, **changed: "not this dtype" if name == "first" else inner(name, problem, **changed))
    assert cuda.choose(SimpleNamespace(chunk=64, streams=1, max_prefix=100_000)) == ("second", 0)


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="no nvcc")
@pytest.mark.parametrize("name", ["per_head", "tensor_core", "hopper", "hopper_rows"])
def test_kernels_check_the_workspace_themselves_and_leave_its_header_to_the_counters(name):
    built = build.build(name, ("sm_90a",) if name.startswith("hopper") else ("sm_90",))
    done = subprocess.run([sys.executable, "-c", ASK, built.path, name], env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TOP), str(TOP / "kernels/verify_attn")))},
                          capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert done.stdout.splitlines() == [
        "True",
        f"1 {name}: workspace of NEED bytes, needs NEED",
        f"1 {name}: workspace of LESS bytes, needs NEED",
        f"1 {name}: workspace must be aligned to 16 bytes",
    ], (done.stdout, done.stderr)
