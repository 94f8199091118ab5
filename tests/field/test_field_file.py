"""FIELD.md says which test plays what went wrong for others: every test it names exists, every item has a test or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FIELD = TESTS / "FIELD.md"
NAMED = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<test>\w+)`")


def items() -> list[str]:
    """The file's items: a line that begins with a dash, and the lines indented below it."""
    found: list[str] = []
    for line in FIELD.read_text().splitlines():
        if line.startswith("- "):
            found.append(line)
        elif line.startswith("  ") and found:
            found[-1] += " " + line.strip()
    return found


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_there_is_something_in_it() -> None:
    assert len(items()) > 100


@pytest.mark.parametrize("file", sorted({match["file"] for match in NAMED.finditer(FIELD.read_text())}))
def test_the_tests_it_names_exist(file: str) -> None:
    named = {match["test"] for match in NAMED.finditer(FIELD.read_text()) if match["file"] == file}
    assert named <= functions(TESTS / file), sorted(named - functions(TESTS / file))


def test_every_item_has_a_reference_and_a_test_or_a_reason() -> None:
    without = [item for item in items() if not re.match(r"- \*\*[^*]*(?:#\d+|:[^*]+|68322025194)[^*]*\*\*", item)]
    assert not without, without
    silent = [item for item in items() if not NAMED.search(item) and "Not played:" not in item]
    assert not silent, silent
