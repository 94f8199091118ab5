"""Tables on terminals of any width: every cell stays whole; and output where a terminal's encoding lacks a character."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from phases.cli.terminal_table import TerminalTable

COLUMNS = ("verdict", "case", "estimate", "interval", "source")
ROWS = [
    ("INCONCLUSIVE", "q9/16384/s1/h8/bfloat16", "1.0312", "1.016 … 1.288e+04", "benchmark: q9/16384/s1 of 2 cases"),
    ("PASS", "q9/16384/s1/h8/float16", "2", "", "parity"),
]


def _shown(width, columns=COLUMNS, rows=ROWS):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(TerminalTable(columns, rows, {"PASS": "green"}))
    return out.getvalue()


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20])
def test_no_cell_is_cut_at_any_width(width):
    lines = _shown(width).splitlines()
    assert max(map(len, lines)) <= width
    together = "".join("".join(lines).split())
    for cell in ("INCONCLUSIVE", "1.0312"):
        assert cell in together
    assert together.count("…") == 1  # the interval's own
    letters = sorted("".join("".join(row) for row in ROWS).replace(" ", ""))
    shown = list(together)
    for letter in letters:
        shown.remove(letter)  # ValueError: something was cut


def test_a_wide_terminal_has_a_line_a_row_and_a_narrow_one_names_each_value():
    assert [line.split()[0] for line in _shown(200).splitlines()] == ["verdict", "INCONCLUSIVE", "PASS"]
    narrow = [line.split() for line in _shown(40).splitlines()]
    assert ["verdict", "INCONCLUSIVE"] in narrow and ["estimate", "1.0312"] in narrow and ["verdict", "PASS"] in narrow
    assert sum(line[:1] == ["interval"] for line in narrow) == 1  # the empty one has no line


def test_only_the_widest_columns_words_are_broken_before_rows_go_below_each_other():
    lines = _shown(70, ("name", "digest", "n"), [("a", "f" * 64, "12"), ("b", "e" * 64, "3")]).splitlines()
    assert len(lines) == 5 and lines[0].split() == ["name", "digest", "n"] and lines[1].rstrip().endswith("12")


def test_two_long_columns_share_the_room():
    lines = _shown(
        60, ("check", "found", "cure"), [("nvcc", "word " * 12, ""), ("repository", "none", "word " * 12)]
    ).splitlines()
    found, cure = lines[0].index("found"), lines[0].index("cure")
    assert abs((cure - found) - (60 - cure)) <= 4


def test_lines_fold_between_words_on_a_terminal_and_nowhere_else(monkeypatch):
    from phases.cli.common import flowed

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    text = "  Waiting for a person who reads it: `phase gate review -p a.yaml`, then goes on."
    assert flowed(text, io.StringIO()) == text
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert flowed(text, terminal).splitlines() == [
        "  Waiting for a person who reads it:",
        "    `phase gate review -p a.yaml`, then",
        "    goes on.",
    ]
    assert flowed("x" * 60, terminal) == "x" * 60  # never broken: it may be an address or a digest to copy


def test_an_empty_table_is_its_head():
    assert _shown(80, ("a", "b"), []).split() == ["a", "b"]


def test_another_encoding_than_utf8_is_no_error():
    code = "import click; from phases.cli.failures import run_and_exit; run_and_exit(click.Command('x', callback=lambda: click.echo('1 … 2 µs')), [])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 ? 2 µs\n".encode("latin-1"), b"")
