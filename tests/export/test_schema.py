"""What flashinfer-bench's schema asks for, and what we refuse beyond it."""

import os
from pathlib import Path

import pytest

from phases.export.bring_in import read_record
from phases.harness.exchange import ExchangeError, Solution, check_definition
from tests.export.kernels import solution

DEFINITION = {
    "name": "n",
    "op_type": "norm",
    "axes": {"rows": {"type": "var"}, "columns": {"type": "const", "value": 8}},
    "inputs": {"x": {"shape": ["rows", "columns"], "dtype": "float32"}, "eps": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": {"shape": ["rows", "columns"], "dtype": "float32"}},
    "reference": "def run(x, eps):\n    return x\n",
}


def test_a_solution_survives_both_ways():
    made = Solution.from_json(solution(description="fast"), "here")
    assert Solution.from_json(made.to_json(), "there") == made


def test_the_digest_is_of_what_runs_not_of_what_it_is_called():
    made = Solution.from_json(solution(), "here").sha256
    assert Solution.from_json(solution(name="other", author="else", description="..."), "here").sha256 == made
    assert Solution.from_json(solution(spec={"destination_passing_style": True}), "here").sha256 != made
    other = solution()
    other["sources"][0]["content"] += "\n"
    assert Solution.from_json(other, "here").sha256 != made


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../up.py",
        "a/../../b.py",
        ".git/hooks/x",
        "a\\b.py",
        "a//b.py",
        "./a.py",
        "a\nb.py",
        "C:x.py",
        ".",
        " ",
        "a /b.py",
        "a" * 300 + ".py",
        "x/" * 200 + "y.py",
    ],
)
def test_sources_stay_below_their_directory(path):
    bad = solution(spec={"entry_point": f"{path}::run"}, sources=[{"path": path, "content": "x"}])
    with pytest.raises(ExchangeError, match="must be relative"):
        Solution.from_json(bad, "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "`name`"),
        ({"sources": []}, "`sources`"),
        ({"spec": {"language": "rust"}}, "`language` must be one of python"),
        ({"spec": {"target_hardware": []}}, "target_hardware"),
        ({"spec": {"entry_point": "pkg/main.py"}}, "file::function"),
        ({"spec": {"entry_point": "gone.py::run"}}, "not among the sources"),
        ({"spec": {"binding": "pybind"}}, "`binding`"),
        ({"sources": [{"path": "pkg/main.py", "content": "x"}] * 2}, "given twice"),
        ({"spec": {"destination_passing_style": "yes"}}, "true or false"),
        ({"sources": [{"path": "pkg/main.py", "content": "\ud800"}]}, "UTF-8"),
        ({"author": "\ud800"}, "`author`"),
        (
            {"sources": [{"path": path, "content": "x"} for path in ("pkg/main.py", "pkg")]},
            "'pkg' is a file and a directory",
        ),
    ],
)
def test_a_wrong_solution_is_told_what_is_wrong(change, said):
    with pytest.raises(ExchangeError, match=said):
        Solution.from_json(solution(**change), "here")


def test_a_right_definition_is_taken():
    assert check_definition(DEFINITION, "here") == DEFINITION


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "`name`"),
        ({"axes": {"rows": {"type": "const"}}}, "axis 'rows'"),
        ({"inputs": {}}, "`inputs`"),
        ({"inputs": {"x": {"shape": ["rows", "depth"], "dtype": "float32"}}}, "not defined: depth"),
        ({"inputs": {"x": {"shape": ["rows"], "dtype": "float"}}}, "dtype"),
        ({"outputs": {"x": {"shape": ["rows"], "dtype": "float32"}}}, "share names: x"),
        ({"reference": "def go(): pass"}, "`run`"),
        ({"reference": "def run(:"}, "Python"),
        ({"constraints": ["rows =="]}, "constraint"),
        ({"constraints": 5}, "`constraints`"),
        ({"constraints": [5]}, "`constraints`"),
        ({"constraints": ["(" * 5000]}, "constraint"),
        ({"inputs": {"x": {"shape": 5, "dtype": "float32"}}}, "`shape` must be"),
        ({"inputs": {"x": {"shape": [["rows"]], "dtype": "float32"}}}, "`shape` must be"),
    ],
)
def test_a_wrong_definition_is_told_what_is_wrong(change, said):
    with pytest.raises(ExchangeError, match=said):
        check_definition({**DEFINITION, **change}, "here")


def test_a_flood_of_mistakes_is_not_a_flood_of_words():
    bad = solution(sources=[{"path": f"../{i}.py", "content": "x"} for i in range(5000)])
    with pytest.raises(ExchangeError, match="and 49[0-9]+ more") as caught:
        Solution.from_json(bad, "here")
    assert len(str(caught.value)) < 2000


def test_json_nested_without_end_is_a_mistake_of_the_file(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ExchangeError, match="nested too deep"):
        read_record(tmp_path / "deep.json")


def test_a_pipe_or_a_device_is_no_record_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path, kind in (
        (tmp_path / "pipe.json", "a named pipe"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a directory"),
    ):
        with pytest.raises(ExchangeError, match=f"cannot be read as JSON: is {kind}"):
            read_record(path)
