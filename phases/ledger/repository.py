"""What exactly is being run: the repository, who runs it, and a digest of the kernel's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from phases.ledger.git import Git, repository_root

_SKIPPED = {"__pycache__", "build", "dist", ".git", ".venv", ".phase", ".pytest_cache", ".hypothesis"}
_SKIPPED_SUFFIXES = {".pyc", ".so", ".o", ".md"}


def repository_of(path: Path) -> Path:
    """Top of the git work tree that holds `path`. Raises LedgerError outside of one."""
    return repository_root(path if path.is_dir() else path.parent)


def identity(repo: Path) -> str:
    """Who git says is working here, as `Name <address>`: a checkpoint and an approval name a person. Raises LedgerError."""
    return Git(repo).identity()


def content_digest(root: Path, extra: bytes = b"") -> str:
    """SHA-256 over `extra` and the names and bytes of the files below `root`, without caches, build outputs and prose (*.md)."""
    total = hashlib.sha256(extra)
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix in _SKIPPED_SUFFIXES or any(part in _SKIPPED or part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file():
            name = os.fsencode("/".join(parts))  # a file may be named in any bytes
            total.update(b"%d %s %s\n" % (len(name), name, hashlib.sha256(path.read_bytes()).hexdigest().encode()))
    return total.hexdigest()
