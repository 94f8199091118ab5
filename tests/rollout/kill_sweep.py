"""kill -9 of `phase` at journal boundaries of the production phases, and what is left: shared by the test and the benchmark."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from phases.engine.closing import JUDGE, RECORD
from phases.rollout import canary, waves
from phases.rollout.shared_steps import FLEET, LEAVE, PUSH, REPORT

Boundary = tuple[str, str, str]  # event, step, moment

STEPS = {
    "tp8-canary": (FLEET, PUSH, canary.CONTROL, canary.CANARY, canary.BAKE, canary.END, REPORT, LEAVE, JUDGE, RECORD),
    "full-rollout": (FLEET, PUSH, waves.wave_name(1), waves.wave_name(2), waves.SOAK, waves.FINISH, REPORT, LEAVE, JUDGE, RECORD),
}


class Driven(Protocol):
    """A fleet and `phase` on it."""

    def phase(self, *arguments: str, kill: Boundary = ..., timeout: float = ...) -> Any: ...

    def mixed(self) -> list[str]: ...


def boundaries(phase: str, *, every: bool) -> list[Boundary]:
    """Where to kill, in the order in which a run comes by.

    Around each record there are two instants, before and after it is on disk. What lies between the end of one step and the
    beginning of the next is one state in three instants; without `every` it is taken once.
    """
    found: list[Boundary] = [("run-started", "", "after")] if every else []
    for step in STEPS[phase]:
        if every:
            found += [("step-started", step, "before"), ("step-started", step, "after")]
        found += [("step-finished", step, "before"), ("step-finished", step, "after")]
    return found + ([("run-finished", "", "before"), ("run-finished", "", "after")] if every else [("run-finished", "", "before")])


def chain(fleet: Driven, phase: str, where: Sequence[Boundary], killed: Callable[[Boundary], None], *, timeout: float = 120.0) -> Any:
    """One run, killed at each boundary in turn and resumed from there; `killed` looks at what is left each time.

    Returns the process that brought the run to its end. A boundary the run never came to is an AssertionError.
    """
    arguments = ["run", phase, "--yes"]
    for boundary in where:
        done = fleet.phase(*arguments, kill=boundary, timeout=timeout)
        assert done.returncode == -signal.SIGKILL, f"not killed at {boundary}: exit {done.returncode}\n{done.stdout}"
        if "--resume" not in arguments:
            arguments.append("--resume")
        killed(boundary)
    return fleet.phase(*arguments, timeout=timeout)
