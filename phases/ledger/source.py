"""What the source was when a checkpoint was made: commit, branch, and whether the work tree differed from it."""

from __future__ import annotations

import hashlib
from typing import Any

from phases.ledger.git import Git

ALLOWED_DIRTY = "allow_dirty"  # in `source` of a run that was started with --allow-dirty
_LISTED = 100  # changed paths named in the manifest; the digest covers them all


def describe(git: Git) -> dict[str, Any]:
    """Facts of the source, as the manifest keeps them.

    Returns:
        commit: object id of HEAD, or None in a repository without commits.
        branch: name of the branch, or None when HEAD is detached.
        shallow: whether the clone is shallow.
        dirty: whether tracked files differ from the commit or untracked, unignored files exist.
        changed: up to 100 `XY path` lines as `git status --porcelain` writes them.
        difference: sha256 over the status and `git diff HEAD`, so that two dirty states can be told apart; None when clean.
    """
    commit = git.resolve("HEAD^{commit}")
    status = git.run("status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
    changed = [entry.decode(errors="replace") for entry in status.split(b"\0") if entry]
    difference = None
    if changed:
        digest = hashlib.sha256(status)
        if commit:
            digest.update(git.run("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv"))
        difference = digest.hexdigest()
    return {
        "commit": commit,
        "branch": git.attempt("symbolic-ref", "--short", "--quiet", "HEAD") or None,
        "shallow": git.text("rev-parse", "--is-shallow-repository") == "true",
        "dirty": bool(changed),
        "changed": changed[:_LISTED],
        "difference": difference,
    }


def changed_paths(git: Git, most: int = 5) -> str:
    """The first few paths of `describe`'s `changed`, in words; empty when the tree is clean."""
    paths = [entry[3:] for entry in describe(git)["changed"]]
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")
