"""Results as a Phase 1 run would leave them, made up but consistent."""

import random

from phases.base.results import BenchmarkRecord, BuildRecord, Case, Ceiling, ParityRecord, Results


def times(center, n=15, spread=0.03, seed=0):
    generator = random.Random(seed)
    return tuple(center * (1 + spread * (generator.random() - 0.5)) for _ in range(n))


def case(queries, prefix, heads=64):
    return Case(f"q{queries}/{prefix}/s1", "float32", {"heads": heads, "prefix": prefix})


def results(slow=1.0, seed=0, **changes):
    cases = [case(9, 1024), case(9, 16384), case(65, 65536)]
    benchmark = []
    for number, one in enumerate(cases):
        floor = 1e-4 * 10**number
        common = {
            "device": "cpu",
            "bytes_needed": int(floor * 40e9),
            "flops": int(floor * 200e9),
            "roofline_seconds": floor,
            "parity_after": True,
        }
        benchmark += [
            BenchmarkRecord(one, "naive", "baseline", samples=times(30 * floor, seed=seed + number), **common),
            BenchmarkRecord(
                one,
                "cpu",
                "candidate",
                samples=times(1.7 * floor * slow, seed=seed + 50 + number),
                detail={"settled": number != 1},
                **common,
            ),
            BenchmarkRecord(
                one,
                "cuda_naive",
                "candidate",
                device="cpu",
                refused="its score row of 65536 keys does not fit shared memory",
            ),
        ]
    parity = (
        ParityRecord(
            cases[0],
            "cpu",
            "cpu",
            True,
            error=2e-7,
            tolerance=1e-5,
            max_abs=1e-6,
            rerun_identical=True,
            batch_invariant=True,
        ),
        ParityRecord(
            cases[1],
            "cpu",
            "cpu",
            False,
            error=0.3,
            tolerance=1e-5,
            rerun_identical=None,
            reason="out is off by 0.3 (relative)",
        ),
        ParityRecord(cases[2], "naive", "cpu", False, tolerance=1e-5, refused="too long"),
    )
    build = (
        BuildRecord("cpu", "x86-64-v4", True, sha256="ab" * 32, seconds=3.2),
        BuildRecord("per_head", "sm_999", False, reason="nvcc: unknown\narch"),
    )
    ceilings = (Ceiling("cpu", "gather", 40e9, (39e9, 40e9)), Ceiling("cpu", "flops_float32", 0.4e12, (0.4e12,)))
    made = {
        "phase": "build-parity",
        "kernel": "verify_attn",
        "build": build,
        "parity": parity,
        "benchmark": tuple(benchmark),
        "ceilings": ceilings,
        "facts": {"cpu": "Test CPU", "threads": 2},
    }
    return Results(**{**made, **changes})
