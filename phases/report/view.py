"""Everything a report shows, gathered from the ledger once so that the page itself is pure."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.results import Results
from phases.gate.outcome import GateOutcome
from phases.ledger import checkpoint as cp
from phases.ledger.approvals import Review, review_state
from phases.ledger.source import ALLOWED_DIRTY
from phases.report import anchors, moved
from phases.report.anchors import Anchor

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Approval, Checkpoint, Draft
    from phases.ledger.ledger import Ledger

TABLE_SUFFIX = ".txt"


@dataclass(frozen=True)
class Change:
    """What differs from the last approved checkpoint of the same phase.

    Attributes:
        against: its name.
        source: `git diff --stat` between the two source commits, or why there is none.
        environment: fact, its value then, its value now; only those that differ.
        benchmark: results of that checkpoint, for a comparison case by case.
        moves: what moved in rules and cases, what is looser first.
        playbook: unified diff of the playbooks; empty where they are the same or one was not kept.
    """

    against: str
    source: str
    environment: tuple[tuple[str, str, str], ...]
    benchmark: Results
    moves: tuple[moved.Move, ...] = ()
    playbook: str = ""


@dataclass(frozen=True)
class ReportView:
    """One checkpoint as a reviewer sees it."""

    title: str
    phase: str
    kernel: str
    gate: GateOutcome
    results: Results
    manifest: dict[str, Any]
    tables: dict[str, str]
    digest: str = ""  # empty inside the checkpoint itself, whose digest covers this page
    review: str = ""
    approvals: tuple[Approval, ...] = ()
    change: Change | None = None
    attempts: tuple[str, ...] = ()  # what was tried since the last approved checkpoint, in words
    anchors: tuple[Anchor, ...] = ()  # other kernels' times
    anchors_about: str = ""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def load_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows on the own load of a production phase, by the step in which a request ended; no rows without one."""
        shares = self.results.facts.get("load", [])
        rows = [
            (
                row["during"],
                str(row["sent"]),
                str(row["failed"]),
                "unknown" if row["retried"] is None else str(row["retried"]),
                str(row["late"]),
            )
            for row in shares
        ]
        return ("during", "sent", "failed", "repeated by the router", "sent late"), rows

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of earlier gates that this checkpoint stands on, in words."""
        return tuple(self.manifest.get("facts", {}).get("overrides", ()))

    @property
    def going_back(self) -> str:
        """Heading of the timeline: a canary that passed goes back too, as planned."""
        planned = self.phase == "tp8-canary" and self.gate.verdict.advances
        return "Going back to the incumbent, as planned" if planned else "Rollback timeline"


def view_of_checkpoint(
    ledger: Ledger, checkpoint: Checkpoint, *, review_required: bool, signed: bool = False
) -> ReportView:
    """The view of a recorded checkpoint. `signed`: its decisions count only with a signature that git verifies.

    Raises:
        LedgerError: the ledger cannot be read.
        ValueError: results.json or gate.json are of another schema.
    """
    files = ledger.files(checkpoint)
    approvals = ledger.approvals(checkpoint)
    counted = ledger.approvals(checkpoint, signed=True) if signed else approvals
    state = review_state(checkpoint, counted, required=review_required)
    return dataclasses.replace(
        _view(checkpoint.name, files, checkpoint.manifest),
        digest=checkpoint.digest,
        review=""
        if state is Review.NOT_NEEDED or (state is Review.WAITING and not checkpoint.verdict.advances)
        else state.value,
        approvals=tuple(approvals),
        **_since(ledger, checkpoint.manifest, files, before=checkpoint.number),
    )


def view_of_directory(ledger: Ledger, name: str, files: dict[str, bytes], manifest: dict[str, Any]) -> ReportView:
    """The view of a checkpoint exported as plain files, compared with what this ledger holds of its phase."""
    view = dataclasses.replace(_view(name, files, manifest), digest=cp.sha256(files[cp.MANIFEST]))
    return dataclasses.replace(view, **_since(ledger, manifest, files, before=None))


def view_of_draft(ledger: Ledger, draft: Draft, author: str) -> ReportView:
    """The view of a checkpoint about to be recorded: no number, digest or approval yet."""
    manifest = json.loads(cp.manifest_of(draft, 0, author, None))
    view = _view(f"{draft.phase} {draft.verdict.value}", draft.files, manifest)
    return dataclasses.replace(view, **_since(ledger, manifest, draft.files, before=None))


def with_anchors(view: ReportView, path: Path) -> ReportView:
    """The view with times of other kernels from a file instead of those recorded with it. Raises UsageError."""
    fact = anchors.read(path)
    return dataclasses.replace(view, anchors=anchors.anchors_of(fact), anchors_about=fact["about"])


def _view(title: str, files: dict[str, bytes], manifest: dict[str, Any]) -> ReportView:
    tables = {
        name: data.decode(errors="replace") for name, data in sorted(files.items()) if name.endswith(TABLE_SUFFIX)
    }
    results = Results.from_json(json.loads(files[cp.RESULTS]))
    beside = results.facts.get(anchors.FACT, {})
    return ReportView(
        title=title,
        phase=manifest["phase"],
        kernel=manifest["kernel"],
        gate=GateOutcome.from_json(json.loads(files[cp.GATE])),
        results=results,
        manifest=manifest,
        tables=tables,
        anchors=anchors.anchors_of(beside),
        anchors_about=beside.get("about", ""),
        provenance=json.loads(files.get(cp.PROVENANCE, b"{}")),
    )


def _since(ledger: Ledger, manifest: dict[str, Any], files: dict[str, bytes], before: int | None) -> dict[str, Any]:
    """`change` and `attempts` of a view. `before`: its number; None where it has none yet."""
    earlier = [
        c
        for c in ledger.checkpoints()
        if c.phase == manifest["phase"]
        and c.manifest["kernel"] == manifest["kernel"]
        and (before is None or c.number < before)
    ]
    approved = next((c for c in reversed(earlier) if _is_approved(ledger, c)), None)
    between = [
        c
        for c in earlier
        if (approved is None or c.number > approved.number) and c.manifest.get("run") != manifest.get("run")
    ]
    change = None if approved is None else _change(ledger, approved, manifest, files)
    return {"change": change, "attempts": moved.attempts(between, manifest)}


def _is_approved(ledger: Ledger, checkpoint: Checkpoint) -> bool:
    return (
        checkpoint.verdict.advances
        and review_state(checkpoint, ledger.approvals(checkpoint), required=True) is Review.APPROVED
    )


def _change(ledger: Ledger, approved: Checkpoint, manifest: dict[str, Any], files: dict[str, bytes]) -> Change:
    then = ledger.files(approved)
    old = Results.from_json(json.loads(then[cp.RESULTS]))
    return Change(
        approved.name,
        _source_change(ledger, approved.manifest, manifest),
        _environment_change(approved.manifest, manifest),
        old,
        moved.moves((_gate(then), old), (_gate(files), Results.from_json(json.loads(files[cp.RESULTS])))),
        moved.playbook_diff(then.get(moved.PLAYBOOK), files.get(moved.PLAYBOOK)),
    )


def _gate(files: dict[str, bytes]) -> GateOutcome:
    return GateOutcome.from_json(json.loads(files[cp.GATE]))


def tree_words(source: dict[str, Any]) -> str:
    """What stands behind a commit whose work tree differed from it; empty for one that held the commit's bytes."""
    words = ""
    if source.get("dirty"):
        words += " with uncommitted changes"
        words += " (--allow-dirty)" if source.get(ALLOWED_DIRTY) else " (the run had no --allow-dirty)"
    if converted := source.get("converted"):
        words += f", {len(converted)} files as that clone's filters or line ends wrote them ({', '.join(list(converted)[:4])})"
    if source.get("left_out"):
        words += f", {source['left_out']} files left out by a sparse checkout"
    return words


def _source_change(ledger: Ledger, old: dict[str, Any], new: dict[str, Any]) -> str:
    a, b = old["source"].get("commit"), new["source"].get("commit")
    if not a or not b:
        return "one of the two has no source commit"
    if a == b:
        return "same commit" + (", with uncommitted changes" if new["source"].get("dirty") else "")
    # What a manifest calls a commit may be anything, an option of git's too: only what git resolves to an object reaches `diff`.
    ids = [ledger.git.resolve(f"{commit}^{{commit}}") for commit in (a, b)]
    lost = next((str(commit)[:12] for commit, found in zip((a, b), ids, strict=True) if not found), None)
    if lost:
        return f"commit {lost} is not in this clone"
    flags = ("--stat=90", "--find-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=none")
    stat = ledger.git.attempt("diff-tree", "-r", *flags, *map(str, ids))
    return stat if stat is not None else "git cannot compare the two commits here"


def _environment_change(old: dict[str, Any], new: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    a, b = _flat(old.get("facts", {})), _flat(new.get("facts", {}))
    return tuple(
        (_FACTS.get(key, key), _short(a.get(key, "-")), _short(b.get(key, "-")))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    )


_FACTS = {"kernel_digest": "files of the kernel", "section_digest": "this phase's section of the playbook"}


def _short(fact: str) -> str:
    """Digests by their first digits, enough to tell two apart; the whole ones stand under provenance."""
    return f"{fact[:16]}…" if re.fullmatch("[0-9a-f]{40,}", fact) else fact


def _flat(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        return {
            k: v for key, child in value.items() for k, v in _flat(child, f"{path}.{key}" if path else str(key)).items()
        }
    if isinstance(value, list):
        return {path: json.dumps(value, sort_keys=True)[:200]}
    return {path: str(value)}
