"""Proving that nothing in a checkpoint was altered, in the ledger or in an exported directory.

In the ledger every object is hashed again from its bytes (git itself trusts what it finds on disk), the tree is compared with
the manifest, the manifest with the commit, the tag and the gate's verdict, and each step of history is checked to have
only added to what was there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phases.base.errors import LedgerError, PhaseError
from phases.gate.outcome import GateOutcome
from phases.ledger import checkpoint as cp
from phases.ledger import lost
from phases.ledger.decisions import UNTAGGED, decision_files
from phases.ledger.objects import Entry, list_tree, object_id, read_objects

if TYPE_CHECKING:
    from phases.ledger.checkpoint import Checkpoint, Damaged
    from phases.ledger.ledger import Ledger


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was recorded."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def verify_files(name: str, files: dict[str, bytes]) -> list[Problem]:
    """Check one checkpoint's files against its manifest, its SHA256SUMS and its directory name.

    Args:
        name: the directory's name, such as `0001-build-parity-PASS`.
        files: contents by relative path.
    """
    if cp.MANIFEST not in files:
        return [Problem(f"{name}/{cp.MANIFEST}", "is missing")]
    problems = []
    if files.get(cp.SUMS) != cp.sums_of(files):
        problems += list(_sums_problems(name, files))
    try:
        manifest = cp.read_manifest(files[cp.MANIFEST])
    except ValueError as fault:
        return [*problems, Problem(f"{name}/{cp.MANIFEST}", str(fault))]
    listed: dict[str, Any] = manifest["files"]
    if cp.canonical_json(manifest) != files[cp.MANIFEST]:
        problems.append(Problem(f"{name}/{cp.MANIFEST}", "is not written as it was recorded"))
    for path in sorted({*listed, *files} - {cp.MANIFEST, cp.SUMS}):
        if path not in files:
            problems.append(Problem(f"{name}/{path}", "is missing"))
        elif path not in listed:
            problems.append(Problem(f"{name}/{path}", "is not in the manifest"))
        elif cp.sha256(files[path]) != listed[path]["sha256"]:
            problems.append(Problem(f"{name}/{path}", "does not have the sha256 of the manifest"))
    return problems + list(_claims(name, manifest, files))


def verify_directory(path: Path) -> list[Problem]:
    """`verify_files` of an exported checkpoint.

    Raises:
        LedgerError: the path is not a directory of a checkpoint, or a file cannot be read.
    """
    if not path.is_dir():
        raise LedgerError(f"{path} is not a directory.", hint="Name a checkpoint or the directory of an exported one.")
    resolved = path.resolve()
    if cp.parse_directory(resolved.name) is None:
        raise LedgerError(
            f"{path} is not named like a checkpoint.",
            hint="An exported checkpoint is called such as 0001-build-parity-PASS.",
        )
    try:
        files = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    except OSError as fault:
        raise LedgerError(f"{fault.filename} cannot be read: {fault.strerror}.") from fault
    return verify_files(resolved.name, files)


def verify_ledger(ledger: Ledger, only: Checkpoint | Damaged | None = None) -> list[Problem]:
    """Check the whole ledger, or one checkpoint of it; an empty list means that nothing was altered. A problem does not end the search."""
    tip = ledger.tip()
    if tip is None:
        raise LedgerError(f"there is no ledger on branch {ledger.branch!r}.", hint="Run a phase first (`phase run`).")
    looks = [_objects(ledger, tip), _history(ledger, tip), _checkpoints(ledger, only)]
    if only is None:
        looks.append(_lost(ledger, tip))
    return list(dict.fromkeys(problem for look in looks for problem in _unreadable_is_altered(look)))


@contextlib.contextmanager
def read_as_recorded(ledger: Ledger, *checkpoints: Checkpoint) -> Iterator[None]:
    """For what makes sense of a checkpoint's files: where it fails over one that was altered, that is what is said.

    Raises:
        LedgerError: something else than a PhaseError was raised inside, and one of the checkpoints is not as it was recorded. Over an unaltered
            one the failure is passed on: that is a mistake of this toolkit.
    """
    try:
        yield
    except (PhaseError, OSError):
        raise
    except Exception as fault:
        for checkpoint in checkpoints:
            if problems := verify_ledger(ledger, checkpoint):
                raise LedgerError(
                    f"{checkpoint.name} was altered: {problems[0]}.",
                    hint=f"See `phase checkpoint verify {checkpoint.number}`.",
                ) from fault
        raise


def _unreadable_is_altered(look: Iterator[Problem], what: str = "ledger") -> Iterator[Problem]:
    """What a look finds, the last being that it could not go on: git refuses to read an object whose stored bytes are broken."""
    try:
        yield from look
    except (LedgerError, ValueError) as fault:
        yield Problem(what, f"cannot be read whole: {fault}")


def _checkpoints(ledger: Ledger, only: Checkpoint | Damaged | None) -> Iterator[Problem]:
    """Every checkpoint, or the one; what is wrong with one does not hide the others."""
    for checkpoint in [only] if only else itertools.chain(*ledger.survey()):
        yield from _unreadable_is_altered(_checkpoint(ledger, checkpoint), checkpoint.name)


def _sums_problems(name: str, files: dict[str, bytes]) -> Iterator[Problem]:
    if cp.SUMS not in files:
        yield Problem(f"{name}/{cp.SUMS}", "is missing")
        return
    recorded = set(files[cp.SUMS].splitlines())
    actual = set(cp.sums_of(files).splitlines())
    altered = sorted({line.partition(b"  ")[2].decode(errors="replace") for line in recorded ^ actual})
    yield Problem(f"{name}/{cp.SUMS}", f"does not match {', '.join(altered[:4]) or 'its own form'}")


def _claims(name: str, manifest: dict[str, Any], files: dict[str, bytes]) -> Iterator[Problem]:
    """Whether name, manifest and gate tell the same story."""
    parsed = cp.parse_directory(name)
    told = (manifest.get("number"), manifest.get("phase"), manifest.get("verdict"))
    if parsed is None or (parsed[0], parsed[1], parsed[2].value) != told:
        yield Problem(name, f"is called otherwise than its manifest says ({told[0]}, {told[1]}, {told[2]})")
    if cp.GATE in files:
        try:
            verdict = GateOutcome.from_json(json.loads(files[cp.GATE])).verdict.value
        except (ValueError, KeyError, TypeError, RecursionError):
            yield Problem(f"{name}/{cp.GATE}", "is not a gate's outcome")
        else:
            if verdict != manifest.get("verdict"):
                yield Problem(f"{name}/{cp.GATE}", f"comes to {verdict}, the manifest says {manifest.get('verdict')}")


def _objects(ledger: Ledger, tip: str) -> Iterator[Problem]:
    """Hash every object of the ledger's own history again: commits, trees, blobs and tags."""
    git = ledger.git
    commits = git.text("rev-list", "--first-parent", tip).splitlines()
    entries = [e for commit in commits for e in _all_entries(ledger, commit)]
    tags = [tag.oid for tag in lost.tags(git, ledger.tag_prefix)]
    names = {e.oid: e.path for e in entries}
    for oid, (kind, content) in read_objects(git, [*commits, *names, *tags]).items():
        if object_id(kind, content, oid) != oid:
            yield Problem(names.get(oid, f"{kind} {oid[:10]}"), f"its stored bytes do not hash to {oid[:10]}")


def _all_entries(ledger: Ledger, commit: str) -> list[Entry]:
    """Trees and blobs of a ledger commit."""
    root = Entry("040000", "tree", ledger.git.text("rev-parse", f"{commit}^{{tree}}"), "/")
    return [root, *list_tree(ledger.git, commit, recursive=True, trees=True)]


def _history(ledger: Ledger, tip: str) -> Iterator[Problem]:
    """Each ledger commit may only add: what its parent held must still be there, byte for byte."""
    commits = ledger.git.text("rev-list", "--first-parent", "--reverse", tip).splitlines()
    before: dict[str, str] = {}
    for commit in commits:
        now = {e.path: e.oid for e in list_tree(ledger.git, commit, recursive=True)}
        for path, oid in before.items():
            if now.get(path) != oid:
                yield Problem(path, f"was {'altered' if path in now else 'removed'} in ledger commit {commit[:10]}")
        before = now


def _checkpoint(ledger: Ledger, checkpoint: Checkpoint | Damaged) -> Iterator[Problem]:
    yield from verify_files(checkpoint.name, ledger.files(checkpoint))
    if isinstance(checkpoint, cp.Damaged):
        return
    if not checkpoint.commit:
        yield Problem(checkpoint.name, "no ledger commit recorded it")
        return
    body = ledger.git.text("cat-file", "commit", checkpoint.commit)
    if f"Checkpoint-Digest: {checkpoint.digest}" not in body:
        yield Problem(checkpoint.name, f"commit {checkpoint.commit[:10]} names another digest")
    source = checkpoint.manifest.get("source", {}).get("commit")
    parents = [line.split()[1] for line in body.splitlines() if line.startswith("parent ")]
    if source and parents[1:] != [source]:
        yield Problem(
            checkpoint.name, f"commit {checkpoint.commit[:10]} does not have the source {source[:10]} as second parent"
        )
    yield from _tag_problems(ledger, checkpoint)
    yield from _decision_problems(ledger, checkpoint)


def _lost(ledger: Ledger, tip: str) -> Iterator[Problem]:
    """Entries that only a tag remembers: the branch was set back, or another one put in its place."""
    for tag in lost.lost(ledger, tip):
        yield Problem(f"tag {tag.name}", f"speaks of an entry that branch {ledger.branch} does not hold any more")


def _decision_problems(ledger: Ledger, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Each decision is on this very checkpoint, and its tag (older ledgers have none) points at the commit that added it."""
    tip = ledger.tip()
    assert tip is not None, "a checkpoint that was found has a ledger"
    for decision, (path, content) in zip(
        ledger.approvals(checkpoint), decision_files(ledger.git, tip, checkpoint), strict=True
    ):
        if decision.digest != checkpoint.digest:
            yield Problem(
                checkpoint.name, f"{decision.person} decided on digest {decision.digest[:12]}, not on this one"
            )
        if json.loads(content).get("schema") == UNTAGGED:
            continue
        name = lost.decision_tag(ledger.tag_prefix, checkpoint, decision.decision, content)
        oid = ledger.git.resolve(f"refs/tags/{name}")
        if oid is None:
            yield Problem(f"tag {name}", "is missing")
        elif f"Decision-Digest: {cp.sha256(content)}" not in ledger.git.text("cat-file", "-p", oid):
            yield Problem(f"tag {name}", "names another decision")
        elif ledger.git.resolve(f"{oid}^{{commit}}") != ledger.git.text(
            "rev-list", "--first-parent", "-1", tip, "--", path
        ):
            yield Problem(f"tag {name}", "does not point at the decision's commit")


def _tag_problems(ledger: Ledger, checkpoint: Checkpoint) -> Iterator[Problem]:
    name = f"{ledger.tag_prefix}{checkpoint.name}"
    oid = ledger.git.resolve(f"refs/tags/{name}")
    if oid is None:
        yield Problem(f"tag {name}", "is missing")
        return
    body = ledger.git.text("cat-file", "-p", oid)
    if ledger.git.text("cat-file", "-t", oid) != "tag" or ledger.git.resolve(f"{oid}^{{commit}}") != checkpoint.commit:
        yield Problem(f"tag {name}", "does not point at the checkpoint's commit")
    elif f"Checkpoint-Digest: {checkpoint.digest}" not in body:
        yield Problem(f"tag {name}", "names another digest")
