"""What a run is doing right now, beside its journal, so that `phase status` can tell it from another terminal.

It is a convenience and no record: written at most once a second, never synced, and its loss costs nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phases.base.errors import Exit
from phases.run.runner import Watcher
from phases.run.steps import Facts, Step

NAME = "live.json"
SECONDS = 1.0  # between two writes while a step talks


class Noting:
    """Passes everything on to the inner watcher and keeps the latest of it in the run's directory below `runs`.

    Args:
        started: called once the run has its lock and its steps.
    """

    def __init__(self, inner: Watcher, runs: Path, started: Callable[[], None] = lambda: None) -> None:
        self.inner, self.runs, self.started = inner, runs, started
        self._path: Path | None = None
        self._state: dict[str, Any] = {}
        self._written = 0.0

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self._path = self.runs / run_id / NAME
        self._state = {"run": run_id, "steps": len(steps)}
        self.inner.run_started(run_id, steps)
        self.started()

    def step_started(self, step: Step, number: int) -> None:
        self._state |= {"step": step.name, "number": number, "since": time.time(), "said": step.summary, "look": None}
        self._write(now=True)
        self.inner.step_started(step, number)

    def step_progress(self, step: Step, line: str) -> None:
        self._state["said"] = line
        self._write()
        self.inner.step_progress(step, line)

    def step_look(self, step: Step, facts: Facts) -> None:
        self._state["look"] = facts
        self._write()
        self.inner.step_look(step, facts)

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self.inner.step_finished(step, facts, seconds, kept)

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self._remove()
        self.inner.step_failed(step, fault)

    def run_finished(self, run_id: str, code: Exit) -> None:
        self._remove()
        self.inner.run_finished(run_id, code)

    def _write(self, now: bool = False) -> None:
        moment = time.monotonic()
        if self._path is None or (not now and moment - self._written < SECONDS):
            return
        self._written = moment
        temporary = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError, TypeError, ValueError):  # a full disk is told of by the journal
            temporary.write_text(json.dumps({**self._state, "at": time.time()}), encoding="utf-8")
            os.replace(temporary, self._path)

    def _remove(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def read(run: Path) -> dict[str, Any] | None:
    """What the run of this directory last said; None when it said nothing, or ended."""
    try:
        found = json.loads((run / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
