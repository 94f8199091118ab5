"""Git by plumbing: argv in, bytes out, never the work tree, the index or the current branch, and the same whatever git's settings are."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import LedgerError

_NETWORK_SECONDS = 60.0
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15"

# What a git of this user says about who they are, where their settings are and how to reach a remote. Every other GIT_* (set inside hooks, by
# tools, or in a profile) would point git at another repository, index or object store, or change what its commands mean.
_KEPT = re.compile(
    r"GIT_((AUTHOR|COMMITTER)_(NAME|EMAIL)|CONFIG_(GLOBAL|SYSTEM|NOSYSTEM|PARAMETERS|COUNT|(KEY|VALUE)_\d+)|SSH(_COMMAND|_VARIANT)?|ASKPASS"
    r"|PROXY_COMMAND|(HTTP|SSL|LFS)_.*|ALLOW_PROTOCOL|PROTOCOL_FROM_USER|EXEC_PATH|CEILING_DIRECTORIES|DISCOVERY_ACROSS_FILESYSTEM)"
)
_FIXED_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_NO_REPLACE_OBJECTS": "1",  # no object is read as another
    "GIT_OPTIONAL_LOCKS": "0",  # the user's index is not written by looking
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
# Settings of git that would change what a command here does or says, by the one value it relies on. Left to the user: identity, signing,
# credentials, addresses, proxies, ssh, fsck, and conversions of a checkout.
_FIXED_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.untrackedCache": "false",
    "core.splitIndex": "false",
    "core.ignoreCase": "false",
    "core.quotePath": "false",
    "core.pager": "cat",
    "color.ui": "false",
    "color.advice": "false",
    "color.push": "false",
    "color.remote": "false",
    "color.transport": "false",
    "i18n.commitEncoding": "UTF-8",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "fetch.writeCommitGraph": "false",
    "push.recurseSubmodules": "no",
    "push.followTags": "false",
    "push.pushOption": "",
    "push.useForceIfIncludes": "false",
}
_SETTINGS = tuple(part for key, value in _FIXED_SETTINGS.items() for part in ("-c", f"{key}={value}"))


class GitFailed(LedgerError):
    """A git command exited non-zero; `stderr` holds what it said, `stdout` what it had printed."""

    def __init__(self, argv: Sequence[str], stderr: str, stdout: str = "", hint: str = "") -> None:
        said = " / ".join(line.strip() for line in stderr.strip().splitlines()[-4:]) or "no message"
        command = argv[2:] if argv[0] == "-c" else argv
        super().__init__(f"`git {' '.join(command[:3])}` failed: {said}.", hint=hint or _cure(stderr))
        self.stderr = stderr
        self.stdout = stdout


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
                ["git", *_SETTINGS, "-C", str(self.path), *argv],
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
            raise GitFailed(argv, done.stderr.decode(errors="replace"), done.stdout.decode(errors="replace"))
        return done.stdout

    def text(self, *argv: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        return self.run(*argv, stdin=stdin, env=env).decode(errors="replace").strip()

    def attempt(self, *argv: str) -> str | None:
        """`text`, or None when git says no."""
        try:
            return self.text(*argv)
        except GitFailed:
            return None

    def network(self, *argv: str, timeout: float = _NETWORK_SECONDS) -> bytes:
        """A command that talks to a remote: bounded in time, and never asking for a password unless the user's own ssh command does."""
        theirs = {"GIT_SSH_COMMAND", "GIT_SSH"} & set(os.environ) or self.attempt("config", "--get", "core.sshCommand")
        return self.run(*argv, timeout=timeout, env={} if theirs else {"GIT_SSH_COMMAND": _SSH})

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
        LedgerError: it lies in none, only in a bare one, or its repository says that its work tree is elsewhere.
    """
    try:
        root = Path(os.fsdecode(Git(path).run("rev-parse", "--show-toplevel").removesuffix(b"\n")))
    except GitFailed as fault:
        if "not a git repository" not in fault.stderr and "work tree" not in fault.stderr:
            raise  # there is one, and git says why it is not read
        raise LedgerError(
            f"{path} is not inside a git work tree.", hint="Run `git init` there, or start `phase` in your repository."
        ) from fault
    if not path.resolve().is_relative_to(root.resolve()):
        raise LedgerError(
            f"{path} is not inside {root}, which its repository calls its work tree.",
            hint="Unset `core.worktree` (`git config --unset core.worktree`).",
        )
    return root


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or _KEPT.fullmatch(key)}
    return {**kept, **_FIXED_ENVIRONMENT, **(extra or {})}


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
