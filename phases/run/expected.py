"""How long a phase will take here: as long as its newest whole attempt did, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from phases.base.errors import PhaseError
from phases.run import run_directory
from phases.run.journal import read
from phases.run.steps import Step


def step_seconds(state: Path, playbook: str, phase: str) -> dict[str, float]:
    """Seconds by step name, of the newest attempt on this machine that came to its end; empty where none did.

    Args:
        state: `.phase` of the repository.
    """
    for attempt in reversed(run_directory.attempts(state, playbook, phase)):
        try:
            records = read(attempt.journal, attempt.record.run_id)
        except (PhaseError, OSError):
            continue
        if any(record.event == "run-finished" for record in records):
            return {r.step: float(r.data["seconds"]) for r in records if r.event == "step-finished"}
    return {}


def left(expected: Mapping[str, float], steps: Sequence[Step]) -> float | None:
    """Seconds that these steps will take; None unless all of them are known."""
    seconds = [expected.get(step.name) for step in steps]
    return None if not steps or None in seconds else sum(value for value in seconds if value is not None)
