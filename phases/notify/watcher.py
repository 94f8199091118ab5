"""A watcher that tells people how a run ended, around the watcher that shows it on this terminal."""

from __future__ import annotations

from collections.abc import Sequence

from phases.base.errors import Exit
from phases.notify.teller import Teller
from phases.run.closing import JUDGE, RECORD
from phases.run.runner import Interrupted, Watcher
from phases.run.steps import Facts, Step


class Telling:
    """Passes everything on; one message at the gate, or one when an error ends the run before it.

    Args:
        nobody_asked: what passes is approved without a person, so nobody is told that it waits.
    """

    def __init__(self, inner: Watcher, teller: Teller, nobody_asked: bool = False) -> None:
        self.inner, self.teller, self.nobody_asked = inner, teller, nobody_asked
        self.judged: Facts = {}
        self.recorded: Facts = {}
        self.stopped = False

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None:
        self.inner.run_started(run_id, steps)

    def step_started(self, step: Step, number: int) -> None:
        self.inner.step_started(step, number)

    def step_progress(self, step: Step, line: str) -> None:
        self.inner.step_progress(step, line)

    def step_look(self, step: Step, facts: Facts) -> None:
        self.inner.step_look(step, facts)

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None:
        self.judged = facts if step.name == JUDGE else self.judged
        self.recorded = facts if step.name == RECORD else self.recorded
        self.inner.step_finished(step, facts, seconds, kept)

    def step_failed(self, step: Step, fault: BaseException) -> None:
        self.inner.step_failed(step, fault)
        if not self.stopped and not isinstance(
            fault, Interrupted
        ):  # who pressed Ctrl-C knows; later faults are of cleaning up
            self.teller.stopped(step.name, fault)
        self.stopped = True

    def run_finished(self, run_id: str, code: Exit) -> None:
        self.inner.run_finished(run_id, code)
        if code is Exit.WAITING_FOR_REVIEW and self.nobody_asked:
            code = Exit.PASSED
        self.teller.gate(self.judged.get("verdict", ""), code, self.recorded, self.judged.get("failed", []))
