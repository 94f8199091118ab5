"""Options and output that commands share."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from phases.base.errors import UsageError

if TYPE_CHECKING:
    from phases.ledger.ledger import Ledger
    from phases.playbook.schema import Playbook
    from phases.report.blocks import Block

F = TypeVar("F", bound=Callable[..., Any])
CANDIDATES = ("playbook.yaml", "playbooks/local.yaml")
_GLUE = "\ue000"  # a blank not to be folded at; no text of ours or that passed `harmless` has it


def completing(name: str) -> Callable[..., list[Any]]:
    """A completion function of `phases.cli.completion`, imported when a shell asks."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        return getattr(importlib.import_module("phases.cli.completion"), name)(ctx, param, incomplete)  # type: ignore[no-any-return]

    return complete


playbook_option: Callable[[F], F] = click.option(
    "-p",
    "--playbook",
    "playbook_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    shell_complete=completing("complete_playbook"),
    help="The playbook. Default: $PHASE_PLAYBOOK, else playbook.yaml or playbooks/local.yaml here or in a directory above.",
)
json_option: Callable[[F], F] = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def example(*lines: str) -> str:
    """Epilog of a command's help: how it is called."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def load_playbook(path: Path | None) -> Playbook:
    """The playbook asked for, or the one found. Raises UsageError or PlaybookError."""
    from phases.playbook import loader

    playbook = loader.load(path or find_playbook())
    for line in playbook.notes:
        note(line)
    return playbook


def find_playbook() -> Path:
    """Raises UsageError when there is none to be found."""
    named = os.environ.get("PHASE_PLAYBOOK")
    if named:
        return Path(named)
    here = Path.cwd()
    for directory in (here, *here.parents):
        for candidate in CANDIDATES:
            if (directory / candidate).is_file():
                found = directory / candidate
                return found.relative_to(here) if found.is_relative_to(here) else found
        if (directory / ".git").exists():
            break
    raise UsageError(
        "no playbook given, and none found here.", hint="Name one with -p FILE, or make one with `phase init`."
    )


def option_for(playbook: Playbook) -> str:
    """The -p that a suggested command needs; none where the playbook would be found anyway."""
    try:
        if find_playbook().resolve() == playbook.path:
            return ""
    except UsageError:
        pass
    return f" -p {os.path.relpath(playbook.path)}"


def open_ledger(playbook: Playbook) -> Ledger:
    from phases.run.closing import ledger_of

    return ledger_of(playbook, lambda line: note(line))


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, sort_keys=True, allow_nan=False, default=str))


def note(line: str) -> None:
    """A line for people on stderr, so that stdout stays clean for results. Lost where nobody takes it: a rollback goes on all the same."""
    with contextlib.suppress(OSError, ValueError):
        click.echo("\n".join(flowed(row, sys.stderr) for row in harmless_lines(line).split("\n")), err=True)


def is_terminal(stream: Any = None) -> bool:
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def say(text: str, **style: Any) -> None:
    """A line on stdout in click's style, plain where colour cannot be shown or is not wanted (https://no-color.org)."""
    click.secho(flowed(text), color=is_terminal() and not os.environ.get("NO_COLOR"), **style)


def flowed(text: str, stream: Any = None) -> str:
    """A line for people: on a terminal too narrow for it folded between words, what stands in backticks (to be copied) left whole."""
    if not is_terminal(stream) or len(text) <= (width := shutil.get_terminal_size().columns):
        return text
    indent = text[: len(text) - len(text.lstrip())]
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _GLUE), text)
    rows = textwrap.wrap(
        whole, max(width, 20), subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(rows).replace(_GLUE, " ")


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: dict[str, str] | None = None) -> None:
    """A table: by rich in a terminal, in aligned plain columns otherwise. `styles` maps cell texts to rich styles.

    What comes from others cannot move the cursor or change colours.
    """
    rows = [[harmless(str(cell)) for cell in row] for row in rows]
    if is_terminal():
        from rich.console import Console

        from phases.cli.terminal_table import TerminalTable

        Console().print(TerminalTable(columns, rows, styles))
        return
    lines = [line for row in [columns, *rows] for line in _wrapped(row)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_blocks(blocks: Iterable[Block], styles: dict[str, str] | None = None) -> None:
    """Tables and lines, one below the other, harmless as well."""
    for block in blocks:
        if block.columns:
            show_table(block.columns, block.rows, styles)
        else:
            say(harmless(block.text), fg=block.colour or None, bold=block.bold or None)


def harmless(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def harmless_lines(text: str) -> str:
    return "\n".join(map(harmless, text.split("\n")))


def _wrapped(row: Sequence[str], width: int = 56) -> list[tuple[str, ...]]:
    """A row as the lines it takes when no cell is wider than `width`."""
    cells = [textwrap.wrap(str(cell), width, break_on_hyphens=False) or [""] for cell in row]
    return list(itertools.zip_longest(*cells, fillvalue=""))


STYLES = {
    "PASS": "green",
    "passed": "green",
    "approved": "green",
    "ok": "green",
    "FAIL": "bold red",
    "ERROR": "bold red",
    "failed": "bold red",
    "rejected": "bold red",
    "problem": "bold red",
    "INCONCLUSIVE": "yellow",
    "inconclusive": "yellow",
    "waiting for review": "yellow",
    "stale": "yellow",
    "warning": "yellow",
    "ABORTED": "magenta",
    "not run": "dim",
    "unfinished": "yellow",
}


def short(digest: str) -> str:
    """The digits of a digest that people compare and `gate approve --digest` takes."""
    return digest[:16]


def when(iso: str) -> str:
    return iso.replace("T", " ").removesuffix("Z")[:16]
