"""What the worker holds on to before any kernel code runs: clocks, synchronisation and the functions that judge.

A kernel shares the worker's process and can replace anything in it. The worker therefore keeps its own references, uses
only those, and looks after every call whether the originals still stand in their places. What this cannot see, the
toolkit's own clock in the other process does (see `phases.harness.benchmark`).
"""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import torch

perf_counter = time.perf_counter
sleep = time.sleep

_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time", "sleep")
_TORCH = ("isnan", "isfinite", "equal", "empty", "allclose", "mm", "as_strided")
_TENSOR = ("clone", "copy_", "double", "to", "view", "fill_", "item", "tolist", "sum", "__getitem__")
_CUDA = ("synchronize", "Event", "Stream", "CUDAGraph", "current_stream", "graph", "stream")
_EVENT = ("record", "elapsed_time", "synchronize", "query")
_GRAPH = ("replay", "capture_begin", "capture_end")
_OWN = (
    "phases.harness.guards",
    "phases.harness.buffers",
    "phases.harness.compare",
    "phases.harness.entry",
    "phases.harness.channel",
    "phases.harness.parity_worker",
    "phases.harness.benchmark_worker",
    "phases.harness.timers",
    "phases.harness.input_sets",
)


class Tampering(Exception):
    """A kernel replaced something of the worker's."""


class Originals:
    """References taken now; `check` tells later whether they still stand."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any, str]] = []
        self._keep("time", time, _CLOCKS)
        self._keep("torch", torch, _TORCH)
        self._keep("torch.Tensor", torch.Tensor, _TENSOR)
        self._keep("torch.cuda", torch.cuda, _CUDA)
        self._keep("torch.cuda.Event", torch.cuda.Event, _EVENT)
        self._keep("torch.cuda.CUDAGraph", torch.cuda.CUDAGraph, _GRAPH)
        for name in _OWN:
            if module := sys.modules.get(name):
                self._keep_own(name, module)

    def check(self) -> None:
        """Raise Tampering naming what was replaced, after putting it back."""
        changed = [
            (owner, name, value, label)
            for owner, name, value, label in self._kept
            if getattr(owner, name, None) is not value
        ]
        for owner, name, value, _ in changed:
            setattr(owner, name, value)
        if changed:
            raise Tampering(f"the kernel replaced {', '.join(label for *_, label in changed)}")

    def _keep(self, label: str, owner: Any, names: tuple[str, ...]) -> None:
        self._kept += [(owner, name, getattr(owner, name), f"{label}.{name}") for name in names if hasattr(owner, name)]

    def _keep_own(self, label: str, module: Any) -> None:
        """Everything a module of the worker's own calls by name (functions, classes, modules), and the methods of its classes."""
        for name, value in list(vars(module).items()):
            if name.startswith("__") or not (callable(value) or isinstance(value, types.ModuleType)):
                continue
            self._kept.append((module, name, value, f"{label}.{name}"))
            if isinstance(value, type) and value.__module__ == label:
                methods = [key for key, item in vars(value).items() if callable(item)]
                self._kept += [(value, key, getattr(value, key), f"{label}.{name}.{key}") for key in methods]
