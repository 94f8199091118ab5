"""An interval against its limit in one line of text, for terminals."""

from __future__ import annotations

import math

WIDTH = 31


def strip(
    estimate: float | None, low: float | None, high: float | None, limit: float, equal: float, width: int = WIDTH
) -> str:
    """A line such as `·······┼──●──┼────│··`: the interval, its estimate (●), no difference (┼) and the limit (│).

    The scale hangs on limit and `equal` only, so that looks one after the other can be compared: it reaches from four times
    their distance before `equal` to six times after it. What lies beyond ends in an arrow.
    """
    span = abs(limit - equal) or abs(limit) or 1.0
    first, last = equal - 4 * span, equal + 6 * span

    def place(value: float) -> int:
        return round((width - 1) * (min(max(value, first), last) - first) / (last - first))

    cells = ["·"] * width
    if estimate is not None and math.isfinite(estimate):
        left, right = (
            first if low is None or not math.isfinite(low) else low,
            last if high is None or not math.isfinite(high) else high,
        )
        for cell in range(place(left), place(right) + 1):
            cells[cell] = "─"
        cells[0] = "◂" if left < first or low is None else cells[0]
        cells[-1] = "▸" if right > last or high is None else cells[-1]
    cells[place(equal)] = "┼"
    cells[place(limit)] = "│"
    if estimate is not None and math.isfinite(estimate):
        cells[place(estimate)] = "●"
    return "".join(cells)
