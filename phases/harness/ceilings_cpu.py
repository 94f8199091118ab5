"""This CPU's own ceilings: reads, copies, random rows, and arithmetic, with the threads a kernel would use.

Read, gather and FMA come from a small C probe compiled here for this very processor; torch's own copy and matrix products
stand beside them. Without a compiler torch alone gives the numbers, and the progress line says so. A ceiling is the best
over methods of the best sample: what the machine was seen to reach.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from phases.harness.channel import Channel
from phases.harness.facts import last_level_cache

ROW_FLOATS = 576  # a row of an MLA key/value pool in float32: 2304 bytes
_SAMPLES = 7
_FMA_ROUNDS, _FMA_OPERATIONS = 4_000_000, 4_000_000 * 12 * 16 * 2
_PROBE = Path(__file__).with_name("ceilings_probe.c")


def measure(job: dict[str, Any], channel: Channel) -> None:
    """Emit one `ceiling` message per kind: read, copy, gather (bytes/s), flops_* (FLOP/s)."""
    threads = job["threads"] or torch.get_num_threads()
    torch.set_num_threads(threads)
    rows = max(8 * last_level_cache(), 256 << 20) // (4 * ROW_FLOATS)
    base = torch.rand(rows, ROW_FLOATS)
    order = torch.randperm(rows)
    size = base.numel() * 4
    probe = _compile(channel)
    candidates: dict[str, list[tuple[Callable[[], Any], float]]] = {
        "read": [(lambda: base.sum(), size)],
        "copy": [_copy(base)],
        "gather": [_embedding(base, order)],
        "flops_float32": [_matmul(torch.float32, 1536)],
        "flops_bfloat16": [_matmul(torch.bfloat16, 1536)],
        "flops_float16": [_matmul(torch.float32, 1536)],  # CPUs convert float16 and compute in float32
    }
    if probe is not None:
        spread = _Spread(probe, threads)
        candidates["read"].append((lambda: spread.read(base, None), size))
        candidates["gather"].append((lambda: spread.read(base, order), size))
        for kind in ("flops_float32", "flops_bfloat16", "flops_float16"):  # 16-bit types may be converted in registers
            candidates[kind].append((spread.fma, threads * _FMA_OPERATIONS))
    for number, (kind, ways) in enumerate(candidates.items()):
        channel.at(number)
        best = max((_rates(run, amount) for run, amount in ways), key=max)
        channel.send("ceiling", kind=kind, value=max(best), samples=best)


def _rates(run: Callable[[], Any], amount: float) -> list[float]:
    run()
    rates = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        run()
        rates.append(amount / (time.perf_counter() - start))
    return rates


def _copy(base: torch.Tensor) -> tuple[Callable[[], Any], float]:
    target = torch.empty_like(base)
    return lambda: target.copy_(base), 2 * base.numel() * 4  # read once, written once


def _embedding(base: torch.Tensor, order: torch.Tensor) -> tuple[Callable[[], Any], float]:
    offsets = torch.arange(0, order.numel(), 64)
    return lambda: torch.nn.functional.embedding_bag(order, base, offsets, mode="sum"), base.numel() * 4


def _matmul(dtype: torch.dtype, size: int) -> tuple[Callable[[], Any], float]:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return lambda: left @ right, 2.0 * size**3


class _Spread:
    """The C probe on several threads at once; ctypes releases the interpreter lock during a call."""

    def __init__(self, probe: ctypes.CDLL, threads: int) -> None:
        self.probe, self.threads = probe, threads
        self.pool = ThreadPoolExecutor(threads)

    def fma(self) -> None:
        list(self.pool.map(lambda _: self.probe.probe_fma(_FMA_ROUNDS, 1e-7), range(self.threads)))

    def read(self, base: torch.Tensor, order: torch.Tensor | None) -> None:
        """Every row once, in `order` or as they lie, each thread its share."""
        rows, floats = base.shape
        bounds = [rows * part // self.threads for part in range(self.threads + 1)]

        def share(part: int) -> None:
            first, count = bounds[part], bounds[part + 1] - bounds[part]
            if order is None:
                self.probe.probe_read(base.data_ptr() + first * floats * 4, None, count, floats)
            else:
                self.probe.probe_read(base.data_ptr(), order.data_ptr() + first * 8, count, floats)

        list(self.pool.map(share, range(self.threads)))


def _compile(channel: Channel) -> ctypes.CDLL | None:
    """Build and load the probe; None, with a progress line, where that is not possible."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        channel.progress("ceilings: no C compiler found; torch alone measures this CPU")
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/probe.so"
        argv = [compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-o", target, str(_PROBE)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        if done.returncode:
            channel.progress(
                f"ceilings: the C probe does not compile ({done.stderr.strip()[-200:]}); torch alone measures this CPU"
            )
            return None
        probe = ctypes.CDLL(target)
    probe.probe_fma.argtypes, probe.probe_fma.restype = [ctypes.c_int64, ctypes.c_float], ctypes.c_float
    probe.probe_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    probe.probe_read.restype = ctypes.c_float
    return probe
