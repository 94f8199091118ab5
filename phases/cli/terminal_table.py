"""A table for a terminal of any width, which never cuts a cell: what a reviewer decides by must be whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

GAP = 2  # blanks between columns; one where that makes it fit
LONGEST = 24  # words beyond this are addresses, paths and digests: they may be broken before anything else
NARROWEST = 10  # cells of a column whose long words are broken; below that rows are written one below the other


class TerminalTable:
    """Columns while every word fits, at most the widest column's words broken; else each row as lines of name and value.

    Args:
        styles: cell texts to rich styles.
    """

    def __init__(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], styles: dict[str, str] | None = None
    ) -> None:
        self.columns, self.styles = [str(name) for name in columns], styles or {}
        self.rows = [[str(cell) for cell in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for gap in (GAP, 1):
            widths = self.widths(options.max_width - gap * len(self.columns), may_break=gap == 1)
            if widths:
                yield self._table(widths, gap)
                return
        yield self._below_each_other()

    def widths(self, room: int, *, may_break: bool) -> list[int]:
        """Cells for each column; empty where not every word fits. `may_break`: the widest column's words need not."""
        from rich.cells import cell_len

        texts = list(zip(self.columns, *self.rows, strict=True))
        longest = [max((cell_len(word) for text in column for word in text.split()), default=1) for column in texts]
        widths = [min(length, LONGEST) for length in longest] if may_break else longest
        wanted = [max(cell_len(line) for text in column for line in (text.splitlines() or [""])) for column in texts]
        spare = room - sum(widths)
        if spare < 0:
            widest = widths.index(max(widths))
            widths[widest] += spare
            return widths if may_break and widths[widest] >= NARROWEST else []
        while spare and (
            short := [i for i, most in enumerate(wanted) if most > widths[i]]
        ):  # to the narrowest first: long texts share what is left
            widths[min(short, key=lambda i: widths[i])] += 1
            spare -= 1
        return widths

    def _table(self, widths: list[int], gap: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(name, width=width, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell, style=self.styles.get(cell, "")) for cell in row))
        return table

    def _below_each_other(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(style="bold", overflow="fold")
        table.add_column(overflow="fold", ratio=1)
        for row in self.rows:
            for name, cell in zip(self.columns, row, strict=True):
                if cell:
                    table.add_row(name, Text(cell, style=self.styles.get(cell, "")))
            table.add_row("", "")
        return table
