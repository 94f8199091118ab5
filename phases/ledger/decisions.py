"""Decisions as the ledger keeps them: one file each, with the exact digest it is about."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from phases.base.errors import GateError, LedgerError
from phases.ledger.checkpoint import REJECT, VERBS, Approval, Checkpoint, Written, canonical_json, mail_of, sha256
from phases.ledger.git import Git
from phases.ledger.lost import decision_tag
from phases.ledger.objects import list_tree, read_objects, write_tree

if TYPE_CHECKING:
    from phases.ledger.ledger import Ledger

SCHEMA = "phasegate/approval/v2"
UNTAGGED = "phasegate/approval/v1"  # decisions of before they had tags


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
    assert tip is not None, "a checkpoint that was found has a ledger"
    _require_not_rejected(read_approvals(ledger.git, tip, checkpoint), approval, checkpoint)
    number = len(list_tree(ledger.git, f"{tip}:{_directory(checkpoint)}")) + 1
    content = canonical_json({"schema": SCHEMA, **dataclasses.asdict(approval)})
    name = decision_tag(ledger.tag_prefix, checkpoint, approval.decision, content)
    tree = write_tree(ledger.git, tip, {f"{_directory(checkpoint)}/{number:04d}.json": content})
    verb = VERBS[approval.decision][0]
    message = f"{verb} {checkpoint.name}\n\n{approval.reason}\n\nCheckpoint-Digest: {checkpoint.digest}\n"
    commit = ledger.commit(tree, [tip], message, at)
    text = f"{verb} {checkpoint.name}\n\nCheckpoint-Digest: {checkpoint.digest}\nDecision-Digest: {sha256(content)}\n"
    return Written(commit, checkpoint, ledger.tag(name, text, commit, at))


def signed(ledger: Ledger, tip: str, checkpoint: Checkpoint) -> list[Approval]:
    """The decisions on a checkpoint that bear a signature of the one they name, as git verifies it here; a no counts without one too."""
    rows = decision_files(ledger.git, tip, checkpoint)
    decisions = [(_parse(data, path), path) for path, data in rows]
    return [
        decision
        for decision, path in decisions
        if decision.decision == REJECT
        or signer(ledger.git, ledger.git.text("rev-list", "--first-parent", "-1", tip, "--", path)) == decision.mail
    ]


def signer(git: Git, commit: str) -> str:
    """Mail address of whoever signed a commit, where git says that the signature is good and whose it is; empty otherwise."""
    flags = ("--no-walk", "--no-show-signature", "--no-notes", "--encoding=UTF-8", "--format=%G?%x09%GS")
    said = git.text("log", *flags, commit)  # no plumbing does it: rev-list does not read gpg.* (git 2.39)
    state, _, who = said.partition("\t")
    return mail_of(who) if state == "G" else ""


def require_signature(ledger: Ledger, written: Written, approval: Approval) -> Written:
    """Before it is published: a decision that would not count is none. Raises GateError."""
    if signer(ledger.git, written.commit) != approval.mail:
        raise GateError(
            f"the playbook wants signed decisions, and git does not verify this one as {approval.mail}'s.",
            hint="Set user.signingKey and gpg.format; for ssh keys, gpg.ssh.allowedSignersFile must name that address with the key.",
        )
    return written


def _require_not_rejected(earlier: list[Approval], new: Approval, checkpoint: Checkpoint) -> None:
    """On the ledger's newest tip, so that a no of somebody else's that came a moment ago counts too."""
    no = next((d for d in earlier if d.digest == checkpoint.digest and d.decision == REJECT), None)
    if new.decision != REJECT and no is not None:
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
    if decision.decision not in VERBS:
        raise LedgerError(f"{where} says none of {', '.join(VERBS)}.", hint="Run `phase checkpoint verify`.")
    return decision
