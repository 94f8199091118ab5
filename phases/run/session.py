"""One attempt at one phase from start to end: lock, run directory, journal, steps, outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases import __version__
from phases.base.clock import Clock
from phases.base.errors import Exit, JournalError, UsageError
from phases.base.verdict import Verdict
from phases.harness import contract
from phases.ledger import repository as source
from phases.ledger import source as ledger_source
from phases.ledger.git import Git
from phases.ledger.lost import require_whole
from phases.playbook.phase_kinds import PhaseKind, load_object
from phases.playbook.schema import PhaseSection, Playbook, Review
from phases.run import progress, run_directory
from phases.run.closing import JUDGE, RECORD, ledger_of
from phases.run.journal import Journal, OnRecord
from phases.run.lock import Lock
from phases.run.phase_run import PLAN, PhaseRun
from phases.run.run_directory import RunDirectory, RunRecord
from phases.run.runner import Watcher, execute, stated_exit
from phases.run.steps import Facts, Step


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    run_id: str
    phase: str
    verdict: Verdict
    checkpoint: Facts  # number, name, digest, commit
    code: Exit

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run_id,
            "phase": self.phase,
            "verdict": self.verdict.value,
            "checkpoint": self.checkpoint,
            "exit": int(self.code),
        }


def plan(playbook: Playbook, section: PhaseSection, clock: Clock) -> list[Step]:
    """The steps a run would take; nothing is written and nothing is run."""
    return _steps(plan_run(playbook, section, clock))


def plan_run(playbook: Playbook, section: PhaseSection, clock: Clock) -> PhaseRun:
    """The run that a plan is of; it has no directory and never starts."""
    repo = source.repository_of(playbook.path)
    record = _record_of(playbook, section, repo, clock, run_id=PLAN, attempt=0)
    return _phase_run(playbook, section, repo, repo / ".phase" / PLAN, record)


def run_phase(
    playbook: Playbook,
    section: PhaseSection,
    *,
    resume: bool,
    clock: Clock,
    watcher: Watcher,
    notice: Callable[[str], None] = lambda line: None,
    on_record: OnRecord | None = None,
    allow_dirty: bool = False,
    keep_going: bool = False,
) -> Outcome:
    """Run a phase, or go on with its latest attempt, and record its checkpoint.

    `allow_dirty`: of a new attempt, whether what it records from a tree with uncommitted changes may be approved all the same.
    `keep_going`: of a new attempt, whether Phase 1 measures also what computes wrong numbers.

    Raises a PhaseError for whatever stops it before a checkpoint is recorded: LockedError, Interrupted, the errors of
    the steps; UsageError when there is nothing to resume; GateError when an earlier phase has not passed.
    """
    repo = source.repository_of(playbook.path)
    state = run_directory.state_directory(repo)
    lock = Lock(state, playbook.name, clock)
    with lock.held(f"phase run {section.name}"):
        if lock.took_over:
            notice(f"took over the lock of a run that is gone: {lock.took_over.describe(clock.now())}")
        _require_clean(section, repo)
        ledger = ledger_of(playbook)
        require_whole(ledger)
        standings = progress.standings(playbook, ledger, kernel_digest(playbook))
        progress.require_ready(section, standings)
        overrides = progress.overrides_before(section, standings)
        for words in overrides:
            notice(f"stands on an override: {words}")
        directory = _attempt(state, playbook, section, repo, clock, resume, notice, allow_dirty, keep_going, overrides)
        return _execute(playbook, section, repo, directory, clock, watcher, on_record)


def adhoc_run(playbook: Playbook, name: str, clock: Clock) -> PhaseRun:
    """A run outside the phases (rollback, watch): it has no steps, no run directory and no gate in the playbook."""
    kind = PhaseKind(0, name, "", "", "", clean_tree=False, changes_production=True)
    section = PhaseSection(kind, Review.NONE, False, (), None, str(playbook.path))
    repo = source.repository_of(playbook.path)
    record = _record_of(playbook, section, repo, clock, run_id=f"{playbook.name}-{name}", attempt=0)
    return _phase_run(playbook, section, repo, repo / ".phase" / name, record)


def kernel_digest(playbook: Playbook) -> str:
    """Digest of kernel.yaml and of the files of the kernel's distribution, and of what else the playbook puts into releases: what a
    checkpoint's pass is good for."""
    kernel = contract.load(playbook.kernel)
    digest = source.content_digest(kernel.root, kernel.file.read_bytes())
    others = [source.content_digest(root) for root in _other_distributions(playbook)]
    return hashlib.sha256(" ".join([digest, *others]).encode()).hexdigest() if others else digest


def _other_distributions(playbook: Playbook) -> list[Path]:
    """Directories of the kernels and packages that the sides of a phase or of production name beside the playbook's kernel."""
    folder, found = playbook.path.parent, []
    for settings in (playbook.sections.get("production"), *(section.settings for section in playbook.phases)):
        sides = [side for name in ("incumbent", "candidate") if (side := getattr(settings, name, None))]
        found += [contract.load(folder / side.kernel).root for side in sides if side.kernel]
        found += [folder / package for side in sides for package in side.packages]
    return sorted(set(found))


def _execute(
    playbook: Playbook,
    section: PhaseSection,
    repo: Path,
    directory: RunDirectory,
    clock: Clock,
    watcher: Watcher,
    on_record: OnRecord | None,
) -> Outcome:
    run_id = directory.record.run_id
    opener = Journal.reopen if directory.journal.exists() else Journal.create
    journal = opener(directory.journal, run_id, clock, on_record)
    steps = _steps(_phase_run(playbook, section, repo, directory.work, directory.record))
    facts = execute(steps, journal, directory.work, clock, watcher)
    verdict = Verdict(facts[RECORD].get("verdict", facts[JUDGE]["verdict"]))
    code = _code_of(facts, verdict, section)
    journal.append("run-finished", exit=int(code), verdict=verdict.value)
    watcher.run_finished(run_id, code)
    return Outcome(run_id, section.name, verdict, facts[RECORD], code)


def _code_of(facts: dict[str, Facts], verdict: Verdict, section: PhaseSection) -> Exit:
    """A step that observed how production ended (rolled back, or not) decides; else the verdict does."""
    stated = stated_exit(facts)
    return progress.exit_code(verdict, section) if stated is None else stated


def _attempt(
    state: Path,
    playbook: Playbook,
    section: PhaseSection,
    repo: Path,
    clock: Clock,
    resume: bool,
    notice: Callable[[str], None],
    allow_dirty: bool,
    keep_going: bool,
    overrides: list[str],
) -> RunDirectory:
    earlier = run_directory.attempts(state, playbook.name, section.name)
    if not resume:
        if earlier and not finished(earlier[-1]):
            notice(
                f"{earlier[-1].record.run_id} was not finished; this starts a new attempt (--resume would go on with it)"
            )
        fields = _record_of(playbook, section, repo, clock, run_id="", attempt=0)
        kept = {
            key: value
            for key, value in vars(fields).items()
            if key not in ("run_id", "attempt", "playbook", "phase", "schema")
        }
        kept["overrides"] = overrides
        if allow_dirty:
            kept["source"] = {**kept["source"], ledger_source.ALLOWED_DIRTY: True}
        kept["keep_going"] = keep_going
        return run_directory.create(state, playbook.name, section.name, **kept)
    if not earlier:
        raise UsageError(
            f"there is no run of {section.name} by playbook {playbook.name!r} to resume.", hint="Leave out --resume."
        )
    _require_same(earlier[-1].record, playbook, repo)
    return earlier[-1]


def has_unfinished(playbook: Playbook, section: PhaseSection) -> bool:
    """Whether the latest attempt at a phase was cut off before its end."""
    state = run_directory.state_directory(source.repository_of(playbook.path))
    earlier = run_directory.attempts(state, playbook.name, section.name)
    return bool(earlier) and not finished(earlier[-1])


def finished(directory: RunDirectory) -> bool:
    """Whether an attempt came to its end."""
    from phases.run.journal import read

    try:
        records = read(directory.journal, directory.record.run_id)
    except JournalError:
        return False
    return any(record.event == "run-finished" for record in records)


def _require_same(record: RunRecord, playbook: Playbook, repo: Path) -> None:
    changed = []
    if record.playbook_digest != playbook.digest:
        changed.append("the playbook")
    if record.kernel_digest != kernel_digest(playbook):
        changed.append("the kernel's files")
    if changed:
        raise JournalError(
            f"{record.run_id} cannot be resumed: {' and '.join(changed)} changed since it started.",
            hint="Start a new run without --resume, or put the old content back.",
        )


def _require_clean(section: PhaseSection, repo: Path) -> None:
    if section.kind.clean_tree and (changed := ledger_source.changed_paths(Git(repo))):
        raise UsageError(
            f"{section.name} refuses uncommitted changes ({changed}): what runs in production must be in git.",
            hint="Commit them, or remove what git does not know.",
        )


def _record_of(
    playbook: Playbook, section: PhaseSection, repo: Path, clock: Clock, *, run_id: str, attempt: int
) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        playbook=playbook.name,
        phase=section.name,
        attempt=attempt,
        started=clock.now(),
        author=source.identity(repo),
        playbook_digest=playbook.digest,
        kernel_digest=kernel_digest(playbook),
        source=ledger_source.describe(Git(repo)),
        toolkit=__version__,
    )


def _phase_run(playbook: Playbook, section: PhaseSection, repo: Path, work: Path, record: RunRecord) -> PhaseRun:
    return PhaseRun(playbook, section, contract.load(playbook.kernel), repo, work, record)


def _steps(run: PhaseRun) -> list[Step]:
    script = load_object(run.section.kind.script)
    if script is None:
        raise UsageError(
            f"this installation of phasegate cannot run {run.section.name} ({run.section.kind.script} is missing)."
        )
    return script(run)
