"""What a rollback by hand needs beside hosts: where to go back to, by the ledger, and the checkpoint it leaves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phases.base.clock import Clock
from phases.base.errors import Exit, LedgerError, PhaseError, UsageError, joined
from phases.base.results import Results
from phases.base.verdict import Verdict
from phases.engines.ssh.releases import NEVER
from phases.fleet.report import table
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger import source as ledger_source
from phases.ledger.checkpoint import (
    GATE,
    PROVENANCE,
    RESULTS,
    Checkpoint,
    Damaged,
    Draft,
    canonical_json,
    parse_directory,
)
from phases.ledger.git import Git
from phases.ledger.ledger import Ledger
from phases.ledger.provenance import statement
from phases.playbook.phase_kinds import ROLLBACK_PHASE
from phases.playbook.schema import Playbook
from phases.production.hot import HotSwitch
from phases.production.production import Production, WorkerState
from phases.rollback.steps import Rollback
from phases.run.closing import ledger_of
from phases.run.phase_run import PhaseRun
from phases.status.textfile import keep_written


@dataclass(frozen=True)
class Ended:
    """How a rollback ended, and its checkpoint."""

    rollback: Rollback
    checkpoint: Checkpoint
    code: Exit


def release_of(playbook: Playbook, name: str) -> str:
    """Digest of the release a passed full rollout made last-good."""
    ledger = ledger_of(playbook)
    checkpoint = ledger.find(name)
    digest = _end(ledger, checkpoint).get("last_good", "")
    if not checkpoint.verdict.advances or not digest:
        raise UsageError(
            f"{checkpoint.name} did not make a release last-good.", hint="Name a full-rollout checkpoint that passed."
        )
    return str(digest)


def record(
    run: PhaseRun, ended: Rollback, detected: float, clock: Clock, progress: Callable[[str], None]
) -> Checkpoint:
    """The rollback's own checkpoint: its timeline, what is left to do, whether it is verified."""
    as_wanted = ended.verified or (not ended.restores and ended.state == "safe")
    verdict = Verdict.PASS if as_wanted else Verdict.FAIL
    left = joined(f"{name}: {why}" for name, why in ended.left.items())
    reason = f"{len(ended.moved)} workers brought back and observed" if ended.verified else f"not restored: {left}"
    if ended.state == "safe" and ended.hot:
        reason = f"traffic safe ({ended.hot.describe()}), not restored: {', '.join(ended.left)}"
    gate = GateOutcome(
        ROLLBACK_PHASE,
        (RuleOutcome("rollback", verdict, reason, n=len(ended.moved), source="hosts and router, observed at the end"),),
    )
    return _write(run, gate, {"timeline": list(ended.events), "rollback": ended.to_json()}, detected, clock, progress)


def record_undone(
    run: PhaseRun, switch: HotSwitch, reason: str, begun: float, clock: Clock, progress: Callable[[str], None]
) -> Checkpoint:
    """The checkpoint of a hot fallback taken back: with it the newest rollback has left nothing to restore, unless a rank did not go along."""
    outcome = RuleOutcome(
        "rollback",
        Verdict.FAIL if switch.missing else Verdict.PASS,
        f"hot fallback taken back: {switch.describe()}",
        n=switch.ranks,
        source="the word of each rank",
    )
    back = {"state": "undone", "verified": not switch.missing, "reason": reason, "hot": switch.to_json()}
    return _write(run, GateOutcome(ROLLBACK_PHASE, (outcome,)), {"rollback": back}, begun, clock, progress)


def _write(
    run: PhaseRun,
    gate: GateOutcome,
    facts: dict[str, Any],
    detected: float,
    clock: Clock,
    progress: Callable[[str], None],
) -> Checkpoint:
    results = Results(ROLLBACK_PHASE, run.kernel.name, facts=facts)
    files = {
        RESULTS: canonical_json(results.to_json()),
        GATE: canonical_json(gate.to_json()),
        "rollback.txt": table(results).encode(),
    }
    draft = Draft(
        ROLLBACK_PHASE,
        gate.verdict,
        run.kernel.name,
        f"{run.record.run_id}@{int(detected * 1000)}",
        files,
        ledger_source.describe(Git(run.repo)),
        clock.now(),
        {},
        f"{run.playbook.name} sha256:{run.playbook.digest}",
    )
    draft.files[PROVENANCE] = statement(draft, detected)
    checkpoint = ledger_of(run.playbook, progress).record(draft)
    keep_written(run.playbook, clock, progress)
    return checkpoint


def recorded(
    run: PhaseRun, ended: Rollback, detected: float, clock: Clock, progress: Callable[[str], None], code: Exit
) -> Ended:
    """`record`, and what the command ends with: how production is matters more than whether that could be written down, so where recording
    fails too `code` stands, unless it is 0."""
    try:
        return Ended(ended, record(run, ended, detected, clock, progress), code)
    except PhaseError as fault:
        progress(f"production is {ended.state}; what failed is only to write that down")
        fault.exit_code = code or fault.exit_code
        raise


def before_rollout(playbook: Playbook, production: Production) -> str:
    """Where to go when every host already runs its last-good release: to what the latest full rollout replaced."""
    states = production.observe(router_needed=False)
    if half := _before_half_kept(states):
        return half
    if any(state.error or state.current != state.last_good or (state.lease and state.lease.active) for state in states):
        return ""
    return _recorded(ledger_of(playbook), states[0].current) or _replaced(states)


def _recorded(ledger: Ledger, release: str) -> str:
    """What the latest full rollout to this release replaced, by the ledger. Empty where it does not say, or where what it says of that rollout
    may be in a damaged checkpoint: that must not keep production from going back, and an older rollout's word is not that of the latest."""
    try:
        found: list[Checkpoint | Damaged] = [*itertools.chain(*ledger.survey())]
        for checkpoint in sorted(found, key=lambda one: one.number, reverse=True):
            number_phase_verdict = parse_directory(checkpoint.name)
            if not number_phase_verdict or number_phase_verdict[1:] != ("full-rollout", Verdict.PASS):
                continue
            if isinstance(checkpoint, Damaged):
                return ""
            end = _end(ledger, checkpoint)
            if end.get("last_good") == release and end.get("previous"):
                return str(end["previous"])
    except LedgerError:
        return ""
    return ""


def _end(ledger: Ledger, checkpoint: Checkpoint) -> dict[str, Any]:
    """How a phase in production ended, as its checkpoint says. Raises LedgerError where that cannot be read."""
    try:
        return dict(Results.from_json(json.loads(ledger.files(checkpoint)[RESULTS])).facts.get("end", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise LedgerError(
            f"{checkpoint.name} holds no readable results.", hint=f"See `phase checkpoint verify {checkpoint.number}`."
        ) from fault


def _replaced(states: Sequence[WorkerState]) -> str:
    """What the hosts themselves know of the rollout that made their release last-good: for a machine whose ledger does not hold it."""
    leases = [
        state.lease if state.lease and state.lease.state == "kept" and state.lease.release == state.current else None
        for state in states
    ]
    before = {lease.previous if lease else "" for lease in leases} - {NEVER}
    return before.pop() if len(before) == 1 else ""


def _before_half_kept(states: Sequence[WorkerState]) -> str:
    """A rollout cut off while it made its release last-good leaves two last-good releases: then what all of them had before; else empty."""
    good = {state.last_good for state in states if not state.error}
    kept = [
        state
        for state in states
        if state.lease and state.lease.state == "kept" and state.lease.release == state.last_good
    ]
    before = {state.lease.previous for state in kept if state.lease}
    return (
        before.pop()
        if len(good) == 2 and len(before) == 1 and good - {state.last_good for state in kept} == before
        else ""
    )
