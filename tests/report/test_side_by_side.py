"""Phase 2's own chart and table: what its checkpoint recorded about both servers, and only that."""

from __future__ import annotations

import dataclasses

import pytest

from phases.base.results import RATIO, Measurement, Results
from phases.base.verdict import Verdict
from phases.gate.outcome import RuleOutcome
from phases.report.page import render
from phases.report.review_text import review_blocks
from phases.report.side_by_side import PHASE, TITLE, ratios
from phases.report.view import ReportView
from tests.report.test_page import EVIL, Tags, view


def measured(name: str = "other_ratio") -> ReportView:
    rows = (
        Measurement("accept_length", 3.0, 2.9, 3.1, 80, "tokens a verify step"),
        Measurement("accept_length_ratio", 0.75, 0.7, 0.8, 80, RATIO),
        Measurement(
            "e2e_latency_ratio", 0.5, 0.4, 0.6, 2, RATIO, detail={"candidate_median": 1.0, "incumbent_median": 2.0}
        ),
        Measurement("verify_step_ratio", None, source="not reported by both servers"),
        Measurement(name, 1.1, None, None, 1, RATIO),
    )
    timings = {"candidate": [{"total": 1.0}, {"total": 1.2}], "incumbent": [{"total": 2.0}, {"total": 2.0}]}
    rule = RuleOutcome(
        "measurement", Verdict.FAIL, "too short", 0.75, 0.7, 0.8, 80, 0.98, RATIO, "", {"metric": "accept_length_ratio"}
    )
    one = view()
    return dataclasses.replace(
        one,
        results=Results(PHASE, "k", measurements=rows, facts={"latency": {"timings": timings}}),
        gate=dataclasses.replace(one.gate, rules=(rule,)),
    )


def test_each_ratio_stands_with_both_sides_its_interval_limit_and_pairs() -> None:
    length, latency, other = ratios(measured())
    assert length.row() == ("accept length", "4", "3", "0.75", "0.7 … 0.8", "0.98", "80")
    assert latency.row() == ("end-to-end time", "2.00 s", "1.00 s", "0.5", "0.4 … 0.6", "–", "2")
    assert latency.pairs == (0.5, 0.6) and length.pairs == ()
    assert other.row() == ("other", "", "", "1.1", "–", "–", "1")


def test_page_and_terminal_show_the_same_rows() -> None:
    page = render(measured())
    chart = next(
        attrs["aria-label"]
        for tag, attrs in Tags(page).seen
        if tag == "svg" and (attrs["aria-label"] or "").startswith(TITLE)
    )
    assert "accept length 0.75, interval 0.7 … 0.8; end-to-end time 0.5, interval 0.4 … 0.6; other 1.1" in (chart or "")
    block = next(block for block in review_blocks(measured()) if block.rows and block.rows[0][0] == "accept length")
    for row in block.rows:
        assert f'<th scope="row">{row[0]}</th>' + "".join(f'<td class="number">{cell}</td>' for cell in row[1:]) in page


def test_a_foreign_name_is_escaped() -> None:
    assert "<script" not in render(measured(EVIL))


@pytest.mark.parametrize(
    "results",
    [Results(PHASE, "k"), Results("full-rollout", "k", measurements=(Measurement("x", 1.0, unit=RATIO),))],
    ids=["none", "phase"],
)
def test_without_ratios_of_phase_two_there_is_no_section(results: Results) -> None:
    one = dataclasses.replace(measured(), results=results)
    assert 'id="sides"' not in render(one) and not any(block.text == TITLE for block in review_blocks(one))
