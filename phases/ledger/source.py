"""What the source was when a checkpoint was made: commit, branch, and whether the work tree differed from it.

The files themselves are compared with the commit, byte for byte. What git remembers of them (index, skip-worktree, assume-unchanged, file
times, monitors, caches) and how it is set (`status.showUntrackedFiles`, `submodule.*.ignore`, `core.fileMode`, clean filters) can make
changed source look clean, so none of it is asked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from phases.base.errors import LedgerError
from phases.ledger.git import Git, GitFailed, repository_root
from phases.ledger.objects import Entry, list_tree, object_id, read_objects

ALLOWED_DIRTY = "allow_dirty"  # in `source` of a run that was started with --allow-dirty
_LISTED = 100  # paths named in the manifest; the digest covers them all
_REPOSITORY, _LINK, _EXECUTABLE = "160000", "120000", "100755"
_CONVERTED = " C"
_LFS = b"version https://git-lfs.github.com/spec/v1\n"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Change:
    """A path that differs from the commit: two letters as `git status --porcelain` writes them, and a digest of what lies there."""

    code: str
    path: str
    content: str = ""

    def __str__(self) -> str:
        return f"{self.code} {_shown(self.path)}"


@dataclass
class _Looked:
    """What a look at a work tree showed; paths from its top, as the file system gives them."""

    changes: list[_Change] = field(default_factory=list)
    converted: list[_Change] = field(default_factory=list)
    left_out: int = 0

    def digest(self) -> str:
        rows = sorted((c.path, c.code, c.content) for c in (*self.changes, *self.converted))
        return _sha256(repr(rows).encode("utf-8", "surrogateescape"))


def describe(git: Git) -> dict[str, Any]:
    """Facts of the source, as the manifest keeps them.

    Returns:
        commit: object id of HEAD, or None in a repository without commits.
        branch: name of the branch, or None when HEAD is detached.
        shallow: whether the clone is shallow.
        dirty: whether files of the commit are otherwise in the work tree, submodules included, or files lie there that it lacks and no
            .gitignore names. What only this clone's own excludes hide counts, but for what editors and tools leave (see `_is_of_tools`).
        changed: up to 100 `XY path` lines as `git status --porcelain` writes them.
        difference: sha256 over every changed path with what lies there, so that two dirty states can be told apart; None when clean.
        converted: path to sha256, up to 100, of files that hold what git's checkout makes of the commit here, by filters or line ends, and
            not its bytes.
        left_out: how many files of the commit a sparse checkout leaves out.

    Raises:
        LedgerError: a file cannot be read.
    """
    top = Git(repository_root(git.path))
    commit = top.resolve("HEAD^{commit}")
    seen = _look(top, commit)
    return {
        "commit": commit,
        "branch": top.attempt("symbolic-ref", "--short", "--quiet", "HEAD") or None,
        "shallow": top.text("rev-parse", "--is-shallow-repository") == "true",
        "dirty": bool(seen.changes),
        "changed": [str(change) for change in seen.changes[:_LISTED]],
        "difference": seen.digest() if seen.changes else None,
        "converted": {_shown(change.path): change.content for change in seen.converted[:_LISTED]},
        "left_out": seen.left_out,
    }


def changed_paths(git: Git, most: int = 5) -> str:
    """The first few paths of `describe`'s `changed`, in words; empty when the tree is clean."""
    paths = [entry[3:] for entry in describe(git)["changed"]]
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _look(git: Git, commit: str | None) -> _Looked:
    """Compare the work tree whose top is `git.path` with a commit; None: with nothing."""
    seen = _Looked()
    tracked = {entry.path: entry for entry in list_tree(git, commit, recursive=True)} if commit else {}
    flagged, indexed = _index(git)
    sparse = git.flag("core.sparseCheckout")
    modes = _holds_modes(git)
    for path, entry in tracked.items():
        there = git.path / path
        if not os.path.lexists(there) and path in flagged and sparse:
            seen.left_out += 1
        elif code := _difference(git, there, entry, modes):
            kept = seen.converted if code == _CONVERTED else seen.changes
            kept.append(_Change(code, path, _content(there)))
    shown = set(_unknown(git, "--exclude-standard"))
    unknown = [
        path
        for path in _unknown(git, "--exclude-per-directory=.gitignore")
        if path in shown or not _is_of_tools(git.path, path)
    ]
    for code, paths in (("A ", indexed), ("??", unknown)):
        for path in paths:
            if path.rstrip("/") not in tracked and os.path.lexists(git.path / path):
                seen.changes.append(_Change(code, path, _content(git.path / path)))
    return seen


def _index(git: Git) -> tuple[set[str], list[str]]:
    """Paths in git's index that are flagged skip-worktree, and all of them."""
    rows = [os.fsdecode(row) for row in git.run("ls-files", "-t", "-z").split(b"\0") if row]
    return {row[2:] for row in rows if row[0] == "S"}, list(dict.fromkeys(row[2:] for row in rows))


def _unknown(git: Git, excludes: str) -> list[str]:
    """Files that git's index lacks and the excludes let through; a repository inside this one is one path that ends with a slash."""
    return [os.fsdecode(path) for path in git.run("ls-files", "-z", "--others", excludes).split(b"\0") if path]


def _is_of_tools(top: Path, path: str) -> bool:
    """Whether an editor, a tool or Python left a file: what begins with a dot, byte code, a virtual environment. Everybody's own excludes
    hide some; nothing that is run comes from them."""
    parts = PurePosixPath(path).parts
    folders = (top.joinpath(*parts[:depth]) for depth in range(1, len(parts)))
    return (
        any(part.startswith(".") or part == "__pycache__" for part in parts)
        or path.endswith((".pyc", "~"))
        or any((folder / "pyvenv.cfg").is_file() for folder in folders)
    )


def _holds_modes(git: Git) -> bool:
    """Whether the file system keeps who may execute a file: `core.fileMode` is false where it does not, but also where somebody set it so."""
    return (
        not (Path(os.fsdecode(git.run("rev-parse", "--absolute-git-dir").rstrip(b"\n"))) / "HEAD").stat().st_mode
        & stat.S_IXUSR
    )


def _difference(git: Git, path: Path, entry: Entry, modes: bool) -> str:
    """How a path differs from its entry in the commit: ` D` gone, ` T` of another kind, ` M` with other content or mode; empty if not."""
    try:
        there = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return " D"
    if entry.mode == _REPOSITORY:
        return _submodule_difference(path, there, entry)
    if entry.mode == _LINK:
        if not stat.S_ISLNK(there.st_mode):
            return " T"
        return "" if object_id("blob", os.fsencode(os.readlink(path)), entry.oid) == entry.oid else " M"
    if not stat.S_ISREG(there.st_mode):
        return " T"
    if modes and bool(there.st_mode & stat.S_IXUSR) != (entry.mode == _EXECUTABLE):
        return " M"
    return "" if _blob_id(path, there.st_size, entry.oid) == entry.oid else _content_difference(git, path, entry)


def _content_difference(git: Git, path: Path, entry: Entry) -> str:
    """Of a file that has not the commit's bytes: empty where it is what a pointer of git-lfs names, which is as good; whether it is what a
    checkout writes with the filters, line ends and encodings in force here."""
    pointer = read_objects(git, [entry.oid])[entry.oid][1]
    content = _file_sha256(path)
    if pointer.startswith(_LFS) and f"oid sha256:{content}".encode() in pointer.splitlines():
        return ""
    try:
        written = git.run("cat-file", "--filters", f"--path={entry.path}", entry.oid)
    except GitFailed:  # the filter is not installed, say
        return " M"
    return _CONVERTED if _sha256(written) == content else " M"


def _submodule_difference(path: Path, there: os.stat_result, entry: Entry) -> str:
    """A submodule is at its commit and clean; or was never fetched, so that its directory is empty."""
    if not stat.S_ISDIR(there.st_mode):
        return " T"
    if not _is_top(path):
        return " M" if any(path.iterdir()) else ""
    inner = Git(path)
    head = inner.resolve("HEAD^{commit}")
    return "" if head == entry.oid and not _look(inner, head).changes else " M"


def _content(path: Path) -> str:
    """A digest of whatever lies at a path, its mode included; empty when nothing does."""
    try:
        there = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISLNK(there.st_mode):
        return _sha256(b"link " + os.fsencode(os.readlink(path)))
    if stat.S_ISREG(there.st_mode):
        executable = there.st_mode & stat.S_IXUSR
        return _file_sha256(path) if not executable else _sha256(b"executable " + _file_sha256(path).encode())
    if not stat.S_ISDIR(there.st_mode):
        return _sha256(b"special %d" % stat.S_IFMT(there.st_mode))
    if _is_top(path):
        inner = Git(path)
        head = inner.resolve("HEAD^{commit}")
        return _sha256(f"repository {head} {_look(inner, head).digest()}".encode())
    rows = [(entry.name, _content(entry)) for entry in sorted(path.iterdir()) if entry.name != ".git"]
    return _sha256(repr(rows).encode("utf-8", "surrogateescape"))


def _is_top(path: Path) -> bool:
    """Whether a directory is the top of a repository's work tree that git can read."""
    if not (path / ".git").exists():
        return False
    try:
        return repository_root(path).samefile(path)
    except LedgerError:
        return False


def _blob_id(path: Path, size: int, oid: str) -> str:
    """The id git gives a file's bytes, in the hash `oid` is written in; no filter sees them."""
    total = hashlib.sha256() if len(oid) == 64 else hashlib.sha1(usedforsecurity=False)
    total.update(b"blob %d\0" % size)
    return _update(total, path)


def _file_sha256(path: Path) -> str:
    return _update(hashlib.sha256(), path)


def _update(total: Any, path: Path) -> str:
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                total.update(block)
    except OSError as fault:
        raise LedgerError(
            f"{path} cannot be read, so nobody can say whether it is as committed: {fault.strerror}.",
            hint="Give this user the right to read it, or remove it.",
        ) from fault
    return str(total.hexdigest())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _shown(path: str) -> str:
    """A path as text that JSON can hold; a file may be named in any bytes."""
    return os.fsencode(path).decode(errors="replace")
