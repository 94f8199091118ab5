"""A kernel that computes wrong numbers is not measured: the gate is lost already."""

from __future__ import annotations

import json

import pytest

from phases.base.results import Results
from phases.base.verdict import Verdict
from phases.run.closing import ledger_of
from phases.run.runner import Silent
from tests.cli.conftest import Phase
from tests.run.conftest import Repository

SCRIPT = "phases.build_parity.phase:build_parity"


class Heard(Silent):
    """What the steps said, by step."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def step_progress(self, step, line):
        self.lines.setdefault(step.name, []).append(line)


@pytest.fixture
def wrong(tmp_path) -> Repository:
    """The candidate adds what is not there; its baseline is right."""
    repository = Repository(tmp_path / "mine")
    contract = repository.path / "src" / "mine" / "contract.py"
    text = contract.read_text()
    assert "VARIANTS" not in text and "def run(" in text
    contract.write_text(
        text
        + "\n\n_right = run\n\n\ndef run(variant, case, inputs, outputs):\n    _right(variant, case, inputs, outputs)\n"
        "    if variant == 'vectorised':\n        next(iter(outputs.values())).add_(1)\n"
    )
    path = repository.path / "playbook.yaml"
    path.write_text(
        path.read_text().replace(
            "    gate:\n", "    benchmark: {seconds: 0.05, min_samples: 3, cases: ['4096x64/*']}\n    gate:\n"
        )
    )
    repository.git("commit", "-qam", "wrong")
    return repository


def results(repository: Repository) -> Results:
    ledger = ledger_of(repository.playbook)
    return Results.from_json(json.loads(ledger.files(ledger.checkpoints()[-1])["results.json"]))


def test_wrong_parity_ends_the_phase_before_ceilings_and_benchmarks(wrong: Repository) -> None:
    heard = Heard()
    outcome = wrong.run(script=SCRIPT, watcher=heard)
    assert outcome.verdict is Verdict.FAIL and outcome.code == 4
    told = results(wrong)
    assert (
        not told.ceilings and not told.benchmark and "cases are wrong, first vectorised" in told.facts["not_measured"]
    )
    assert "--keep-going" in heard.lines["measure ceilings"][0] and "--keep-going" in heard.lines["benchmark"][0]


def test_a_flag_measures_all_the_same_and_the_gate_fails_as_before(wrong: Repository) -> None:
    done = Phase(wrong.path)("run", "--keep-going", code=4)
    told = results(wrong)
    assert told.ceilings and any(record.samples for record in told.benchmark) and "not_measured" not in told.facts
    assert "mine" in done.stdout
    assert "is said when a run starts" in Phase(wrong.path)("run", "--keep-going", "--resume", code=2).stderr
