"""A release as built on this machine: files, launch arguments and a manifest whose hash is the release's name."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phases.engines.ssh.errors import ReleaseError

SCHEMA = "phasegate/release/v1"
CHUNK = 1 << 20
FORBIDDEN = {"manifest.json", ".complete"}


@dataclass(frozen=True)
class Launch:
    """How the service starts from a release.

    `argv` and the values of `env` may contain {release}, {root}, {python} and any of the host's own values, such as
    {port}. `site` is the directory of the release that goes on PYTHONPATH.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    site: str = "site"


@dataclass(frozen=True)
class BundleFile:
    path: str  # inside the release, with /
    sha256: str
    size: int
    executable: bool
    source: Path | bytes


@dataclass(frozen=True)
class Bundle:
    """An immutable release. `manifest` is the text that hashes to `digest`; files are sent in its order."""

    digest: str
    manifest: str
    files: tuple[BundleFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def payload(self, offset: int = 0) -> Iterator[memoryview | bytes]:
        """The files' bytes one after the other, from a byte offset on."""
        start = 0
        for file in self.files:
            end = start + file.size
            if end > offset:
                yield from _read(file, max(0, offset - start))
            start = end


def make_bundle(files: Mapping[str, Path | bytes], launch: Launch, facts: Mapping[str, Any] | None = None) -> Bundle:
    """A bundle of files by their path in the release.

    Args:
        facts: plain JSON kept in the manifest: kernel, variant, versions of torch and SGLang it was built for ...
    Raises: ReleaseError for a path that leaves the release or a file that cannot be read.
    """
    made = tuple(_file(path, files[path]) for path in sorted(files))
    manifest = {
        "schema": SCHEMA,
        "files": [{"path": f.path, "sha256": f.sha256, "size": f.size, "executable": f.executable} for f in made],
        "launch": {"argv": list(launch.argv), "env": launch.env, "site": launch.site},
        "facts": dict(facts or {}),
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return Bundle(hashlib.sha256(text.encode()).hexdigest(), text, made)


def bundle_release(
    wheels: Sequence[Path], objects: Sequence[Path], launch: Launch, facts: Mapping[str, Any] | None = None
) -> Bundle:
    """A bundle of wheels (unpacked under the site directory, so that a switch needs no pip on the host) and compiled objects.

    Objects go to `objects/<file name>`; the launch environment tells the kernel where they are.
    """
    files: dict[str, Path | bytes] = {}
    for wheel in wheels:
        files |= {f"{launch.site}/{name}": data for name, data in _unpack(wheel).items()}
    for path in objects:
        name = f"objects/{path.name}"
        if name in files:
            raise ReleaseError(
                f"two objects are called {path.name}.", hint="Give them different names.", host="this machine"
            )
        files[name] = path
    return make_bundle(files, launch, facts)


def _unpack(wheel: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
            return {_site_name(name): archive.read(name) for name in names}
    except (OSError, zipfile.BadZipFile) as fault:
        raise ReleaseError(
            f"{wheel} is not a readable wheel: {fault}.", hint="Build it again.", host="this machine"
        ) from None


def _site_name(name: str) -> str:
    """Where a wheel's file goes: `x.data/purelib/...` belongs beside the packages."""
    head, _, rest = name.partition("/")
    kind, _, inner = rest.partition("/")
    return inner if head.endswith(".data") and kind in ("purelib", "platlib") else name


def _file(path: str, source: Path | bytes) -> BundleFile:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0] in FORBIDDEN:
        raise ReleaseError(
            f"{path!r} cannot be a path in a release.", hint="Use a plain relative path.", host="this machine"
        )
    if isinstance(source, bytes):
        return BundleFile(path, hashlib.sha256(source).hexdigest(), len(source), False, source)
    try:
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return BundleFile(path, digest, os.fstat(file.fileno()).st_size, os.access(source, os.X_OK), source)
    except OSError as fault:
        raise ReleaseError(
            f"{source} cannot be read: {fault.strerror}.", hint="Build it again.", host="this machine"
        ) from None


def _read(file: BundleFile, offset: int) -> Iterator[memoryview | bytes]:
    if isinstance(file.source, bytes):
        yield memoryview(file.source)[offset:]
        return
    sent = offset
    with open(file.source, "rb") as source:
        source.seek(offset)
        while data := source.read(min(CHUNK, file.size - sent)):
            yield data
            sent += len(data)
    if sent != file.size:
        raise ReleaseError(
            f"{file.source} has changed since the release was made.",
            hint="Make the release again.",
            host="this machine",
        )
