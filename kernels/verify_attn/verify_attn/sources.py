"""What is compiled from what: one `Library` per shared object, each for one or more architectures.

Add a kernel here and the build, its cache key, the wheel test and `phase kernel` know it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """A shared object.

    Attributes:
        name: stem of the file, unique.
        compiler: `cxx` (all architectures in one object, picked at run time) or `nvcc` (one object an architecture).
        sources: compiled files, relative to csrc/.
        headers: included files; part of the cache key.
        variants: the `<v>` of the exported `verify_attn_<v>_run`.
        archs: architectures it is written for.
        flags: compiler flags beyond those of build.py.
    """

    name: str
    compiler: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    variants: tuple[str, ...]
    archs: tuple[str, ...]
    flags: tuple[str, ...] = ()


_CUDA = ("verify_attn.h", "cuda/common.cuh", "cuda/host.cuh")

LIBRARIES = (
    Library("cpu", "cxx", ("cpu/kernel.cpp", "cpu/entry.cpp", "cpu/pool.cpp"),
            ("verify_attn.h", "cpu/task.h", "cpu/simd.h", "cpu/pool.h"), ("cpu",), ("x86-64-v3", "x86-64-v4", "aarch64")),
    Library("naive", "nvcc", ("cuda/naive.cu",), _CUDA, ("cuda_naive",),
            ("sm_80", "sm_90", "sm_120")),
    Library("per_head", "nvcc", ("cuda/per_head.cu",), (*_CUDA, "cuda/merge.cuh"), ("per_head",),
            ("sm_80", "sm_90", "sm_120")),
    Library("tensor_core", "nvcc", ("cuda/tensor_core.cu",), (*_CUDA, "cuda/merge.cuh", "cuda/mma.cuh", "cuda/tensor_core.cuh"), ("tensor_core",),
            ("sm_80", "sm_90", "sm_120")),
    Library("hopper", "nvcc", ("cuda/hopper.cu",), (*_CUDA, "cuda/hopper_host.cuh", "cuda/hopper_load.cuh", "cuda/hopper_meet.cuh", "cuda/hopper_merge.cuh",
             "cuda/hopper_ptx.cuh", "cuda/hopper_store.cuh", "cuda/hopper_tile.cuh", "cuda/hopper_work.cuh"),
            ("hopper",), ("sm_90a",)),
    Library("hopper_rows", "nvcc", ("cuda/hopper_rows.cu",), (*_CUDA, "cuda/hopper_host.cuh", "cuda/hopper_meet.cuh", "cuda/hopper_ptx.cuh", "cuda/hopper_rows_load.cuh",
             "cuda/hopper_rows_merge.cuh", "cuda/hopper_rows_ptx.cuh", "cuda/hopper_rows_tile.cuh", "cuda/hopper_rows_work.cuh",
             "cuda/hopper_work.cuh"),
            ("hopper_rows",), ("sm_90a",)),
)


def csrc() -> Path:
    """Directory of the C++ and CUDA sources: inside an installed wheel, or beside the package in a checkout."""
    here = Path(__file__).resolve().parent
    return next((d for d in (here / "csrc", here.parent / "csrc") if (d / "verify_attn.h").is_file()), here / "csrc")


def library(name: str) -> Library:
    """The library of that name; KeyError when there is none."""
    return {lib.name: lib for lib in LIBRARIES}[name]
