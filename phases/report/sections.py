"""What the verdict rests on: benchmarks, the bake over time, the rollback, and what changed since the last approval.

Every chart is followed by its numbers as a table, for those who cannot or would not read charts.
"""

from __future__ import annotations

from typing import Any

from phases.base.results import BenchmarkRecord, Measurement, Results
from phases.gate.intervals import ratio_interval
from phases.report import charts, diff
from phases.report import served as both
from phases.report import timeline as brief
from phases.report.charts import Point
from phases.report.markup import folded, interval, number, pre, section, table, text
from phases.report.tables import seconds
from phases.report.view import Change, ReportView

_LONG = 3.0  # an interval that reaches further than this many estimates is drawn so far only


def benchmark(view: ReportView) -> str:
    """Speedups, the roofline, all medians; other kernels' recorded times beside them."""
    timed = _timed(view.results)
    if not timed:
        return ""
    parts = [part for role in ("baseline", "incumbent") if (part := _speedup_chart(view, timed, role))]
    parts.append(_roofline(view, timed))
    floors = {r.case.key: r.roofline_seconds for r in timed if r.roofline_seconds}
    rows = [
        (r.case.key, r.variant, r.role, seconds(r.median), len(r.samples), _share(r.roofline_seconds, r.median))
        for r in timed
    ]
    rows += [
        (
            a.case,
            a.name,
            "recorded" if a.recorded else "same run",
            seconds(a.seconds),
            "",
            _share(floors.get(a.case), a.seconds),
        )
        for a in _anchors(view, timed)
    ]
    rows.sort(key=lambda row: row[0])
    parts.append(
        folded(
            "All medians",
            table(("case", "variant", "role", "median", "samples", "of floor"), rows, "medians by case", (3, 4, 5)),
            shown=len(rows) <= 30,
        )
    )
    if view.anchors_about:
        parts.append(f'<p class="muted">Recorded: {text(view.anchors_about)}</p>')
    return section("benchmark", "Benchmark", "".join(parts))


def bake(view: ReportView) -> str:
    """Canary against control over time: results.facts["sequential"], one entry a test."""
    parts = [_bake_chart(test) for test in view.results.facts.get("sequential", []) if test["looks"]]
    return section("bake", "Canary against control", "".join(parts)) if parts else ""


def served(view: ReportView) -> str:
    """What both arms served, in absolute numbers: results.facts["served"]."""
    arms = view.results.facts.get("served")
    if not arms:
        return ""
    said = "".join(f"<li>{text(sentence)}</li>" for sentence in both.sentences(arms))
    return section(
        "served", both.TITLE, table(both.COLUMNS, both.rows(arms), both.TITLE, (2, 3, 4)) + f"<ul>{said}</ul>"
    )


def load(view: ReportView) -> str:
    """What requests met while production was changed: results.facts["load"]."""
    columns, rows = view.load_table
    return (
        section("load", "Own load through the router", table(columns, rows, "own load by step", (1, 2, 3, 4)))
        if rows
        else ""
    )


def timeline(view: ReportView) -> str:
    """How a rollback went: results.facts["timeline"], events in seconds from the first. Many are drawn by kind and listed folded."""
    events = view.results.facts.get("timeline", [])
    if not events:
        return ""
    every = table(brief.COLUMNS, brief.rows(events), "rollback timeline")
    if len(events) <= brief.MOST:
        spans = [
            (" ".join(filter(None, (event["event"], event.get("host", "")))), at, event["at"])
            for at, event in zip([0.0, *(event["at"] for event in events)], events)
        ]
        return section("rollback", view.going_back, _event_chart(spans, [at for _, _, at in spans]) + every)
    kinds = brief.kinds(events)
    chart = _event_chart(
        [(kind.label, kind.first, kind.last) for kind in kinds],
        [at for kind in kinds for at in (kind.first, kind.last)],
    )
    overview = table(
        brief.KIND_COLUMNS, [kind.row() for kind in kinds], "rollback timeline by kind of event", (1, 2, 3)
    )
    return section("rollback", view.going_back, chart + overview + folded(f"All {len(events)} events", every))


def _event_chart(spans: list[tuple[str, float, float]], times: list[float]) -> str:
    """Nothing where all happened at once."""
    said = "; ".join(f"{name} after {last:.1f} s" for name, _, last in spans)
    return charts.event_line(spans, title=f"rollback timeline: {said}") if len(set(times)) > 1 else ""


def moved(view: ReportView) -> str:
    """What moved in rules and cases since the last approval, what was tried in between, and the playbook's diff."""
    made = view.change
    moves = "".join(
        f'<li><code class="{"" if move.looser is False else "INCONCLUSIVE"}">{text(move)}</code></li>'
        for move in (made.moves if made else ())
    )
    tried = "".join(f"<li>{text(words)}</li>" for words in view.attempts)
    if made is None and not tried:
        return ""
    content = "".join(f'<ul class="moved">{rows}</ul>' for rows in (moves, tried) if rows)
    if made and made.playbook:
        content += f"<h3>The playbook</h3>{pre(made.playbook, 'difference of the playbooks')}"
    title = f"What moved since {made.against}" if made else "What was tried before"
    return section("moved", title, content or "<p>No rule, no case, nothing tried in between.</p>")


def change(view: ReportView) -> str:
    if view.change is None:
        return section(
            "change",
            "Since the last approved checkpoint",
            '<p class="muted">No earlier checkpoint of this phase is approved.</p>',
        )
    made = view.change
    environment = (
        table(("fact", "then", "now"), made.environment, "environment changes")
        if made.environment
        else "<p>The environment is the same.</p>"
    )
    content = f"<h3>Source</h3>{pre(made.source, 'source changes')}<h3>Environment</h3>{environment}"
    return section(
        "change", f"Since {made.against}", content + _benchmark_change(view, made) + _measurement_change(view, made)
    )


# -- benchmark -----------------------------------------------------------------------------------------------------------


def _timed(results: Results) -> list[BenchmarkRecord]:
    return [r for r in results.benchmark if r.samples and r.parity_after]


def _anchors(view: ReportView, timed: list[BenchmarkRecord]) -> list[Any]:
    keys = {r.case.key for r in timed}
    return [a for a in view.anchors if a.case in keys]


def _speedup_chart(view: ReportView, timed: list[BenchmarkRecord], role: str) -> str:
    """How many times faster than the baseline, or the incumbent, each case is; recorded kernels among the candidates."""
    rows, numbers = [], []
    for base in [r for r in timed if r.role == role]:
        points = [
            (other.variant, _speedup(base, other))
            for other in timed
            if other.case.key == base.case.key and other.variant != base.variant
        ]
        points = [
            (name, point) for name, point in points if role == "baseline" or name not in _of_role(timed, "baseline")
        ]
        points += [
            (a.name, Point((base.median or 0.0) / a.seconds)) for a in _anchors(view, timed) if a.case == base.case.key
        ]
        if points:
            rows.append((base.case.key, points))
            numbers += [(base.case.key, name, f"{number(p.estimate)} x", interval(p.low, p.high)) for name, p in points]
    if not rows:
        return ""
    name = _of_role(timed, role)[0]
    title = f"Times faster than the {role}, {name}"
    chart = charts.dot_rows(
        rows, xlabel=f"times faster than {name} (99 % interval)", title=_words(title, rows), reference=1.0
    )
    return f"<h3>{text(title)}</h3>{chart}" + folded(
        "Numbers", table(("case", "variant", "speedup", "99 % interval"), numbers, title, (2, 3))
    )


def _speedup(base: BenchmarkRecord, other: BenchmarkRecord) -> Point:
    ratio = ratio_interval(base.samples, other.samples)
    return Point(ratio.estimate, ratio.low, min(ratio.high, ratio.estimate * _LONG))


def _words(title: str, rows: list[tuple[str, list[tuple[str, Point]]]]) -> str:
    """A chart's text alternative: the range each variant spans."""
    spans: dict[str, list[float]] = {}
    for _, points in rows:
        for name, point in points:
            spans.setdefault(name, []).append(point.estimate)
    return f"{title}: " + "; ".join(
        f"{name} {number(min(values))} to {number(max(values))} over {len(values)} cases"
        for name, values in spans.items()
    )


def _of_role(timed: list[BenchmarkRecord], role: str) -> list[str]:
    return list(dict.fromkeys(r.variant for r in timed if r.role == role))


def _roofline(view: ReportView, timed: list[BenchmarkRecord]) -> str:
    floors = {r.case.key: r.roofline_seconds for r in timed if r.roofline_seconds}
    points = [(r.variant, r.roofline_seconds, r.median) for r in timed if r.roofline_seconds and r.median]
    points += [(a.name, floors[a.case], a.seconds) for a in _anchors(view, timed) if a.case in floors]
    if not points:
        return ""
    spans: dict[str, list[float]] = {}
    for name, floor, median in points:
        spans.setdefault(name, []).append(median / floor)
    said = "; ".join(
        f"{name} takes {number(min(values))} to {number(max(values))} times the floor" for name, values in spans.items()
    )
    about = "Floor: the larger of needed bytes over measured bandwidth and operations over measured arithmetic, on the same device in the same run."
    return f'<h3>Measured against the floor</h3><p class="muted">{about}</p>' + charts.roofline(
        points, title=f"measured time against the floor by case: {said}"
    )


def _share(floor: float | None, median: float | None) -> str:
    return f"{floor / median:.0%}" if floor and median else ""


# -- bake ----------------------------------------------------------------------------------------------------------------


def _bake_chart(test: dict[str, Any]) -> str:
    ratio = test.get("unit", "ratio") == "ratio"
    decided = (
        f"decided {test['verdict']} at {test['decided_at']:.0f} s"
        if test.get("decided_at") is not None
        else "never decided"
    )
    margin, last = test["margin"] + (1.0 if ratio else 0.0), test["looks"][-1]
    said = f"{test['name']}, canary against control: {decided}; at the end {number(last[1])}, band {interval(last[2], last[3])}, limit {number(margin)}"
    chart = charts.over_time(
        [look[0] for look in test["looks"]],
        [Point(*look[1:4]) for look in test["looks"]],
        margin=margin,
        decided_at=test.get("decided_at"),
        equal=1.0 if ratio else 0.0,
        title=said,
        ylabel="canary / control" if ratio else "excess",
    )
    rows = [(f"{at:.0f} s", number(estimate), interval(low, high)) for at, estimate, low, high in test["looks"]]
    reason = f"<p>{text(test['reason'])}</p>" if test.get("reason") else ""
    return f"<h3>{text(test['name'])}: {text(decided)}</h3>{reason}{chart}" + folded(
        "Every look", table(("after", "estimate", "band"), rows, f"looks of {test['name']}", (1, 2))
    )


# -- change --------------------------------------------------------------------------------------------------------------


def _benchmark_change(view: ReportView, made: Change) -> str:
    compared = diff.compare(made.benchmark, view.results)
    changes = [c for c in compared.changes if c.ratio is not None]
    rows = [
        (c.case, c.variant, seconds(c.before), seconds(c.after), f"{c.ratio:.3f}", interval(c.low, c.high), c.what)
        for c in changes
    ]
    if not rows and not compared.parity:
        return ""
    said = "".join(f"<li>{text(line)}</li>" for line in compared.parity)
    parity = f"<p>Parity that changed:</p><ul>{said}</ul>" if said else ""
    head = ("case", "variant", "then", "now", "now / then", f"{compared.confidence:.0%} interval", "")
    return "<h3>Benchmark</h3>" + parity + (table(head, rows, "benchmark changes", (2, 3, 4, 5)) if rows else "")


def _measurement_change(view: ReportView, made: Change) -> str:
    before = {m.metric: m for m in made.benchmark.measurements}
    rows = [(m.metric, *_cells(before.get(m.metric)), *_cells(m)) for m in view.results.measurements]
    return (
        "<h3>Measurements</h3>"
        + table(("metric", "then", "interval", "now", "interval"), rows, "measurement changes", (1, 2, 3, 4))
        if rows
        else ""
    )


def _cells(measured: Measurement | None) -> tuple[str, str]:
    return ("absent", "") if measured is None else (number(measured.estimate), interval(measured.low, measured.high))
