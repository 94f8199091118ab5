"""What a command shows, before anybody decides how: tables and lines, the same for a terminal, a pipe and a live view."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A table (with columns), or a line of text.

    Attributes:
        colour: of the line, empty for none: red, green, yellow.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text: str = ""
    colour: str = ""
    bold: bool = False


def line(text: str, colour: str = "", *, bold: bool = False) -> Block:
    return Block(text=text, colour=colour, bold=bold)
