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
from verify_attn.errors import InputError, RefusedError
from verify_attn.problem import Problem
from verify_attn.sources import LIBRARIES, Library

OBJECTS = "VERIFY_ATTN_OBJECTS"
ALIGNMENT = 16  # bytes, of a workspace and of the rows of tensors

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
    return _refusal(name, problem)


def choose(problem: Problem) -> tuple[str, int]:
    """Variant and KV splits (0 = the variant's own) for a problem, by the dispatch table of its device.

    In batch-invariant mode the choice looks at nothing that depends on the batch, so that a row keeps its kernel: where that one cannot do
    the batch, none is chosen.

    Raises:
        RefusedError: with every variant's reason, when none can do it.
    """
    if problem.chunk:
        return _choose_invariant(problem), 0
    row = dispatch.nearest(torch.cuda.get_device_name(problem.q.device), problem)
    candidates = ([(row.variant, row.splits)] if row else []) + [(name, 0) for name in variants()]
    reasons = {}
    for name, splits in candidates:
        reasons[name] = refuse(name, problem) if name in variants() else "not built"
        if not reasons[name]:
            return name, splits
    raise RefusedError("no CUDA variant can do this: " + "; ".join(f"{k}: {v}" for k, v in reasons.items()))


def _choose_invariant(problem: Problem) -> str:
    """The first variant that can do one query after an empty prefix, which is what all batches of a model have in common."""
    reasons = {}
    for name in variants():
        reasons[name] = _refusal(name, problem, streams=1, tokens=1, max_q=1, max_prefix=0)
        if not reasons[name]:
            if reason := _refusal(name, problem):
                raise RefusedError(f"{name}: {reason}. In batch-invariant mode auto takes no other variant, whose bits would differ: heed that, or "
                                   "name one variant for all batches")
            return name
    raise RefusedError("no CUDA variant can do this: " + "; ".join(f"{k}: {v}" for k, v in reasons.items()))


def _refusal(name: str, problem: Problem, **changed: int) -> str:
    """As `refuse`, with some numbers of the C parameters changed."""
    with torch.cuda.device(problem.q.device):
        try:
            params = abi.params_of(problem)
            for field, value in changed.items():
                setattr(params, field, value)
            return load(name, problem.q.device).refuse(params)
        except RefusedError as reason:
            return str(reason)


def workspace_bytes(problem: Problem, variant: str = "auto", *, num_splits: int = 0) -> int:
    """Bytes of workspace for any call with these host-known fields (tokens, streams, heads, max_q, max_prefix, chunk).

    `auto`: for what it chooses. A workspace for several shapes or variants in turn needs the largest of their sizes.

    Raises:
        RefusedError: as `choose` and `load`.
    """
    if variant == "auto":
        variant, tuned = choose(problem)
        num_splits = num_splits or tuned
    with torch.cuda.device(problem.q.device):
        return load(variant, problem.q.device).workspace_bytes(abi.params_of(problem, num_splits=num_splits))


def make_workspace(problem: Problem, variant: str = "auto", *, num_splits: int = 0) -> Tensor:
    """A zeroed workspace. It serves call after call on one stream, whatever their variants and shapes, as long as it is large enough: every
    variant leaves zeroed what any needs zeroed."""
    size = workspace_bytes(problem, variant, num_splits=num_splits)
    return torch.zeros(max(size, 1), dtype=torch.uint8, device=problem.q.device)


def check_workspace(workspace: Tensor, device: torch.device, need: int) -> None:
    """That a kernel may use it.

    Raises:
        InputError: wrong device, not contiguous, not aligned, or too small.
    """
    if workspace.device != device:
        raise InputError(f"workspace is on {workspace.device} but q on {device}; make it with cuda.make_workspace")
    if not workspace.is_contiguous():
        raise InputError("workspace is not contiguous; make it with cuda.make_workspace")
    if workspace.data_ptr() % ALIGNMENT:
        raise InputError(f"workspace does not start at a multiple of {ALIGNMENT} bytes; give a tensor of its own or such a slice")
    if workspace.nbytes < need:
        raise InputError(f"workspace has {workspace.nbytes} bytes, this call needs {need} (cuda.workspace_bytes); give zeros of that size")


def run(problem: Problem, variant: str = "auto", *, num_splits: int = 0, workspace: Tensor | None = None) -> str:
    """Enqueues the problem on torch's current stream; returns the variant that ran.

    Args:
        variant: a name of `variants()`, or `auto` for the dispatch table's choice.
        num_splits: KV splits; 0 = the table's or the variant's choice.
        workspace: from `make_workspace` or zeros of at least `workspace_bytes`; made here when missing.

    Raises:
        InputError: the workspace cannot be used.
        RefusedError: with the variant's reason.
        KernelRunError: the launch failed.
    """
    plan = Plan(problem, variant, num_splits=num_splits, workspace=workspace)
    plan()
    return plan.variant


class Plan:
    """A problem's launch made ready once. `plan()` enqueues it again at little cost on the host, `plan(q=..., out=...)` with other tensors.

    Nothing is chosen, allocated or looked up then, so a plan may be called under graph capture. What the host knows of the problem stays: streams,
    max_q, max_prefix, scale, chunk, kind of mask.

    Args:
        problem, variant, num_splits, workspace: as `run` takes them. The plan keeps the tensors alive.

    Raises:
        as `run`.
    """

    def __init__(self, problem: Problem, variant: str = "auto", *, num_splits: int = 0, workspace: Tensor | None = None) -> None:
        if variant == "auto":
            variant, tuned = choose(problem)
            num_splits = num_splits or tuned
        device = problem.q.device
        self.variant, self.num_splits, self.workspace = variant, num_splits, workspace
        with torch.cuda.device(device):
            self._device, self._kernel = torch.cuda.current_device(), load(variant, device)
            self._params = abi.params_of(problem, num_splits=num_splits)
            if reason := self._kernel.refuse(self._params):
                raise RefusedError(f"{variant}: {reason}")
            need = self._kernel.workspace_bytes(self._params)
            if workspace is None:
                self.workspace = torch.zeros(max(need, 1), dtype=torch.uint8, device=device)
            check_workspace(self.workspace, problem.q.device, need)
        self._params.workspace, self._params.workspace_bytes = self.workspace.data_ptr(), self.workspace.nbytes
        self._tensors = {name: tensor for name in abi.TENSORS if (tensor := getattr(problem, name)) is not None}
        self._forms: dict[str, tuple] = {}  # of those that a call has replaced

    def __call__(self, **tensors: Tensor) -> None:
        """Enqueues on torch's current stream of the problem's device.

        Args:
            tensors: of the problem's, by its names, to be taken from now on. Shape, strides, dtype and device are as planned, and so is the alignment
                to 16 bytes; kv_indices and a flat mask may have any length. Their values are the caller's promise, as always on a GPU.

        Raises:
            InputError: a tensor is none of the planned problem's, or not of its form.
            KernelRunError: the launch failed.
        """
        params = self._params
        for name, tensor in tensors.items():
            address, planned = tensor.data_ptr(), self._forms.get(name) or self._planned(name)
            if _form(name, tensor) != planned or address % ALIGNMENT and name in _ALIGNED:
                raise InputError(f"{name} is {_form(name, tensor)} at {address % ALIGNMENT} bytes past a multiple of {ALIGNMENT}; planned was "
                                 f"{planned}: make another plan")
            setattr(params, name, address)
            self._tensors[name] = tensor
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self._enqueue(params)
        else:
            self._enqueue(params)

    def _enqueue(self, params: abi.Params) -> None:
        params.stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch(params)

    def _planned(self, name: str) -> tuple:
        if name not in self._tensors:
            raise InputError(f"{name} is no tensor of the planned problem, which has {', '.join(self._tensors)}")
        self._forms[name] = _form(name, self._tensors[name])
        return self._forms[name]


_ALIGNED = frozenset(("q", "kv_pool", "draft_kv", "out"))
_ANY_LENGTH = frozenset(("kv_indices", "mask"))  # where they have one dimension


def _form(name: str, tensor: Tensor) -> tuple:
    """What a call's tensor must have in common with the plan's: shape, strides, dtype, device."""
    flat = name in _ANY_LENGTH and tensor.dim() == 1
    return (() if flat else tensor.shape), tensor.stride(), tensor.dtype, tensor.device
