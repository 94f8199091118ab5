"""Value types of the ledger: what is recorded, and what is read back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from phases.base.errors import LedgerError
from phases.base.verdict import Verdict

MANIFEST_SCHEMA = "phasegate/manifest/v1"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
RESULTS = "results.json"
GATE = "gate.json"
PROVENANCE = "provenance.intoto.json"
# Decisions: as a file keeps them, as an order, as a fact. An override goes on from an INCONCLUSIVE gate; it is no approval and no PASS.
APPROVE, REJECT, OVERRIDE = "approve", "reject", "override"
VERBS = {APPROVE: ("Approve", "approved"), REJECT: ("Reject", "rejected"), OVERRIDE: ("Override", "overridden")}
BY_YES = "phase run --yes: "  # how the reason of an approval begins that nobody looked for
_DIRECTORY = re.compile(r"^(\d{4,})-([a-z0-9-]+)-(PASS|INCONCLUSIVE|FAIL|ERROR|ABORTED)$")


@dataclass(frozen=True)
class Draft:
    """A checkpoint before it has a number.

    Attributes:
        run: identity of the run and attempt; recording the same run's phase twice gives the same checkpoint.
        files: contents by relative path, results.json and gate.json among them.
        facts: toolchain, torch, driver, GPU, host facts: plain JSON for the manifest.
        source: the source commit it speaks of, with `dirty` and the digest of the difference; see `source.describe`.
        recorded_at: seconds since the epoch, fixed by the run so that recording again gives the same bytes.
    """

    phase: str
    verdict: Verdict
    kernel: str
    run: str
    files: dict[str, bytes]
    source: dict[str, Any]
    recorded_at: float
    facts: dict[str, Any] = field(default_factory=dict)
    playbook: str = ""  # name and sha256 of the playbook it ran by


@dataclass(frozen=True)
class Checkpoint:
    """One recorded checkpoint.

    Attributes:
        digest: sha256 of its manifest, which names the sha256 of every other file: the whole checkpoint in 64 digits.
    """

    number: int
    phase: str
    verdict: Verdict
    digest: str
    commit: str
    directory: str
    manifest: dict[str, Any]
    tree: str = ""

    @property
    def name(self) -> str:
        return self.directory.rpartition("/")[2]

    @property
    def author(self) -> str:
        return str(self.manifest.get("author", ""))

    @property
    def recorded_at(self) -> float:
        return datetime.fromisoformat(self.manifest["recorded_at"]).timestamp()

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "name": self.name,
            "phase": self.phase,
            "verdict": self.verdict.value,
            "digest": self.digest,
            "commit": self.commit,
            "kernel": self.manifest.get("kernel"),
            "author": self.author,
            "recorded_at": self.manifest.get("recorded_at"),
            "source": self.manifest.get("source"),
        }


@dataclass(frozen=True)
class Damaged:
    """A checkpoint whose manifest cannot be read. `problem` says why, after "its manifest"."""

    number: int
    directory: str
    problem: str
    tree: str

    @property
    def name(self) -> str:
        return self.directory.rpartition("/")[2]

    def error(self, tag_prefix: str) -> LedgerError:
        """What is wrong with it and where to find what was recorded."""
        return LedgerError(
            f"{self.name} is damaged: its manifest {self.problem}.",
            hint=f"`phase checkpoint verify {self.number}` says what was altered where; "
            f"what was recorded is `git show {tag_prefix}{self.name}:{self.directory}/{MANIFEST}`.",
        )


@dataclass(frozen=True)
class Approval:
    """One person's yes or no to exactly the checkpoint they saw, or `--yes` in their name; or their override of its verdict."""

    checkpoint: int
    digest: str
    decision: str  # approve | reject | override
    person: str  # Name <mail>, from git's identity
    reason: str
    at: str  # ISO 8601, UTC

    @property
    def mail(self) -> str:
        return mail_of(self.person)

    @property
    def past(self) -> str:
        """approved, rejected or overridden"""
        return VERBS[self.decision][1]

    @property
    def by_yes(self) -> bool:
        """Whether `phase run --yes` approved it in the person's name: nobody looked."""
        return self.reason.startswith(BY_YES)


def mail_of(person: str) -> str:
    """The mail address inside `Name <mail>`, lower case."""
    return person.rpartition("<")[2].rstrip(">").strip().lower()


def parse_directory(name: str) -> tuple[int, str, Verdict] | None:
    """Number, phase and verdict from `0001-build-parity-PASS`, or None."""
    match = _DIRECTORY.match(name)
    return (int(match[1]), match[2], Verdict(match[3])) if match else None


def directory_name(number: int, phase: str, verdict: Verdict) -> str:
    return f"{number:04d}-{phase}-{verdict.value}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, two spaces and a final newline: readable, and the same bytes for the same value."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def manifest_of(draft: Draft, number: int, author: str, previous: str | None) -> bytes:
    """The manifest of a draft that gets this number; `previous` is the digest of the checkpoint before it."""
    return canonical_json(
        {
            "schema": MANIFEST_SCHEMA,
            "number": number,
            "phase": draft.phase,
            "verdict": draft.verdict.value,
            "kernel": draft.kernel,
            "run": draft.run,
            "playbook": draft.playbook,
            "author": author,
            "recorded_at": iso(draft.recorded_at),
            "previous": previous,
            "source": draft.source,
            "facts": draft.facts,
            "files": {path: {"sha256": sha256(data), "bytes": len(data)} for path, data in sorted(draft.files.items())},
        }
    )


def read_manifest(data: bytes) -> dict[str, Any]:
    """The manifest from its bytes.

    Raises:
        ValueError: it is none that this toolkit writes; the text says why, after "its manifest".
    """
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(manifest, dict):
        raise ValueError("is not a JSON object")
    if manifest.get("schema") != MANIFEST_SCHEMA:
        raise ValueError(f"has the schema {manifest.get('schema')!r}, which is not {MANIFEST_SCHEMA}")
    wrong = [name for name, kind in _KINDS.items() if not isinstance(manifest.get(name), kind)] or list(
        _deeper_faults(manifest)
    )
    if wrong:
        raise ValueError(f"has no {wrong[0]!r}, or one that this toolkit does not write")
    return manifest


_KINDS = {
    "number": int,
    "phase": str,
    "verdict": str,
    "kernel": str,
    "run": str,
    "playbook": str,
    "author": str,
    "recorded_at": str,
    "previous": (str, type(None)),
    "source": dict,
    "facts": dict,
    "files": dict,
}


def _deeper_faults(manifest: dict[str, Any]) -> Iterator[str]:
    """Members that are of the right kind and hold what is not: all that is read from a manifest relies on it."""
    try:
        datetime.fromisoformat(manifest["recorded_at"]).timestamp()
    except (ValueError, OverflowError):
        yield "recorded_at"
    if not isinstance(manifest["source"].get("commit"), (str, type(None))):
        yield "source"
    if not all(
        isinstance(facts, dict) and isinstance(facts.get("sha256"), str) for facts in manifest["files"].values()
    ):
        yield "files"
    for name, value in manifest.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):  # NaN, or half of a surrogate pair: neither can be written as it was read
            yield name


def sums_of(files: dict[str, bytes]) -> bytes:
    """SHA256SUMS over every file, so that a stranger can check with `sha256sum -c SHA256SUMS` alone."""
    return "".join(f"{sha256(data)}  {path}\n" for path, data in sorted(files.items()) if path != SUMS).encode(
        "utf-8", "surrogateescape"
    )


@dataclass(frozen=True)
class Written:
    """Objects written for one ledger entry, before any reference points at them."""

    commit: str
    checkpoint: Checkpoint
    tags: dict[str, str]
    is_new: bool = True
