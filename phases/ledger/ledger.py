"""The ledger: a git branch whose every commit is one checkpoint or one approval.

A checkpoint's commit has the previous ledger commit as first parent and the source commit as second. Its tree holds all
checkpoints so far, so the tip alone is the whole record. References move only from the value that was read (compare and
swap); a lost race is built again on the new tip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from phases.base.errors import LedgerError
from phases.ledger import checkpoint as cp
from phases.ledger import decisions
from phases.ledger.checkpoint import Approval, Checkpoint, Damaged, Draft, Written
from phases.ledger.git import Git, GitFailed
from phases.ledger.lost import require_whole
from phases.ledger.objects import list_tree, read_objects, write_tree
from phases.ledger.readme import LEDGER_README
from phases.ledger.remote import Remote, RemoteMoved, RemoteUnreachable

_TRIES = 24
DIRECTORY = "checkpoints"
APPROVALS = "approvals"


@dataclass
class Ledger:
    """The checkpoints of a repository.

    Attributes:
        repo: any directory inside the repository.
        remote: name of the git remote the ledger is pushed to; empty for none.
        sign: `auto` signs when git is set to sign (commit.gpgSign, tag.gpgSign), `always`, `never`.
        warn: called with one line when the remote could not be reached; the checkpoint is then recorded here only and
            pushed with the next one.
    """

    repo: Path
    branch: str = "checkpoints"
    remote: str = ""
    sign: str = "auto"
    tag_prefix: str = "checkpoint/"
    warn: Callable[[str], None] = field(default=lambda line: None)

    def __post_init__(self) -> None:
        self.git = Git(self.repo)

    # -- reading -------------------------------------------------------------------------------------------------------

    def tip(self) -> str | None:
        """Commit of the local ledger branch, or of the remote-tracking one in a fresh clone; None when there is none."""
        local = self.git.resolve(f"refs/heads/{self.branch}")
        if local is None and self.remote:
            return self.git.resolve(f"refs/remotes/{self.remote}/{self.branch}")
        return local

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, oldest first. Raises LedgerError when one of them is damaged."""
        tip = self.tip()
        return self._list_at(tip) if tip else []

    def survey(self) -> tuple[list[Checkpoint], list[Damaged]]:
        """The checkpoints that can be read and those that are damaged, each oldest first."""
        tip = self.tip()
        return self._survey_at(tip) if tip else ([], [])

    def find(self, name: str) -> Checkpoint:
        """The checkpoint called by number, directory name, tag, digest (or its first 6 digits or more) or `latest`.

        Raises:
            LedgerError: there is none, or several, or it is damaged; that others are is no hindrance.
        """
        found = self.look_up(name)
        if isinstance(found, Damaged):
            raise found.error(self.tag_prefix)
        return found

    def look_up(self, name: str) -> Checkpoint | Damaged:
        """As `find`, but a damaged one is returned, not raised."""
        sound, damaged = self.survey()
        known: list[Checkpoint | Damaged] = sorted([*sound, *damaged], key=lambda c: c.number)
        if not known:
            raise LedgerError(
                f"there is no checkpoint yet on branch {self.branch!r}.", hint="Run a phase first (`phase run`)."
            )
        wanted = name.removeprefix(self.tag_prefix)
        found = (
            known[-1:]
            if name == "latest"
            else [c for c in known if wanted == c.name or (wanted.isdigit() and int(wanted) == c.number)]
        )
        if not found and len(wanted) >= 6:
            found = [c for c in sound if c.digest.startswith(wanted) or c.commit.startswith(wanted)]
        if len(found) != 1:
            problem = "names several checkpoints" if found else "names no checkpoint"
            raise LedgerError(f"{name!r} {problem}.", hint=f"Known: {', '.join(c.name for c in known[-8:])}.")
        return found[0]

    def files(self, checkpoint: Checkpoint | Damaged) -> dict[str, bytes]:
        """Contents of every file of a checkpoint by relative path, its manifest among them if it has one."""
        entries = list_tree(self.git, checkpoint.tree, recursive=True)
        contents = read_objects(self.git, (e.oid for e in entries))
        return {e.path: contents[e.oid][1] for e in entries}

    def approvals(self, checkpoint: Checkpoint, *, signed: bool = False) -> list[Approval]:
        """Decisions on this checkpoint's digest, oldest first; `signed`: only those that count where signatures are wanted."""
        tip = self.tip()
        if not tip:
            return []
        return (
            decisions.signed(self, tip, checkpoint) if signed else decisions.read_approvals(self.git, tip, checkpoint)
        )

    # -- writing -------------------------------------------------------------------------------------------------------

    def preflight(self) -> None:
        """Find out now what would stop a recording later.

        Raises:
            LedgerError: no git identity, the branch name is not valid, the branch is checked out somewhere or was set back.
        """
        self.git.identity()
        if self.git.attempt("check-ref-format", f"refs/heads/{self.branch}") is None:
            raise LedgerError(
                f"{self.branch!r} is not a valid branch name.", hint="Change `ledger: branch:` in the playbook."
            )
        self._refuse_checked_out()
        require_whole(self)

    def record(self, draft: Draft) -> Checkpoint:
        """Record a checkpoint: commit, annotated tag, and push when a remote is set.

        Recording the same run's phase again returns the checkpoint already there.

        Raises:
            LedgerError: nothing was recorded; the message says why. The draft can be recorded again once it is cured.
        """
        self.preflight()
        author = self.git.identity()
        return self._append(lambda tip: self._build(draft, tip, author))

    def decide(
        self, checkpoint: Checkpoint, decision: str, reason: str, at: float, *, signed: bool = False
    ) -> Approval:
        """Record a decision on exactly this digest by git's identity. `signed`: by their signature, whatever git is set to.

        Raises GateError when git cannot verify the signature here: it would not count.
        """
        self.preflight()
        approval = Approval(checkpoint.number, checkpoint.digest, decision, self.git.identity(), reason, cp.iso(at))
        by = replace(self, sign="always") if signed else self

        def build(tip: str | None) -> Written:
            written = decisions.build_approval(by, approval, checkpoint, tip, at)
            return decisions.require_signature(by, written, approval) if signed else written

        self._append(build)
        return approval

    def sync(self) -> str | None:
        """Bring in what the remote has and send what it lacks; returns the tip.

        Raises:
            RemoteUnreachable: the remote does not answer.
            LedgerError: both sides have checkpoints the other lacks.
        """
        local = self.git.resolve(f"refs/heads/{self.branch}")
        if not self.remote:
            return local
        theirs = self._remote().tip()
        if theirs == local or theirs is None:
            return local
        if local is None or self._is_ancestor(local, theirs):
            self._move_branch(local, theirs, {})
            return theirs
        if self._is_ancestor(theirs, local):
            return local
        raise LedgerError(
            f"the ledger here and on {self.remote!r} have both grown: {local[:10]} here, {theirs[:10]} there.",
            hint=f"Keep yours aside with `git branch {self.branch}-mine {self.branch}`, take theirs with "
            f"`git update-ref refs/heads/{self.branch} {theirs[:10]}`, and run the phase again.",
        )

    # -- mechanics -----------------------------------------------------------------------------------------------------

    def _append(self, build: Callable[[str | None], Written]) -> Checkpoint:
        """Build a commit on the newest tip and move the references to it, trying again when another run was faster."""
        for _ in range(_TRIES):
            tip, reachable = self._newest()
            require_whole(self)
            try:
                written = build(tip)
            except GitFailed as fault:
                if "already exists" in fault.stderr:  # the tag that was to be signed: another run was faster
                    continue
                raise
            if written.is_new and self._publish(tip, written, reachable):
                return written.checkpoint
            if not written.is_new:
                self._push_pending(reachable)
                return written.checkpoint
        raise LedgerError(
            f"branch {self.branch!r} kept moving while recording.", hint="Try again with `phase run --resume`."
        )

    def _newest(self) -> tuple[str | None, bool]:
        """The tip to build on, and whether the remote can be pushed to."""
        if not self.remote:
            return self.git.resolve(f"refs/heads/{self.branch}"), False
        try:
            return self.sync(), True
        except RemoteUnreachable as fault:
            self.warn(f"{fault} Recording here only; it is pushed with the next checkpoint.")
            return self.tip(), False

    def _publish(self, tip: str | None, written: Written, reachable: bool) -> bool:
        """Push first, then move the local references, so that this side is never ahead by accident. False: lost a race."""
        if reachable:
            try:
                remote = self._remote()
                remote.push(written.commit, remote.head(), {**remote.missing_tags(), **written.tags})
            except RemoteMoved:
                return False
            except RemoteUnreachable as fault:
                self.warn(f"{fault} Recorded here only; it is pushed with the next checkpoint.")
        return self._move_branch(tip, written.commit, written.tags)

    def _push_pending(self, reachable: bool) -> None:
        tip, remote = self.tip(), self._remote()
        if not reachable or tip is None:
            return
        try:
            theirs = remote.head()
            if theirs != tip:
                remote.push(tip, theirs, remote.missing_tags())
        except LedgerError as fault:
            self.warn(str(fault))

    def _move_branch(self, old: str | None, new: str, tags: dict[str, str]) -> bool:
        """Branch from `old` to `new` and the tags from nothing, in one transaction; False when the branch is elsewhere."""
        zero = "0" * len(new)
        lines = [f"update refs/heads/{self.branch} {new} {old or zero}"]
        lines += [f"create refs/tags/{name} {oid}" for name, oid in tags.items()]
        try:
            self.git.run(
                "update-ref", "--create-reflog", "-m", "phasegate", "--stdin", stdin=("\n".join(lines) + "\n").encode()
            )
        except GitFailed:
            if self.git.resolve(f"refs/heads/{self.branch}") in (old, None) and not self._lost_to_tag(tags):
                raise
            return False
        return True

    def _lost_to_tag(self, tags: dict[str, str]) -> bool:
        return any(self.git.resolve(f"refs/tags/{name}") for name in tags)

    def _build(self, draft: Draft, tip: str | None, author: str) -> Written:
        existing = self._list_at(tip) if tip else []
        same = next(
            (c for c in reversed(existing) if c.manifest.get("run") == draft.run and c.phase == draft.phase), None
        )
        if same:
            self._refuse_other_content(same, draft)
            return Written(same.commit, same, {}, is_new=False)
        parent = tip or self._root(draft)
        number = existing[-1].number + 1 if existing else 1
        name = cp.directory_name(number, draft.phase, draft.verdict)
        manifest = cp.manifest_of(draft, number, author, existing[-1].digest if existing else None)
        files = {**draft.files, cp.MANIFEST: manifest}
        files[cp.SUMS] = cp.sums_of(files)
        digest = cp.sha256(manifest)
        tree = write_tree(self.git, parent, {f"{DIRECTORY}/{name}/{path}": data for path, data in files.items()})
        parents = [parent, *([draft.source["commit"]] if draft.source.get("commit") else [])]
        message = f"Record {name} of {draft.kernel}\n\nPhase: {draft.phase}\nVerdict: {draft.verdict.value}\nCheckpoint-Digest: {digest}\n"
        commit = self.commit(tree, parents, message, draft.recorded_at)
        made = self._list_at(commit)[-1]
        tag = f"{self.tag_prefix}{made.name}"
        return Written(
            commit, made, self.tag(tag, f"{made.name}\n\nCheckpoint-Digest: {digest}\n", commit, draft.recorded_at)
        )

    def _root(self, draft: Draft) -> str:
        tree = write_tree(self.git, None, {"README.md": LEDGER_README})
        return self.commit(tree, [], "Begin the ledger\n", draft.recorded_at)

    def commit(self, tree: str, parents: list[str], message: str, at: float) -> str:
        """A commit object with fixed dates; no reference moves."""
        date = f"@{int(at)} +0000"
        signing = ["-S"] if self._signs("commit.gpgSign") else []
        flags = [part for parent in parents for part in ("-p", parent)]
        env = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        return self.git.text("commit-tree", *signing, *flags, tree, stdin=message.encode(), env=env)

    def tag(self, name: str, text: str, commit: str, at: float) -> dict[str, str]:
        """An annotated tag object: name to object id; its reference comes into being with the branch's move."""
        if self._signs("tag.gpgSign"):
            date = {"GIT_COMMITTER_DATE": f"@{int(at)} +0000"}
            # git signs a tag only while creating its reference, and a tag without its entry reads as an entry lost
            self.git.run("tag", "--sign", "--cleanup=verbatim", "-F", "-", name, commit, stdin=text.encode(), env=date)
            signed = self.git.text("rev-parse", f"refs/tags/{name}")
            self.git.run("update-ref", "-d", f"refs/tags/{name}", signed)
            return {name: signed}
        who = self.git.identity()
        body = f"object {commit}\ntype commit\ntag {name}\ntagger {who} {int(at)} +0000\n\n{text}"
        return {name: self.git.text("mktag", stdin=body.encode())}

    def _signs(self, key: str) -> bool:
        return self.sign == "always" or (self.sign == "auto" and self.git.flag(key))

    def _refuse_other_content(self, same: Checkpoint, draft: Draft) -> None:
        recorded = {path: facts["sha256"] for path, facts in same.manifest["files"].items()}
        wanted = {path: cp.sha256(data) for path, data in draft.files.items()}
        differs = sorted(path for path in {*recorded, *wanted} if recorded.get(path) != wanted.get(path))
        if differs:
            raise LedgerError(
                f"run {draft.run} is already recorded as {same.name} with other content ({', '.join(differs[:4])}).",
                hint="Start a new run instead of resuming this one.",
            )

    def _refuse_checked_out(self) -> None:
        listing = self.git.text("worktree", "list", "--porcelain")
        for block in listing.split("\n\n"):
            lines = block.splitlines()
            if f"branch refs/heads/{self.branch}" in lines:
                where = lines[0].removeprefix("worktree ")
                raise LedgerError(
                    f"branch {self.branch!r} is checked out at {where}, where moving it would make every file look changed.",
                    hint=f"Switch that work tree to another branch (`git -C {where} switch --detach`), or name another ledger branch.",
                )

    def _list_at(self, tip: str) -> list[Checkpoint]:
        sound, damaged = self._survey_at(tip)
        if damaged:
            raise damaged[0].error(self.tag_prefix)
        return sound

    def _survey_at(self, tip: str) -> tuple[list[Checkpoint], list[Damaged]]:
        rows = [
            (e, parsed) for e in list_tree(self.git, f"{tip}:{DIRECTORY}") if (parsed := cp.parse_directory(e.path))
        ]
        manifests = {e.path: self.git.resolve(f"{e.oid}:{cp.MANIFEST}") for e, _ in rows}
        if not rows:
            self.git.run("ls-tree", tip)  # a tree that is lost looks like one that holds nothing: GitFailed
        contents = self._readable(filter(None, manifests.values()))
        commits = self._commits(tip)
        sound, damaged = [], []
        for entry, (number, phase, verdict) in sorted(rows, key=lambda row: row[1][0]):
            directory, oid = f"{DIRECTORY}/{entry.path}", manifests[entry.path]
            if oid is None:
                damaged.append(Damaged(number, directory, "is missing", entry.oid))
                continue
            data = contents.get(oid)
            try:
                if data is None:
                    raise ValueError(
                        f"cannot be read, since git has lost or damaged object {oid[:10]} (a clone that has it can give it back)"
                    )
                manifest = cp.read_manifest(data)
            except ValueError as fault:
                damaged.append(Damaged(number, directory, str(fault), entry.oid))
            else:
                sound.append(
                    Checkpoint(
                        number,
                        phase,
                        verdict,
                        cp.sha256(data),
                        commits.get(entry.path, ""),
                        directory,
                        manifest,
                        entry.oid,
                    )
                )
        return sound, damaged

    def _readable(self, oids: Iterable[str]) -> dict[str, bytes]:
        """Contents of those objects that git can read."""
        wanted = list(oids)
        try:
            return {oid: content for oid, (_, content) in read_objects(self.git, wanted).items()}
        except (LedgerError, ValueError):  # one of them stops all: then each by itself
            return (
                {}
                if len(wanted) == 1
                else {oid: content for one in wanted for oid, content in self._readable([one]).items()}
            )

    def _commits(self, tip: str) -> dict[str, str]:
        """Directory name of each checkpoint to the commit that recorded it."""
        commits = read_objects(self.git, self.git.text("rev-list", "--first-parent", tip).splitlines())
        subjects = {
            oid: body.partition(b"\n\n")[2].split(b"\n", 1)[0].decode(errors="replace")
            for oid, (_, body) in commits.items()
        }
        return {
            words[1]: oid
            for oid, subject in subjects.items()
            if (words := subject.split(" "))[0] == "Record" and words[1:]
        }

    def _remote(self) -> Remote:
        return Remote(self.git, self.remote, self.branch, self.tag_prefix)

    def _is_ancestor(self, older: str, newer: str) -> bool:
        return self.git.attempt("merge-base", "--is-ancestor", older, newer) is not None
