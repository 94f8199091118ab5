"""The CPU kernel against plain torch and against this machine's own ceilings.

    python tests/benchmarks/bench_cpu_kernel.py [--threads N] [--seconds S] [--all]

One row a shape: best of plain torch's two forms, ours, the ratios, and the fraction of the roofline, which is the larger
of needed bytes / read ceiling and FLOPs / multiply-add ceiling, both measured in this run before and after each shape (the
better counts: on a shared machine the worse measures the neighbours). Variants take turns; a number is the median.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from verify_attn import attention, cases, cpu, inputs

SHAPES = [(64, 9, 1024, 1), (64, 9, 4096, 1), (64, 9, 16384, 1), (64, 17, 4096, 1), (64, 65, 1024, 1),
          (8, 9, 1024, 1), (8, 9, 16384, 1), (8, 9, 4096, 4), (8, 65, 4096, 1)]  # fmt: skip


def main() -> None:
    given = _arguments()
    torch.set_num_threads(given.threads)
    print(f"{cpu.isa()} kernel, {given.threads} threads, torch {torch.__version__}, float32; medians in ms")
    print(f"{'heads/q/prefix/streams':24}{'naive':>9}{'torch_gemm':>12}{'cpu':>9}{'x naive':>9}{'x gemm':>8}{'GFLOP/s':>9}{'ceiling':>9}{'GB/s':>7}{'read':>7}{'roofline':>10}")
    for heads, q, prefix, streams in SHAPES if given.all else SHAPES[2:3]:
        print(_row(cases.make(q, prefix, streams, heads=heads, dtype=given.dtype), given))


def _row(case: dict, given: argparse.Namespace) -> str:
    made = [inputs.problem(inputs.inputs(case, seed, "cpu"), inputs.outputs(case, "cpu")) for seed in range(3)]
    ceilings = [_ceilings(given.threads)]
    samples = {"cpu": _samples(made, "cpu", given.seconds)}
    ceilings.append(_ceilings(given.threads))
    for variant in ("torch_gemm", "naive"):
        samples[variant] = _samples(made, variant, given.seconds)
    samples["cpu"] += _samples(made, "cpu", given.seconds)
    ceilings.append(_ceilings(given.threads))
    flops, read = (max(values) for values in zip(*ceilings))
    cost = cases.cost(case)
    time_of = {variant: statistics.median(values) for variant, values in samples.items()}
    mine = time_of["cpu"]
    floor = max(cost["flops"] / flops, cost["bytes"] / read)
    p = case["params"]
    name = f"{p['heads']}/{p['q'][0]}/{p['prefix'][0]}/{len(p['q'])}"
    return (f"{name:24}{time_of['naive'] * 1e3:9.1f}{time_of['torch_gemm'] * 1e3:12.2f}{mine * 1e3:9.2f}{time_of['naive'] / mine:9.1f}"
            f"{time_of['torch_gemm'] / mine:8.1f}{cost['flops'] / mine / 1e9:9.0f}{flops / 1e9:9.0f}{cost['bytes'] / mine / 1e9:7.1f}"
            f"{read / 1e9:7.1f}{floor / mine:10.0%}")


def _samples(made: list, variant: str, seconds: float) -> list[float]:
    """Times of calls on problems in turn, after one that does not count; at least three."""
    attention.run_problem(made[-1], variant)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        p = made[len(taken) % len(made)]
        taken.append(_timed(lambda: attention.run_problem(p, variant)))
    return taken


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _ceilings(threads: int) -> tuple[float, float]:
    return max(cpu.flops_ceiling(threads, 0.2) for _ in range(3)), max(cpu.read_ceiling(threads) for _ in range(3))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="sampling time a variant and shape")
    parser.add_argument("--dtype", choices=sorted(cases.BYTES), default="float32")
    parser.add_argument("--all", action="store_true", help="every shape instead of 64 heads, q9, 16384")
    return parser.parse_args()


if __name__ == "__main__":
    main()
