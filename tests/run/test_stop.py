"""SIGTERM stops a run wherever it hits; `python -m tests.run.sigterm_storm` is the same with hundreds of shots."""

from __future__ import annotations

import pytest

from phases.run.closing import ledger_of
from tests.run.sigterm_storm import PATIENCE, journal, start, storm


@pytest.mark.parametrize("phase", ["callback_phase", "swallowing_phase"])
def test_a_signal_that_was_swallowed_stops_the_run_all_the_same(repository, phase):
    process = start(repository.path, phase=phase)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "the signal came" in out + err, (out, err)
    assert "--resume" in err and "Traceback" not in err and "ignored" not in err
    assert [row["data"]["step"] for row in journal(repository.path) if row["event"] == "step-started"] == ["draw"]
    assert ledger_of(repository.playbook).checkpoints() == []


def test_a_few_signals_at_random_moments(tmp_path):
    found = storm(3, seed=5, folder=tmp_path, resume_every=3)
    assert [shot for shot in found if shot.fault] == []
