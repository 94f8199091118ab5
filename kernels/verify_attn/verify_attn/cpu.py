"""Loads the compiled CPU kernel: from a release bundle, else from the build cache, compiling it on first use."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from verify_attn import build, toolchain
from verify_attn.abi import Variant, open_library, params_of
from verify_attn.errors import KernelBuildError
from verify_attn.problem import Problem


@functools.lru_cache(maxsize=1)
def built() -> build.Built:
    """The object in use: from the directory $VERIFY_ATTN_OBJECTS (as a release bundle has one) when set, else built here.

    Raises:
        KernelBuildError: it cannot be built, or the directory has none made from these sources.
    """
    archs = toolchain.native_cpu_archs()
    bundle = os.environ.get("VERIFY_ATTN_OBJECTS")
    if not bundle:
        return build.build("cpu", archs)
    found = build.prebuilt("cpu", archs[0], Path(bundle))
    if not found:
        raise KernelBuildError(f"VERIFY_ATTN_OBJECTS={bundle} has no object of cpu for {archs[0]} made from these sources; "
                               "put it there, or unset VERIFY_ATTN_OBJECTS to compile it")
    return found


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = open_library(Path(built().path))
    library.verify_attn_cpu_isa.restype, library.verify_attn_cpu_isa.argtypes = ctypes.c_char_p, []
    library.verify_attn_cpu_flops.restype = ctypes.c_double
    library.verify_attn_cpu_flops.argtypes = [ctypes.c_int, ctypes.c_double]
    library.verify_attn_cpu_read.restype = ctypes.c_double
    library.verify_attn_cpu_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    library.verify_attn_cpu_exp2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    library.verify_attn_cpu_exp2.restype = None
    return library


@functools.lru_cache(maxsize=1)
def _variant() -> Variant:
    return Variant(_library(), "cpu")


def run(p: Problem, *, num_splits: int = 0, threads: int = 0) -> None:
    """Fills p.out and p.lse.

    Args:
        num_splits: KV splits; 0 chooses by threads and length.
        threads: 0 = torch.get_num_threads().

    Raises:
        RefusedError, KernelRunError, KernelBuildError.
    """
    _variant().run(params_of(p, num_splits=num_splits, threads=threads or torch.get_num_threads()))


def isa() -> str:
    """Instruction set in use: v4 (AVX-512), v3 (AVX2) or portable."""
    return _library().verify_attn_cpu_isa().decode()


def flops_ceiling(threads: int = 0, seconds: float = 0.3) -> float:
    """FLOP/s (float32) of multiply-adds that touch only registers: what the arithmetic of this machine can do."""
    return _library().verify_attn_cpu_flops(threads or torch.get_num_threads(), seconds)


def read_ceiling(threads: int = 0, megabytes: int = 256) -> float:
    """Bytes/s of reading memory once, in order, from a buffer larger than the caches."""
    data = torch.ones(megabytes * 262144)
    return _library().verify_attn_cpu_read(threads or torch.get_num_threads(), data.data_ptr(), data.numel() * 4)


def exp2(x: Tensor) -> Tensor:
    """The kernel's own 2^x of a float32 tensor with x <= 0; for tests of its error."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _library().verify_attn_cpu_exp2(x.data_ptr(), y.data_ptr(), x.numel())
    return y
