"""Charts of a report as SVG text that takes its colours from the page, so that light, dark and print all read well."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import Any

from phases.base.extras import Extra
from phases.report.markup import text as words

# Drawn in these, then replaced by the page's CSS variables.
_INK, _MUTED, _GRID, _PAPER = "#010101", "#020202", "#030303", "#fdfdfd"
_SERIES = ("#040404", "#050505", "#060606", "#070707", "#080808", "#090909")
_MARKS = "osD^vPX"  # one more than colours: 42 series before two look alike
_VARIABLES = {
    _INK: "--ink",
    _MUTED: "--muted",
    _GRID: "--rule",
    _PAPER: "--paper",
    **{color: f"--series-{i}" for i, color in enumerate(_SERIES)},
}


@dataclass(frozen=True)
class Point:
    """One dot with its interval on a row or at a time."""

    estimate: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class RatioRow:
    """A ratio with its interval; `limit`: the rule's; `single`: what it was taken from."""

    name: str
    point: Point
    limit: float | None = None
    single: tuple[float, ...] = ()


def interval_strip(point: Point, threshold: float | None, label: str) -> str:
    """A rule at a glance: dot and whisker against the threshold's line, with their values; 320 by 56 units."""
    values = [v for v in (point.estimate, point.low, point.high, threshold) if v is not None and math.isfinite(v)]
    low, high = min(values), max(values)
    margin = (high - low) * 0.15 or abs(high) * 0.1 or 1.0
    scale = lambda v: 12 + 296 * (v - low + margin) / (high - low + 2 * margin)  # noqa: E731
    left = scale(point.low) if point.low is not None and math.isfinite(point.low) else 2.0
    right = scale(point.high) if point.high is not None and math.isfinite(point.high) else 318.0
    limit = (
        ""
        if threshold is None
        else _mark(scale(threshold), 12, f"limit {threshold:.4g}", "limit")
        + (f'<line class="threshold" x1="{scale(threshold):.1f}" x2="{scale(threshold):.1f}" y1="17" y2="41"/>')
    )
    return (
        f'<svg class="strip" viewBox="0 0 320 56" role="img" aria-label="{words(label)}"><line class="axis" x1="2" x2="318" y1="29" y2="29"/>{limit}'
        f'<line class="whisker" x1="{left:.1f}" x2="{right:.1f}" y1="29" y2="29"/><circle cx="{scale(point.estimate):.1f}" cy="29" r="5"/>'
        f"{_mark(scale(point.estimate), 53, f'{point.estimate:.4g}', 'value')}</svg>"
    )


def _mark(x: float, y: float, text: str, kind: str) -> str:
    """A value beside its place, kept inside the strip."""
    anchor = "start" if x < 60 else "end" if x > 260 else "middle"
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _drawn(chart: Callable[..., str]) -> Callable[..., str]:
    """A chart that matplotlib draws; without it a line says so, since the table beside every chart has its numbers."""

    @wraps(chart)
    def drawn(*arguments: Any, **named: Any) -> str:
        if Extra.PLOTS.installed:
            return chart(*arguments, **named)
        return f'<p class="muted">No chart: {words(Extra.PLOTS.missing)} ({words(Extra.PLOTS.cure)}).</p>'

    return drawn


@_drawn
def dot_rows(
    rows: Sequence[tuple[str, Sequence[tuple[str, Point]]]], *, xlabel: str, title: str, reference: float | None = None
) -> str:
    """Cases down, value across (log scale): one dot with whisker a series, such as the speedup of each case."""
    names = list(dict.fromkeys(name for _, points in rows for name, _ in points))
    with _figure(5.2, 0.9 + (0.16 + 0.07 * len(names)) * len(rows) + 0.16 * len(names)) as (figure, axes):
        for color, mark, name in zip(_SERIES * len(names), _MARKS * len(names), names):
            shift = (
                0.6 * (names.index(name) - (len(names) - 1) / 2) / max(len(names), 2)
            )  # series of a row side by side
            points = [(y + shift, p) for y, (_, series) in enumerate(rows) for n, p in series if n == name]
            x = [p.estimate for _, p in points]
            errors = [
                [max(0.0, p.estimate - (p.estimate if p.low is None else p.low)) for _, p in points],
                [max(0.0, (p.estimate if p.high is None else p.high) - p.estimate) for _, p in points],
            ]
            axes.errorbar(
                x,
                [y for y, _ in points],
                xerr=errors,
                fmt=mark,
                color=color,
                label=_cut(name, 24),
                markersize=5,
                elinewidth=1.4,
            )
        if reference is not None:
            axes.axvline(reference, color=_MUTED, linewidth=1.2, linestyle="--")
        axes.set_yticks(range(len(rows)), [_cut(label) for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _logarithmic(axes.xaxis, axes.set_xscale, [p.estimate for _, s in rows for _, p in s])
        axes.set_xlabel(_cut(xlabel, 90))
        if len(names) > 1:
            figure.legend(loc="outside upper left", frameon=False, ncols=2, fontsize=8)
    return _svg(figure, title)


@_drawn
def ratios(rows: Sequence[RatioRow], *, xlabel: str, title: str) -> str:
    """Ratios down, their values across: interval and estimate, limit, single pairs, and the line where both sides are equal."""
    with _figure(5.2, 0.95 + 0.42 * len(rows)) as (figure, axes):
        for y, row in enumerate(rows):
            point = row.point
            low, high = (point.estimate if end is None else end for end in (point.low, point.high))
            first = {"label": "estimate and interval"} if y == 0 else {}
            axes.errorbar(
                [point.estimate],
                [y],
                xerr=[[max(0.0, point.estimate - low)], [max(0.0, high - point.estimate)]],
                fmt="o",
                color=_SERIES[0],
                markersize=4.5,
                elinewidth=1.8,
                capsize=3,
                zorder=4,
                **first,
            )
            axes.plot(row.single, [y + 0.26] * len(row.single), ".", color=_MUTED, markersize=4)
        limits = [(row.limit, y) for y, row in enumerate(rows) if row.limit is not None]
        if limits:
            axes.plot(
                [at for at, _ in limits],
                [y for _, y in limits],
                "|",
                color=_SERIES[1],
                markersize=17,
                markeredgewidth=2,
                zorder=3,
                label="limit of its rule",
            )
        axes.axvline(1.0, color=_MUTED, linewidth=1.2, linestyle="--", label="equal")
        axes.set_yticks(range(len(rows)), [_cut(row.name) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        _logarithmic(
            axes.xaxis,
            axes.set_xscale,
            [
                1.0,
                *(
                    v
                    for row in rows
                    for v in (row.point.estimate, row.point.low, row.point.high, *row.single)
                    if v is not None and math.isfinite(v)
                ),
            ],
        )
        axes.set_xlabel(xlabel)
        figure.legend(loc="outside upper left", frameon=False, ncols=3, fontsize=8)
    return _svg(figure, title)


@_drawn
def roofline(points: Sequence[tuple[str, float, float]], *, title: str) -> str:
    """Measured time against the floor of each case, both in microseconds, log-log; on the diagonal nothing is left to win.

    Args:
        points: series name, floor in seconds, median in seconds.
    """
    with _figure(5.2, 4.2) as (figure, axes):
        names = list(dict.fromkeys(name for name, _, _ in points))
        for color, mark, name in zip(_SERIES * len(names), _MARKS * len(names), names):
            axes.plot(
                [f * 1e6 for n, f, _ in points if n == name],
                [t * 1e6 for n, _, t in points if n == name],
                mark,
                color=color,
                label=_cut(name, 24),
                markersize=5,
            )
        ends = [min(f for _, f, _ in points) * 0.7e6, max(f for _, f, _ in points) * 1.4e6]
        for factor, style in ((1, "-"), (2, "--"), (10, ":")):
            axes.plot(
                ends,
                [end * factor for end in ends],
                style,
                color=_MUTED,
                linewidth=1,
                label="floor" if factor == 1 else f"{factor}x floor",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("floor (µs)")
        axes.set_ylabel("measured (µs)")
        figure.legend(loc="outside upper left", frameon=False, ncols=2, fontsize=8)
    return _svg(figure, title)


@_drawn
def event_line(spans: Sequence[tuple[str, float, float]], *, title: str) -> str:
    """Events down, seconds since the first across: how long each step of a rollback took.

    Args:
        spans: name, where its line begins, and where it ends with a dot.
    """
    with _figure(5.2, 0.7 + 0.22 * len(spans)) as (figure, axes):
        for y, (_, start, end) in enumerate(spans):
            axes.plot([start, end], [y, y], color=_SERIES[0], linewidth=2.2, solid_capstyle="round")
            axes.plot([end], [y], "o", color=_SERIES[0], markersize=5)
        axes.set_yticks(range(len(spans)), [_cut(name) for name, _, _ in spans])
        axes.set_ylim(len(spans) - 0.5, -0.5)
        axes.set_xlim(left=min(0.0, *(end for _, _, end in spans)))
        axes.set_xlabel("seconds since it was detected")
    return _svg(figure, title)


@_drawn
def over_time(
    times: Sequence[float],
    points: Sequence[Point],
    *,
    margin: float,
    decided_at: float | None,
    title: str,
    ylabel: str,
    equal: float = 1.0,
) -> str:
    """Estimate and confidence band over a bake, with the limit, the value of equal arms and the moment of decision. Times in seconds."""
    with _figure(5.2, 3.1) as (figure, axes):
        low = [math.nan if p.low is None else p.low for p in points]
        high = [math.nan if p.high is None else p.high for p in points]
        axes.fill_between(times, low, high, color=_SERIES[0], alpha=0.22, linewidth=0, label="confidence band")
        axes.plot(times, [p.estimate for p in points], color=_SERIES[0], label="estimate")
        axes.axhline(margin, color=_SERIES[1], linewidth=1.2, linestyle="--", label=f"limit {margin:g}")
        axes.axhline(equal, color=_MUTED, linewidth=0.8)
        if decided_at is not None:
            axes.axvline(decided_at, color=_INK, linewidth=1, linestyle=":", label=f"decided at {decided_at:.0f} s")
        axes.set_xlabel("seconds since the bake began")
        axes.set_ylabel(ylabel)
        if equal > 0:  # a ratio: twice as slow is as far from equal as twice as fast
            _logarithmic(axes.yaxis, axes.set_yscale, [margin, *(v for v in (*low, *high) if math.isfinite(v))])
        figure.legend(loc="outside upper left", frameon=False, ncols=2, fontsize=8)
    return _svg(figure, title)


def _cut(label: str, most: int = 30) -> str:
    """What fits beside a chart; the table below it has the whole name."""
    label = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in label)
    return label if len(label) <= most else label[: most - 1] + "…"


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    style = {
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "phasegate",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": _INK,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
        "grid.color": _GRID,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.linewidth": 0.6,
        "legend.facecolor": "none",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _logarithmic(axis: Any, set_scale: Any, values: Sequence[float]) -> None:
    """A log axis labelled in plain numbers, when the values span enough of one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not values or min(values) <= 0 or max(values) / min(values) < 3:
        return
    set_scale("log")
    narrow = max(values) / min(values) < 10  # 1, 2, 5 alone would leave one label or two
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if narrow else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _svg(figure: Any, title: str) -> str:
    """The figure as an accessible <svg> element, without fixed size, colours from the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head = lambda found: f'<svg class="chart" viewBox="{found[1]}" role="img" aria-label="{words(title)}">'  # noqa: E731
    text = re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', head, text, count=1, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return _own_ids(text, title)


def _own_ids(text: str, title: str) -> str:
    """Ids that are the same for the same chart (matplotlib's hold memory addresses) and differ from the page's other charts'."""
    prefix = f"c{zlib.crc32((title + str(len(text))).encode()):08x}-"
    names = {
        name: f"{prefix}{number}" for number, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]+)"', text)))
    }
    text = re.sub(r'\bid="([^"]+)"', lambda found: f'id="{names[found[1]]}"', text)
    return re.sub(r"#([\w.:-]+)(?=[\")])", lambda found: f"#{names.get(found[1], found[1])}", text)
