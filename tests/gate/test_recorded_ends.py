"""Checkpoints recorded before results held their ends are read with the end they had."""

import json
from pathlib import Path

import pytest

from phases.base.results import Results
from phases.base.verdict import Verdict

RECORDED = sorted((Path(__file__).parents[2] / "checkpoints").glob("*/*-tp8-canary-*/results.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parts[-3]}-{path.parent.name}")
def test_a_recorded_canary_ends_as_its_gate_says(path: Path) -> None:
    results = Results.from_json(json.loads(path.read_text()))
    end = results.end_of("bake")
    assert end and end.reason
    assert end.verdict is Verdict(json.loads((path.parent / "gate.json").read_text())["verdict"])
    assert Results.from_json(json.loads(json.dumps(results.to_json()))) == results
