"""What exactly is being run: the repository, who runs it, and a digest of the kernel's files."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from phases.errors import PhaseError, UsageError

_SKIPPED = {"__pycache__", "build", "dist", ".git", ".venv", ".phase", ".pytest_cache", ".hypothesis"}
_SKIPPED_SUFFIXES = {".pyc", ".so", ".o"}


class SourceError(PhaseError):
    stage = "source"


def repository_of(path: Path) -> Path:
    """Top of the git work tree that holds `path`. Raises UsageError outside of one."""
    start = path if path.is_dir() else path.parent
    answer = git(start, "rev-parse", "--show-toplevel")
    if answer is None:
        raise UsageError(f"{start} is not inside a git work tree.", hint="Checkpoints live in git: run `git init` there, or use a clone.")
    return Path(answer)


def identity(repo: Path) -> str:
    """Who git says is working here, as `Name <address>`.

    Raises SourceError when git knows no identity: a checkpoint and an approval must name a person.
    """
    name, address = git(repo, "config", "user.name"), git(repo, "config", "user.email")
    if not name or not address:
        raise SourceError(
            "git does not know who you are, and a checkpoint names who made it.",
            hint="Run `git config user.name NAME` and `git config user.email ADDRESS` in the repository.",
        )
    return f"{name} <{address}>"


def content_digest(root: Path) -> str:
    """SHA-256 over relative names and bytes of the files below `root`, without caches and build outputs."""
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix in _SKIPPED_SUFFIXES or any(part in _SKIPPED or part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file():
            name = "/".join(parts).encode()
            total.update(b"%d %s %s\n" % (len(name), name, hashlib.sha256(path.read_bytes()).hexdigest().encode()))
    return total.hexdigest()


def git(directory: Path, *arguments: str) -> str | None:
    """What git prints, stripped; None when it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise SourceError("git is not installed.", hint="Install it (Debian, Ubuntu: apt-get install git).") from None
    return done.stdout.strip() if done.returncode == 0 else None
