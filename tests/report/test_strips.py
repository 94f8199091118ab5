"""An interval as a line of text: on one scale, so that looks can be compared."""

from __future__ import annotations

import math

from phases.report.strips import WIDTH, strip


def test_the_interval_narrows_on_a_scale_that_stays():
    early, late = strip(1.02, 0.8, 1.3, 1.1, 1.0), strip(1.02, 0.97, 1.06, 1.1, 1.0)
    assert len(early) == len(late) == WIDTH
    assert early.index("│") == late.index("│") and early.index("┼") == late.index("┼") < late.index("│")
    assert early.count("─") > late.count("─") and late.index("┼") < late.index("●") < late.index("│")


def test_what_lies_beyond_ends_in_an_arrow():
    assert strip(1.02, 0.1, 9.0, 1.1, 1.0)[0] == "◂" and strip(1.02, 0.1, 9.0, 1.1, 1.0)[-1] == "▸"
    unbounded = strip(1.02, None, None, 1.1, 1.0)
    assert unbounded[0] == "◂" and unbounded[-1] == "▸"
    assert strip(99.0, 98.0, 100.0, 1.1, 1.0)[-1] == "●"


def test_nothing_to_draw_is_drawn_as_nothing():
    for estimate in (None, math.nan):
        assert set(strip(estimate, None, None, 1.1, 1.0)) == {"·", "┼", "│"}
    assert len(strip(0.0, 0.0, 0.01, 0.0, 0.0)) == WIDTH  # limit and no difference are the same
