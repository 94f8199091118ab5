"""Finds the C++ compiler and nvcc, says exactly which they are, and refuses architectures nvcc does not know."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from verify_attn.errors import KernelBuildError

# Architecture-specific targets (no forward compatibility) a plain name must not be mistaken for.
_SM = re.compile(r"^sm_(\d+)([af]?)$")


@dataclass(frozen=True)
class Compiler:
    """One compiler of this machine.

    Attributes:
        kind: `cxx` or `nvcc`.
        path: what is executed.
        version: its first version line, for people.
        identity: digest of everything it says about itself, and of the host compiler for nvcc; part of cache keys.
    """

    kind: str
    path: str
    version: str
    identity: str


def cxx() -> Compiler:
    """The C++ compiler: $CXX, else g++, c++, clang++ on PATH.

    Raises:
        KernelBuildError: when there is none, saying what to install.
    """
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        path = shutil.which(name)
        if path:
            return _described("cxx", path, ("--version",), ("-dumpmachine",))
    if wanted:
        raise KernelBuildError(f"CXX is set to {wanted!r}, which is not an executable on PATH; correct or unset it")
    raise KernelBuildError("no C++ compiler found (g++, c++, clang++); install one, for example `apt-get install g++`, or set CXX")


def nvcc() -> Compiler:
    """nvcc: $NVCC, else nvcc on PATH, in $CUDA_HOME/bin, $CUDA_PATH/bin, /usr/local/cuda/bin or /opt/cuda/bin, in this order.

    Raises:
        KernelBuildError: when there is none or it cannot be run.
    """
    wanted = os.environ.get("NVCC")
    if wanted and not shutil.which(wanted):
        raise KernelBuildError(f"NVCC is {wanted!r}, which is not executable; correct or unset it")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [wanted, "nvcc", home and f"{home}/bin/nvcc", "/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc"]
    for path in filter(None, (shutil.which(c) for c in candidates if c)):
        return _described("nvcc", path, ("--version",))
    raise KernelBuildError("no nvcc found; install the CUDA toolkit (13.0 is tested), or set CUDA_HOME or NVCC")


def check_archs(compiler: Compiler, archs: list[str]) -> None:
    """That this nvcc can build for every architecture, before anything is compiled.

    Raises:
        KernelBuildError: one error naming every architecture it cannot build for, and what it can.
    """
    known = {line.replace("compute_", "sm_") for line in _known_archs(compiler.path, compiler.identity)}
    bad = []
    for arch in archs:
        match = _SM.match(arch)
        if not match:
            raise KernelBuildError(f"{arch!r} is not a GPU architecture; give sm_80, sm_90, sm_90a, sm_120 ...")
        if f"sm_{match[1]}" not in known or (match[2] == "f" and int(match[1]) < 100):
            bad.append(arch)
    if bad:
        listed = ", ".join(sorted(known, key=lambda a: int(a[3:])))
        raise KernelBuildError(f"{compiler.version} at {compiler.path} cannot build for {', '.join(bad)}; it knows {listed}. "
                               "Use a toolkit that knows the architecture, or take it off the list")


def native_cpu_archs() -> tuple[str, ...]:
    """Architectures the CPU kernel is compiled for on this kind of machine."""
    machine = platform.machine()
    return ("x86-64-v3", "x86-64-v4") if machine in ("x86_64", "AMD64") else (machine,)


@functools.lru_cache(maxsize=8)
def _known_archs(path: str, identity: str) -> tuple[str, ...]:
    text = _say(path, "--list-gpu-arch")
    archs = tuple(line.strip() for line in text.splitlines() if line.strip().startswith("compute_"))
    if not archs:
        raise KernelBuildError(f"{path} --list-gpu-arch names no architecture; this does not look like an nvcc of CUDA 11.5 or later")
    return archs


@functools.lru_cache(maxsize=32)
def _describe(kind: str, path: str, stamp: tuple, questions: tuple) -> Compiler:
    answers = [_say(path, *question) for question in questions]
    lines = [line.strip() for line in answers[0].splitlines() if line.strip()]
    version = next((line for line in lines if "release" in line), lines[0] if lines else path)
    if kind == "nvcc":
        if "release" not in version:
            raise KernelBuildError(f"{path} --version does not read like nvcc ({version!r}); set NVCC to the right one")
        answers.append(cxx().identity)  # nvcc's host compiler
    digest = hashlib.sha256("\0".join([kind, str(Path(path).resolve()), *answers]).encode()).hexdigest()
    return Compiler(kind, path, version, digest)


def _described(kind: str, path: str, *questions: tuple[str, ...]) -> Compiler:
    real = os.stat(path)  # asked again when the file is replaced while this process lives
    return _describe(kind, path, (real.st_ino, real.st_size, real.st_mtime_ns), questions)


def _say(path: str, *arguments: str) -> str:
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"cannot run {path} {' '.join(arguments)}: {error}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"{path} {' '.join(arguments)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout
