"""flashinfer-bench's records (its "FlashInfer Trace" schema) as value types, with the rules it checks them by.

Written from its documentation (https://bench.flashinfer.ai/docs, pages Definition, Workload, Solution, Trace) and checked
against the models of flashinfer-bench 0.1.2. What arrives from outside is checked before anything is written or run.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from phases.base.errors import PhaseError

LANGUAGES = ("python", "triton", "cpp", "cuda", "tilelang")
BINDINGS = ("tvm-ffi", "torch")
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
)

_TOLD = 12  # faults of a record in one message

Json = dict[str, Any]


class ExchangeError(PhaseError):
    """A record of flashinfer-bench's is not what its schema asks for, or cannot be made."""

    stage = "flashinfer-bench"


@dataclass(frozen=True)
class Solution:
    """One implementation of a Definition.

    Attributes:
        definition: name of the Definition it implements.
        entry: file and function to call.
        in_place: outputs are handed over as the last arguments; else they are returned.
        binding: how compiled code meets Python (`tvm-ffi` or `torch`); empty for Python and Triton.
        sources: text of every file by relative path, in the order given.
    """

    name: str
    definition: str
    author: str
    language: str
    target_hardware: tuple[str, ...]
    entry: tuple[str, str]
    sources: dict[str, str]
    in_place: bool = True
    binding: str = ""
    dependencies: tuple[str, ...] = ()
    description: str = ""

    @property
    def sha256(self) -> str:
        """Digest of everything that decides what it does: all but name, author and description."""
        told = {k: v for k, v in self.to_json().items() if k not in ("name", "author", "description")}
        return hashlib.sha256(json.dumps(told, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def to_json(self) -> Json:
        spec: Json = {
            "language": self.language,
            "target_hardware": list(self.target_hardware),
            "entry_point": "::".join(self.entry),
            "dependencies": list(self.dependencies),
            "destination_passing_style": self.in_place,
        }
        if self.binding:
            spec["binding"] = self.binding
        sources = [{"path": path, "content": text} for path, text in self.sources.items()]
        made: Json = {
            "name": self.name,
            "definition": self.definition,
            "author": self.author,
            "spec": spec,
            "sources": sources,
        }
        return {**made, "description": self.description} if self.description else made

    @staticmethod
    def from_json(data: Any, where: str) -> Solution:
        """Raises ExchangeError naming `where` and everything that is wrong."""
        faults = _Faults(where)
        if not isinstance(data, dict):
            raise ExchangeError(f"{where}: a Solution is a JSON object.", hint="Give the .json file of one Solution.")
        spec = data.get("spec") if isinstance(data.get("spec"), dict) else {}
        faults.need(bool(spec), "`spec` is missing")
        texts = {key: faults.text(data, key) for key in ("name", "definition", "author")}
        language = faults.one_of(spec, "language", LANGUAGES)
        binding = faults.one_of(spec, "binding", BINDINGS) if spec.get("binding") is not None else ""
        hardware = faults.texts(spec, "target_hardware")
        faults.need(bool(hardware), "`spec.target_hardware` must name at least one")
        entry = faults.text(spec, "entry_point").split("::")
        faults.need(len(entry) == 2 and all(entry), "`spec.entry_point` must read file::function")
        sources = _sources(data.get("sources"), faults)
        faults.need(
            len(entry) != 2 or entry[0] in sources,
            f"`spec.entry_point` names {entry[0]!r}, which is not among the sources",
        )
        in_place = spec.get("destination_passing_style", True)
        faults.need(isinstance(in_place, bool), "`spec.destination_passing_style` must be true or false")
        dependencies = faults.texts(spec, "dependencies")
        description = data.get("description")
        faults.need(description is None or isinstance(description, str), "`description` must be text")
        faults.raise_if_any()
        return Solution(
            **texts,
            language=language,
            target_hardware=hardware,
            entry=(entry[0], entry[1]),
            sources=sources,
            in_place=in_place,
            binding=binding,
            dependencies=dependencies,
            description=description or "",
        )


def check_definition(data: Any, where: str) -> Json:
    """A Definition that keeps the schema's rules, as given.

    Raises:
        ExchangeError: naming `where` and everything that is wrong.
    """
    if not isinstance(data, dict):
        raise ExchangeError(f"{where}: a Definition is a JSON object.")
    faults = _Faults(where)
    for key in ("name", "op_type"):
        faults.text(data, key)
    axes, inputs, outputs = (
        data.get(key) if isinstance(data.get(key), dict) else {} for key in ("axes", "inputs", "outputs")
    )
    for name, axis in axes.items():
        kind = axis.get("type") if isinstance(axis, dict) else None
        good = kind == "var" or (kind == "const" and isinstance(axis.get("value"), int) and axis["value"] >= 0)
        faults.need(good, f"axis {name!r} must be of type var, or const with a value of 0 or more")
    for what, tensors in (("inputs", inputs), ("outputs", outputs)):
        faults.need(bool(tensors), f"`{what}` must name at least one tensor")
        for name, tensor in tensors.items():
            _check_tensor(name, tensor, axes, faults)
    faults.need(
        not set(inputs) & set(outputs),
        f"inputs and outputs share names: {', '.join(sorted(set(inputs) & set(outputs)))}",
    )
    _check_reference(data.get("reference"), faults)
    for constraint in faults.texts(data, "constraints"):
        faults.need(_parses(constraint, "eval"), f"constraint {constraint!r} is no Python expression")
    faults.raise_if_any()
    return data


def shape_of(tensor: Mapping[str, Any], axes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape a tensor has when the axes have these values; None for a scalar."""
    return None if tensor["shape"] is None else tuple(axes[axis] for axis in tensor["shape"])


def axis_values(definition: Mapping[str, Any], variable: Mapping[str, int]) -> dict[str, int]:
    """Every axis with its value: the constants, and the variable ones as given."""
    return {**{name: axis["value"] for name, axis in definition["axes"].items() if axis["type"] == "const"}, **variable}


class _Faults:
    """Everything wrong with one record."""

    def __init__(self, where: str) -> None:
        self.where, self.found = where, list[str]()

    def need(self, good: bool, otherwise: str) -> None:
        if not good:
            self.found.append(otherwise)

    def text(self, data: Mapping[str, Any], key: str) -> str:
        value = data.get(key)
        self.need(
            isinstance(value, str) and value != "" and _encodable(value), f"`{key}` must be a text that is not empty"
        )
        return value if isinstance(value, str) else ""

    def texts(self, data: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = data.get(key) or []
        good = isinstance(value, list) and all(isinstance(item, str) and item and _encodable(item) for item in value)
        self.need(good, f"`{key}` must be a list of texts")
        return tuple(value) if good else ()

    def one_of(self, data: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
        value = data.get(key)
        self.need(value in known, f"`{key}` must be one of {', '.join(known)}, not {value!r}")
        return value if value in known else ""

    def raise_if_any(self) -> None:
        if self.found:
            told = list(dict.fromkeys(self.found))
            more = f"; and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
            raise ExchangeError(
                f"{self.where}: {'; '.join(told[:_TOLD])}{more}.", hint="The schema: https://bench.flashinfer.ai/docs."
            )


def _sources(given: Any, faults: _Faults) -> dict[str, str]:
    found: dict[str, str] = {}
    faults.need(isinstance(given, list) and bool(given), "`sources` must be a list of at least one file")
    for item in given if isinstance(given, list) else ():
        path, text = (item.get("path"), item.get("content")) if isinstance(item, dict) else (None, None)
        if not isinstance(path, str) or not path or not isinstance(text, str) or not text:
            faults.need(False, "each of `sources` must have a `path` and a `content` that are not empty")
            continue
        faults.need(confined(path), f"source path {path!r} must be relative, plain and without `..`")
        faults.need(path not in found, f"source path {path!r} is given twice")
        faults.need(_encodable(text), f"the content of {path!r} is no text that UTF-8 can write")
        found[path] = text
    both = [str(above) for path in found for above in PurePosixPath(path).parents if str(above) in found]
    faults.need(not both, f"source path {both[0] if both else ''!r} is a file and a directory")
    return found


def _encodable(text: str) -> bool:
    """JSON may hold halves of characters ("\\ud800"), which no file can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def confined(path: str) -> bool:
    """Whether it stays below the directory it is written to, on any file system."""
    pure = PurePosixPath(path)
    plain = all(char.isprintable() and char not in '\\:*?"<>|' for char in path)
    plain = (
        plain
        and 0 < len(pure.parts) <= 32
        and all(part == part.strip() and len(part.encode()) <= 200 for part in pure.parts)
    )
    return (
        plain
        and not pure.is_absolute()
        and str(pure) == path
        and not any(part in ("..", "~") or part.startswith(".") for part in pure.parts)
    )


def _check_tensor(name: str, tensor: Any, axes: Mapping[str, Any], faults: _Faults) -> None:
    if not isinstance(tensor, dict) or "shape" not in tensor:
        faults.need(False, f"tensor {name!r} needs `shape` (null for a scalar) and `dtype`")
        return
    faults.need(
        tensor.get("dtype") in DTYPES,
        f"tensor {name!r}: dtype must be one of {', '.join(DTYPES)}, not {tensor.get('dtype')!r}",
    )
    shape = [] if tensor["shape"] is None else tensor["shape"]
    if not isinstance(shape, list) or not all(isinstance(axis, str) for axis in shape):
        faults.need(False, f"tensor {name!r}: `shape` must be a list of axes, or null")
        return
    unknown = [axis for axis in shape if axis not in axes]
    faults.need(not unknown, f"tensor {name!r} has axes that are not defined: {', '.join(map(str, unknown))}")


def _check_reference(code: Any, faults: _Faults) -> None:
    if not isinstance(code, str) or not _parses(code, "exec"):
        faults.need(False, "`reference` must be Python code")
        return
    functions = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    faults.need("run" in functions, "`reference` must define a function `run` at its top level")


def _parses(code: str, mode: str) -> bool:
    try:
        ast.parse(code, mode=mode)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
        return False
    return True
