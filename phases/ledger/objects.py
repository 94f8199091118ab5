"""Reading and writing git objects in bulk, beside the work tree and the user's index."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from phases.base.errors import LedgerError
from phases.ledger.git import Git


@dataclass(frozen=True)
class Entry:
    """One entry of a tree."""

    mode: str
    kind: str  # blob | tree | commit
    oid: str
    path: str


def list_tree(git: Git, treeish: str, *, recursive: bool = False, trees: bool = False) -> list[Entry]:
    """Entries of a tree; paths relative to it. Empty when the tree does not exist. `trees`: also those gone into."""
    if git.resolve(treeish) is None:
        return []
    raw = git.run("ls-tree", "-z", *(["-r"] if recursive else []), *(["-t"] if trees else []), treeish)
    entries = []
    for line in filter(None, raw.split(b"\0")):
        head, _, path = line.partition(b"\t")
        mode, kind, oid = head.decode().split()
        entries.append(Entry(mode, kind, oid, path.decode(errors="surrogateescape")))
    return entries


def read_objects(git: Git, oids: Iterable[str]) -> dict[str, tuple[str, bytes]]:
    """Kind and content of each object.

    Raises:
        LedgerError: an object is missing or its stored bytes are corrupt.
    """
    wanted = list(dict.fromkeys(oids))
    if not wanted:
        return {}
    raw = git.run("cat-file", "--batch", stdin="".join(f"{oid}\n" for oid in wanted).encode())
    found: dict[str, tuple[str, bytes]] = {}
    at = 0
    for oid in wanted:
        end = raw.index(b"\n", at)
        header = raw[at:end].decode().split()
        if len(header) != 3:
            raise LedgerError(
                f"object {oid} is missing from the repository.",
                hint="Fetch the ledger branch from a clone that has it.",
            )
        size = int(header[2])
        found[oid] = (header[1], raw[end + 1 : end + 1 + size])
        at = end + 1 + size + 1
    return found


def object_id(kind: str, content: bytes, oid: str) -> str:
    """The id git gives this content, in the hash `oid` is written in (SHA-1 or SHA-256)."""
    digest = hashlib.sha256() if len(oid) == 64 else hashlib.sha1(usedforsecurity=False)
    digest.update(f"{kind} {len(content)}\0".encode())
    digest.update(content)
    return digest.hexdigest()


def write_tree(git: Git, base: str | None, files: Mapping[str, bytes]) -> str:
    """Tree of commit `base` with `files` added, by way of a private index; returns its object id.

    Raises:
        LedgerError: a path is not plain and relative.
    """
    oids = {path: git.text("hash-object", "-w", "--stdin", stdin=data) for path, data in files.items() if _plain(path)}
    with tempfile.TemporaryDirectory(prefix="phasegate-index-") as scratch:
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        if base:
            git.run("read-tree", base, env=env)
        listing = b"".join(f"100644 {oid}\t".encode() + path.encode() + b"\0" for path, oid in oids.items())
        git.run("update-index", "-z", "--index-info", stdin=listing, env=env)
        return git.text("write-tree", env=env)


def _plain(path: str) -> bool:
    parts = PurePosixPath(path).parts
    bad = (
        not parts
        or path.startswith("/")
        or any(p in ("..", ".", ".git") for p in parts)
        or any(ord(c) < 32 for c in path)
    )
    if bad or str(PurePosixPath(path)) != path:
        raise LedgerError(f"{path!r} cannot be the path of a checkpoint's file.", hint="Use plain relative paths.")
    return True
