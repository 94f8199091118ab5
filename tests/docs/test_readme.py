"""The README stays what a stranger reads to the end; numbers live in docs/results.md."""

from __future__ import annotations

import re

from tests.docs.commands import HERE, phase_lines

LINES, COLUMNS, START = 120, 100, 25


def test_it_is_short_and_its_beginning_is_enough_to_start() -> None:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    start = phase_lines("\n".join(lines[:START]))
    assert ["demo"] in start and ["gate", "review"] in start and ["rollback"] in start


def test_its_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (HERE / "README.md").read_text(encoding="utf-8"))
    assert len(pictures) == 1 and (HERE / pictures[0]).read_bytes().startswith(b"\x89PNG")


def test_every_law_names_tests_that_exist() -> None:
    text = (HERE / "docs/architecture.md").read_text(encoding="utf-8")
    laws = re.findall(r"^\d+\. \*\*(?:.|\n)*?^   Held by (.*)$", text, re.M)
    assert len(laws) == len(re.findall(r"^\d+\. \*\*", text, re.M)) == 11
    for law in laws:
        names = [name for name in re.findall(r"`([^`]+)`", law)]
        assert names and all(list(HERE.rglob(f"tests/**/{name.rpartition('/')[2]}")) for name in names), law
