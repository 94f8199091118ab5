"""What ledger and run directories say at one moment, gathered once and shown in several ways."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phases.base.clock import Clock
from phases.base.errors import Exit, JournalError, LedgerError
from phases.engines.embedded import taken_down
from phases.engines.embedded.taken_down import TakenDown
from phases.ledger import lost
from phases.ledger import repository as source
from phases.ledger.checkpoint import RESULTS, Checkpoint
from phases.ledger.ledger import Ledger
from phases.playbook.phase_kinds import ROLLBACK_PHASE
from phases.playbook.schema import Playbook
from phases.run import live_state, progress, run_directory, session
from phases.run.journal import read as read_journal
from phases.run.lock import Lock, Owner, is_dead
from phases.run.progress import Standing, State
from phases.run.run_directory import RunDirectory

_ROLLED_BACK = (Exit.ROLLED_BACK, Exit.ROLLBACK_INCOMPLETE)


@dataclass(frozen=True)
class Waiting:
    """A phase that waits for a person. `since` in seconds since the epoch."""

    phase: str
    checkpoint: str
    since: float
    reviewer: str  # who may say yes, in words


@dataclass(frozen=True)
class LastGood:
    """The release the newest passed full rollout made last-good, and when."""

    release: str
    checkpoint: str
    at: float


@dataclass(frozen=True)
class RolledBack:
    """A rollback in the ledger.

    Attributes:
        state: restored; undone: the hot fallback was taken back; safe: no traffic on the candidate's kernel, restarts still to come; incomplete.
        restores: whether it was to restore, or only to make traffic safe. left: what was not as it should be at its end, by worker.
    """

    checkpoint: str
    at: float
    verified: bool
    reason: str
    state: str = ""
    restores: bool = True
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Overview:
    """One moment.

    Attributes:
        running: who holds the playbook's lock on this machine. live: what that run is doing, as it last said.
        rolled_back: the newest rollback.
        unrestored: the newest one that was to restore and did not, where none since has either; hot fallbacks made or taken back since are none.
        lost: what tags remember and the ledger branch does not hold any more, in words.
        damaged: why the ledger cannot be read, in words: then nothing is told of what stands in it, neither phases, nor last good, nor rollbacks.
        taken_down: when and by whom the embedded fleet was; None where there is none, or nobody has.
        unfinished: attempts that were cut off. exits: exit code of each phase's latest finished attempt here.
    """

    playbook: Playbook
    at: float
    phases: tuple[Standing, ...]
    waiting: tuple[Waiting, ...] = ()
    running: Owner | None = None
    live: dict[str, Any] | None = None
    unfinished: tuple[str, ...] = ()
    exits: tuple[tuple[str, int], ...] = ()
    last_good: LastGood | None = None
    rolled_back: RolledBack | None = None
    unrestored: RolledBack | None = None
    lost: str = ""
    taken_down: TakenDown | None = None
    damaged: str = ""

    @property
    def left_to_restore(self) -> bool:
        """Whether rollbacks have left something to do: not where the workers they speak of have been taken down since."""
        open_ones = [back for back in (self.unrestored, self.rolled_back) if back is not None and not back.verified]
        return any(not (self.taken_down and self.taken_down.settles(back.at)) for back in open_ones)

    def to_json(self) -> dict[str, Any]:
        return {
            "playbook": self.playbook.name,
            "kernel": str(self.playbook.kernel),
            "phases": [standing.to_json() for standing in self.phases],
            "waiting": [vars(row) for row in self.waiting],
            "running": vars(self.running) if self.running else None,
            "live": self.live,
            "unfinished": list(self.unfinished),
            "exits": dict(self.exits),
            "last_good": vars(self.last_good) if self.last_good else None,
            "rolled_back": vars(self.rolled_back) if self.rolled_back else None,
            "unrestored": vars(self.unrestored) if self.unrestored else None,
            "lost": self.lost,
            "damaged": self.damaged,
            "taken_down": vars(self.taken_down) if self.taken_down else None,
        }


def gather(playbook: Playbook, ledger: Ledger, clock: Clock) -> Overview:
    """Read ledger and run directories. Nothing is created where no run ever was. A damaged ledger is told of and keeps nothing else from being seen."""
    owner, latest = _runs(playbook, clock)
    unfinished = tuple(run.record.run_id for run in latest if not session.finished(run))
    live = next((found for run in latest if owner and (found := live_state.read(run.path))), None)
    exits = tuple((run.record.phase, code) for run in latest if (code := _exit_of(run)) is not None)
    here = Overview(
        playbook,
        clock.now(),
        (),
        running=owner,
        live=live,
        unfinished=unfinished,
        exits=exits,
        taken_down=taken_down.of_playbook(playbook),
    )
    try:
        return replace(here, **_in_ledger(playbook, ledger))
    except LedgerError as fault:
        return replace(here, damaged=str(fault))


def _in_ledger(playbook: Playbook, ledger: Ledger) -> dict[str, Any]:
    """What the ledger tells, by attribute of Overview. Raises LedgerError."""
    known = progress.standings(playbook, ledger, session.kernel_digest(playbook))
    mine = [found for found in ledger.checkpoints() if progress.of_playbook(found, playbook)]
    return {
        "phases": known,
        "waiting": tuple(_waiting(row) for row in known if row.state is State.WAITING),
        "last_good": _last_good(ledger, mine),
        "rolled_back": rolled_back(ledger, mine),
        "unrestored": unrestored(ledger, mine),
        "lost": lost.warning(ledger),
    }


def _waiting(standing: Standing) -> Waiting:
    checkpoint = standing.checkpoint
    assert checkpoint is not None, "only a recorded checkpoint waits"
    author = checkpoint.author.partition(" <")[0]
    reviewer = f"a reviewer other than {author}" if standing.section.four_eyes else "a reviewer"
    return Waiting(standing.section.name, checkpoint.name, checkpoint.recorded_at, reviewer)


def _runs(playbook: Playbook, clock: Clock) -> tuple[Owner | None, list[RunDirectory]]:
    """(who holds the lock, each phase's latest attempt)."""
    state: Path = source.repository_of(playbook.path) / ".phase"
    if not state.is_dir():
        return None, []
    owner = Lock(state, playbook.name, clock).owner()
    if owner and is_dead(owner):
        owner = None  # killed: the next run takes its lock over, so nothing stands in the way
    latest = [run_directory.attempts(state, playbook.name, section.name)[-1:] for section in playbook.phases]
    return owner, [run for runs in latest for run in runs]


def _exit_of(run: RunDirectory) -> int | None:
    try:
        ends = [
            record.data["exit"]
            for record in read_journal(run.journal, run.record.run_id)
            if record.event == "run-finished"
        ]
    except JournalError:
        return None
    return int(ends[-1]) if ends else None


def _last_good(ledger: Ledger, mine: list[Checkpoint]) -> LastGood | None:
    """What the newest passed full rollout brought, or the newest verified rollback that was told where to go."""
    for found in reversed(mine):
        if found.phase == "full-rollout" and found.verdict.advances:
            release = _members(_facts(ledger, found).get("end")).get("last_good", "")
        elif found.phase == ROLLBACK_PHASE and found.verdict.advances:
            release = _members(_facts(ledger, found).get("rollback")).get("target", "")
        else:
            continue
        if release:
            return LastGood(release, found.name, found.recorded_at)
    return None


def rolled_back(ledger: Ledger, mine: list[Checkpoint]) -> RolledBack | None:
    """The newest rollback."""
    return next((back for found in reversed(mine) if (back := _rollback_of(ledger, found))), None)


def unrestored(ledger: Ledger, mine: list[Checkpoint]) -> RolledBack | None:
    """The newest rollback that was to restore and did not, unless one since did, or a full rollout has passed."""
    for found in reversed(mine):
        if found.phase == "full-rollout" and found.verdict.advances:
            return None
        back = _rollback_of(ledger, found)
        if back and back.state != "undone" and (back.verified or back.restores):
            return None if back.verified else back
    return None


def _rollback_of(ledger: Ledger, found: Checkpoint) -> RolledBack | None:
    """By hand or by the watch (a checkpoint of its own), or by a phase whose end says so."""
    if found.phase == ROLLBACK_PHASE:
        back = _members(_facts(ledger, found).get("rollback"))
    elif found.phase in ("tp8-canary", "full-rollout") and not found.verdict.advances:
        facts = _facts(ledger, found)
        end = _members(facts.get("end"))
        if end.get("exit_code") not in _ROLLED_BACK:
            return None
        back = _members(end.get("rollback") or facts.get("rollback"))
    else:
        return None
    state = str(back.get("state", ""))
    restores = bool(
        back.get("restores", state != "safe")
    )  # not told by older ones, where most that ended safe went no further
    return RolledBack(
        found.name,
        found.recorded_at,
        bool(back.get("verified")),
        str(back.get("reason", "")),
        state,
        restores,
        _members(back.get("left")),
    )


def _facts(ledger: Ledger, found: Checkpoint) -> dict[str, Any]:
    """The facts of a checkpoint's results; nothing where they cannot be read, which `phase checkpoint verify` is for."""
    try:
        facts = json.loads(ledger.files(found)[RESULTS]).get("facts", {})
    except (KeyError, ValueError, AttributeError, RecursionError):
        return {}
    return _members(facts)


def _members(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
