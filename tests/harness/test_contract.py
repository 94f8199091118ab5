"""kernel.yaml and the contract module: every mistake with file and line, every broken promise with its name."""

import pytest

from phases.base.errors import KernelContractError, PlaybookError
from phases.harness import build, contract, parity
from tests.harness import kernels

GOOD = """schema: phasegate/kernel/v1
name: toy
package: toy
entry: toy_contract
variants:
  only: {role: candidate, device: cpu}
  twin: {role: candidate, device: cpu}
parity:
  tolerances: {float32: 1e-5}
  cases: [{name: n4, dtype: float32, params: {n: 4}}]
"""
MODULE = """import torch
def inputs(case, seed, device): return {"x": torch.randn(case["params"]["n"], generator=torch.Generator().manual_seed(seed))}
def outputs(case, device): return {"y": torch.empty(case["params"]["n"])}
def reference(case, inputs): return {"y": inputs["x"].double() * 2}
def run(variant, case, inputs, outputs): torch.mul(inputs["x"], 2, out=outputs["y"])
def cost(case): return {"bytes": 8 * case["params"]["n"], "flops": case["params"]["n"]}
"""


def toy(folder, text=GOOD, module=MODULE):
    (folder / "kernel.yaml").write_text(text)
    (folder / "toy_contract.py").write_text(module)
    return folder / "kernel.yaml"


def test_good_one_loads_and_proves(tmp_path):
    kernel = contract.load(toy(tmp_path))
    assert (
        kernel.root == tmp_path
        and kernel.variants_for("cpu", ["only"]) == ("only",)
        and kernel.variants_for("cuda") == ()
    )
    assert kernel.parity_cases[0].key == "n4/float32"
    records = parity.prove(kernel, "cpu")
    assert [record.variant for record in records] == ["only", "twin"] and all(
        record.ok and record.error == 0.0 for record in records
    )


def test_every_mistake_at_once_with_file_and_line(tmp_path):
    text = GOOD.replace("role: candidate", "role: candidat").replace("1e-5", "2").replace("package: toy", "packag: toy")
    with pytest.raises(PlaybookError) as caught:
        contract.load(toy(tmp_path, text))
    message = str(caught.value)
    for expected in (
        "kernel.yaml:3: unknown key 'packag' (did you mean 'package'?)",
        "kernel.yaml:6: variants.only.role: must be one of",
        "did you mean 'candidate'?",
        "key 'package' is missing",
        "kernel.yaml:9: tolerance of float32 must lie between 0 and 1",
    ):
        assert expected in message


def test_missing_file_and_missing_root(tmp_path):
    with pytest.raises(PlaybookError, match="kernel.yaml:1: cannot be read"):
        contract.load(tmp_path)
    with pytest.raises(PlaybookError, match="kernel.yaml:1: path: .*nowhere is not a directory"):
        contract.load(toy(tmp_path, "path: nowhere\n" + GOOD))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def cost(case):", "def price(case):", r"cost\(case\) is missing"),
        (
            "def inputs(case, seed, device)",
            "def inputs(case)",
            r"inputs\(case, seed, device\) is declared as inputs\(case\)",
        ),
        (
            "import torch\n",
            "import torch, nosuchmodule\n",
            "ModuleNotFoundError: No module named 'nosuchmodule' at .*toy_contract.py:1",
        ),
        ("import torch\n", "import torch\nraise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        ("import torch\n", "import os\nos.kill(os.getpid(), 11)\n", "could not be examined: was killed by SIGSEGV"),
        (
            'inputs["x"].double() * 2',
            'inputs["x"] * 2',
            r"on case n4/float32: reference\(\)\['y'\] must be float64, not torch.float32",
        ),
        ("manual_seed(seed)", "manual_seed(torch.seed() % 1000003)", "inputs.. gives other inputs for the same seed"),
        ('{"y": torch.empty(case["params"]["n"])}', "[1]", "outputs.. must return a dict of tensors"),
        (
            'return {"y": inputs["x"].double() * 2}',
            "return 1 / 0",
            "reference.. raised ZeroDivisionError: division by zero at .*toy_contract.py:4",
        ),
    ],
)
def test_a_broken_module_is_a_clear_error(tmp_path, old, new, expected):
    assert old in MODULE
    kernel = contract.load(toy(tmp_path, module=MODULE.replace(old, new)))
    with pytest.raises(KernelContractError, match=expected):
        parity.prove(kernel, "cpu")


def test_what_can_be_known_without_the_module_is_said_with_its_line(tmp_path):
    text = (
        GOOD.replace("dtype: float32", "dtype: floot16").replace("{float32: 1e-5}", "{float32: 1e-5, bf16: 1e-3}")
        + "architectures: [sm_90a, sm_91, avx512]\n"
    )
    with pytest.raises(PlaybookError) as caught:
        contract.load(toy(tmp_path, text))
    message = str(caught.value)
    for expected in (
        "kernel.yaml:9: parity.tolerances: there is no dtype 'bf16'",
        "kernel.yaml:10: parity.cases[0].dtype: there is no dtype 'floot16' (did you mean 'float16'?)",
        "kernel.yaml:11: architectures[1]: there is no architecture 'sm_91'",
        "there is no architecture 'avx512'",
    ):
        assert expected in message
    assert "sm_90a'" not in message.replace("did you mean 'sm_90a'", "")
    with pytest.raises(
        PlaybookError, match="kernel.yaml:10: parity.cases.0..dtype: parity.tolerances has none for float64"
    ):
        contract.load(toy(tmp_path, GOOD.replace("dtype: float32", "dtype: float64")))
    toy(tmp_path)
    (tmp_path / "toy_contract.py").unlink()
    with pytest.raises(PlaybookError, match="kernel.yaml:4: entry: there is no module toy_contract in"):
        contract.load(tmp_path)


def test_dtype_without_a_tolerance(tmp_path):
    made = 'def parity_cases(device): return [{"name": "n4", "dtype": "float64", "params": {"n": 4}}]\n'
    kernel = contract.load(
        toy(tmp_path, GOOD.replace("  cases: [{name: n4, dtype: float32, params: {n: 4}}]\n", ""), MODULE + made)
    )
    with pytest.raises(KernelContractError, match="no parity tolerance for dtype float64 .it has float32"):
        parity.prove(kernel, "cpu")


def test_build_records(tmp_path):
    kernel = contract.load(toy(tmp_path))
    assert build.build(kernel, ["x86-64-v3"], tmp_path)[0].arch == "python"
    building = 'def build(archs, cache, progress):\n progress("compiling")\n return [{"variant": "only", "arch": a, "ok": True} for a in archs]\n'
    toy(tmp_path, module=MODULE + building)
    said = []
    records = build.build(kernel, ["sm_80", "sm_90"], tmp_path, said.append)
    assert [record.arch for record in records] == ["sm_80", "sm_90"] and said == ["compiling"]


def test_build_failures(tmp_path):
    from phases.base.errors import BuildError

    toy(
        tmp_path,
        module=MODULE + 'def build(archs, cache, progress):\n raise OSError("no compiler found; install g++")\n',
    )
    with pytest.raises(BuildError, match="no compiler found; install g.."):
        build.build(contract.load(tmp_path), [], tmp_path)
    toy(tmp_path, module=MODULE + "def build(archs, cache, progress):\n return [{'arch': 'x'}]\n")
    with pytest.raises(KernelContractError, match="must return dicts with the fields of a build record"):
        build.build(contract.load(tmp_path), [], tmp_path)


def test_json_schema_accepts_the_fixtures():
    import jsonschema
    import yaml

    for name in ("cheats", "five_line"):
        jsonschema.validate(yaml.safe_load((kernels.FOLDER / name / "kernel.yaml").read_text()), contract.schema())
