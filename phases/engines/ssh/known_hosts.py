"""known_hosts files as OpenSSH reads them: patterns, hashed names, `@revoked`, `@cert-authority`; a line nobody can read is
skipped and told once.

The library's own reader gives up at the first line that it does not understand, wherever that is, knows no patterns, keeps
one key of each kind for a host, and takes a revoked key for a good one.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

REVOKED, AUTHORITY = "@revoked", "@cert-authority"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownKey:
    """One readable line: a key for the hosts that its patterns match."""

    file: str
    number: int
    marker: str  # "", REVOKED or AUTHORITY
    names: tuple[str, ...]  # patterns, "!pattern", or one hashed name
    kind: str  # ssh-ed25519 ...
    blob: bytes

    @property
    def at(self) -> str:
        return f"{self.file}:{self.number}"

    def matches(self, name: str) -> bool:
        """Whether the line is about this host (`name`, or `[name]:port` for another port than 22)."""
        name = name.lower()
        if any(pattern.startswith("!") and _fits(pattern[1:], name) for pattern in self.names):
            return False
        return any(_fits(pattern, name) for pattern in self.names)


@dataclass(frozen=True)
class Unreadable:
    """A line, or with number 0 a file, that cannot be used."""

    file: str
    number: int
    why: str


@dataclass(frozen=True)
class KnownHosts:
    """What one or more files say. Later files add to earlier ones."""

    files: tuple[str, ...]
    keys: tuple[KnownKey, ...]
    unreadable: tuple[Unreadable, ...]

    def about(self, names: Sequence[str], marker: str = "") -> list[KnownKey]:
        """Lines of one marker about a host that goes by any of these names."""
        return [key for key in self.keys if key.marker == marker and any(map(key.matches, names))]


def read_known_hosts(paths: Iterable[Path]) -> KnownHosts:
    """Read the files that exist; what cannot be used is logged as one warning a file, once."""
    stamps = []
    for path in paths:
        name = os.path.expanduser(path)
        try:
            status = os.stat(name)
        except OSError:
            continue
        stamps.append((name, status.st_mtime_ns, status.st_size))
    return _read(tuple(stamps))


@functools.lru_cache(maxsize=16)
def _read(stamps: tuple[tuple[str, int, int], ...]) -> KnownHosts:
    keys: list[KnownKey] = []
    unreadable: list[Unreadable] = []
    for file, _, _ in stamps:
        try:
            lines = Path(file).read_bytes().decode("utf-8", "surrogateescape").splitlines()
        except OSError as fault:
            lines = []
            unreadable.append(Unreadable(file, 0, fault.strerror or str(fault)))
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                keys.append(_key(file, number, line))
            except ValueError as fault:
                unreadable.append(Unreadable(file, number, str(fault)))
    for file in dict.fromkeys(each.file for each in unreadable):
        log.warning(describe([each for each in unreadable if each.file == file]))
    return KnownHosts(tuple(file for file, _, _ in stamps), tuple(keys), tuple(unreadable))


def describe(unreadable: Sequence[Unreadable]) -> str:
    """One sentence for the lines of one file that are skipped."""
    first = unreadable[0]
    if first.number == 0:
        return f"{first.file} cannot be read ({first.why}); no host key is taken from it."
    shown = [f"line {each.number} ({each.why})" for each in unreadable[:5]]
    more = f" and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
    return (
        f"{first.file}: {', '.join(shown)}{more} cannot be read and {'is' if len(unreadable) == 1 else 'are'} skipped."
    )


def _key(file: str, number: int, line: str) -> KnownKey:
    fields = line.split()
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if marker not in ("", REVOKED, AUTHORITY):
        raise ValueError(f"unknown marker {marker}")
    if len(fields) < 3:
        raise ValueError("no host, kind and key")
    names, kind, text = fields[:3]
    if kind.isdigit():
        raise ValueError("a key of SSH protocol 1")
    try:
        blob = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the key is not base64") from None
    length = int.from_bytes(blob[:4], "big")
    if len(blob) < 4 or blob[4 : 4 + length] != kind.encode("utf-8", "replace") or len(blob) <= 4 + length:
        raise ValueError(f"the key is cut off or no {kind}")
    return KnownKey(
        file,
        number,
        marker,
        tuple(name.lower() if name[0] != "|" else name for name in names.split(",") if name),
        kind,
        blob,
    )


def _fits(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)
    return _pattern(pattern).fullmatch(name) is not None


@functools.lru_cache(maxsize=4096)
def _pattern(pattern: str) -> re.Pattern[str]:
    """OpenSSH's patterns have * and ? and nothing else; [ and ] stand for themselves, around a host with a port."""
    return re.compile("".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern), re.DOTALL)
