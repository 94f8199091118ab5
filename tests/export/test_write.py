"""An exported dataset: laid out as flashinfer-bench reads it, true to what was measured."""

import dataclasses
import json
import subprocess
import sys

import pytest

from phases.base.results import ParityRecord
from phases.export.write import export
from phases.harness.definitions import safetensors
from phases.harness.exchange import ExchangeError, Solution, check_definition
from phases.ledger.git import Git
from tests.export.kernels import case, manifest, repository, results


@pytest.fixture
def kernel(tmp_path):
    return repository(tmp_path / "norm")


def write(kernel, directory, made=None, **facts):
    return export(kernel, made or results(), {**manifest(kernel), **facts}, Git(kernel.file.parent), directory)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_dataset_holds_definition_solutions_workload_and_traces(kernel, tmp_path):
    made = write(kernel, tmp_path / "out")
    assert (made.definitions, made.workloads, made.traces) == (["norm_float32"], 2, 2)
    assert made.left_out == ["vectorised on 9x9/float32: too odd"]
    definition = check_definition(
        json.loads((tmp_path / "out/definitions/norm/norm_float32.json").read_text()), "written"
    )
    workload, _ = lines(tmp_path / "out/workloads/norm/norm_float32.jsonl")
    assert workload["workload"]["axes"] == {"rows": 4, "columns": 8} and workload["workload"]["inputs"] == {
        "x": {"type": "random"}
    }
    assert workload["solution"] is None and workload["evaluation"] is None and set(definition["inputs"]) == {"x"}
    (trace,) = lines(tmp_path / "out/traces/Ada/norm/norm_float32.jsonl")
    (base,) = lines(tmp_path / "out/traces/baseline/norm/norm_float32.jsonl")
    assert trace["workload"] == workload["workload"] == base["workload"]
    evaluation = trace["evaluation"]
    assert evaluation["status"] == "PASSED" and evaluation["environment"] == {
        "hardware": "Test_CPU",
        "libs": {"torch": "2.13"},
    }
    assert evaluation["performance"]["latency_ms"] == pytest.approx(2.0)  # the mean, as the schema says, not the median
    assert evaluation["correctness"] == {
        "max_relative_error": "NaN",
        "max_absolute_error": 2e-7,
        "extra": {"relative_frobenius_error": 1e-7, "tolerance": 1e-5},
    }
    (name,) = [n for n in made.solutions if "vectorised" in n]
    solution = Solution.from_json(
        json.loads((tmp_path / f"out/solutions/Ada/norm/norm_float32/{name}.json").read_text()), "written"
    )
    assert trace["solution"] == solution.name and name.endswith(solution.sha256[:8])
    assert "src/norm" not in solution.sources and "norm/contract.py" in solution.sources


def test_an_exported_solution_runs_from_its_sources_alone(kernel, tmp_path):
    write(kernel, tmp_path / "out")
    (path,) = (tmp_path / "out/solutions/Ada").rglob("*.json")
    solution = Solution.from_json(json.loads(path.read_text()), "written")
    for name, text in solution.sources.items():
        (tmp_path / "alone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "alone" / name).write_text(text)
    code = "import torch, main\nx = torch.randn(3, 5)\ny = torch.empty(3, 5)\nmain.run(x, y)\nprint(float((y.square().mean(-1) - 1).abs().max()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "alone", capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1e-4


def test_a_second_export_adds_nothing_and_another_kernel_of_the_name_is_refused(kernel, tmp_path):
    write(kernel, tmp_path / "out")
    again = write(kernel, tmp_path / "out")
    assert (again.workloads, again.traces, again.written) == (0, 0, [])
    contract_file = kernel.root / "norm" / "contract.py"
    contract_file.write_text(contract_file.read_text().replace("{EPSILON})", "0.5)"))
    with pytest.raises(ExchangeError, match="another record of this name"):
        write(kernel, tmp_path / "out")


def test_sources_are_those_of_the_checkpoints_commit(kernel, tmp_path):
    (kernel.root / "norm" / "contract.py").write_text(
        (kernel.root / "norm" / "contract.py").read_text() + "\n# later\n"
    )
    write(kernel, tmp_path / "out", source={**manifest(kernel)["source"], "dirty": True})
    texts = [path.read_text() for path in (tmp_path / "out/solutions").rglob("*.json")]
    assert all("# later" not in text and "work tree had changes" in text for text in texts)
    with pytest.raises(ExchangeError, match="not in this repository"):
        write(kernel, tmp_path / "other", source={"commit": "ab" * 20, "dirty": False})


def test_a_wrong_number_is_a_result_too(kernel, tmp_path):
    wrong = ParityRecord(case(), "vectorised", "cpu", False, error=0.3, tolerance=1e-5, reason="y is off by 0.3")
    made = results()
    made = dataclasses.replace(made, parity=(wrong,), benchmark=made.benchmark[:1])
    write(kernel, tmp_path / "out", made)
    (trace,) = lines(tmp_path / "out/traces/Ada/norm/norm_float32.jsonl")
    evaluation = trace["evaluation"]
    assert (evaluation["status"], evaluation["log"]) == (
        "INCORRECT_NUMERICAL",
        "y is off by 0.3",
    ) and "performance" not in evaluation


def test_a_kernel_without_definitions_is_told_how_to_add_one(kernel, tmp_path):
    contract_file = kernel.root / "norm" / "contract.py"
    contract_file.write_text(contract_file.read_text().replace("def definition(case)", "def _definition(case)"))
    with pytest.raises(ExchangeError, match="no Definition for any of its 2 benchmark cases.*definition\\(case\\)"):
        write(kernel, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stored_tensors_are_in_the_safetensors_format():
    import torch

    data = safetensors(
        {
            "a": torch.tensor([[1, -2]], dtype=torch.int32),
            "b": torch.tensor([1.5], dtype=torch.bfloat16),
            "c": torch.tensor([], dtype=torch.bool),
        }
    )
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    assert size % 8 == 0 and len(body) == 10
    assert (
        header["a"] == {"dtype": "I32", "shape": [1, 2], "data_offsets": [0, 8]}
        and body[:8] == b"\1\0\0\0\xfe\xff\xff\xff"
    )
    assert header["b"] == {"dtype": "BF16", "shape": [1], "data_offsets": [8, 10]} and header["c"]["data_offsets"] == [
        10,
        10,
    ]
