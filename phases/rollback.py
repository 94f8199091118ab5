"""Rolling production back by hand: from any terminal, in any state, during any phase.

It takes over the hosts from whatever run holds them, brings every worker to a release that was verified good, and tells how it
ended by what is observed. It leaves a checkpoint of its own with the timeline.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phases.engine.closing import ledger_of
from phases.engine.phase_run import PhaseRun
from phases.engine.session import adhoc_run
from phases.engine.steps import Clock
from phases.errors import Exit, UsageError
from phases.gates.outcome import GateOutcome, RuleOutcome
from phases.ledger import source as ledger_source
from phases.ledger.checkpoint import GATE, PROVENANCE, RESULTS, Checkpoint, Draft, canonical_json
from phases.ledger.git import Git
from phases.ledger.provenance import statement
from phases.playbook.schema import Playbook
from phases.results import Results
from phases.rollout.live import open_production
from phases.rollout.production import Production, WorkerState
from phases.rollout.report import table
from phases.rollout import hot
from phases.rollout.hot import HotSwitch
from phases.rollout.rollback import Rollback, roll_back, safe_only
from phases.status.textfile import keep_written
from phases.verdict import Verdict

PHASE = "rollback"


@dataclass(frozen=True)
class Ended:
    """How a rollback by hand ended."""

    rollback: Rollback
    checkpoint: Checkpoint
    code: Exit


def roll_back_now(playbook: Playbook, *, to: str, reason: str, clock: Clock, progress: Callable[[str], None], restore: bool = True) -> Ended:
    """Roll production back and record it: traffic safe by the hot fallback where that works, then restored by restarts.

    Args:
        restore: false: stop at safe.
        to: a checkpoint whose release to go to; empty: what each host records as last-good, or, when all of them run that
            already, the release before the latest full rollout.
    Raises:
        UsageError: the checkpoint names no release that passed a full rollout.
    """
    detected = clock.now()
    run = adhoc_run(playbook, PHASE, clock)
    with open_production(run, f"rollback: {reason}", clock, progress) as production:
        production.preempt = True
        target = release_of(playbook, to) if to else ""
        if restore:
            first = hot.fall_back(production, target=target) if production.settings.fallback.hot else None  # before anything slower
            target = target or before_rollout(playbook, production)
            done = first if first and first.affected else None
            ended = roll_back(production, reason, detected=detected, target=target, by_hand=True, hot_done=done)
        else:
            ended = safe_only(production, reason, detected=detected, target=target)
    return Ended(ended, record(run, ended, detected, clock, progress), _code(ended, only_safe=not restore))


def undo_hot(playbook: Playbook, *, reason: str, clock: Clock, progress: Callable[[str], None]) -> HotSwitch:
    """Servers that fell back hot to the candidate's kernel again: a fallback that turned out not to be needed.

    Raises:
        UsageError: none has fallen back. HostLockedError: a run holds a host.
    """
    run = adhoc_run(playbook, PHASE, clock)
    with open_production(run, f"undo of a hot fallback: {reason}", clock, progress) as production:
        fallen = hot.fallen_back(production)
        if not fallen:
            raise UsageError("no server has fallen back hot.", hint="`phase rollback --hot` would do that.")
        return hot.go_forward(production, fallen)


def release_of(playbook: Playbook, name: str) -> str:
    """Digest of the release a passed full rollout made last-good."""
    ledger = ledger_of(playbook)
    checkpoint = ledger.find(name)
    results = Results.from_json(json.loads(ledger.files(checkpoint)[RESULTS]))
    digest = results.facts.get("end", {}).get("last_good", "")
    if not checkpoint.verdict.advances or not digest:
        raise UsageError(f"{checkpoint.name} did not make a release last-good.", hint="Name a full-rollout checkpoint that passed.")
    return str(digest)


def record(run: PhaseRun, ended: Rollback, detected: float, clock: Clock, progress: Callable[[str], None]) -> Checkpoint:
    """The rollback's own checkpoint: its timeline, what is left to do, whether it is verified."""
    as_wanted = ended.verified or (not ended.restores and ended.state == "safe")
    verdict = Verdict.PASS if as_wanted else Verdict.FAIL
    reason = f"{len(ended.moved)} workers brought back and observed" if ended.verified else f"not restored: {ended.left}"
    if ended.state == "safe" and ended.hot:
        reason = f"traffic safe ({ended.hot.describe()}), not restored: {', '.join(ended.left)}"
    gate = GateOutcome(PHASE, (RuleOutcome("rollback", verdict, reason, n=len(ended.moved), source="hosts and router, observed at the end"),))
    results = Results(PHASE, run.kernel.name, facts={"timeline": list(ended.events), "rollback": ended.to_json()})
    files = {RESULTS: canonical_json(results.to_json()), GATE: canonical_json(gate.to_json()), "rollback.txt": table(results).encode()}
    draft = Draft(PHASE, verdict, run.kernel.name, f"{run.record.run_id}@{int(detected * 1000)}", files, ledger_source.describe(Git(run.repo)),
                  clock.now(), {}, f"{run.playbook.name} sha256:{run.playbook.digest}")  # fmt: skip
    draft.files[PROVENANCE] = statement(draft, detected)
    checkpoint = ledger_of(run.playbook, progress).record(draft)
    keep_written(run.playbook, clock, progress)
    return checkpoint


def before_rollout(playbook: Playbook, production: Production) -> str:
    """Where to go when every host already runs its last-good release: to what the latest full rollout replaced."""
    states = production.observe(router_needed=False)
    if half := _before_half_kept(states):
        return half
    if any(state.error or state.current != state.last_good or (state.lease and state.lease.active) for state in states):
        return ""
    ledger = ledger_of(playbook)
    for checkpoint in reversed([c for c in ledger.checkpoints() if c.phase == "full-rollout" and c.verdict.advances]):
        end: dict[str, Any] = Results.from_json(json.loads(ledger.files(checkpoint)[RESULTS])).facts.get("end", {})
        if end.get("last_good") == states[0].current and end.get("previous"):
            return str(end["previous"])
    return ""


def _before_half_kept(states: Sequence[WorkerState]) -> str:
    """A rollout cut off while it made its release last-good leaves two last-good releases: then what all of them had before; else empty."""
    good = {state.last_good for state in states if not state.error}
    kept = [state for state in states if state.lease and state.lease.state == "kept" and state.lease.release == state.last_good]
    before = {state.lease.previous for state in kept if state.lease}
    return before.pop() if len(good) == 2 and len(before) == 1 and good - {state.last_good for state in kept} == before else ""


def _code(ended: Rollback, *, only_safe: bool) -> Exit:
    """A rollback asked for that ends where it should has passed: 0; else a person is needed."""
    return Exit.PASSED if ended.verified or (only_safe and ended.state == "safe") else Exit.ROLLBACK_INCOMPLETE


