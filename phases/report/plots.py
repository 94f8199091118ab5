"""Benchmark plots as PNG. The same results give the same bytes: no dates, no version, no fonts of the machine."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from phases.base.results import BenchmarkRecord
from phases.gate.intervals import ratio_interval

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442", "#000000")  # Okabe-Ito
_MARKS = "osD^vP*X"
_STYLE = {
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "svg.hashsalt": "phasegate",
}


def achieved(records: Sequence[BenchmarkRecord], title: str = "") -> bytes:
    """Median time of every case over its roofline floor, both logarithmic, with lines at 1x, 2x and 10x the floor.

    Returns:
        PNG bytes; empty when no record has both samples and a floor.
    """
    shown = [r for r in records if r.median and r.roofline_seconds]
    if not shown:
        return b""

    def draw(axes: Any) -> None:
        floors = [r.roofline_seconds * 1e6 for r in shown]
        span = [min(floors) / 1.5, max(floors) * 1.5]
        for factor, style in ((1, "-"), (2, "--"), (10, ":")):
            axes.plot(span, [factor * s for s in span], style, color="0.5", linewidth=1)
            axes.annotate(
                f"{factor}x floor ", (span[1], factor * span[1]), fontsize=7, color="0.4", ha="right", va="top"
            )
        for variant, colour, mark in _variants(shown):
            points = sorted((r.roofline_seconds * 1e6, r.median * 1e6) for r in shown if r.variant == variant)
            axes.plot(*zip(*points, strict=True), mark, color=colour, label=variant, markersize=5, alpha=0.85)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="roofline floor of this device, µs",
            ylabel="measured median, µs",
            title=title or "Measured time over the roofline floor",
        )
        _plain_numbers(axes.xaxis, axes.yaxis)
        axes.legend(fontsize=8, loc="upper left")

    return _png(draw, (7.5, 5.5))


def speedups(records: Sequence[BenchmarkRecord], title: str = "", confidence: float = 0.99) -> bytes:
    """Speedup of each variant over the baseline, case by case, with the interval of the ratio of medians.

    Returns:
        PNG bytes; empty when no case has samples of the baseline and of another variant.
    """
    base = {r.case.key: r for r in records if r.role == "baseline" and r.samples}
    others = [r for r in records if r.role != "baseline" and r.samples and r.case.key in base]
    if not others:
        return b""
    keys = list(dict.fromkeys(r.case.key for r in others))

    def draw(axes: Any) -> None:
        variants = _variants(others)
        for number, (variant, colour, mark) in enumerate(variants):
            rows = [r for r in others if r.variant == variant]
            parts = [ratio_interval(base[r.case.key].samples, r.samples, confidence) for r in rows]
            heights = [keys.index(r.case.key) + 0.6 * ((number + 0.5) / len(variants) - 0.5) for r in rows]
            low = [p.estimate - max(p.low, p.estimate / 100) for p in parts]
            high = [min(p.high, p.estimate * 100) - p.estimate for p in parts]
            axes.errorbar(
                [p.estimate for p in parts],
                heights,
                xerr=[low, high],
                fmt=mark,
                color=colour,
                label=variant,
                markersize=4,
                capsize=2,
                linewidth=1,
            )
        axes.axvline(1.0, color="0.4", linewidth=1)
        axes.set(
            xscale="log", xlabel=f"times faster than the baseline ({confidence:.0%} interval)", title=title or "Speedup"
        )
        _plain_numbers(axes.xaxis)
        axes.set_yticks(range(len(keys)), keys, fontsize=7)
        axes.invert_yaxis()
        axes.legend(fontsize=8)

    return _png(draw, (7.5, max(2.5, 0.28 * len(keys) + 1.2)))


def _variants(records: Sequence[BenchmarkRecord]) -> list[tuple[str, str, str]]:
    names = list(dict.fromkeys(r.variant for r in records))
    return [(name, _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]) for i, name in enumerate(names)]


def _plain_numbers(*axes: Any) -> None:
    """Labels of log axes as 1,000: matplotlib's own are formulas, and formulas are off (`_STYLE`) since names may hold a `$`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axis.set_minor_formatter(NullFormatter())


def _png(draw: Any, size: tuple[float, float]) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        sink = io.BytesIO()
        figure.savefig(sink, format="png", metadata={"Software": None})
    return sink.getvalue()
