"""A step: the unit a phase is planned, journalled, executed and resumed in.

A phase script is a function that yields steps; making the steps is pure, so planning is making them without running
them. A step's `run` returns facts (plain JSON) which the journal keeps and later steps read; its `holds` observes
whether its effect is already there, so that a resumed run skips what is done and repeats what was cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phases.base.clock import Clock

Facts = dict[str, Any]


@dataclass(frozen=True)
class StepContext:
    """What a running step may use.

    Attributes:
        work: directory of this run; survives a kill, holds what steps hand to one another as files.
        facts: facts of the steps that already ran, by step name.
        progress: called with one short line whenever something a person would like to see happened.
        clock: the time.
        look: called with the plain facts of a look at something measured over time (`phases.trial.looks`), for a live view.
    """

    work: Path
    facts: dict[str, Facts]
    progress: Callable[[str], None]
    clock: Clock
    look: Callable[[Facts], None] = lambda facts: None


@dataclass(frozen=True)
class Step:
    """One named, idempotent action.

    Attributes:
        name: unique within the phase; what the journal and `--resume` match on.
        summary: what `phase plan` prints: the action and its object in one line.
        run: does it and returns facts; must be safe to repeat after a kill at any instant.
        holds: whether the effect of a finished `run` is still there (given that run's facts); None when the files
            and facts it left say enough.
        host: where it acts; `local` is this machine.
        always: run also when an earlier step failed (stopping servers, releasing locks).
    """

    name: str
    summary: str
    run: Callable[[StepContext], Facts]
    holds: Callable[[StepContext, Facts], bool] | None = None
    host: str = "local"
    always: bool = False
    detail: tuple[str, ...] = field(default=())
