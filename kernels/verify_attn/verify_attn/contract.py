"""verify_attn's side of the kernel contract (kernel.yaml names this module as `entry`)."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from verify_attn import attention, build as builder, cases, exchange, inputs as made_inputs, reference as exact
from verify_attn.cases import Json
from verify_attn.errors import KernelBuildError
from verify_attn.sources import LIBRARIES, Library

NAIVE_FLOPS = 21e9  # more than this takes the torch loop many seconds a call on a CPU
_PLAIN = ("naive", "torch_gemm")
_workspaces: dict[tuple, Tensor] = {}


def build(archs: list[str], cache: Path, progress: Callable[[str], None]) -> list[Json]:
    """Builds every library for those of `archs` it is written for; one record a variant and architecture."""
    if not archs:
        raise KernelBuildError("no architecture given; kernel.yaml's `architectures` names those of the fleet")
    unknown = [a for a in archs if not any(a in lib.archs for lib in LIBRARIES)]
    if unknown:
        known = sorted({a for lib in LIBRARIES for a in lib.archs})
        raise KernelBuildError(f"verify_attn has no kernel for {', '.join(unknown)}; it has kernels for {', '.join(known)}")
    records = []
    for lib in LIBRARIES:
        wanted = tuple(a for a in archs if a in lib.archs)
        for group in [wanted] if lib.compiler == "cxx" else [(a,) for a in wanted]:
            if group:
                records += _built(lib, group, cache, progress)
    return records


def _built(lib: Library, archs: tuple[str, ...], cache: Path, progress: Callable[[str], None]) -> list[Json]:
    base = {"ok": False, "reason": ""}
    native = platform.machine() in ("x86_64", "AMD64")
    if lib.compiler == "cxx" and any(a.startswith("x86") != native for a in archs):
        base["reason"] = f"this machine is {platform.machine()}; objects for {', '.join(archs)} are built on one of their kind"
        return [{**base, "variant": v, "arch": a} for v in lib.variants for a in archs]
    try:
        b = builder.build(lib.name, archs, Path(cache), progress)
        base = {"ok": True, "artifact": str(Path(b.path).relative_to(cache)), "sha256": b.sha256, "cache_key": b.cache_key,
                "compiler": b.compiler, "flags": b.flags, "seconds": b.seconds, "cached": b.cached}
    except KernelBuildError as error:
        base["reason"] = str(error)
    return [{**base, "variant": v, "arch": a} for v in lib.variants for a in archs]


def parity_cases(device: str) -> list[Json]:
    return cases.parity(device)


def benchmark_cases(device: str) -> list[Json]:
    return cases.benchmark(device)


def inputs(case: Json, seed: int, device: str) -> Json:
    return made_inputs.inputs(case, seed, device)


def outputs(case: Json, device: str) -> dict[str, Tensor]:
    return made_inputs.outputs(case, device)


def reference(case: Json, inputs: Json) -> dict[str, Tensor]:
    """float64 results; NaN in the padding rows, which must stay untouched."""
    out, lse = exact.attend(made_inputs.problem(inputs, outputs(case, inputs["q"].device.type)))
    live = sum(case["params"]["q"])
    out[live:], lse[live:] = float("nan"), float("nan")
    return {"out": out, "lse": lse}


def run(variant: str, case: Json, inputs: Json, outputs: dict[str, Tensor]) -> None:
    """Runs a variant through the package's own entry; value checks are part of what a CPU call costs."""
    p = made_inputs.problem(inputs, outputs)
    attention.run_problem(p, variant, workspace=_workspace(variant, case, p))


def _workspace(variant: str, case: Json, p: object) -> Tensor | None:
    """CUDA: one zeroed workspace a variant and case, kept, since captured graphs go on using its address."""
    if p.q.device.type != "cuda" or variant in _PLAIN:
        return None
    from verify_attn import cuda

    key = (variant, case["name"], case["dtype"], p.heads, str(p.q.device))
    if key not in _workspaces:
        _workspaces[key] = cuda.make_workspace(p, variant)
    return _workspaces[key]


def refuse(variant: str, case: Json, device: str) -> str:
    """The variant's reason for not doing the case, or an empty string."""
    p = cases.full(case)
    if variant in _PLAIN and p["chunk"]:
        return "plain torch has no batch-invariant mode"
    if device.startswith("cuda"):
        return _refuse_cuda(variant, case, device)
    if variant == "naive" and cases.cost(case)["flops"] > NAIVE_FLOPS:
        return "a torch loop over queries and heads takes many seconds a call here; compare with torch_gemm"
    return ""


def _refuse_cuda(variant: str, case: Json, device: str) -> str:
    if variant in _PLAIN:
        scores = sum(case["params"]["q"]) * case["params"]["heads"] * max(case["params"]["prefix"]) * 4
        return "its score matrix would take over 16 GB" if scores > 16e9 else ""
    from verify_attn import cuda

    return cuda.refuse(variant, made_inputs.shape_only(case, device))


def cost(case: Json) -> Json:
    return cases.cost(case)


def definition(case: Json) -> Json:
    """The case in flashinfer-bench's words, or nothing."""
    return exchange.definition(case)


def perturbations(case: Json, inputs: Json, seed: int) -> list[tuple[str, Json]]:
    return made_inputs.perturbations(case, inputs, seed)


def companions(case: Json, inputs: Json) -> list[tuple[Json, Json, Callable]]:
    """The same rows in the reverse order, and among copies of themselves; only the batch-invariant mode promises anything."""
    p = cases.full(case)
    if not p["chunk"] or p["mask"] != "bits" or p["padding"]:
        return []
    streams = list(range(len(p["q"])))
    made = []
    for order in (streams[::-1], streams[:1] * 2 + streams + streams[-1:]):
        other_case, other_inputs = made_inputs.rearranged(case, inputs, order)
        made.append((other_case, other_inputs, _selector(p["q"], order)))
    return made


def _selector(q: list[int], order: list[int]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Picks the rows of the original batch, in its order, out of the outputs of a batch of streams `order`."""
    starts = [0]
    for b in order:
        starts.append(starts[-1] + q[b])
    last = {b: starts[n] for n, b in enumerate(order)}  # the last occurrence of each stream
    rows = torch.cat([torch.arange(last[b], last[b] + n) for b, n in enumerate(q)])
    return lambda outputs: {name: tensor[rows.to(tensor.device)] for name, tensor in outputs.items()}
