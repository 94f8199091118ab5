"""The CUDA variants: which compiled object serves which GPU, what each refuses, workspace, launch, dispatch.

An object is taken from the directory VERIFY_ATTN_OBJECTS (a build cache, as a release bundle carries it) when that is
set, else from this machine's build cache, compiling it on first use. Launching allocates nothing and never waits for the
device when the caller brings out, lse, workspace, max_q and max_prefix: it can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from verify_attn import abi, build, dispatch
from verify_attn.errors import RefusedError
from verify_attn.problem import Problem
from verify_attn.sources import LIBRARIES, Library

OBJECTS = "VERIFY_ATTN_OBJECTS"

# variant -> (library, exported symbol), best first: the order in which `auto` tries what no table knows
ORDER = ("hopper", "hopper_rows", "tensor_core", "per_head", "cuda_naive")


def variants() -> dict[str, Library]:
    """Variant name -> the library that exports it, for every CUDA library, in the order of preference."""
    known = {v: library for library in LIBRARIES if library.compiler == "nvcc" for v in library.variants}
    return {name: known[name] for name in sorted(known, key=lambda v: ORDER.index(v) if v in ORDER else len(ORDER))}


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Does machine code for `arch` run on a GPU of that compute capability? (sm_90a: exactly 9.0; sm_80: 8.0 and up to 8.9)"""
    digits = arch.removeprefix("sm_")
    exact, digits = digits[-1] in "af", digits.rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    return capability == (major, minor) if exact else capability[0] == major and capability[1] >= minor


def arch_for(library: Library, device: torch.device) -> str:
    """The architecture of `library` that the device runs, or "" when it has none for it."""
    capability = torch.cuda.get_device_capability(device)
    return next((arch for arch in library.archs if runs_on(arch, capability)), "")


@functools.cache
def _load(name: str, arch: str) -> abi.Variant:
    library = variants()[name]
    return abi.Variant(abi.open_library(_object(library, arch)), name)


def _object(library: Library, arch: str) -> Path:
    given = os.environ.get(OBJECTS)
    if not given:
        return Path(build.build(library.name, (arch,)).path)
    found = build.prebuilt(library.name, arch, Path(given))
    if not found:
        raise RefusedError(f"{OBJECTS}={given} has no object of {library.name} for {arch} made from these sources; "
                           f"put it there, or unset {OBJECTS} to compile it")
    return Path(found.path)


def load(name: str, device: torch.device) -> abi.Variant:
    """The loaded variant for a device.

    Raises:
        RefusedError: no such variant, none of its architectures runs on the device, or the release bundle has no object.
        KernelBuildError: it cannot be compiled or loaded.
    """
    if name not in variants():
        raise RefusedError(f"no CUDA variant {name!r}; there are {', '.join(variants())}")
    arch = arch_for(variants()[name], device)
    if not arch:
        major, minor = torch.cuda.get_device_capability(device)
        raise RefusedError(f"{name} is written for {', '.join(variants()[name].archs)}; {torch.cuda.get_device_name(device)} "
                           f"is sm_{major}{minor}")
    return _load(name, arch)


def refuse(name: str, problem: Problem) -> str:
    """The variant's reason for not doing the problem on its device, or an empty string."""
    with torch.cuda.device(problem.q.device):
        try:
            return load(name, problem.q.device).refuse(abi.params_of(problem))
        except RefusedError as reason:
            return str(reason)


def choose(problem: Problem) -> tuple[str, int]:
    """Variant and KV splits (0 = the variant's own) for a problem, by the dispatch table of its device.

    In batch-invariant mode the choice looks at nothing that depends on the batch, so that a row keeps its kernel.

    Raises:
        RefusedError: with every variant's reason, when none can do it.
    """
    device = problem.q.device
    row = None if problem.chunk else dispatch.nearest(torch.cuda.get_device_name(device), problem)
    candidates = ([(row.variant, row.splits)] if row else []) + [(name, 0) for name in variants()]
    reasons = {}
    for name, splits in candidates:
        reasons[name] = refuse(name, problem) if name in variants() else "not built"
        if not reasons[name]:
            return name, splits
    raise RefusedError("no CUDA variant can do this: " + "; ".join(f"{k}: {v}" for k, v in reasons.items()))


def workspace_bytes(problem: Problem, variant: str, *, num_splits: int = 0) -> int:
    """Bytes of workspace for any call with these host-known fields (tokens, streams, heads, max_q, max_prefix, chunk)."""
    with torch.cuda.device(problem.q.device):
        return load(variant, problem.q.device).workspace_bytes(abi.params_of(problem, num_splits=num_splits))


def make_workspace(problem: Problem, variant: str, *, num_splits: int = 0) -> Tensor:
    """A zeroed workspace; variants leave zeroed what they need zeroed, so it serves call after call on one stream."""
    size = workspace_bytes(problem, variant, num_splits=num_splits)
    return torch.zeros(max(size, 1), dtype=torch.uint8, device=problem.q.device)


def run(problem: Problem, variant: str = "auto", *, num_splits: int = 0, workspace: Tensor | None = None) -> str:
    """Enqueues the problem on torch's current stream; returns the variant that ran.

    Args:
        variant: a name of `variants()`, or `auto` for the dispatch table's choice.
        num_splits: KV splits; 0 = the table's or the variant's choice.
        workspace: from `make_workspace` or zeros of at least `workspace_bytes`; made here when missing.

    Raises:
        RefusedError: with the variant's reason.
        KernelRunError: the launch failed.
    """
    if variant == "auto":
        variant, tuned = choose(problem)
        num_splits = num_splits or tuned
    if workspace is None:
        workspace = make_workspace(problem, variant, num_splits=num_splits)
    device = problem.q.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        load(variant, device).run(abi.params_of(problem, num_splits=num_splits, stream=stream), workspace)
    return variant
