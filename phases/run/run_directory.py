"""Where a run keeps its journal and files: `.phase/runs/<run id>/`, made once, never reused by another run.

.phase/.gitignore                       `*`: git never sees any of this
.phase/locks/<playbook>.json
.phase/runs/<playbook>-<phase>-0001/    one attempt
    run.json                            what was run: playbook, phase, digests, commit, who, when
    journal.jsonl
    work/                               files the steps hand to one another
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phases.base.errors import JournalError, PhaseError
from phases.base.files import explain, sync_directory, write_atomically, write_json

SCHEMA = "phasegate/run/v1"


@dataclass(frozen=True)
class RunRecord:
    """What an attempt is an attempt of; written once, before its first step.

    A run may only be resumed while playbook and kernel are byte for byte what they were.
    """

    run_id: str
    playbook: str
    phase: str
    attempt: int
    started: float  # seconds since the epoch
    author: str  # git identity of who ran it
    playbook_digest: str
    kernel_digest: str
    source: dict[str, Any]  # commit, branch, dirty ... as phases.ledger.source.describe gives them
    toolkit: str  # version of phasegate
    overrides: list[str] = field(default_factory=list)  # of earlier phases, that this run stands on
    keep_going: bool = False  # measure what cannot pass any more, too
    schema: str = SCHEMA


@dataclass(frozen=True)
class RunDirectory:
    """One attempt on disk."""

    path: Path
    record: RunRecord

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def work(self) -> Path:
        return self.path / "work"


def state_directory(repo: Path) -> Path:
    """`.phase` of a repository, made on first use and ignored by git. Raises PhaseError where it cannot be written."""
    state = repo / ".phase"
    try:
        (state / "runs").mkdir(parents=True, exist_ok=True)
        if not (state / ".gitignore").exists():
            write_atomically(state / ".gitignore", b"*\n")
    except OSError as fault:
        message, hint = explain(fault)
        raise PhaseError(f"cannot keep the state of runs: {message}", hint=hint) from fault
    return state


def attempts(state: Path, playbook: str, phase: str) -> list[RunDirectory]:
    """The attempts of a phase in order; a directory whose run.json never got written is no attempt."""
    found = []
    for path in (state / "runs").glob(f"{_stem(playbook, phase)}-*"):
        record = _read(path)
        if record and (record.playbook, record.phase) == (playbook, phase):
            found.append(RunDirectory(path, record))
    return sorted(found, key=lambda run: run.record.attempt)


def create(state: Path, playbook: str, phase: str, **facts: object) -> RunDirectory:
    """A new attempt, numbered after the last. `facts` are the remaining fields of RunRecord."""
    stem = _stem(playbook, phase)
    numbers = [
        int(tail)
        for path in (state / "runs").glob(f"{stem}-*")
        if (tail := path.name.removeprefix(f"{stem}-")).isdecimal()
    ]
    attempt = max(numbers, default=0) + 1
    run_id = f"{stem}-{attempt:04d}"
    record = RunRecord(run_id=run_id, playbook=playbook, phase=phase, attempt=attempt, **facts)  # type: ignore[arg-type]
    path = state / "runs" / run_id
    try:
        (path / "work").mkdir(parents=True)
        write_json(path / "run.json", asdict(record))
        sync_directory(path.parent)
    except OSError as fault:
        message, hint = explain(fault)
        raise PhaseError(f"cannot start a run: {message}", hint=hint) from fault
    return RunDirectory(path, record)


def _read(path: Path) -> RunRecord | None:
    try:
        data = json.loads((path / "run.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        raise JournalError(f"{path / 'run.json'} cannot be read: {fault}.", hint="Move that directory away.") from fault
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise JournalError(
            f"{path / 'run.json'} has schema {schema!r}, this toolkit reads {SCHEMA!r}.",
            hint="Move that directory away.",
        )
    try:
        return RunRecord(**data)
    except TypeError as fault:
        raise JournalError(
            f"{path / 'run.json'} has other fields than a run of this toolkit.", hint="Move that directory away."
        ) from fault


def _stem(playbook: str, phase: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{playbook}-{phase}")
