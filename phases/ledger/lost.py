"""What only a tag remembers: entries of the ledger that its branch does not hold any more.

Every checkpoint and every decision has an annotated tag. When the branch is set back, or another one is put in its place, the
tags still point at what is gone. Decisions of ledgers from before decisions were tagged are covered as soon as something was
recorded after them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phases.base.errors import LedgerError
from phases.ledger import checkpoint as cp
from phases.ledger.checkpoint import Checkpoint
from phases.ledger.git import Git

if TYPE_CHECKING:
    from phases.ledger.ledger import Ledger

_LOOKS, _BETWEEN = 3, 0.2  # git moves references one by one: another run's tag may be seen just before its branch


@dataclass(frozen=True)
class Tag:
    """An annotated tag of the ledger: full name, the tag object, the commit it points at (empty for a light tag)."""

    name: str
    oid: str
    commit: str


def decision_tag(prefix: str, checkpoint: Checkpoint, decision: str, content: bytes) -> str:
    """Name of the tag of a decision, such as checkpoint/0001-approve-3f2a91c07be4: two clones never give one to two decisions."""
    return f"{prefix}{checkpoint.number:04d}-{decision}-{cp.sha256(content)[:12]}"


def tags(git: Git, prefix: str) -> list[Tag]:
    """All tags whose name begins with `prefix`."""
    rows = git.text("for-each-ref", "--format=%(objectname) %(*objectname) %(refname)", "refs/tags").splitlines()
    found = [
        Tag(ref.removeprefix("refs/tags/"), oid, commit) for oid, commit, ref in (row.split(" ", 2) for row in rows)
    ]
    return [tag for tag in found if tag.name.startswith(prefix)]


def lost(ledger: Ledger, tip: str | None) -> list[Tag]:
    """Tags of entries that neither the ledger ending at `tip` nor any other branch holds."""
    known = {commit for commit in ledger.git.text("rev-list", "--first-parent", tip).splitlines()} if tip else set()
    mine = [tag for tag in tags(ledger.git, ledger.tag_prefix) if _is_entry(tag.name.removeprefix(ledger.tag_prefix))]
    gone = [tag for tag in mine if tag.commit and tag.commit not in known]
    return [
        tag
        for tag in gone
        if not ledger.git.attempt("for-each-ref", "--count=1", "--contains", tag.commit, "refs/heads", "refs/remotes")
    ]


def warning(ledger: Ledger) -> str:
    """What is lost here and how to bring it back, in words; empty when nothing is. Changes nothing, asks no remote."""
    gone = _surely_lost(ledger, fetch=False)
    if not gone:
        return ""
    fault = refusal(ledger, gone)
    return f"{fault.message} {fault.hint}"


def require_whole(ledger: Ledger) -> None:
    """Raises LedgerError when entries were lost here. With a remote that still has them, they are brought back first."""
    gone = _surely_lost(ledger, fetch=True)
    if gone:
        raise refusal(ledger, gone)


def _surely_lost(ledger: Ledger, *, fetch: bool) -> list[Tag]:
    """What is lost at every one of a few looks. `fetch`: bring it back from the remote in between, if there is one."""
    gone: list[Tag] = []
    for look in range(_LOOKS):
        gone = lost(ledger, ledger.tip())
        if not gone:
            return []
        if fetch and ledger.remote:
            with contextlib.suppress(
                LedgerError
            ):  # out of reach or grown apart: what is lost is still the first thing to say
                ledger.sync()
        if look + 1 < _LOOKS:
            time.sleep(_BETWEEN)
    return gone


def refusal(ledger: Ledger, gone: list[Tag]) -> LedgerError:
    """The error that says what is lost and how to bring it back, or how to say that this was meant."""
    names = ", ".join(tag.name for tag in gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
    whole = [
        tag.commit
        for tag in gone
        if all(
            ledger.git.attempt("merge-base", "--is-ancestor", other, tag.commit) is not None
            for other in [*(t.commit for t in gone), *filter(None, [ledger.tip()])]
        )
    ]
    back = (
        f"Bring it back with `git update-ref refs/heads/{ledger.branch} {whole[-1][:12]}`."
        if whole
        else "Fetch the branch from a clone that has it."
    )
    return LedgerError(
        f"{names} is recorded, but branch {ledger.branch!r} does not hold it: the branch was set back, or a recording was cut off.",
        hint=f"{back} If it was removed on purpose, delete the tag (`git tag -d {gone[0].name}`).",
    )


def _is_entry(name: str) -> bool:
    number, _, rest = name.partition("-")
    return (
        cp.parse_directory(name) is not None
        or number.isdigit()
        and rest.startswith(tuple(f"{kind}-" for kind in cp.VERBS))
    )
