"""Safe YAML in which every node knows its file and line.

`load` composes a document without constructing objects: no tags, no code, no merge keys; a key given twice is a
mistake. Scalars follow YAML 1.2's core schema, so `no` and `on` stay text, `22:22` is not a number and `1e-3` is.
Readers collect into one `Mistakes`, so that a user sees everything wrong at once, each with file:line.

    mistakes = Mistakes()
    root = load(path, mistakes)              # a Node, an empty mapping where the file could not be read
    ...                                      # phases.playbook.typed.read(Settings, root, mistakes)
    mistakes.raise_if_any("playbook")        # PlaybookError with every line
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phases.base.errors import PlaybookError
from phases.base.reading import NotAFile, open_regular

MAX_BYTES = 1 << 20
MAX_NODES = 100_000


@dataclass(frozen=True)
class Where:
    """A place in a file; prints as file:line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Mistake:
    where: Where
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class Mistakes:
    """Everything wrong with a document, collected while it is read."""

    def __init__(self) -> None:
        self.found: list[Mistake] = []
        self.notes: list[Mistake] = []  # what is read and has no effect any more

    def add(self, at: Node | Where, text: str) -> None:
        mistake = Mistake(at if isinstance(at, Where) else at.where, text)
        if mistake not in self.found:
            self.found.append(mistake)

    def note(self, at: Node, text: str) -> None:
        """Something that is no mistake, and that whoever wrote it should know."""
        self.notes.append(Mistake(at.where, text))

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[Mistake]:
        return iter(sorted(self.found, key=lambda mistake: (mistake.where.file, mistake.where.line)))

    def raise_if_any(self, what: str = "file") -> None:
        """Raise PlaybookError listing every mistake in line order; do nothing when there is none."""
        if not self.found:
            return
        count = "1 mistake" if len(self.found) == 1 else f"{len(self.found)} mistakes"
        lines = "\n".join(f"  {mistake}" for mistake in self)
        rows = tuple((mistake.where.file, mistake.where.line, mistake.text) for mistake in self)
        raise PlaybookError(f"{count} in the {what}:\n{lines}", mistakes=rows)


@dataclass(frozen=True)
class Node:
    """One YAML value and where it stands.

    Attributes:
        kind: `mapping`, `list`, `text`, `number` (int or float), `flag` or `null`.
        value: dict[str, Node] | list[Node] | str | int | float | bool | None, as `kind` says.
        where: file and line of the value.
        path: dotted path from the root, such as `phases.build-parity.gate.rules[0]`; empty for the root.
        keys: for a mapping, the place of each key.
    """

    kind: str
    value: Any
    where: Where
    path: str = ""
    keys: dict[str, Where] = field(default_factory=dict, compare=False)

    def get(self, key: str) -> Node | None:
        """The value of a key of a mapping, or None."""
        return self.value.get(key) if self.kind == "mapping" else None

    def items(self) -> Iterable[tuple[str, Node]]:
        return self.value.items() if self.kind == "mapping" else ()

    def elements(self) -> list[Node]:
        return self.value if self.kind == "list" else []

    def plain(self) -> Any:
        """The value as plain JSON, without places."""
        if self.kind == "mapping":
            return {key: child.plain() for key, child in self.value.items()}
        if self.kind == "list":
            return [child.plain() for child in self.value]
        return self.value

    def without(self, *keys: str) -> Node:
        """The same mapping without some keys, for a reader that takes the rest."""
        kept = {key: child for key, child in self.value.items() if key not in keys}
        return Node(self.kind, kept, self.where, self.path, self.keys)

    def describe(self) -> str:
        """What was found, for messages: `a list`, `the text 'abc'`, `the number 3` ..."""
        plain = {"mapping": "a mapping", "list": "a list", "null": "nothing"}
        if self.kind in plain:
            return plain[self.kind]
        shown = str(self.value).lower() if self.kind == "flag" else repr(self.value)
        return f"the {self.kind} {shown}"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, else ` (known: a, b, c)`: the tail of a message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(known)})" if known else ""


def load(path: Path | str, mistakes: Mistakes) -> Node:
    """Read one YAML document whose top level is a mapping.

    Faults of the file (missing, not UTF-8, syntax, tags, duplicate keys) are added to `mistakes`; the node returned then
    holds what could be read, an empty mapping at worst.
    """
    text, shown = read_text(Path(path), mistakes)
    return load_text(text, shown, mistakes) if text is not None else Node("mapping", {}, Where(shown, 1))


def read_text(path: Path, mistakes: Mistakes) -> tuple[str | None, str]:
    """(text of a UTF-8 file, or None with the mistake added; the name to show it by)."""
    shown = _shown(path)
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except NotAFile as fault:
        mistakes.add(Where(shown, 1), str(fault))
        return None, shown
    except (OSError, ValueError) as fault:  # ValueError: a NUL in its name
        mistakes.add(Where(shown, 1), f"cannot be read: {getattr(fault, 'strerror', None) or fault}")
        return None, shown
    if len(data) > MAX_BYTES:
        mistakes.add(Where(shown, 1), f"is larger than {MAX_BYTES} bytes")
        return None, shown
    try:
        return data.decode("utf-8"), shown
    except UnicodeDecodeError as fault:
        mistakes.add(Where(shown, data[: fault.start].count(b"\n") + 1), "is not UTF-8 text")
        return None, shown


def load_text(text: str, file: str, mistakes: Mistakes) -> Node:
    """`load` for text already in hand; `file` is only the name shown in messages."""
    top = Where(file, 1)
    empty = Node("mapping", {}, top)
    if len(text) > MAX_BYTES:
        mistakes.add(top, f"is larger than {MAX_BYTES} bytes")
        return empty
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        mistakes.add(Where(file, mark.line + 1 if mark else 1), _syntax(fault))
        return empty
    except yaml.YAMLError as fault:
        mistakes.add(top, f"is not valid YAML: {' '.join(str(fault).split())}")
        return empty
    except RecursionError:
        mistakes.add(top, "is nested too deeply")
        return empty
    if root is None:
        mistakes.add(top, "is empty")
        return empty
    node = _Converter(file, mistakes).convert(root, "")
    if node.kind != "mapping":
        mistakes.add(node, f"must be a mapping of names to values, not {node.describe()}")
        return empty
    return node


def _shown(path: Path) -> str:
    """The path as short as it can be: relative to the current directory where it lies below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError, RuntimeError):  # RuntimeError: links that go in a circle
        return str(path)


def _syntax(fault: yaml.MarkedYAMLError) -> str:
    problem = " ".join(str(fault.problem or "cannot be parsed").split())
    if "\\t" in problem:
        problem = "a tab is used for indentation; YAML wants spaces"
    context = f" {' '.join(fault.context.split())}" if fault.context else ""
    return f"is not valid YAML: {problem}{context}"


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's core schema for plain scalars; used for composing only."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


class _Converter:
    """Turns composed nodes into `Node`s, refusing tags, duplicate keys, merge keys, cycles and alias bombs."""

    def __init__(self, file: str, mistakes: Mistakes) -> None:
        self.file, self.mistakes = file, mistakes
        self.open: set[int] = set()  # ids of the collections being converted: an alias into one is a cycle
        self.count = 0

    def convert(self, raw: yaml.Node, path: str) -> Node:
        where = Where(self.file, raw.start_mark.line + 1)
        self.count += 1
        if id(raw) in self.open or self.count > MAX_NODES:
            why = (
                "an alias refers to the value it stands in"
                if id(raw) in self.open
                else "aliases expand to too many values"
            )
            self.mistakes.add(where, why)
            return Node("null", None, where, path)
        if isinstance(raw, yaml.ScalarNode):
            return self._scalar(raw, where, path)
        self.open.add(id(raw))
        try:
            return (
                self._mapping(raw, where, path) if isinstance(raw, yaml.MappingNode) else self._list(raw, where, path)
            )
        finally:
            self.open.discard(id(raw))

    def _mapping(self, raw: yaml.MappingNode, where: Where, path: str) -> Node:
        self._standard(raw, where, "map")
        values: dict[str, Node] = {}
        keys: dict[str, Where] = {}
        for raw_key, raw_value in raw.value:
            at = Where(self.file, raw_key.start_mark.line + 1)
            if not isinstance(raw_key, yaml.ScalarNode):
                self.mistakes.add(at, "a key must be a plain name")
                continue
            key = raw_key.value
            if key == "<<":
                self.mistakes.add(at, "merge keys ('<<') are not supported; write the keys out")
                continue
            if key in keys:
                self.mistakes.add(at, f"key {key!r} is given twice; it already stands at {keys[key]}")
                continue
            keys[key] = at
            values[key] = self.convert(raw_value, f"{path}.{key}" if path else key)
        return Node("mapping", values, where, path, keys)

    def _list(self, raw: yaml.SequenceNode, where: Where, path: str) -> Node:
        self._standard(raw, where, "seq")
        return Node("list", [self.convert(item, f"{path}[{i}]") for i, item in enumerate(raw.value)], where, path)

    def _scalar(self, raw: yaml.ScalarNode, where: Where, path: str) -> Node:
        tag = raw.tag.removeprefix("tag:yaml.org,2002:")
        if tag == "str":
            return Node("text", raw.value, where, path)
        if tag == "null":
            return Node("null", None, where, path)
        if tag == "bool":
            return Node("flag", raw.value.lower() == "true", where, path)
        try:
            if tag == "int":
                return Node("number", _integer(raw.value), where, path)
            if tag == "float":
                return Node("number", float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", raw.value)), where, path)
        except ValueError:
            self.mistakes.add(where, f"{raw.value!r} is not a number")
            return Node("null", None, where, path)
        self._standard(raw, where, "str")
        return Node("text", raw.value, where, path)

    def _standard(self, raw: yaml.Node, where: Where, tag: str) -> None:
        if raw.tag != f"tag:yaml.org,2002:{tag}":
            self.mistakes.add(where, f"tag {raw.tag!r} is not supported; write plain values")


def _integer(text: str) -> int:
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
