"""Imported Solutions of flashinfer-bench as variants, inside a worker: checked against their digest, built, called.

`phase kernel import` puts a Solution's files below `solutions/<variant>/` of the kernel's distribution and its digest into
kernel.yaml. Nothing of it is run before every file has proved to be what was imported. It is code of others all the same,
and runs with the rights of whoever runs the worker, as the kernel's own code does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from phases.base.errors import KernelContractError
from phases.base.reading import open_regular
from phases.harness.exchange import ExchangeError, Solution, confined

SCHEMA = "phasegate/solution/v1"
FOLDER = "solutions"  # below the root of the kernel's distribution
RECORD, SOURCES = "solution.json", "src"
COMPILED = ("cpp", "cuda")
_CPP, _CUDA = (".cpp", ".cc", ".cxx", ".c"), (".cu",)

Json = dict[str, Any]


@dataclass(frozen=True)
class Imported:
    """One imported Solution.

    Attributes:
        directory: holds the record and the sources.
        inputs, outputs: names of tensors and scalars in the order the Solution takes them.
        definition: name of the only Definition it is good for; empty: the whole kernel is that Definition.
    """

    variant: str
    directory: Path
    solution: Solution
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    definition: str = ""

    def refuse(self, definition_of: Callable[[], str]) -> str:
        """Why it does not do a case; `definition_of` names the case's Definition, or is empty."""
        case = definition_of() if self.definition else ""
        return (
            "" if case == self.definition else f"imported for {self.definition}; this case is {case or 'no Definition'}"
        )

    def run(self, inputs: Json, outputs: Json) -> None:
        """Call it: outputs are written in place, or what it returns is copied into them."""
        made = [outputs[name] for name in self.outputs]
        given = [inputs[name] for name in self.inputs]
        function = self._function
        with self._modules:
            returned = function(*given, *made) if self.solution.in_place else function(*given)
        if self.solution.in_place:
            return
        if isinstance(returned, dict):
            returned = [returned[name] for name in self.outputs]
        returned = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if len(returned) != len(made):
            raise RuntimeError(f"it returned {len(returned)} outputs, {len(made)} were expected")
        for target, value in zip(made, returned, strict=True):
            if target.shape != value.shape:
                raise RuntimeError(f"it returned shape {tuple(value.shape)}, {tuple(target.shape)} was expected")
            target.copy_(value)

    def build(self) -> Json:
        """A build record: what it was made of, and why it could not be made."""
        record: Json = {
            "variant": self.variant,
            "arch": self.solution.language,
            "ok": True,
            "cache_key": self.solution.sha256,
            "sha256": self.solution.sha256,
            "compiler": self.solution.binding,
        }
        try:
            _ = self._function
        except Exception as fault:  # noqa: BLE001  # whatever the code of others raises while it is made
            return {**record, "ok": False, "reason": f"{type(fault).__name__}: {' '.join(str(fault).split())[-1500:]}"}
        return record

    @cached_property
    def _function(self) -> Callable[..., Any]:
        file, symbol = self.solution.entry
        module = self._compiled() if self.solution.language in COMPILED else self._python(file)
        function = getattr(module, symbol, None)
        if not callable(function):
            raise RuntimeError(f"{file} has no function {symbol}")
        return function  # type: ignore[no-any-return]

    @cached_property
    def _modules(self) -> OwnModules:
        return OwnModules(absolute_names(self.solution.sources))

    def _python(self, file: str) -> Any:
        """The entry file as a module of a package of its own, so that its relative imports work and no name collides."""
        package = types.ModuleType(f"phasegate_solution_{self.solution.sha256[:16]}")
        package.__path__ = [str(self.directory / SOURCES)]
        sys.modules[package.__name__] = package
        path = list(sys.path)
        try:
            with self._modules:
                return importlib.import_module(".".join([package.__name__, *PurePosixPath(file).with_suffix("").parts]))
        finally:
            sys.path[:] = path  # what it put there served its own modules, which stay loaded

    def _compiled(self) -> Any:
        name, where = f"solution_{self.solution.sha256[:16]}", _cache() / self.solution.sha256[:32]
        where.mkdir(parents=True, exist_ok=True)
        files = {
            kind: [str(self.directory / SOURCES / path) for path in self.solution.sources if path.endswith(kind)]
            for kind in (_CPP, _CUDA)
        }
        include = [str(self.directory / SOURCES)]
        if self.solution.binding == "torch":
            from torch.utils import cpp_extension

            return cpp_extension.load(
                name,
                [*files[_CPP], *files[_CUDA]],
                extra_include_paths=include,
                build_directory=str(where),
                with_cuda=self.solution.language == "cuda",
            )
        try:
            import tvm_ffi
            import tvm_ffi.cpp
        except ImportError:
            raise RuntimeError("its binding is tvm-ffi: `pip install apache-tvm-ffi` into this Python") from None
        built = tvm_ffi.cpp.build(
            name=name,
            cpp_files=files[_CPP],
            cuda_files=files[_CUDA],
            extra_include_paths=include,
            build_directory=str(where),
        )
        return tvm_ffi.load_module(built)


class OwnModules:
    """Modules of certain names as one Solution has them, put in place while its code runs.

    An exported kernel brings a package of the kernel's own name; without this it would find the one that is loaded already, and
    what was proved and timed would not be what was imported. Costs nothing where there are no such names.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self._mine: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        self._count = -1

    def __enter__(self) -> None:
        if self.names:
            self._others = self._swap(self._others, self._mine)

    def __exit__(self, *_: object) -> None:
        if self.names:
            self._mine = self._swap(self._mine, self._others)

    def _swap(self, known: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
        """Take out the modules of our names, put in `wanted`. They are looked for anew only when modules came or went since."""
        expected = self._count + len(known)
        names = (
            list(known)
            if len(sys.modules) == expected
            else [name for name in sys.modules if name.partition(".")[0] in self.names]
        )
        taken = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        self._count = len(sys.modules)  # of all other names
        sys.modules.update(wanted)
        return taken


def absolute_names(sources: dict[str, str]) -> frozenset[str]:
    """Top-level names among the sources that some of them import absolutely."""
    own = {PurePosixPath(path).with_suffix("").parts[0] for path in sources if path.endswith(".py")}
    found: set[str] = set()
    for path, text in sources.items():
        for node in ast.walk(_parsed(text)) if path.endswith(".py") else ():
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return frozenset(own & found)


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # told when it is imported
        return ast.Module([], [])


def load(variant: str, directory: Path, sha256: str) -> Imported:
    """The Solution imported as `variant`.

    Raises:
        KernelContractError: its files are gone, or are not those that were imported.
    """
    hint = "Import it again (`phase kernel import`), so that its digest is recorded anew."
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r}")
        whole = dict(record["solution"])
        whole["sources"] = [
            {"path": item["path"], "content": _text(directory / SOURCES, item["path"], item["sha256"])}
            for item in whole["sources"]
        ]
        solution = Solution.from_json(whole, str(directory / RECORD))
    except (OSError, ValueError, KeyError, TypeError, ExchangeError) as fault:
        raise KernelContractError(
            f"variant {variant}: the imported Solution in {directory} cannot be read: {fault}.", hint=hint
        ) from None
    if solution.sha256 != sha256:
        raise KernelContractError(
            f"variant {variant}: {directory} holds Solution {solution.sha256[:16]}, kernel.yaml names {sha256[:16]}.",
            hint=hint,
        )
    return Imported(
        variant, directory, solution, tuple(record["inputs"]), tuple(record["outputs"]), record["definition"]
    )


def record_of(solution: Solution, inputs: Sequence[str], outputs: Sequence[str], definition: str) -> Json:
    """What is kept beside the sources: the Solution with digests in place of texts, and how it is called."""
    told = solution.to_json()
    told["sources"] = [
        {"path": path, "sha256": hashlib.sha256(text.encode()).hexdigest()} for path, text in solution.sources.items()
    ]
    return {
        "schema": SCHEMA,
        "solution": told,
        "inputs": list(inputs),
        "outputs": list(outputs),
        "definition": definition,
    }


def _text(directory: Path, path: str, sha256: str) -> str:
    if not confined(path):
        raise ValueError(f"{path!r} is no path below {directory}")
    with open_regular(directory / path) as file:  # a pipe or a device in its place would never end
        data = file.read()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{path} was changed after the import")
    return data.decode()


def _cache() -> Path:
    """Objects of imported Solutions; one directory a torch and Python, whose extensions do not mix."""
    import torch

    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        base
        / "phasegate"
        / "solutions"
        / f"torch{torch.__version__}-py{sys.version_info.major}.{sys.version_info.minor}"
    )
