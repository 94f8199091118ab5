"""The compilers of this machine, and whether they can build for an architecture; asked before anything is built."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phases.base.errors import BuildError
from phases.playbook.known import CPU_ARCHITECTURES
from phases.playbook.located import nearest

_CUDA_ARCH = re.compile(r"^sm_(\d+)([af]?)$")
_CUDA_PLACES = ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc")


@dataclass(frozen=True)
class Compiler:
    """A compiler that answered: its path and the first telling line of `--version`."""

    path: str
    version: str


@dataclass(frozen=True)
class Nvcc(Compiler):
    archs: tuple[str, ...]  # sm_80, sm_90 ... as `nvcc --list-gpu-arch` implies

    def can_build(self, arch: str) -> bool:
        match = _CUDA_ARCH.match(arch)
        return bool(match) and f"sm_{match[1]}" in self.archs


def find_cxx() -> Compiler:
    """The C++ compiler: $CXX, else g++, c++ or clang++. Raises BuildError when there is none that works."""
    wanted = os.environ.get("CXX")
    path = shutil.which(wanted) if wanted else next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if path is None:
        missing = (
            f"the C++ compiler {wanted!r} that CXX names does not exist." if wanted else "there is no C++ compiler."
        )
        raise BuildError(missing, hint="Install one (Debian, Ubuntu: apt-get install g++), or let CXX name one.")
    version = _ask(path, "--version")
    if not version:
        raise BuildError(
            f"{path} --version fails: it is not a working C++ compiler.", hint="Let CXX name one that works."
        )
    return Compiler(path, version.splitlines()[0].strip())


def find_nvcc() -> Nvcc:
    """The CUDA compiler: $NVCC, else nvcc on PATH, in $CUDA_HOME/bin or /usr/local/cuda/bin.

    Raises BuildError when there is none, or it is not NVIDIA's nvcc, or it does not say what it can build for.
    """
    path = _nvcc_path()
    if path is None:
        raise BuildError(
            "there is no nvcc.",
            hint="Install the CUDA toolkit (NVIDIA's, or Debian, Ubuntu: apt-get install nvidia-cuda-toolkit), or let NVCC or CUDA_HOME say where it is.",
        )
    version = _ask(path, "--version")
    release = re.search(r"release (\S+), (V\S+)", version)
    if "nvcc" not in version.lower() or not release:
        raise BuildError(
            f"{path} is not NVIDIA's nvcc: `--version` says {(version.strip() or 'nothing').splitlines()[0]!r}.",
            hint="Let NVCC name the nvcc of a CUDA toolkit.",
        )
    listed = re.findall(r"compute_(\d+)\b", _ask(path, "--list-gpu-arch"))
    if not listed:
        raise BuildError(f"{path} does not list its architectures (--list-gpu-arch).", hint="Use CUDA 11.0 or newer.")
    return Nvcc(
        path, f"nvcc {release[1]} ({release[2]})", tuple(f"sm_{number}" for number in sorted(set(listed), key=int))
    )


def is_cuda(arch: str) -> bool:
    return arch.startswith("sm")


def require(archs: Sequence[str]) -> dict[str, str]:
    """Check that every architecture can be built here; return facts on the compilers used.

    Raises BuildError naming each architecture that cannot be built, and why.
    """
    facts: dict[str, str] = {}
    cuda = [arch for arch in archs if is_cuda(arch)]
    cpu = [arch for arch in archs if not is_cuda(arch) and arch != "python"]
    unknown = [arch for arch in cpu if arch not in CPU_ARCHITECTURES]
    if unknown:
        raise BuildError(
            f"unknown architecture {unknown[0]!r}{nearest(unknown[0], [*CPU_ARCHITECTURES, 'sm_80', 'sm_90', 'sm_120'])}.",
            hint="Mend 'architectures' in the playbook or in kernel.yaml.",
        )
    if cpu:
        cxx = find_cxx()
        facts |= {"cxx": cxx.path, "cxx_version": cxx.version}
    if cuda:
        nvcc = find_nvcc()
        facts |= {"nvcc": nvcc.path, "nvcc_version": nvcc.version}
        cannot = [arch for arch in cuda if not nvcc.can_build(arch)]
        if cannot:
            raise BuildError(
                f"{nvcc.version} at {nvcc.path} does not know {', '.join(cannot)}; it knows {', '.join(nvcc.archs)}.",
                hint="Use a newer (or, for old GPUs, older) CUDA toolkit through NVCC, or take the architecture out.",
            )
    return facts


def environment() -> dict[str, str]:
    """CXX and NVCC for a kernel's build, so that what builds is what was asked and recorded; without those that are not here."""
    found = {}
    for variable, find in (("CXX", find_cxx), ("NVCC", find_nvcc)):
        with contextlib.suppress(BuildError):
            found[variable] = find().path
    return found


def buildable(archs: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(those of `archs` that can be built here, {the others: why not})."""
    can: list[str] = []
    cannot: dict[str, str] = {}
    for arch in archs:
        try:
            require([arch])
            can.append(arch)
        except BuildError as fault:
            cannot[arch] = fault.message
    return can, cannot


def _nvcc_path() -> str | None:
    wanted = os.environ.get("NVCC")
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise BuildError(f"the nvcc {wanted!r} that NVCC names does not exist.", hint="Mend or unset NVCC.")
        return found
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = ["nvcc", *([str(Path(home) / "bin" / "nvcc")] if home else []), *_CUDA_PLACES]
    return next(filter(None, map(shutil.which, candidates)), None)


def _ask(path: str, argument: str) -> str:
    """What a tool prints for one argument; empty when it fails or hangs."""
    try:
        done = subprocess.run(
            [path, argument], capture_output=True, text=True, check=False, timeout=30, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
