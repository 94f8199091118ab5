"""This GPU's own ceilings: copies, reads, random 1152-byte rows, matrix products, each timed by events around several runs.

Reads and gathers move several times the L2. Where triton cannot be used, torch's reduction and embedding_bag stand in and
a progress line says so: their numbers are lower, which makes every share of the ceiling look better than it is. A ceiling
is the best median over ways of doing it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from phases.harness.channel import Channel
from phases.harness.input_sets import free_memory

_SAMPLES = 10
_BYTES = 4 << 30
_ROW = 576
_SPIN_CYCLES = 400_000

Way = tuple[Callable[[], Any], float]  # what to run, and the bytes or operations of one run


def measure(job: dict[str, Any], channel: Channel) -> None:
    """Emit one `ceiling` message per kind: copy, read, gather (bytes/s), flops_* (FLOP/s)."""
    device = job["device"]
    size = min(_BYTES, free_memory(device) // 8)
    makers: dict[str, Callable[[], list[Way]]] = {
        "copy": lambda: _copies(device, size),
        "read": lambda: _reads(device, size, channel),
        "gather": lambda: _gathers(device, size, channel),
        "flops_bfloat16": lambda: _matmuls(device, torch.bfloat16),
        "flops_float16": lambda: _matmuls(device, torch.float16),
        "flops_float32": lambda: _matmuls(device, torch.float32),
    }
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 here
    for number, (kind, make) in enumerate(makers.items()):
        channel.at(number)
        best = max((_rates(run, amount) for run, amount in make()), key=statistics.median)
        channel.send("ceiling", kind=kind, value=statistics.median(best), samples=best)
        torch.cuda.empty_cache()


def _rates(run: Callable[[], Any], amount: float) -> list[float]:
    """Amount per second of each sample; a sample is several runs between two events, behind a short spin."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    repeats, rates = 1, []
    for number in range(_SAMPLES + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SPIN_CYCLES)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        seconds = start.elapsed_time(end) * 1e-3 / repeats
        if number == 0:
            repeats = max(1, min(50, int(5e-3 / seconds)))  # the first sample only tells how long one run takes
        else:
            rates.append(amount / seconds)
    return rates


def _copies(device: str, size: int) -> list[Way]:
    source = _random(device, size // 4)
    target = torch.empty_like(source)
    return [(lambda: target.copy_(source), 2 * source.numel() * 2)]


def _reads(device: str, size: int, channel: Channel) -> list[Way]:
    try:
        from phases.harness.ceilings_triton import read_once
    except ImportError as fault:
        channel.progress(f"ceilings: no triton ({fault}); torch's reduction stands in for pure reads")
        source = _random(device, size // 2)
        return [(lambda: source.sum(), source.numel() * 2)]
    ways = []
    for per_sm, warps in ((8, 8), (16, 4), (4, 16)):
        programs = per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        source = _random(device, size // 2 // (programs * 8192) * (programs * 8192))
        sink = torch.empty(programs, device=device)
        ways.append((_bind(read_once, source, sink, warps), source.numel() * 2))
    return ways


def _gathers(device: str, size: int, channel: Channel) -> list[Way]:
    rows = size // (2 * _ROW) // 4
    source = _random(device, rows * _ROW).view(rows, _ROW)
    try:
        from phases.harness.ceilings_triton import gather_once
    except ImportError as fault:
        channel.progress(f"ceilings: no triton ({fault}); torch's embedding_bag stands in for gathers")
        order, offsets = torch.randperm(rows, device=device), torch.arange(0, rows, 64, device=device)
        return [(lambda: torch.nn.functional.embedding_bag(order, source, offsets, mode="sum"), rows * _ROW * 2)]
    ways = []
    for per_sm, warps in ((8, 4), (16, 4), (8, 8), (4, 8)):
        programs = per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        count = rows // (programs * 16) * (programs * 16)
        order = torch.randperm(rows, device=device)[:count]
        sink = torch.empty(programs, device=device)
        ways.append((_bind(gather_once, source, order, sink, warps), count * _ROW * 2))
    return ways


def _matmuls(device: str, dtype: torch.dtype) -> list[Way]:
    size = 4096 if dtype == torch.float32 else 8192
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return [(lambda: torch.mm(left, right, out=out), 2.0 * size**3)]


def _random(device: str, elements: int) -> torch.Tensor:
    """Random bfloat16 values: zeros would draw less power and can run faster than real data."""
    return torch.randn(elements, device=device, dtype=torch.bfloat16)


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
