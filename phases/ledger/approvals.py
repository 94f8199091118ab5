"""Approvals: a person, a reason, and the exact digest they saw."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from phases.base.errors import GateError, LedgerError, UsageError
from phases.ledger.checkpoint import Approval, Checkpoint, canonical_json, mail_of, sha256
from phases.ledger.git import Git, GitFailed
from phases.ledger.lost import decision_tag
from phases.ledger.objects import list_tree, read_objects, write_tree

if TYPE_CHECKING:
    from phases.ledger.ledger import Ledger, Written

SCHEMA = "phasegate/approval/v2"
UNTAGGED = "phasegate/approval/v1"  # decisions of before they had tags


class Review(Enum):
    """Where a checkpoint stands between the gate and the next phase."""

    NOT_NEEDED = "not needed"
    WAITING = "waiting for review"
    APPROVED = "approved"
    REJECTED = "rejected"


def review_state(checkpoint: Checkpoint, decisions: list[Approval], *, required: bool) -> Review:
    """A no to this digest is final, whatever was said before or after it; decisions on another digest do not count."""
    mine = [d for d in decisions if d.digest == checkpoint.digest]
    if mine:
        return Review.REJECTED if any(d.decision == "reject" for d in mine) else Review.APPROVED
    return Review.WAITING if required else Review.NOT_NEEDED


def approve(ledger: Ledger, checkpoint: Checkpoint, *, reason: str, seen: str, at: float, four_eyes: bool) -> Approval:
    """Say yes to a checkpoint.

    Args:
        seen: the digest the reviewer saw, whole or its first 12 digits or more.
        four_eyes: refuse the author's own approval.

    Raises:
        GateError: the gate did not pass, the digest is another one, a file is not as recorded, or the author approves their own work.
        UsageError: no reason given.
    """
    reason = _check(checkpoint, reason, seen)
    if not checkpoint.verdict.advances:
        raise GateError(
            f"{checkpoint.name} has verdict {checkpoint.verdict.value}; only PASS can be approved.",
            hint="Mend the cause and run the phase again.",
        )
    _require_unaltered(ledger, checkpoint)
    person = ledger.git.identity()
    if four_eyes and mail_of(person) == mail_of(checkpoint.author):
        raise GateError(
            f"{person} recorded {checkpoint.name} and the playbook wants four eyes.",
            hint="Ask somebody else to review it from their own clone.",
        )
    return ledger.decide(checkpoint, "approve", reason, at)


def reject(ledger: Ledger, checkpoint: Checkpoint, *, reason: str, seen: str, at: float) -> Approval:
    """Say no to a checkpoint: the run stops there. Raises as `approve`, but any verdict may be rejected."""
    reason = _check(checkpoint, reason, seen)
    return ledger.decide(checkpoint, "reject", reason, at)


def _require_unaltered(ledger: Ledger, checkpoint: Checkpoint) -> None:
    """The digest is the manifest's: that its files are those of the manifest is for whoever approves to find out, not for a later `verify`."""
    from phases.ledger.verify import verify_files

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


def read_approvals(git: Git, tip: str, checkpoint: Checkpoint) -> list[Approval]:
    """Decisions recorded for a checkpoint's number, oldest first."""
    return [_parse(data, path) for path, data in decision_files(git, tip, checkpoint)]


def decision_files(git: Git, tip: str, checkpoint: Checkpoint) -> list[tuple[str, bytes]]:
    """Path in the ledger's tree and content of every decision recorded for a checkpoint's number, oldest first."""
    entries = sorted(list_tree(git, f"{tip}:{_directory(checkpoint)}"), key=lambda entry: entry.path)
    contents = read_objects(git, (entry.oid for entry in entries))
    return [(f"{_directory(checkpoint)}/{entry.path}", contents[entry.oid][1]) for entry in entries]


def build_approval(ledger: Ledger, approval: Approval, checkpoint: Checkpoint, tip: str | None, at: float) -> Written:
    """The ledger commit holding one more decision."""
    from phases.ledger.ledger import Written

    assert tip is not None, "a checkpoint that was found has a ledger"
    _require_not_rejected(read_approvals(ledger.git, tip, checkpoint), approval, checkpoint)
    number = len(list_tree(ledger.git, f"{tip}:{_directory(checkpoint)}")) + 1
    content = canonical_json({"schema": SCHEMA, **dataclasses.asdict(approval)})
    name = decision_tag(ledger.tag_prefix, checkpoint, approval.decision, content)
    tree = write_tree(ledger.git, tip, {f"{_directory(checkpoint)}/{number:04d}.json": content})
    verb = {"approve": "Approve", "reject": "Reject"}[approval.decision]
    message = f"{verb} {checkpoint.name}\n\n{approval.reason}\n\nCheckpoint-Digest: {checkpoint.digest}\n"
    commit = ledger.commit(tree, [tip], message, at)
    text = f"{verb} {checkpoint.name}\n\nCheckpoint-Digest: {checkpoint.digest}\nDecision-Digest: {sha256(content)}\n"
    return Written(commit, checkpoint, ledger.tag(name, text, commit, at))


def _require_not_rejected(earlier: list[Approval], new: Approval, checkpoint: Checkpoint) -> None:
    """On the ledger's newest tip, so that a no of somebody else's that came a moment ago counts too."""
    no = next((d for d in earlier if d.digest == checkpoint.digest and d.decision == "reject"), None)
    if new.decision == "approve" and no is not None:
        raise GateError(
            f"{checkpoint.name} was rejected by {no.person} ({no.reason}); a no is final for that checkpoint.",
            hint=f"Mend the cause and run {checkpoint.phase} again: a new checkpoint can be approved.",
        )


def _directory(checkpoint: Checkpoint) -> str:
    return f"approvals/{checkpoint.number:04d}"


def _parse(data: bytes, where: str) -> Approval:
    try:
        row: dict[str, Any] = json.loads(data)
        decision = Approval(**{field.name: row[field.name] for field in dataclasses.fields(Approval)})
        if not isinstance(decision.checkpoint, int) or not all(
            isinstance(value, str) for name, value in vars(decision).items() if name != "checkpoint"
        ):
            raise ValueError("a member is of another kind")
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        raise LedgerError(
            f"{where} is not a decision of this toolkit.", hint="Run `phase checkpoint verify`."
        ) from fault
    if decision.decision not in ("approve", "reject"):
        raise LedgerError(f"{where} says neither approve nor reject.", hint="Run `phase checkpoint verify`.")
    return decision
