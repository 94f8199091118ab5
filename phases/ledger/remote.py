"""Keeping the ledger branch and its tags in step with a remote, atomically and never by force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phases.base.errors import LedgerError
from phases.ledger.git import Git, GitFailed


class RemoteMoved(LedgerError):
    """Somebody else recorded in between: fetch and build on theirs."""


class RemoteUnreachable(LedgerError):
    """The remote cannot be reached or refuses this user."""


# Each says no to a setting of fetch or of this remote that would bring or remove more than what is asked for.
_FETCH = (
    "--no-tags",
    "--no-prune",
    "--no-recurse-submodules",
    "--no-write-fetch-head",
    "--no-auto-maintenance",
    "--refmap=",
)


@dataclass(frozen=True)
class Remote:
    """A configured git remote (by name) or a URL, and the ledger branch on it."""

    git: Git
    name: str
    branch: str
    tag_prefix: str

    def tip(self) -> str | None:
        """Object id of the ledger branch there, fetched with its tags; None when it has none yet.

        Raises:
            RemoteUnreachable: the remote does not answer.
        """
        try:
            head = self.head()
            if head is None:
                return None
            self._fetch(f"refs/heads/{self.branch}")
            self._fetch_tags()
        except LedgerError as fault:
            raise RemoteUnreachable(f"remote {self.name!r} cannot be read: {fault.message}", hint=fault.hint) from fault
        return head

    def _fetch(self, refspec: str) -> None:
        self.git.network("fetch", *_FETCH, self.name, refspec)

    def _fetch_tags(self) -> None:
        """Bring in tags this side lacks. One of the same name with another object stays: the branches then differ too."""
        try:
            self._fetch(f"refs/tags/{self.tag_prefix}*:refs/tags/{self.tag_prefix}*")
        except GitFailed as fault:
            if (
                "clobber" not in fault.stderr and "cannot lock ref" not in fault.stderr
            ):  # another run of this clone fetches them
                raise

    def head(self) -> str | None:
        """Object id of the ledger branch there, not fetched; None when it has none."""
        listed = self.git.network("ls-remote", self.name, f"refs/heads/{self.branch}").decode().split()
        return listed[0] if listed else None

    def missing_tags(self) -> dict[str, str]:
        """Checkpoint tags of this repository that the remote lacks: name to object id."""
        pattern = f"refs/tags/{self.tag_prefix}"
        listed = self.git.network("ls-remote", "--tags", "--refs", self.name, f"{pattern}*").decode()
        there = {line.split("\t", 1)[1] for line in listed.splitlines()}
        here = self.git.text("for-each-ref", "--format=%(objectname) %(refname)", pattern).splitlines()
        pairs = (line.split(" ", 1) for line in here)
        return {name.removeprefix("refs/tags/"): oid for oid, name in pairs if name not in there}

    def push(self, commit: str, expected: str | None, tags: Mapping[str, str]) -> None:
        """Move the branch there from `expected` to `commit` and create `tags` (name to object id): all or nothing.

        Raises:
            RemoteMoved: the branch is not at `expected` any more, or `commit` does not build on it.
            RemoteUnreachable: the remote does not answer or refuses.
        """
        if expected and self.git.attempt("merge-base", "--is-ancestor", expected, commit) is None:
            raise RemoteMoved(
                f"the ledger on {self.name!r} moved while recording."
            )  # the lease alone would overwrite it
        refs = [f"{commit}:refs/heads/{self.branch}", *(f"{oid}:refs/tags/{name}" for name, oid in tags.items())]
        lease = f"--force-with-lease=refs/heads/{self.branch}:{expected or ''}"
        try:
            # a mirror would push all there is, and takes no references
            mirror = ("-c", f"remote.{self.name}.mirror=false") if self.git.flag(f"remote.{self.name}.mirror") else ()
            flags = ("--quiet", "--atomic", "--porcelain", "--no-verify", "--no-prune")
            self.git.network(*mirror, "push", *flags, lease, self.name, *refs)
        except GitFailed as fault:
            if any(
                sign in fault.stdout + fault.stderr
                for sign in ("stale info", "fetch first", "non-fast-forward", "already exists", "cannot lock ref")
            ):
                raise RemoteMoved(f"the ledger on {self.name!r} moved while recording.") from fault
            raise RemoteUnreachable(
                f"remote {self.name!r} refused the checkpoint: {fault.message}", hint=fault.hint
            ) from fault
        except LedgerError as fault:
            raise RemoteUnreachable(
                f"remote {self.name!r} cannot be reached: {fault.message}", hint=fault.hint
            ) from fault
