"""Dataclasses as schema: reading with every mistake, and the JSON Schema that says the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from phases.playbook.located import Mistakes, Node, load_text
from phases.playbook.typed import json_schema, read, setting


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@dataclass(frozen=True)
class Inner:
    size: int = setting(at_least=1, at_most=9)


@dataclass(frozen=True)
class Outer:
    """A thing."""

    name: str = setting(pattern="[a-z]+", help="its name")
    count: int = 3
    share: float = setting(0.5, above=0, at_most=1)
    wait: float = setting(10.0, duration=True)
    on: bool = False
    colour: Colour = Colour.RED
    kind: str = setting("a", choices=("alpha", "beta", "a"))
    where: Path = Path(".")
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    named: dict[str, float] = setting(factory=dict)
    free: Any = None
    raw: Node | None = None
    launch: str = setting("", key="launch-args")

    def check(self, node, mistakes):
        if self.count == 13:
            mistakes.add(node, "count: 13 brings bad luck")


def parse(text):
    mistakes = Mistakes()
    value = read(Outer, load_text(text, "f", mistakes), mistakes)
    return value, [str(mistake) for mistake in mistakes]


def test_a_whole_value():
    value, mistakes = parse(
        "name: abc\ncount: 4\nshare: 1\nwait: 5m\non: true\ncolour: green\nkind: beta\nwhere: /x\ninner: {size: 2}\n"
        "many: [{size: 1}, {size: 9}]\nnamed: {a: 1, b: 2.5}\nfree: [1, {x: y}]\nraw: {k: v}\nlaunch-args: --tp 8\n"
    )
    assert mistakes == []
    assert (value.count, value.share, value.wait, value.on, value.colour, value.kind) == (
        4,
        1.0,
        300.0,
        True,
        Colour.GREEN,
        "beta",
    )
    assert (value.where, value.inner, value.many) == (Path("/x"), Inner(2), (Inner(1), Inner(9)))
    assert (value.named, value.free, value.raw.get("k").value, value.launch) == (
        {"a": 1.0, "b": 2.5},
        [1, {"x": "y"}],
        "v",
        "--tp 8",
    )
    assert isinstance(value.share, float) and isinstance(value.named["a"], float)


def test_defaults():
    value, mistakes = parse("name: abc\ninner: ~\ncount:\n")
    assert mistakes == [] and (value.count, value.inner, value.named) == (3, None, {})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("name: Abc", "text of the form"),
        ("name: 3", "must be text (put it in quotes), not the number 3"),
        ("count: 1.5", "a whole number"),
        ("count: many", "a whole number, not the text 'many'"),
        ("count: true", "a whole number, not the flag true"),
        ("share: 0", "more than 0"),
        ("share: 1.1", "at most 1"),
        ("share: .nan", "a finite number"),
        ("wait: soon", "a duration such as"),
        ("on: yes", "true or false, not the text 'yes'"),
        ("colour: gren", "one of red, green, not the text 'gren' (did you mean 'green'?)"),
        ("kind: betta", "(did you mean 'beta'?)"),
        ("inner: 3", "must be a mapping with the keys size"),
        ("inner: {}", "key 'size' is missing"),
        ("inner: {size: 10}", "inner.size: must be at most 9"),
        ("many: {size: 1}", "a list"),
        ("many: [{size: 1}, {siz: 2}]", "many[1]: unknown key 'siz' (did you mean 'size'?)"),
        ("named: {a: x}", "named.a: must be a number"),
        ("launch_args: x", "unknown key 'launch_args' (did you mean 'launch-args'?)"),
        ("count: 13", "bad luck"),
    ],
)
def test_each_mistake_is_named_and_the_schema_agrees(line, words):
    text = line if line.startswith("name") else f"name: abc\n{line}"
    _, mistakes = parse(text)
    assert any(words in mistake for mistake in mistakes), mistakes
    line_number = (
        1 if words == "bad luck" else text.count("\n") + 1
    )  # a check of the whole stands where the whole begins
    assert all(mistake.startswith(f"f:{line_number}: ") for mistake in mistakes)
    plain = load_text(text, "f", Mistakes()).plain()
    if words not in ("bad luck", "a finite number"):
        assert not jsonschema.Draft202012Validator(json_schema(Outer)).is_valid(plain)


def test_the_schema_accepts_what_the_reader_accepts():
    plain = {
        "name": "abc",
        "wait": "5m",
        "colour": "green",
        "inner": None,
        "many": [{"size": 1}],
        "free": [1],
        "launch-args": "x",
    }
    schema = json_schema(Outer)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plain, schema)
    assert schema["properties"]["name"]["description"] == "its name" and schema["required"] == ["name"]
