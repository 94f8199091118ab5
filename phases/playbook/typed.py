"""Frozen dataclasses as the schema of YAML sections: one declaration gives the reader and the JSON Schema.

    @dataclass(frozen=True)
    class LedgerSettings:
        '''Where checkpoints are kept.'''
        branch: str = setting("checkpoints", help="branch holding the checkpoints")
        keep: int = setting(10, at_least=1)
        timeout: float = setting(30.0, help="connect timeout", duration=True)   # 30, "30s", "5m", "2h"

    settings = read(LedgerSettings, node, mistakes)      # always an instance; mistakes tells whether to trust it
    schema = json_schema(LedgerSettings)

Field types: str, int, float, bool, pathlib.Path, an Enum (by value), another dataclass, `T | None`, tuple[T, ...],
dict[str, T], Any (plain JSON) and Node (left to the caller). A field `launch_args` is the YAML key `launch_args`; give
`key="launch-args"` for another spelling. Unknown keys are mistakes with the nearest valid name. A class may define
`check(self, node, mistakes)` for what its types cannot say.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from phases.playbook.located import Mistakes, Node, nearest

T = TypeVar("T")
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_INVALID: Any = object()


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str = "",
    key: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    pattern: str = "",
    duration: bool = False,
    not_empty: bool = False,
    examples: tuple[Any, ...] = (),
    factory: Any = None,
) -> Any:
    """A dataclass field with what the reader checks and the editor shows. Without a default the key is required."""
    metadata = {
        "help": help,
        "key": key,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "choices": choices,
        "pattern": pattern,
        "duration": duration,
        "not_empty": not_empty,
        "examples": examples,
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read(kind: type[T], node: Node, mistakes: Mistakes) -> T:
    """Read a mapping into dataclass `kind`, adding every mistake; invalid fields hold their default or None."""
    hints = typing.get_type_hints(kind)
    fields = {_key(item): item for item in dataclasses.fields(kind) if item.init}
    before = len(mistakes.found)
    if node.kind not in ("mapping", "null"):
        mistakes.add(node, f"{_at(node)}must be a mapping with the keys {', '.join(fields)}, not {node.describe()}")
    for key, _ in node.items():
        if key not in fields:
            mistakes.add(node.keys.get(key, node.where), f"{_at(node)}unknown key {key!r}{nearest(key, fields)}")
    values = {item.name: _field(item, hints[item.name], node, mistakes) for item in fields.values()}
    made = kind(**values)
    check = getattr(made, "check", None)
    if check is not None and len(mistakes.found) == before:
        check(node, mistakes)
    return made


def _field(item: dataclasses.Field[Any], hint: Any, node: Node, mistakes: Mistakes) -> Any:
    child = node.get(_key(item))
    default = item.default if item.default is not dataclasses.MISSING else None
    if item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    if child is None or (child.kind == "null" and not _required(item)):
        if _required(item):
            mistakes.add(node, f"{_at(node)}key {_key(item)!r} is missing{_help(item)}")
        return default
    value = _value(hint, child, mistakes, item.metadata)
    return default if value is _INVALID else value


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _key(item: dataclasses.Field[Any]) -> str:
    return item.metadata.get("key") or item.name


def _help(item: dataclasses.Field[Any]) -> str:
    text = item.metadata.get("help", "")
    return f" ({text})" if text else ""


def _at(node: Node) -> str:
    return f"{node.path}: " if node.path else ""


def _value(hint: Any, node: Node, mistakes: Mistakes, limits: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return node.plain()
    if hint is Node:
        return node
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if node.kind == "null" else _value(inner, node, mistakes, limits)
    if origin is tuple:
        return _sequence(arguments[0], node, mistakes, limits)
    if origin is dict:
        return _mapping(arguments[1], node, mistakes, limits)
    if dataclasses.is_dataclass(hint):
        return read(hint, node, mistakes)  # type: ignore[type-var]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, node, mistakes)
    return _scalar(hint, node, mistakes, limits)


def _sequence(inner: Any, node: Node, mistakes: Mistakes, limits: Any) -> Any:
    if node.kind != "list":
        return _wrong(node, mistakes, "a list")
    if limits.get("not_empty") and not node.elements():
        return _wrong(node, mistakes, "a list with at least one entry")
    values = [_value(inner, item, mistakes, limits) for item in node.elements()]
    return _INVALID if any(value is _INVALID for value in values) else tuple(values)


def _mapping(inner: Any, node: Node, mistakes: Mistakes, limits: Any) -> Any:
    if node.kind != "mapping":
        return _wrong(node, mistakes, "a mapping")
    if limits.get("not_empty") and not node.value:
        return _wrong(node, mistakes, "a mapping with at least one entry")
    values = {key: _value(inner, child, mistakes, limits) for key, child in node.items()}
    return _INVALID if any(value is _INVALID for value in values.values()) else values


def _enum(hint: type[Enum], node: Node, mistakes: Mistakes) -> Any:
    known = [str(member.value) for member in hint]
    for member in hint:
        if node.kind in ("text", "number") and str(member.value) == str(node.value):
            return member
    return _wrong(node, mistakes, f"one of {', '.join(known)}", known)


def _scalar(hint: Any, node: Node, mistakes: Mistakes, limits: Any) -> Any:
    if hint is bool:
        return node.value if node.kind == "flag" else _wrong(node, mistakes, "true or false")
    if hint in (int, float):
        return _number(hint, node, mistakes, limits)
    if hint not in (str, Path):
        raise TypeError(f"the reader does not know the field type {hint!r}")
    if node.kind != "text":
        hint_text = "text (put it in quotes)" if node.kind in ("number", "flag") else "text"
        return _wrong(node, mistakes, hint_text)
    choices = limits.get("choices")
    if choices and node.value not in choices:
        return _wrong(node, mistakes, f"one of {', '.join(choices)}", choices)
    if limits.get("not_empty") and not node.value.strip():
        return _wrong(node, mistakes, "text that is not empty")
    if limits.get("pattern") and not re.fullmatch(limits["pattern"], node.value):
        return _wrong(node, mistakes, f"text of the form {limits['pattern']}")
    if hint is Path and "\0" in node.value:
        return _wrong(node, mistakes, "a path")
    return hint(node.value)


def _number(hint: Any, node: Node, mistakes: Mistakes, limits: Any) -> Any:
    value = node.value
    if limits.get("duration") and node.kind == "text":
        match = _DURATION.match(value)
        if not match:
            return _wrong(node, mistakes, "a duration such as 30, 30s, 5m or 2h")
        value = float(match[1]) * _SECONDS[match[2]]
    elif node.kind != "number":
        return _wrong(node, mistakes, "a whole number" if hint is int else "a number")
    if abs(value) > sys.float_info.max:  # infinite, or a whole number with hundreds of digits
        return _wrong(node, mistakes, "a finite number")
    if hint is int and value != int(value if math.isfinite(value) else 0):
        return _wrong(node, mistakes, "a whole number")
    if not math.isfinite(value):
        return _wrong(node, mistakes, "a finite number")
    low, high, above = limits.get("at_least"), limits.get("at_most"), limits.get("above")
    if low is not None and value < low:
        return _wrong(node, mistakes, f"at least {low:g}")
    if high is not None and value > high:
        return _wrong(node, mistakes, f"at most {high:g}")
    if above is not None and value <= above:
        return _wrong(node, mistakes, f"more than {above:g}")
    return hint(value)


def _wrong(node: Node, mistakes: Mistakes, wanted: str, known: Any = ()) -> Any:
    guess = nearest(str(node.value), known) if known and node.kind == "text" else ""
    hint = guess if "did you mean" in guess else ""
    mistakes.add(node, f"{_at(node)}must be {wanted}, not {node.describe()}{hint}")
    return _INVALID


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a dataclass read by `read`, without `$schema` and `$id`."""
    hints = typing.get_type_hints(kind)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for item in dataclasses.fields(kind):
        if not item.init:
            continue
        schema = _schema(hints[item.name], item.metadata)
        if item.metadata.get("help"):
            schema["description"] = item.metadata["help"]
        if _required(item):
            required.append(_key(item))
        elif isinstance(item.default, (str, int, float, bool)):
            schema["default"] = item.default
        elif isinstance(item.default, Enum):
            schema["default"] = item.default.value
        properties[_key(item)] = schema
    result: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("):
        result["description"] = " ".join(kind.__doc__.split())
    if required:
        result["required"] = required
    return result


def _schema(hint: Any, limits: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint is Node:
        return {}
    if origin in (types.UnionType, typing.Union):
        inner = next(argument for argument in arguments if argument is not type(None))
        return {"anyOf": [_schema(inner, limits), {"type": "null"}]}
    if origin is tuple:
        extra = {"minItems": 1} if limits.get("not_empty") else {}
        return {"type": "array", "items": _schema(arguments[0], limits), **extra}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], limits)}
    if dataclasses.is_dataclass(hint):
        return json_schema(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    return _scalar_schema(hint, limits)


def _scalar_schema(hint: Any, limits: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": {str: "string", Path: "string", bool: "boolean", int: "integer", float: "number"}[hint]
    }
    if limits.get("duration"):
        schema = {"anyOf": [schema, {"type": "string", "pattern": _DURATION.pattern}]}
    for ours, theirs in (("at_least", "minimum"), ("at_most", "maximum"), ("above", "exclusiveMinimum")):
        if limits.get(ours) is not None:
            (schema["anyOf"][0] if "anyOf" in schema else schema)[theirs] = limits[ours]
    if limits.get("choices"):
        schema["enum"] = list(limits["choices"])
    if limits.get("pattern"):
        schema["pattern"] = f"^(?:{limits['pattern']})$"
    if limits.get("examples"):
        schema["examples"] = list(limits["examples"])
    return schema
