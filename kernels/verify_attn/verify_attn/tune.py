"""Measures which CUDA variant, with how many KV splits, is fastest at which shape of this GPU, and records the table that
dispatch.py reads. `phase kernel tune` calls `tune`; `python -m verify_attn.tune` does too.

Only what gave the right numbers against float64 at that very shape is timed. Times are medians of CUDA-graph replays over
sets of KV rows that rotate through several times the L2, all contestants taking turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from verify_attn import cases, cuda, dispatch, inputs, reference
from verify_attn.errors import InputError, RefusedError, VerifyAttnError
from verify_attn.problem import Problem
from verify_attn.timing import graph_of, time_graphs

SPLITS = (1, 2, 4, 8, 16, 32, 64)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-3, "float16": 1e-3}
_COLD_BYTES = 200 << 20  # over three times the largest L2 there is a variant for
_MOST_BYTES = 6 << 30    # KV rows of one shape
_NEAR = 1.5              # variants within this of the best have their splits tuned


@dataclass(frozen=True)
class Shape:
    heads: int
    q: int
    streams: int
    prefix: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.q}/{self.streams}/{self.prefix}"


def shapes(heads: Iterable[int] = (8, 16, 64, 128), qs: Iterable[int] = (9, 17, 33, 65), streams: Iterable[int] = (1, 4, 16, 64),
           prefixes: Iterable[int] = (1024, 4096, 16384, 65536)) -> tuple[Shape, ...]:
    """The grid of shapes, without those whose KV rows would take over 3 GB or that would run for many milliseconds."""
    made = (Shape(h, q, s, n) for h in heads for q in qs for s in streams for n in prefixes)
    return tuple(m for m in made if m.streams * m.prefix <= 2_600_000 and m.heads * m.q * m.streams * m.prefix <= 2.5e9)


def tune(dtype: str = "bfloat16", grid: Sequence[Shape] | None = None, variants: Sequence[str] | None = None,
         progress: Callable[[str], None] = lambda line: None) -> tuple[dispatch.Row, ...]:
    """The winner of every shape on the current GPU.

    Args:
        dtype: float32, bfloat16 or float16.
        grid: shapes; default `shapes()`.
        variants: names of `cuda.variants()`; default all.
        progress: called with a line a shape.

    Raises:
        InputError: no CUDA device, or an unknown dtype or variant.
        VerifyAttnError: a variant gave wrong numbers; a dispatch table must not hide that.
    """
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; run the tuning on the GPU that is to be tuned")
    if dtype not in TOLERANCE:
        raise InputError(f"dtype {dtype!r}; give one of {', '.join(TOLERANCE)}")
    names = list(variants or cuda.variants())
    unknown = [name for name in names if name not in cuda.variants()]
    if unknown:
        raise InputError(f"no CUDA variant {unknown[0]!r}; there are {', '.join(cuda.variants())}")
    rows = []
    for shape in shapes() if grid is None else grid:
        row = _winner(shape, dtype, names)
        if row is None:
            progress(f"{shape} {dtype}: no variant can do it")
            continue
        rows.append(row)
        progress(f"{shape} {dtype}: {row.variant}, splits {row.splits or 'its own'}, {row.microseconds:.1f} us")
        torch.cuda.empty_cache()
    return tuple(rows)


def _winner(shape: Shape, dtype: str, names: list[str]) -> dispatch.Row | None:
    sets = _cold_sets(shape, dtype)
    names = [name for name in names if not cuda.refuse(name, sets[0])]
    if not names:
        return None
    expected = reference.attend(sets[0])
    times = _time(sets, [(name, 0) for name in names], expected, dtype)
    best = min(times.values())
    near = [name for name in names if times[name, 0] <= _NEAR * best]
    keys = shape.prefix + shape.q
    times |= _time(sets, [(name, n) for name in near for n in SPLITS if n * 64 <= keys], expected, dtype)
    variant, splits = min(times, key=times.__getitem__)
    if times[variant, 0] <= times[variant, splits] * 1.02:
        splits = 0  # the variant's own choice is as good: it adapts to shapes that were not measured
    return dispatch.Row(torch.cuda.get_device_name(), dtype, shape.heads, shape.q, shape.streams, shape.prefix, variant, splits,
                        round(times[variant, splits], 2))


def _cold_sets(shape: Shape, dtype: str) -> list[Problem]:
    case = cases.make(shape.q, shape.prefix, shape.streams, heads=shape.heads, dtype=dtype)
    each = shape.streams * (shape.prefix + shape.q) * 576 * cases.BYTES[dtype]
    count = max(2, min(100, -(-_COLD_BYTES // each), _MOST_BYTES // each))
    made = (inputs.inputs(case, seed, "cuda") for seed in range(count))
    return [inputs.problem(m, inputs.outputs(case, "cuda")) for m in made]


def _time(sets: list[Problem], contestants: list[tuple[str, int]], expected: tuple, dtype: str) -> dict[tuple[str, int], float]:
    """Median microseconds of each (variant, splits) that can do it and does it right."""
    graphs, kept = {}, []
    for name, splits in contestants:
        try:
            workspace = cuda.make_workspace(sets[0], name, num_splits=splits)
            _check(sets[0], name, splits, workspace, expected, dtype)
        except (RefusedError, torch.cuda.OutOfMemoryError):
            continue
        kept.append(workspace)  # the graph goes on using its address
        graphs[name, splits] = graph_of([_call(p, name, splits, workspace) for p in sets])
    samples = time_graphs({f"{n} {s}": g for (n, s), g in graphs.items()}, len(sets), rounds=7)
    return {key: statistics.median(samples[f"{key[0]} {key[1]}"]) for key in graphs}


def _call(p: Problem, name: str, splits: int, workspace: torch.Tensor) -> Callable[[], object]:
    return lambda: cuda.run(p, name, num_splits=splits, workspace=workspace)


def _check(p: Problem, name: str, splits: int, workspace: torch.Tensor, expected: tuple, dtype: str) -> None:
    p.out.fill_(float("nan"))
    cuda.run(p, name, num_splits=splits, workspace=workspace)
    error = float((p.out.double() - expected[0]).norm() / expected[0].norm())
    if not error <= TOLERANCE[dtype]:
        raise VerifyAttnError(f"{name} with {splits} splits is wrong at {p.heads} heads, {p.max_q} queries, {p.streams} streams, "
                              f"prefix {p.max_prefix}: error {error:.2e}; no table is written")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verify_attn.tune", description="Tune the dispatch table on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help=f"table to write; use it by setting {dispatch.TABLE} to its path")
    parser.add_argument("--dtype", action="append", help="repeatable; default bfloat16")
    parser.add_argument("--heads", type=int, action="append", help="repeatable; default 8, 16, 64, 128")
    options = parser.parse_args(argv)
    grid = shapes(options.heads) if options.heads else shapes()
    try:
        rows = tuple(row for dtype in options.dtype or ["bfloat16"] for row in tune(dtype, grid, progress=print))
    except VerifyAttnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dispatch.write(options.out, rows)
    print(f"{len(rows)} rows in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
