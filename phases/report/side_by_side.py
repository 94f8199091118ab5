"""Phase 2 at a glance: candidate and incumbent, a server each, by every ratio the phase measured between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phases.base.results import RATIO, Measurement
from phases.report import charts
from phases.report.charts import Point, RatioRow
from phases.report.markup import interval, number, section, table, text
from phases.report.tables import seconds
from phases.report.view import ReportView

PHASE = "sglang-integration"
TITLE = "Candidate against incumbent"
COLUMNS = ("measured", "incumbent", "candidate", "ratio", "interval", "limit", "n")
# metric: what a person calls it, and its field in the timings of each pair
_KNOWN = {
    "accept_length_ratio": ("accept length", ""),
    "e2e_latency_ratio": ("end-to-end time", "total"),
    "verify_step_ratio": ("verify step", "verify_step"),
    "verify_attention_ratio": ("verify attention", "verify_attention"),
}
_ABOUT = "Each ratio is candidate / incumbent: of a time, less than 1 is faster; of the accept length, more than 1 is better."
_PAIRS = " Small dots: the single pairs of requests."


@dataclass(frozen=True)
class Ratio:
    """One ratio with what it was made of: the values of either side (empty when they were not kept), each pair's, the rule's limit."""

    name: str
    measured: Measurement
    limit: float | None
    incumbent: str
    candidate: str
    pairs: tuple[float, ...]

    def row(self) -> tuple[str, ...]:
        m = self.measured
        return (
            self.name,
            self.incumbent,
            self.candidate,
            number(m.estimate),
            interval(m.low, m.high),
            number(self.limit),
            str(m.n),
        )


def ratios(view: ReportView) -> list[Ratio]:
    """Every ratio of a Phase 2 checkpoint that has a value; none for other phases."""
    if view.results.phase != PHASE:
        return []
    found = [
        m for m in view.results.measurements if m.unit == RATIO and m.estimate is not None and math.isfinite(m.estimate)
    ]
    limits = {rule.detail["metric"]: rule.threshold for rule in view.gate.rules if "metric" in rule.detail}
    return [_ratio(view, m, limits.get(m.metric)) for m in found]


def side_by_side(view: ReportView) -> str:
    """The section: one row a ratio, with its interval, its limit and the pairs it rests on."""
    found = ratios(view)
    if not found:
        return ""
    rows = [
        RatioRow(r.name, Point(r.measured.estimate or 0.0, r.measured.low, r.measured.high), r.limit, r.pairs)
        for r in found
    ]
    said = "; ".join(
        f"{r.name} {number(r.measured.estimate)}, interval {interval(r.measured.low, r.measured.high)}" for r in found
    )
    chart = charts.ratios(rows, xlabel=RATIO, title=f"{TITLE}: {said}")
    about = _ABOUT + (_PAIRS if any(row.single for row in rows) else "")
    numbers = table(COLUMNS, [r.row() for r in found], TITLE, range(1, len(COLUMNS)))
    return section("sides", TITLE, f'<p class="muted">{text(about)}</p>{chart}{numbers}')


def _ratio(view: ReportView, measured: Measurement, limit: float | None) -> Ratio:
    name, field = _KNOWN.get(measured.metric, (measured.metric.replace("_ratio", "").replace("_", " "), ""))
    theirs, ours = _sides(view, measured)
    return Ratio(name, measured, limit, theirs, ours, _pairs(view, field))


def _sides(view: ReportView, measured: Measurement) -> tuple[str, str]:
    """Incumbent's and candidate's own value, as text."""
    medians = [measured.detail.get(f"{side}_median") for side in ("incumbent", "candidate")]
    if None not in medians:
        return seconds(medians[0]), seconds(medians[1])
    length = next((m.estimate for m in view.results.measurements if m.metric == "accept_length"), None)
    if measured.metric == "accept_length_ratio" and length and measured.estimate:
        return number(length / measured.estimate), number(length)  # the ratio is that of the two lengths
    return "", ""


def _pairs(view: ReportView, field: str) -> tuple[float, ...]:
    """candidate / incumbent of each pair of requests, where both sides reported the field."""
    timings = view.results.facts.get("latency", {}).get("timings", {}) if field else {}
    both = zip(timings.get("candidate", []), timings.get("incumbent", []), strict=False)
    return tuple(ours[field] / theirs[field] for ours, theirs in both if ours.get(field) and theirs.get(field))
