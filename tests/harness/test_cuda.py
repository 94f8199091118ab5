"""The harness on a GPU; skipped where there is none."""

import pytest

from phases.harness import benchmark, ceilings, parity
from tests.harness import kernels
from tests.harness.test_benchmark import QUICK

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_ceilings():
    found = {ceiling.kind: ceiling.value for ceiling in ceilings.measure("cuda")}
    assert set(found) == {"read", "copy", "gather", "flops_float32", "flops_bfloat16", "flops_float16"}
    assert found["gather"] < 1.1 * found["read"] and found["flops_bfloat16"] > found["flops_float32"]


def test_graph_replay_times_an_honest_kernel():
    assert all(record.ok for record in parity.prove(kernels.five_line(), "cuda"))
    for record in benchmark.measure(kernels.five_line(), "cuda", (), (), effort=QUICK):
        assert record.samples and record.detail["method"] == "graph replay" and record.detail["cold"]


@pytest.mark.parametrize(
    "cheat", ["caches_by_pointer", "skips_half", "ignores_mask", "mutates_inputs", "random_bits", "returns_nan"]
)
def test_cheats_are_caught(cheat):
    (record,) = parity.prove(kernels.cheats(), "cuda", variants=[cheat], cases=["q5/*"])
    assert not record.ok
    (timing,) = benchmark.measure(kernels.cheats(), "cuda", (), (), variants=[cheat], effort=QUICK)
    assert not timing.samples
