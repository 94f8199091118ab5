"""Builds the shared objects into a cache keyed by content.

The key of an object is the digest of its sources and headers, flags, architectures, the compiler's own description of
itself and the C ABI version. Modification times play no part. An object is compiled in a temporary directory and
appears under its key by one rename, so a killed build leaves nothing that looks finished; the lock that keeps two
processes from compiling the same thing is an fcntl lock, which dies with its holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from verify_attn import fatbin, toolchain
from verify_attn.abi import ABI
from verify_attn.errors import KernelBuildError
from verify_attn.sources import LIBRARIES, Library, csrc, library
from verify_attn.toolchain import Compiler

CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-Wall",
             "-Wextra", "-Wno-psabi")
CXX_LINK = ("-shared", "-static-libstdc++", "-static-libgcc", "-pthread")
NVCC_FLAGS = ("-std=c++17", "-O3", "--shared", "-cudart", "static", "-Xcompiler", "-fPIC", "-lineinfo")
# Translation units named *kernel.cpp are compiled once for each of these; the rest once for the default target.
CXX_ISAS = {"x86-64-v3": "v3", "x86-64-v4": "v4"}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """One object in the cache, with what it was made from and by."""

    library: str
    archs: tuple[str, ...]
    path: str
    sha256: str
    cache_key: str
    sources: str  # digest of sources, headers and ABI alone: what a host without a compiler can check
    compiler: str
    flags: tuple[str, ...]
    seconds: float
    cached: bool


def cache_dir() -> Path:
    """$VERIFY_ATTN_CACHE, else verify_attn under $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("VERIFY_ATTN_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verify_attn"


def build(name: str, archs: tuple[str, ...], cache: Path | None = None, progress: Progress | None = None) -> Built:
    """The object of a library for these architectures: from the cache, or compiled now.

    Args:
        name: a library of sources.py.
        archs: CPU: any subset of x86-64-v3, x86-64-v4, or the machine's name elsewhere; CUDA: one or more sm_*.
        cache: default `cache_dir()`.
        progress: called with a line when something is compiled.

    Raises:
        KernelBuildError: no architectures, no compiler, an architecture it does not know, a compile error with the
            compiler's last lines, or a cache that cannot be written.
    """
    lib = _known(name)
    if not archs:
        raise KernelBuildError(f"no architecture given for {name}; it can be built for {', '.join(lib.archs)}")
    compiler = toolchain.cxx() if lib.compiler == "cxx" else toolchain.nvcc()
    if lib.compiler == "nvcc":
        toolchain.check_archs(compiler, list(archs))
    commands = _commands(lib, archs, compiler, Path("OUT"))
    sources = source_digest(lib)
    words = [[w.replace(str(csrc()), "csrc") for w in command[1:]] for command in commands]  # wherever it is installed
    flags = tuple(dict.fromkeys(w for command in words for w in command if w.startswith("-")))
    key = _digest([sources, list(archs), words, compiler.identity])
    entry = (cache or cache_dir()) / f"{name}-{'-'.join(archs)}-{key[:20]}"
    found = _finished(entry, key)
    if found:
        return found
    with _locked(entry):
        found = _finished(entry, key)  # another process may have made it while we waited
        if found:
            return found
        if progress:
            progress(f"compiling {name} for {', '.join(archs)} with {compiler.version}")
        return _compile(lib, archs, compiler, entry, Built(name, archs, "", "", key, sources, compiler.version, flags, 0.0, False))


def source_digest(lib: Library) -> str:
    """Digest of a library's sources and headers and of the ABI, independent of any compiler."""
    parts: list[object] = [ABI, lib.name, lib.compiler, list(lib.flags)]
    for relative in sorted({*lib.sources, *lib.headers}):
        try:
            parts.append([relative, hashlib.sha256((csrc() / relative).read_bytes()).hexdigest()])
        except OSError as error:
            raise KernelBuildError(f"source {relative} of {lib.name} cannot be read: {error}; reinstall verify_attn") from error
    return _digest(parts)


def prebuilt(name: str, arch: str, directory: Path) -> Built | None:
    """An object of a release bundle: made elsewhere, from these very sources, for that architecture; None if absent."""
    want = source_digest(_known(name))
    for record in sorted(directory.glob(f"{name}-*/record.json")):
        found = _finished(record.parent, None)
        if found and found.sources == want and arch in found.archs:
            return found
    return None


# ---- compile commands ----


def _commands(lib: Library, archs: tuple[str, ...], compiler: Compiler, out: Path) -> list[list[str]]:
    root = csrc()
    target = str(out / f"lib{lib.name}.so")
    if lib.compiler == "nvcc":
        gencode = [f"-gencode=arch=compute_{a[3:]},code=sm_{a[3:]}" for a in archs]
        return [[compiler.path, *NVCC_FLAGS, *lib.flags, *gencode, f"-I{root}", "-o", target, *(str(root / s) for s in lib.sources)]]
    commands, objects = [], []
    for source in lib.sources:
        for isa, march in _isas(source, archs):
            objects.append(str(out / f"{Path(source).stem}-{isa or 'any'}.o"))
            defines = [f"-DVA_ISA={isa}"] if isa else []
            commands.append([compiler.path, *CXX_FLAGS, *lib.flags, *defines, *march, "-c", "-o", objects[-1], str(root / source)])
    commands.append([compiler.path, *CXX_LINK, "-o", target, *objects])
    return commands


def _isas(source: str, archs: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    if not source.endswith("kernel.cpp"):
        built = [f"-DVA_HAVE_{CXX_ISAS[a]}" for a in archs if a in CXX_ISAS]
        return [("", built)]
    return [(CXX_ISAS[a], [f"-march={a}"]) for a in archs if a in CXX_ISAS] + [("portable", [])]


# ---- the cache ----


def _compile(lib: Library, archs: tuple[str, ...], compiler: Compiler, entry: Path, draft: Built) -> Built:
    started = time.monotonic()
    _remove_leftovers(entry)
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    except OSError as error:
        raise _cannot_write(entry.parent, error) from error
    try:
        for command in _commands(lib, archs, compiler, work):
            _run(command, f"{lib.name} for {', '.join(archs)}")
        if source_digest(lib) != draft.sources:
            raise KernelBuildError(f"the sources of {lib.name} changed while they were compiled; build again")
        target = work / f"lib{lib.name}.so"
        if lib.compiler == "nvcc":
            _check_embedded(target, archs)
        for leftover in work.glob("*.o"):
            leftover.unlink()
        built = Built(**{**asdict(draft), "path": str(entry / target.name), "sha256": _file_digest(target),
                         "seconds": round(time.monotonic() - started, 3)})
        work.chmod(0o755)  # readable to others, as the rest of a cache is
        _write_synced(work / "record.json", json.dumps({**asdict(built), "path": target.name}, indent=1))
        _sync(target)
        if entry.exists():  # damaged: _finished refused it
            shutil.rmtree(entry)
        os.rename(work, entry)
        _sync(entry.parent)
        return built
    except OSError as error:
        raise _cannot_write(entry.parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _finished(entry: Path, key: str | None) -> Built | None:
    """The object of a complete, undamaged entry; None when it must be made (again)."""
    try:
        record = json.loads((entry / "record.json").read_text())
        path = entry / record["path"]
        if (key is not None and record["cache_key"] != key) or _file_digest(path) != record["sha256"]:
            return None
        return Built(**{**record, "path": str(path), "archs": tuple(record["archs"]), "flags": tuple(record["flags"]), "cached": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[None]:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = open(entry.parent / f".{entry.name}.lock", "w")
    except OSError as error:
        raise _cannot_write(entry.parent, error) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(entry: Path) -> None:
    """Temporary directories of killed builds of the same entry; its lock is ours, so nobody is using them."""
    for leftover in entry.parent.glob(f".{entry.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelBuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        if any("No space left on device" in line for line in said):
            raise KernelBuildError(f"disk full while compiling {what}; free space or set VERIFY_ATTN_CACHE and TMPDIR elsewhere")
        raise KernelBuildError(f"{what}: {Path(command[0]).name} failed ({done.returncode}); its last lines:\n" + "\n".join(said[-20:]))


def _check_embedded(path: Path, archs: tuple[str, ...]) -> None:
    """That the object really holds machine code for every architecture asked for."""
    embedded = fatbin.embedded_archs(path)
    missing = [a for a in archs if a not in embedded]
    if missing:
        raise KernelBuildError(f"{path.name} was built but holds no machine code for {', '.join(missing)} "
                               f"(it holds {', '.join(sorted(embedded)) or 'none'}); check the compiler flags")


def _cannot_write(directory: Path, error: OSError) -> KernelBuildError:
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return KernelBuildError(f"cannot write the build cache {directory}: {why}; free space or set VERIFY_ATTN_CACHE to a writable directory")


def _known(name: str) -> Library:
    try:
        return library(name)
    except KeyError:
        raise KernelBuildError(f"there is no library {name!r}; there are {', '.join(lib.name for lib in LIBRARIES)}") from None


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
