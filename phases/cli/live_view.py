"""What a terminal shows of a running step: its last messages, and how a canary compares so far."""

from __future__ import annotations

import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from phases.base.clock import age
from phases.cli.common import harmless
from phases.report.strips import strip

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

SHOWN_LINES = 4
_STYLES = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow"}


class RunningStep:
    """Drawn anew a few times a second: its clock goes on while nothing is said."""

    def __init__(self, label: str, summary: str, expected: float | None = None) -> None:
        from rich.spinner import Spinner

        self.label, self.begun, self.expected = label, time.monotonic(), expected  # seconds it took last time
        self.lines: deque[str] = deque([summary], SHOWN_LINES)
        self.look: dict[str, Any] | None = None
        self._spinner = Spinner("dots")

    def say(self, line: str) -> None:
        """One more message; a look's own line is left out, since the table tells it better."""
        if not is_look(line):
            self.lines.append(harmless(line))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Group
        from rich.text import Text

        about = f" of about {age(self.expected)}" if self.expected is not None else ""
        self._spinner.update(text=_line(f"{self.label} ({time.monotonic() - self.begun:.0f} s{about})", ""))
        rows = [*look_lines(self.look, options.max_width)] if self.look else []
        said = [_line(f"    {line}", "dim") for line in tuple(self.lines)]  # a copy: it is drawn in a thread of its own
        yield Group(self._spinner, *rows, *said) if rows or said else Group(self._spinner, Text(""))


def is_look(line: str) -> bool:
    """Whether a message is that of a look: it begins with the seconds."""
    return re.match(r"\s*\d+ s  ", line) is not None


def look_lines(look: dict[str, Any], width: int) -> list[Text]:
    """Hosts, share and time of a canary, then a row a test: estimate, interval, limit and where they lie."""
    return [_line(f"    {look_head(look)}", ""), *(_test_line(row, width) for row in look["tests"])]


def look_head(look: dict[str, Any]) -> str:
    arms = " against ".join(f"{arm} {_few(names)}" for arm, names in look["arms"].items())
    if len(look["arms"]) == 2 and len({tuple(names) for names in look["arms"].values()}) == 1:
        arms = f"both kernels in turns on {_few(next(iter(look['arms'].values())))}"
    counted = look.get("requests", {})
    total = sum(counted.values())
    share = f", {counted.get('canary', 0) / total:.0%} of {total:.0f} requests to the canary" if total else ""
    latest = f", at the latest {look['deadline']:.0f} s" if look["deadline"] > look["bake"] else ""
    return f"{arms}: {look['elapsed']:.0f} s of {look['bake']:.0f} s{latest}{share}"


def look_row(row: dict[str, Any], width: int) -> str:
    """One test in plain text, with its drawing where `width` columns hold all of it: half a drawing shows nothing."""
    if row["estimate"] is None:
        return f"{row['name']:<16} nothing to compare yet (n {row['n']})"
    low, high = ("?" if row[side] is None else f"{row[side]:.3g}" for side in ("low", "high"))
    threshold = row["threshold"]
    limit, drawn = "", ""
    if threshold is not None:
        limit = f"  limit {threshold:.3g}"
        drawn = strip(row["estimate"], row["low"], row["high"], threshold, 1.0 if row["unit"] == "ratio" else 0.0)
    numbers = f"{row['name']:<16} {row['estimate']:>6.3g} [{low}, {high}]{limit}  n {row['n']}"
    return whole if len(whole := numbers.ljust(62) + drawn) <= width else numbers


def _test_line(row: dict[str, Any], width: int) -> Text:
    text = _line("    ", "")
    text.append(f"{row['verdict']:<5}", style=_STYLES.get(row["verdict"], ""))  # first: a narrow terminal cuts the end
    text.append(look_row(row, width - len(text)))
    return text


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _line(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
