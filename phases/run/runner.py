"""Plan → execute: run the steps of a phase in order, journal each, go on where an earlier process was cut off.

Every step is journalled before it starts and after it ended, both on disk before anything else happens. On resume a
finished step is kept if its effect still holds; from the first step that has to be done (again) everything that follows
is done too, since it may rest on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from phases.base.clock import Clock
from phases.base.errors import Exit, JournalError, PhaseError
from phases.base.files import explain
from phases.run import stop
from phases.run.journal import Journal, Record
from phases.run.steps import Facts, Step, StepContext


class Interrupted(PhaseError):
    """The user (or the system) asked the run to stop; it can be resumed."""

    stage = "interrupted"


class StepError(PhaseError):
    """A step failed for a reason outside the toolkit: full disk, missing permission."""

    stage = "step"


class Watcher(Protocol):
    """Told what happens while it happens; all methods return nothing and must not raise."""

    def run_started(self, run_id: str, steps: Sequence[Step]) -> None: ...

    def step_started(self, step: Step, number: int) -> None: ...

    def step_progress(self, step: Step, line: str) -> None: ...

    def step_look(self, step: Step, facts: Facts) -> None: ...

    def step_finished(self, step: Step, facts: Facts, seconds: float, kept: bool) -> None: ...

    def step_failed(self, step: Step, fault: BaseException) -> None: ...

    def run_finished(self, run_id: str, code: Exit) -> None: ...


class Silent(Watcher):
    """A watcher that says nothing, as the protocol's own methods do."""


def execute(steps: Sequence[Step], journal: Journal, work: Path, clock: Clock, watcher: Watcher) -> dict[str, Facts]:
    """Run the steps; return the facts of each by name.

    `journal` may be new or reopened; what it already holds decides what is still to do. Raises what the failing step
    raised (PhaseError), Interrupted, or JournalError when the journal belongs to other steps or cannot be written. After a
    failure the steps marked `always` still run.
    """
    _check_names(steps)
    earlier = _earlier_facts(steps, journal)
    plan = [step.name for step in steps]
    journal.append("run-resumed" if journal.records else "run-started", plan=plan)
    watcher.run_started(journal.run_id, steps)
    run = _Run(journal, work, clock, watcher)
    for number, step in enumerate(steps, 1):
        try:
            run.do(step, number, earlier)
        except BaseException as fault:
            raised = run.told(step, fault)
            run.clean_up([later for later in steps[number:] if later.always])
            if raised is fault:
                raise
            raise raised from fault
    return run.facts


class _Run:
    """The state of one `execute`."""

    def __init__(self, journal: Journal, work: Path, clock: Clock, watcher: Watcher) -> None:
        self.journal, self.work, self.clock, self.watcher = journal, work, clock, watcher
        self.facts: dict[str, Facts] = {}

    def do(self, step: Step, number: int, earlier: dict[str, Facts]) -> None:
        stop.raise_if_asked()
        self.watcher.step_started(step, number)
        context = self._context(step)
        if step.name in earlier and (step.holds is None or step.holds(context, earlier[step.name])):
            self.facts[step.name] = earlier[step.name]
            self.watcher.step_finished(step, self.facts[step.name], 0.0, kept=True)
            return
        earlier.clear()
        self.journal.append("step-started", step=step.name)
        begun = self.clock.monotonic()
        facts = step.run(context)
        seconds = self.clock.monotonic() - begun
        record = self.journal.append("step-finished", step=step.name, facts=facts or {}, seconds=seconds)
        self.facts[step.name] = record.data["facts"]
        self.watcher.step_finished(step, self.facts[step.name], seconds, kept=False)

    def _context(self, step: Step) -> StepContext:
        watcher = self.watcher
        return StepContext(
            self.work,
            dict(self.facts),
            lambda line: watcher.step_progress(step, line),
            self.clock,
            lambda facts: watcher.step_look(step, facts),
        )

    def told(self, step: Step, fault: BaseException) -> BaseException:
        """Journal and show why a step ended the run; the exception to raise."""
        if isinstance(fault, KeyboardInterrupt):
            event, fault = (
                "step-interrupted",
                Interrupted(
                    f"{self.journal.run_id} stopped in step {step.name!r}; nothing done so far is lost.",
                    hint="Go on with the same command and --resume.",
                ),
            )
        else:
            event = "step-failed"
        if isinstance(fault, OSError):
            message, hint = explain(fault)
            fault = StepError(f"{step.name}: {message}", hint=f"{hint} Then go on with --resume.".strip())
        if isinstance(fault, PhaseError):
            _end_as_production_did(fault, self.facts)
        try:
            if not isinstance(fault, JournalError):
                self.journal.append(event, step=step.name, error=str(fault))
        except JournalError:
            pass  # the first failure is the one to report; the journal still ends in "step-started"
        self.watcher.step_failed(step, fault)
        return fault

    def clean_up(self, steps: Sequence[Step]) -> None:
        """Run what must run after a failure too; its own faults are shown, the first failure stays the reported one."""
        for step in steps:
            context = self._context(step)
            try:
                step.run(context)
            except Exception as fault:
                self.watcher.step_failed(step, fault)


def stated_exit(facts: dict[str, Facts]) -> Exit | None:
    """How production ended, by the last step that observed it; None while none has."""
    stated = [Exit(step["exit_code"]) for step in facts.values() if "exit_code" in step]
    return stated[-1] if stated else None


def _end_as_production_did(fault: PhaseError, facts: dict[str, Facts]) -> None:
    """Once a step has observed that production was rolled back, or that it was not, a later failure to write that down changes neither."""
    seen = stated_exit(facts)
    words = {
        Exit.ROLLED_BACK: "Production was rolled back, as observed",
        Exit.ROLLBACK_INCOMPLETE: "The rollback of production is incomplete: a person is needed",
    }
    if seen in words:
        fault.exit_code = seen
        fault.hint = (
            f"{fault.hint} {words[seen]}; the record of it is still to be written, which --resume does.".strip()
        )


def _check_names(steps: Sequence[Step]) -> None:
    names = [step.name for step in steps]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise JournalError(f"two steps are called {', '.join(twice)}; the journal tells steps apart by name.")


def _earlier_facts(steps: Sequence[Step], journal: Journal) -> dict[str, Facts]:
    """Facts of the leading steps an earlier process finished and no later one began again."""
    if not journal.records:
        return {}
    plan = journal.records[0].data.get("plan")
    if plan != [step.name for step in steps]:
        raise JournalError(f"the journal of {journal.run_id} is of other steps: {plan}.", hint="Start a new run.")
    finished = _finished(journal.records)
    kept: dict[str, Facts] = {}
    for step in steps:
        if step.name not in finished:
            break
        kept[step.name] = finished[step.name]
    return kept


def _finished(records: Sequence[Record]) -> dict[str, Facts]:
    finished: dict[str, Facts] = {}
    for record in records:
        if record.event == "step-started":
            _forget_from(finished, record.step)
        elif record.event == "step-finished":
            finished[record.step] = record.data["facts"]
    return finished


def _forget_from(finished: dict[str, Facts], step: str) -> None:
    """A step begun again: what it and those finished after it left is no longer known to hold."""
    names = list(finished)
    for name in names[names.index(step) :] if step in finished else []:
        del finished[name]
