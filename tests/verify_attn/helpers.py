"""Problems for the kernel tests: a case's inputs, run and compared."""

from __future__ import annotations

from typing import Any

import torch

from verify_attn import KernelBuildError, attention, cases, inputs, reference, toolchain
from verify_attn.problem import Problem

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}


def has_nvcc() -> bool:
    try:
        toolchain.nvcc()
        return True
    except KernelBuildError:
        return False


def problem(q: Any, prefix: Any, streams: int = 1, *, seed: int = 1, **params: Any) -> Problem:
    """The checked problem of a case, its outputs poisoned."""
    case = cases.make(q, prefix, streams, **{"heads": 4, "dtype": "float32", **params})
    return of_case(case, seed)


def of_case(case: dict, seed: int = 1) -> Problem:
    out = inputs.outputs(case, "cpu")
    for tensor in out.values():
        tensor.fill_(float("nan"))
    return inputs.problem(inputs.inputs(case, seed, "cpu"), out)


def run(p: Problem, variant: str = "cpu", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of out and lse after a run on poisoned outputs."""
    p.out.fill_(float("nan"))
    p.lse.fill_(float("nan"))
    if variant == "cpu":
        options.setdefault("threads", 2)
    attention.run_problem(p, variant, **options)
    return p.out.clone(), p.lse.clone()


def error(p: Problem, rows: int | None = None) -> float:
    """Worst relative Frobenius error of out and lse over the first `rows` rows against float64; NaN anywhere gives inf."""
    out, lse = reference.attend(p)
    worst = 0.0
    for got, want in ((p.out[:rows].double(), out[:rows]), (p.lse[:rows].double(), lse[:rows])):
        if not torch.equal(got.isneginf(), want.isneginf()):
            return float("inf")
        finite = want.isfinite()
        got, want = got[finite], want[finite]
        norm = float(torch.linalg.vector_norm(want))
        e = float(torch.linalg.vector_norm(got - want)) / (norm or 1.0)
        worst = max(worst, e if e == e else float("inf"))
    return worst
