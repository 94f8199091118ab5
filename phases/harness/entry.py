"""The contract module inside a worker: imported, checked, and called with blame put where it belongs.

Functions of a contract module; a case is the dict {"name", "dtype", "params"}, a device `cpu` or `cuda`:

    inputs(case, seed, device) -> dict        fresh inputs; the same seed gives the same inputs
    outputs(case, device) -> dict             tensors, allocated; what they hold does not matter
    reference(case, inputs) -> dict           float64 tensors, one per output; NaN where a kernel must leave it untouched
    run(variant, case, inputs, outputs)       computes into outputs and returns None
    cost(case) -> dict                        {"bytes": needed bytes, each once, "flops": int, "access": "gather" | "read"}
  optional:
    build(archs, cache, progress) -> list     build records; a kernel without it is plain Python
    parity_cases(device), benchmark_cases(device) -> list    cases, where kernel.yaml does not list them
    refuse(variant, case, device) -> str      why the variant cannot do the case; empty when it can
    companions(case, inputs) -> list          (case, inputs, select): the same rows in other batches; having any claims
                                              that the rows come out bit-identical; select(outputs) picks those rows
    perturbations(case, inputs, seed) -> list (what, inputs): changed inputs that must change the result, such as one
                                              flipped mask bit
    definition(case) -> dict                  the case in flashinfer-bench's words (docs/kernel.md): "definition", "axes",
                                              "inputs", and "main" where run() needs more than those inputs; empty for
                                              a case that has none
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phases.base.errors import KernelContractError
from phases.harness import solutions

REQUIRED = {
    "inputs": ("case", "seed", "device"),
    "outputs": ("case", "device"),
    "reference": ("case", "inputs"),
    "run": ("variant", "case", "inputs", "outputs"),
    "cost": ("case",),
}
OPTIONAL = {
    "build": ("archs", "cache", "progress"),
    "parity_cases": ("device",),
    "benchmark_cases": ("device",),
    "refuse": ("variant", "case", "device"),
    "companions": ("case", "inputs"),
    "perturbations": ("case", "inputs", "seed"),
    "definition": ("case",),
}
ACCESS = ("gather", "read")

Json = dict[str, Any]
Tensors = dict[str, Any]


class Entry:
    """A checked contract module. Every method raises KernelContractError when the module breaks its word."""

    def __init__(self, kernel: Json) -> None:
        self.kernel = kernel
        self.module = _import(kernel)
        self._check()
        folder = Path(kernel["root"]) / solutions.FOLDER
        self.imported = {
            name: solutions.load(name, folder / name, digest) for name, digest in kernel.get("solutions", {}).items()
        }

    def inputs(self, case: Json, seed: int, device: str) -> Tensors:
        made = self._call("inputs", case, seed, device)
        if not isinstance(made, dict) or not made:
            raise self.broken(f"inputs() must return a dict of inputs, not {type(made).__name__}", case)
        return made

    def outputs(self, case: Json, device: str) -> Tensors:
        return self._tensors("outputs", self._call("outputs", case, device), case)

    def reference(self, case: Json, inputs: Tensors) -> Tensors:
        import torch

        made = self._tensors("reference", self._call("reference", case, inputs), case)
        for name, tensor in made.items():
            if tensor.dtype != torch.float64:
                raise self.broken(f"reference()[{name!r}] must be float64, not {tensor.dtype}", case)
        return made

    def run(self, variant: str, case: Json, inputs: Tensors, outputs: Tensors) -> None:
        """The kernel itself: exceptions pass through, they are the variant's own."""
        if variant in self.imported:
            self.imported[variant].run(inputs, outputs)
            return
        if (returned := self.module.run(variant, case, inputs, outputs)) is not None:
            raise RuntimeError(
                f"run() returned {type(returned).__name__} instead of None: outputs must be written when it returns"
            )

    def cost(self, case: Json) -> Json:
        made = self._call("cost", case)
        if (
            not isinstance(made, dict)
            or not {"bytes", "flops"} <= set(made)
            or made.get("access", "read") not in ACCESS
        ):
            raise self.broken(
                f"cost() must return bytes, flops and access (one of {', '.join(ACCESS)}), not {made!r}", case
            )
        return {"access": "read", **made}

    def refuse(self, variant: str, case: Json, device: str) -> str:
        if variant in self.imported:
            return self.imported[variant].refuse(lambda: self.definition(case).get("definition", {}).get("name", ""))
        return str(self._call("refuse", variant, case, device) or "") if self.has("refuse") else ""

    def companions(self, case: Json, inputs: Tensors) -> list[tuple[Json, Tensors, Callable[[Tensors], Tensors]]]:
        return list(self._call("companions", case, inputs) or ()) if self.has("companions") else []

    def perturbations(self, case: Json, inputs: Tensors, seed: int) -> list[tuple[str, Tensors]]:
        return list(self._call("perturbations", case, inputs, seed) or ()) if self.has("perturbations") else []

    def definition(self, case: Json) -> Json:
        """The case in flashinfer-bench's words, {"definition", "axes", "inputs"}; empty when the kernel has none for it."""
        made = self._call("definition", case) if self.has("definition") else {}
        if not isinstance(made, dict) or (made and not {"definition", "axes", "inputs"} <= set(made)):
            raise self.broken(
                f"definition() must return definition, axes and inputs, or nothing, not {str(made)[:200]}", case
            )
        return made

    def cases(self, kind: str, device: str) -> list[Json]:
        """The module's own parity or benchmark cases; empty without such a function."""
        name = f"{kind}_cases"
        made = list(self._call(name, device) or ()) if self.has(name) else []
        for case in made:
            if not isinstance(case, dict) or not {"name", "dtype"} <= set(case) <= {"name", "dtype", "params"}:
                raise self.broken(f"{name}() must return dicts of name, dtype and params, not {case!r}")
        return [{"params": {}, **case} for case in made]

    def build(self, archs: list[str], cache: Any, progress: Callable[[str], None]) -> list[Json]:
        """Build records; exceptions pass through, they are the build's own. A kernel of plain Python has one, of arch `python`."""
        if self.has("build"):
            own = list(self.module.build(archs, cache, progress) or ())
        else:
            own = [{"variant": self.kernel["name"], "arch": "python", "ok": True}]
        return own + [solution.build() for solution in self.imported.values()]

    def tolerance(self, case: Json) -> float:
        known = self.kernel["tolerances"]
        if case["dtype"] not in known:
            raise self.broken(
                f"kernel.yaml has no parity tolerance for dtype {case['dtype']} (it has {', '.join(known)})", case
            )
        return float(known[case["dtype"]])

    def has(self, name: str) -> bool:
        return hasattr(self.module, name)

    def _check(self) -> None:
        problems = [
            f"{name}({', '.join(parameters)}) is missing" for name, parameters in REQUIRED.items() if not self.has(name)
        ]
        for name, parameters in {**REQUIRED, **OPTIONAL}.items():
            if self.has(name):
                problems += filter(None, [_signature_problem(getattr(self.module, name), name, parameters)])
        if problems:
            raise KernelContractError(
                f"contract module {self.kernel['entry']} ({self._file()}): {'; '.join(problems)}.",
                hint="The functions and their parameters stand in phases/harness/entry.py.",
            )

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.module, name)(*arguments)
        except KernelContractError:
            raise
        except (Exception, SystemExit) as fault:
            case = next((a for a in arguments if isinstance(a, dict) and "dtype" in a), None)
            raise self.broken(f"{name}() raised {blame(fault)}", case) from fault

    def _tensors(self, name: str, made: Any, case: Json) -> Tensors:
        import torch

        if (
            not isinstance(made, dict)
            or not made
            or not all(isinstance(value, torch.Tensor) for value in made.values())
        ):
            raise self.broken(f"{name}() must return a dict of tensors", case)
        return made

    def broken(self, text: str, case: Json | None = None) -> KernelContractError:
        at = f" on case {case['name']}/{case['dtype']}" if case else ""
        return KernelContractError(f"{self.kernel['entry']} ({self._file()}){at}: {text}.")

    def _file(self) -> str:
        return getattr(self.module, "__file__", None) or self.kernel["entry"]


def blame(fault: BaseException) -> str:
    """An exception in one line: type, text, and where in the kernel's own code it arose."""
    frames = traceback.extract_tb(fault.__traceback__)
    theirs = [frame for frame in frames if "/phases/harness/" not in frame.filename]
    at = f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text[:600]}{at}"


def _import(kernel: Json) -> Any:
    if kernel["root"] not in sys.path:
        sys.path.insert(0, kernel["root"])
    try:
        return importlib.import_module(kernel["entry"])
    except (Exception, SystemExit) as fault:
        raise KernelContractError(
            f"the contract module {kernel['entry']} named in {kernel['file']} cannot be imported: {blame(fault)}.",
            hint=f"It is looked for in {kernel['root']} and in this Python's packages.",
        ) from fault


def _signature_problem(function: Any, name: str, parameters: tuple[str, ...]) -> str:
    wanted = f"{name}({', '.join(parameters)})"
    if not callable(function):
        return f"{wanted} is not a function"
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        return f"{wanted} is declared as {name}{inspect.signature(function)}"
    except ValueError:  # a builtin without a signature
        pass
    return ""
