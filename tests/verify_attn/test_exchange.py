"""verify_attn in flashinfer-bench's words: the reference says what ours says, and an exported Solution's main.py calls the kernel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verify_attn
from verify_attn import cases, contract

CASES = [
    cases.make([9, 1, 17], [70, 0, 5], heads=2, dtype="float32"), cases.make([7, 7], [0, 50], heads=3, dtype="float32", tree="blind"),
    cases.make([9, 17], [100, 33], heads=2, dtype="float32", page=16), cases.make(33, 40, heads=2, dtype="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_reference_is_the_contracts_own(case):
    made = contract.definition(case)
    inputs = contract.inputs(case, 5, "cpu")
    scope = {}
    exec(made["definition"]["reference"], scope)
    out, lse = scope["run"](*[inputs[name] for name in made["definition"]["inputs"]])
    exact = contract.reference(case, inputs)
    torch.testing.assert_close(out.double(), exact["out"], rtol=2e-2 if case["dtype"] == "bfloat16" else 1e-5, atol=1e-2 if case["dtype"] == "bfloat16" else 1e-5)
    torch.testing.assert_close(lse.double(), exact["lse"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_axes_and_stored_tensors_fit_the_inputs(case):
    made, inputs = contract.definition(case), contract.inputs(case, 0, "cpu")
    axes = made["axes"] | {name: axis["value"] for name, axis in made["definition"]["axes"].items() if axis["type"] == "const"}
    for name, tensor in made["definition"]["inputs"].items():
        stored = made["inputs"][name]
        if isinstance(stored, torch.Tensor):
            assert str(stored.dtype) == f"torch.{tensor['dtype']}"
            assert torch.equal(stored, inputs[name][: len(stored)]), name
        if tensor["shape"] is not None:
            shape = tuple(axes[axis] for axis in tensor["shape"])
            assert shape == (tuple(stored.shape) if isinstance(stored, torch.Tensor) else tuple(inputs[name].shape)), name


def test_cases_of_other_layouts_have_none():
    for params in ({"mask": "bool"}, {"draft": "beside"}, {"index": 64}, {"padding": 3}, {"chunk": 256}):
        assert contract.definition(cases.make(9, 40, heads=2, dtype="float32", **params)) == {}


def test_main_of_a_solution_calls_the_variant(tmp_path):
    case = CASES[0]
    made, inputs = contract.definition(case), contract.inputs(case, 5, "cpu")
    (tmp_path / "main.py").write_text(made["main"].replace("VARIANT", "torch_gemm"))
    (tmp_path / "verify_attn").symlink_to(Path(verify_attn.__file__).parent)
    given = [inputs[name] for name in made["definition"]["inputs"]]
    out, lse = contract.outputs(case, "cpu").values()
    torch.save({"given": given, "made": [out, lse]}, tmp_path / "call.pt")
    code = "import torch, main\ncall = torch.load('call.pt')\nmain.run(*call['given'], *call['made'])\ntorch.save(call['made'], 'made.pt')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    out, lse = torch.load(tmp_path / "made.pt")
    exact = contract.reference(case, inputs)
    torch.testing.assert_close(out.double(), exact["out"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), exact["lse"], rtol=1e-4, atol=1e-4)
