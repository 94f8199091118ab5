"""Git by plumbing: argv in, bytes out, never the work tree, the index or the current branch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import LedgerError

ZERO = "0" * 40
_NETWORK_SECONDS = 60.0
_ELSEWHERE = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
}


class GitFailed(LedgerError):
    """A git command exited non-zero; `stderr` holds what it said."""

    def __init__(self, argv: Sequence[str], stderr: str, hint: str = "") -> None:
        said = " / ".join(line.strip() for line in stderr.strip().splitlines()[-4:]) or "no message"
        super().__init__(f"`git {' '.join(argv[:3])}` failed: {said}.", hint=hint or _cure(stderr))
        self.stderr = stderr


@dataclass(frozen=True)
class Git:
    """The git repository that holds `path`."""

    path: Path

    def run(
        self, *argv: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> bytes:
        """Run git and return its standard output.

        Raises:
            GitFailed: it exited non-zero; the message holds its last lines.
            LedgerError: git is not installed, or did not end within `timeout` seconds.
        """
        try:
            done = subprocess.run(
                ["git", "-C", str(self.path), *argv],
                input=stdin,
                capture_output=True,
                env=_environment(env),
                timeout=timeout,
                check=False,
                stdin=subprocess.DEVNULL if stdin is None else None,
            )
        except FileNotFoundError as fault:
            raise LedgerError("git is not installed.", hint="Install it (apt-get install git).") from fault
        except subprocess.TimeoutExpired as fault:
            raise LedgerError(
                f"`git {argv[0]}` did not end within {timeout:.0f} s.", hint="Check the remote and the network."
            ) from fault
        if done.returncode:
            raise GitFailed(argv, done.stderr.decode(errors="replace"))
        return done.stdout

    def text(self, *argv: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        return self.run(*argv, stdin=stdin, env=env).decode(errors="replace").strip()

    def attempt(self, *argv: str) -> str | None:
        """`text`, or None when git says no."""
        try:
            return self.text(*argv)
        except GitFailed:
            return None

    def network(self, *argv: str) -> bytes:
        """A command that talks to a remote: bounded in time and never asking for a password."""
        return self.run(
            *argv, timeout=_NETWORK_SECONDS, env={"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": _ssh_command()}
        )

    def resolve(self, revision: str) -> str | None:
        """Object id of a revision, or None when there is none."""
        return self.attempt("rev-parse", "--verify", "--quiet", "--end-of-options", revision)

    def flag(self, key: str) -> bool:
        """A boolean setting of git's configuration."""
        return self.attempt("config", "--type=bool", "--get", key) == "true"

    def identity(self) -> str:
        """`Name <mail>` git would record for this person.

        Raises:
            LedgerError: git knows no name or mail.
        """
        try:
            who = self.text("var", "GIT_COMMITTER_IDENT")
        except GitFailed as fault:
            raise LedgerError(
                "git does not know who you are, and a checkpoint names its author.",
                hint="Run `git config user.name NAME` and `git config user.email MAIL`.",
            ) from fault
        return who[: who.rindex(">") + 1]


def repository_root(path: Path) -> Path:
    """Top directory of the repository `path` lies in.

    Raises:
        LedgerError: it lies in none, or only in a bare one.
    """
    try:
        return Path(Git(path).text("rev-parse", "--show-toplevel"))
    except GitFailed as fault:
        raise LedgerError(
            f"{path} is not inside a git work tree.", hint="Run `git init` there, or start `phase` in your repository."
        ) from fault


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    """The caller's environment without what would point git at another repository (set inside hooks); no object is read as another."""
    kept = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE}
    return {**kept, "LC_ALL": "C", "GIT_NO_REPLACE_OBJECTS": "1", **(extra or {})}


def _ssh_command() -> str:
    return os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=15")


def _cure(stderr: str) -> str:
    lowered = stderr.lower()
    cures = {
        "permission denied": "Check that this user may write the repository's .git directory.",
        "insufficient permission": "Check that this user may write the repository's .git directory.",
        "read-only file system": "The repository is on a read-only file system; mount it writable or work in a clone.",
        "no space left": "Free disk space, then continue with `phase run --resume`.",
        "unable to write": "Check free disk space and permissions of the repository's .git directory.",
        "dubious ownership": "Add the directory to git's safe.directory, as git's message says.",
        "gpg failed": "Git is set to sign but cannot; check user.signingkey and gpg.format.",
    }
    return next((cure for sign, cure in cures.items() if sign in lowered), "")
