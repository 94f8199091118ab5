"""A click group that knows its commands' names and one-line helps without importing them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


Table = dict[str, tuple[str, str]]  # name -> ("module:attribute", one-line help)

_PACKAGE = Path(__file__).parent


class LazyGroup(click.Group):
    """`table` lists the commands; one whose module is not part of this installation is left out."""

    def __init__(self, *args: Any, table: Table | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = {name: row for name, row in (table or {}).items() if _exists(row[0])}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        module, _, attribute = self.table[name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands from the table: click's own way would import every one of them for its one-line help."""
        from click.shell_completion import CompletionItem

        own = [CompletionItem(name, help=text) for name, (_, text) in self.table.items() if name.startswith(incomplete)]
        return [*own, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in self.table and not name.startswith("-") and not ctx.resilient_parsing:
            from phases.playbook.located import nearest

            raise click.UsageError(f"there is no command {name!r}{nearest(name, self.table)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.table.items()])


def _exists(reference: str) -> bool:
    return (_PACKAGE / f"{reference.partition(':')[0].rpartition('.')[2]}.py").exists()
