"""How far a kernel has come by a playbook, read from the ledger: the truth that `phase status` and the next phase go by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from phases.base.errors import Exit, GateError
from phases.base.verdict import Verdict
from phases.ledger.approvals import Review as ReviewState
from phases.ledger.approvals import review_state
from phases.ledger.checkpoint import OVERRIDE, Approval, Checkpoint
from phases.ledger.ledger import Ledger
from phases.playbook.schema import PhaseSection, Playbook, Review


class State(Enum):
    """Where one phase stands."""

    NOT_RUN = "not run"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    WAITING = "waiting for review"
    REJECTED = "rejected"
    APPROVED = "approved"
    OVERRIDDEN = "overridden"  # inconclusive, and a person went on from it all the same
    PASSED = "passed"  # and no review wanted
    STALE = "stale"  # passed, but the kernel, or what the playbook asks of it, is another one by now

    @property
    def lets_next_start(self) -> bool:
        return self in (State.APPROVED, State.PASSED, State.OVERRIDDEN)


@dataclass(frozen=True)
class Standing:
    """One phase of a playbook, its newest checkpoint and the decisions on it."""

    section: PhaseSection
    state: State
    checkpoint: Checkpoint | None = None
    approvals: tuple[Approval, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.section.name,
            "number": self.section.kind.number,
            "state": self.state.value,
            "review": self.section.review.value,
            "checkpoint": self.checkpoint.to_json() if self.checkpoint else None,
            "approvals": [vars(approval) for approval in self.approvals],
        }


def standings(playbook: Playbook, ledger: Ledger, kernel_digest: str) -> tuple[Standing, ...]:
    """Every phase of the playbook in order. The newest checkpoint of a phase decides."""
    newest = {checkpoint.phase: checkpoint for checkpoint in ledger.checkpoints() if of_playbook(checkpoint, playbook)}
    return tuple(_standing(section, newest.get(section.name), ledger, kernel_digest) for section in playbook.phases)


def of_playbook(checkpoint: Checkpoint, playbook: Playbook) -> bool:
    return str(checkpoint.manifest.get("playbook", "")).split(" ")[0] == playbook.name


def exit_code(verdict: Verdict, section: PhaseSection) -> Exit:
    """How `phase run` ends after a checkpoint with this verdict was recorded."""
    if verdict is Verdict.PASS:
        return Exit.WAITING_FOR_REVIEW if section.review is Review.REQUIRED else Exit.PASSED
    return {Verdict.INCONCLUSIVE: Exit.INCONCLUSIVE, Verdict.ABORTED: Exit.OPERATIONAL}.get(verdict, Exit.GATE_FAILED)


def require_ready(section: PhaseSection, known: tuple[Standing, ...]) -> None:
    """Raise GateError when a phase before this one has not passed and been approved."""
    for standing in known:
        if standing.section.kind.number >= section.kind.number or standing.state.lets_next_start:
            continue
        cure = {
            State.WAITING: f"Review it: `phase gate review {standing.section.name}`, then `phase gate approve`.",
            State.STALE: f"The kernel or its gate changed since; run `phase run {standing.section.name}` again.",
        }.get(standing.state, f"Run `phase run {standing.section.name}` first.")
        fault = GateError(
            f"{section.name} may not start: {standing.section.name} is {standing.state.value}.", hint=cure
        )
        fault.exit_code = Exit.WAITING_FOR_REVIEW if standing.state is State.WAITING else Exit.GATE_FAILED
        raise fault


def _standing(section: PhaseSection, checkpoint: Checkpoint | None, ledger: Ledger, kernel_digest: str) -> Standing:
    if checkpoint is None:
        return Standing(section, State.NOT_RUN)
    approvals = ledger.approvals(checkpoint, signed=section.signed_decisions)
    return Standing(section, _state(section, checkpoint, approvals, kernel_digest), checkpoint, tuple(approvals))


def _state(section: PhaseSection, checkpoint: Checkpoint, approvals: list[Approval], kernel_digest: str) -> State:
    review = review_state(checkpoint, approvals, required=section.review is Review.REQUIRED)
    if review is ReviewState.REJECTED:
        return State.REJECTED
    overridden = review is ReviewState.OVERRIDDEN and section.allow_override
    if checkpoint.verdict is Verdict.INCONCLUSIVE and not overridden:
        return State.INCONCLUSIVE
    if not checkpoint.verdict.advances and not overridden:
        return State.FAILED
    facts = checkpoint.manifest.get("facts", {})
    if facts.get("kernel_digest") != kernel_digest or facts.get("section_digest") != section.digest:
        return State.STALE
    if overridden:
        return State.OVERRIDDEN
    return {ReviewState.WAITING: State.WAITING, ReviewState.APPROVED: State.APPROVED}.get(review, State.PASSED)


def overrides_before(section: PhaseSection, known: tuple[Standing, ...]) -> list[str]:
    """The overrides that a run of this phase stands on, in words: checkpoint, person and reason of each."""
    earlier = [row for row in known if row.state is State.OVERRIDDEN and row.section.kind.number < section.kind.number]
    return [
        f"{row.checkpoint.name}, overridden by {made.person}: {made.reason}"
        for row in earlier
        for made in row.approvals
        if row.checkpoint and made.decision == OVERRIDE
    ]
