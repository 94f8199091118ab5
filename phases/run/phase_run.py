"""What a phase script is given: the run it makes steps for, and how steps hand results to one another."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.errors import JournalError
from phases.base.files import write_atomically, write_json
from phases.base.results import Results
from phases.playbook.schema import PhaseSection, Playbook
from phases.run.run_directory import RunRecord
from phases.run.steps import Facts, Step, StepContext

if TYPE_CHECKING:
    from phases.harness.contract import Kernel

PLAN = "plan"  # run id of what never starts


@dataclass(frozen=True)
class PhaseRun:
    """One attempt at one phase.

    Attributes:
        section: the phase's part of the playbook; `settings` is its own settings.
        kernel: what kernel.yaml says.
        repo: top of the git work tree.
        work: directory of the attempt; its `checkpoint/` is what the checkpoint will hold.
        record: run id, attempt, digests, source, author; for a plan, of a run that does not exist.
    """

    playbook: Playbook
    section: PhaseSection
    kernel: Kernel
    repo: Path
    work: Path
    record: RunRecord

    @property
    def settings(self) -> Any:
        return self.section.settings

    @property
    def candidates(self) -> tuple[str, ...]:
        """The kernel's variants that are to go to production."""
        return tuple(name for name, variant in self.kernel.variants.items() if variant.role == "candidate")

    @property
    def is_plan(self) -> bool:
        """Whether its steps are only shown: then nothing may be written."""
        return self.record.run_id == PLAN

    @property
    def checkpoint_files(self) -> Path:
        return self.work / "checkpoint"

    def results_step(
        self,
        name: str,
        summary: str,
        measure: Callable[[StepContext], dict[str, Any]],
        *,
        always: bool = False,
        detail: tuple[str, ...] = (),
    ) -> Step:
        """A step whose `measure` returns some fields of Results (`{"parity": (...)}`); they are kept in a file.

        The step holds while that file is what it was, so a resumed run does not measure again.
        """

        def run(context: StepContext) -> Facts:
            partial = Results(self.section.name, self.kernel.name, **measure(context))
            return keep(context.work / f"{slug(name)}.json", partial)

        return Step(name, summary, run, holds=kept, always=always, detail=detail)

    def gathered(self, context: StepContext) -> Results:
        """All fields that the results steps of this run kept, as one Results."""
        merged: dict[str, Any] = {"facts": {}}
        for facts in context.facts.values():
            if "kept" not in facts:
                continue
            part = load_results(context.work / facts["kept"])
            for field in dataclasses.fields(Results):
                value = getattr(part, field.name)
                if field.name == "facts":
                    merged["facts"].update(value)
                elif isinstance(value, tuple):
                    merged[field.name] = merged.get(field.name, ()) + value
        return Results(self.section.name, self.kernel.name, **merged)

    def add_file(self, name: str, data: bytes) -> None:
        """Put a file into the coming checkpoint; `name` may hold slashes."""
        path = self.checkpoint_files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)


def keep(path: Path, results: Results) -> Facts:
    """Write results and return the facts by which `kept` recognises them."""
    write_json(path, results.to_json())
    return {"kept": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def kept(context: StepContext, facts: Facts) -> bool:
    """Whether the file that `keep` wrote is still the same."""
    try:
        return hashlib.sha256((context.work / facts["kept"]).read_bytes()).hexdigest() == facts["sha256"]
    except (OSError, KeyError):
        return False


def load_results(path: Path) -> Results:
    """Raises JournalError when the file is missing or is not results of this version."""
    try:
        return Results.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise JournalError(f"{path} cannot be read as results: {fault}.", hint="Start a new run.") from fault


def slug(name: str) -> str:
    """A step's name as a file name."""
    return "".join(char if char.isalnum() else "-" for char in name)
