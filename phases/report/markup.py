"""Small pieces of HTML: everything that comes from outside is escaped here."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "�")


def text(value: Any) -> str:
    """Escaped, and without what HTML does not allow and a terminal would obey."""
    return escape(str(value).translate(_CONTROLS), quote=True)


def number(value: float | None) -> str:
    return "–" if value is None else figures(value)


def figures(value: float) -> str:
    """Four figures; up to a billion without an exponent, which nobody reads at a glance."""
    return f"{float(f'{value:.4g}'):.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def interval(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "–"
    return f"{'−∞' if low is None else number(low)} … {'∞' if high is None else number(high)}"


def definitions(pairs: Iterable[tuple[str, Any]], kind: str = "") -> str:
    """Names and values, without those that have none."""
    rows = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs if value not in (None, "")
    )
    return f'<dl class="{kind}">{rows}</dl>' if kind else f"<dl>{rows}</dl>"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], caption: str, numbers: Iterable[int] = ()) -> str:
    """A table that scrolls by itself where it is too wide; the first cell of a row is its head. `numbers`: columns to the right."""
    right = set(numbers)
    cells = "".join(f'<th scope="col"{_class(i in right)}>{text(name)}</th>' for i, name in enumerate(head))
    lines = "".join(f"<tr>{''.join(_cell(i, cell, i in right) for i, cell in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def pre(content: str, label: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><pre>{text(content)}</pre></div>'


def folded(summary: str, content: str, *, shown: bool = False) -> str:
    return f"<details{' open' if shown else ''}><summary>{text(summary)}</summary>{content}</details>"


def section(name: str, title: str, content: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(title)}</h2>{content}</section>'


def _class(right: bool) -> str:
    return ' class="number"' if right else ""


def _cell(column: int, cell: Any, right: bool) -> str:
    return f'<th scope="row">{text(cell)}</th>' if column == 0 else f"<td{_class(right)}>{text(cell)}</td>"
