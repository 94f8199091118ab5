"""Approvals: a person, a reason, and the exact digest they saw."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from phases.base.errors import GateError, UsageError
from phases.base.verdict import Verdict
from phases.ledger.checkpoint import APPROVE, OVERRIDE, REJECT, Approval, Checkpoint, mail_of
from phases.ledger.git import GitFailed
from phases.ledger.source import ALLOWED_DIRTY
from phases.ledger.verify import verify_files

if TYPE_CHECKING:
    from phases.ledger.ledger import Ledger


class Review(Enum):
    """Where a checkpoint stands between the gate and the next phase."""

    NOT_NEEDED = "not needed"
    WAITING = "waiting for review"
    APPROVED = "approved"
    OVERRIDDEN = "overridden, not passed"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Terms:
    """What a playbook asks of whoever says yes.

    Attributes:
        four_eyes: it is not the one who ran the phase.
        signed: the decision bears their signature, as git verifies it.
    """

    four_eyes: bool = False
    signed: bool = False


def review_state(checkpoint: Checkpoint, decisions: list[Approval], *, required: bool) -> Review:
    """A no to this digest is final, whatever was said before or after it; decisions on another digest do not count. An override counts of an
    INCONCLUSIVE gate alone."""
    mine = {d.decision for d in decisions if d.digest == checkpoint.digest}
    if REJECT in mine:
        return Review.REJECTED
    if OVERRIDE in mine and checkpoint.verdict is Verdict.INCONCLUSIVE:
        return Review.OVERRIDDEN
    if APPROVE in mine:
        return Review.APPROVED
    return Review.WAITING if required else Review.NOT_NEEDED


def approve(ledger: Ledger, checkpoint: Checkpoint, *, reason: str, seen: str, at: float, terms: Terms) -> Approval:
    """Say yes to a checkpoint.

    Args:
        seen: the digest the reviewer saw, whole or its first 12 digits or more.

    Raises:
        GateError: the gate did not pass, the digest is another one, a file is not as recorded, the source was not in git and
            the run did not say so, the author approves their own work, or a signature is wanted and git verifies none.
        UsageError: no reason given.
    """
    reason = _check(checkpoint, reason, seen)
    if not checkpoint.verdict.advances:
        raise GateError(
            f"{checkpoint.name} has verdict {checkpoint.verdict.value}; only PASS can be approved.",
            hint="Mend the cause and run the phase again.",
        )
    return _let_on(ledger, checkpoint, APPROVE, reason, at, terms)


def override(ledger: Ledger, checkpoint: Checkpoint, *, reason: str, seen: str, at: float, terms: Terms) -> Approval:
    """Go on from a gate that could not decide. It stays INCONCLUSIVE, and whatever is built on it says that it was overridden.

    Raises as `approve`; of any verdict but INCONCLUSIVE GateError.
    """
    reason = _check(checkpoint, reason, seen)
    if checkpoint.verdict is not Verdict.INCONCLUSIVE:
        passed = checkpoint.verdict.advances
        raise GateError(
            f"{checkpoint.name} has verdict {checkpoint.verdict.value}; only INCONCLUSIVE can be overridden.",
            hint="It passed: `phase gate approve`." if passed else "Mend the cause and run the phase again.",
        )
    return _let_on(ledger, checkpoint, OVERRIDE, reason, at, terms)


def reject(ledger: Ledger, checkpoint: Checkpoint, *, reason: str, seen: str, at: float) -> Approval:
    """Say no to a checkpoint: the run stops there. Raises as `approve`, but any verdict may be rejected."""
    reason = _check(checkpoint, reason, seen)
    return ledger.decide(checkpoint, REJECT, reason, at)


def _let_on(ledger: Ledger, checkpoint: Checkpoint, kind: str, reason: str, at: float, terms: Terms) -> Approval:
    """Record a decision that opens the next phase, after what every such one needs."""
    _require_clean_source(checkpoint)
    _require_unaltered(ledger, checkpoint)
    person = ledger.git.identity()
    if terms.four_eyes and mail_of(person) == mail_of(checkpoint.author):
        raise GateError(
            f"{person} recorded {checkpoint.name} and the playbook wants four eyes.",
            hint="Ask somebody else to review it from their own clone.",
        )
    return ledger.decide(checkpoint, kind, reason, at, signed=terms.signed)


def _require_clean_source(checkpoint: Checkpoint) -> None:
    """What is approved must be in git, or the run must have said from its start that it is not."""
    source = checkpoint.manifest["source"]
    if source.get("dirty") and source.get(ALLOWED_DIRTY) is not True:
        raise GateError(
            f"{checkpoint.name} was recorded with uncommitted changes, so nobody can say later what was approved.",
            hint=f"Commit them and run {checkpoint.phase} again; or run it with --allow-dirty, which every page then says.",
        )


def _require_unaltered(ledger: Ledger, checkpoint: Checkpoint) -> None:
    """The digest is the manifest's: that its files are those of the manifest is for whoever approves to find out, not for a later `verify`."""
    try:
        files = ledger.files(checkpoint)
    except GitFailed:  # another clone's, which this one has not fetched yet
        ledger.sync()
        files = ledger.files(checkpoint)
    problems = verify_files(checkpoint.name, files)
    if problems:
        raise GateError(
            f"{checkpoint.name} was altered: {problems[0]}.", hint=f"See `phase checkpoint verify {checkpoint.number}`."
        )


def _check(checkpoint: Checkpoint, reason: str, seen: str) -> str:
    """The reason as text: under LC_ALL=C Python hands over the bytes of the command line undecoded."""
    try:
        reason = reason.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as fault:
        raise UsageError("the reason is not UTF-8 text.", hint="Write it in UTF-8.") from fault
    if any(ord(char) < 32 and char not in "\n\t" or ord(char) == 127 for char in reason):
        raise UsageError(
            "the reason holds control characters, which would reach the terminal of whoever reads it.",
            hint="Write it as plain text.",
        )
    if not reason.strip():
        raise UsageError("a decision needs a reason.", hint="Give it with --reason.")
    if len(seen) < 12 or not checkpoint.digest.startswith(seen.lower()):
        raise GateError(
            f"the digest {seen!r} is not that of {checkpoint.name}, which is {checkpoint.digest[:16]}.",
            hint=f"Look again with `phase gate review {checkpoint.number}`, then decide on what you saw.",
        )
    return reason
