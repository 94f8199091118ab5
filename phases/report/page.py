"""A checkpoint as one HTML file: verdict first, then each rule with its numbers, then what they rest on.

The page loads nothing: style and charts are inline, there is no script.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from phases.gates.intervals import ratio_interval
from phases.gates.outcome import RuleOutcome
from phases.report import charts
from phases.report.charts import Point
from phases.report.view import Change, ReportView
from phases.results import BenchmarkRecord


def render(view: ReportView) -> str:
    """The whole page."""
    style = files("phases.report").joinpath("report.css").read_text(encoding="utf-8")
    sections = [_head(view), _rules(view), _benchmark(view), _bake(view), _timeline(view), _change(view), _tables(view), _origin(view)]
    body = "\n".join(filter(None, sections))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_(view.title)}: {_(view.kernel)}</title><style>{style}</style></head>\n"
        f'<body><a class="skip" href="#rules">Skip to the rules</a><main>\n{body}\n</main></body></html>\n'
    )


def _(value: Any) -> str:
    return escape(str(value), quote=True)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    return "<dl>" + "".join(f"<dt>{_(name)}</dt><dd>{_(value)}</dd>" for name, value in pairs if value not in (None, "")) + "</dl>"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]], caption: str) -> str:
    cells = "".join(f'<th scope="col">{_(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{_(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_(caption)}"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _head(view: ReportView) -> str:
    verdict = view.gate.verdict.value
    failed = [rule for rule in view.gate.rules if not rule.verdict.advances]
    said = "every rule passed" if not failed else f"{len(failed)} of {len(view.gate.rules)} rules did not pass: {', '.join(r.rule for r in failed)}"
    source = view.manifest["source"]
    commit = (source.get("commit") or "none") + (" with uncommitted changes" if source.get("dirty") else "")
    decisions = "".join(f"<p>{_(a.decision)}: {_(a.person)}, {_(a.at)}: {_(a.reason)}</p>" for a in view.approvals)
    facts = [("kernel", view.kernel), ("phase", view.phase), ("recorded", view.manifest["recorded_at"]), ("by", view.manifest["author"]),
             ("source", commit), ("playbook", view.manifest.get("playbook")), ("digest", view.digest)]  # fmt: skip
    review = f"<span>{_(view.review)}</span>" if view.review else ""
    return (
        f'<header><h1>{_(view.title)}</h1><p class="verdict {verdict}"><strong>{verdict}</strong><span>{_(said)}</span>{review}</p>'
        f"{decisions}{_definitions(facts)}</header>"
    )


def _rules(view: ReportView) -> str:
    return '<section id="rules"><h2>Rules</h2>' + "".join(map(_rule, view.gate.rules)) + "</section>"


def _rule(rule: RuleOutcome) -> str:
    strip = ""
    if rule.estimate is not None:
        label = f"{rule.rule}: estimate {_number(rule.estimate)}, interval {_number(rule.low)} to {_number(rule.high)}, threshold {_number(rule.threshold)}"
        strip = charts.interval_strip(Point(rule.estimate, rule.low, rule.high), rule.threshold, label)
    interval = f"{_number(rule.low)} … {_number(rule.high)}"
    facts = [("estimate", f"{_number(rule.estimate)} {rule.unit}".strip()), ("interval", interval), ("threshold", _number(rule.threshold)), ("n", rule.n), ("source", rule.source)]
    failed = "".join(f"<li><code>{_(line)}</code></li>" for line in rule.detail.get("failed", []))
    name = f"{rule.rule}: {rule.detail['metric']}" if "metric" in rule.detail else rule.rule
    return (
        f'<article class="rule"><header><h3>{_(name)} <span class="badge {rule.verdict.value}">{rule.verdict.value}</span></h3>{strip}</header>'
        f"<p>{_(rule.reason)}</p>{_definitions(facts)}{f'<ul>{failed}</ul>' if failed else ''}</article>"
    )


def _timed(view: ReportView) -> list[BenchmarkRecord]:
    return [r for r in view.results.benchmark if r.samples and r.parity_after]


def _benchmark(view: ReportView) -> str:
    timed = _timed(view)
    if not timed:
        return ""
    parts = ["<section><h2>Benchmark</h2>"]
    speedups = _speedups(timed)
    if speedups:
        parts += ["<h3>Times faster than the baseline</h3>", charts.dot_rows(speedups, xlabel="speedup (99 % interval)", title="speedup over the baseline by case", reference=1.0)]
    floors = [(r.variant, r.roofline_seconds, r.median) for r in timed if r.roofline_seconds and r.median]
    if floors:
        parts += ["<h3>Measured against the floor</h3>", '<p class="muted">Floor: the larger of needed bytes over measured bandwidth and operations over '
                  "measured arithmetic, on the same device in the same run.</p>", charts.roofline(floors, title="measured time against the floor by case")]  # fmt: skip
    anchors = view.results.facts.get("anchors", [])
    rows = [_row(record) for record in timed] + [(a["case"], a["name"], f"{a['us']:.4g}", "", "", "recorded" if a.get("recorded") else "") for a in anchors]
    parts.append("<details open><summary>All medians</summary>" + _table(("case", "variant", "median µs", "samples", "of floor", "note"), rows, "medians by case") + "</details>")
    return "".join(parts) + "</section>"


def _row(record: BenchmarkRecord) -> tuple[Any, ...]:
    floor = f"{record.roofline_seconds / record.median:.0%}" if record.roofline_seconds and record.median else ""
    return record.case.key, record.variant, f"{record.median * 1e6:.4g}", len(record.samples), floor, record.role


def _speedups(timed: list[BenchmarkRecord]) -> list[tuple[str, list[tuple[str, Point]]]]:
    baseline = {r.case.key: r for r in timed if r.role == "baseline"}
    rows = []
    for key, base in baseline.items():
        others = [r for r in timed if r.case.key == key and r.role != "baseline"]
        points = []
        for other in others:
            ratio = ratio_interval(base.samples, other.samples)
            points.append((other.variant, Point(ratio.estimate, ratio.low, min(ratio.high, ratio.estimate * 3))))
        if points:
            rows.append((key, points))
    return rows


def _bake(view: ReportView) -> str:
    """Canary against control over time: results.facts["sequential"], one entry a metric."""
    parts = []
    for test in view.results.facts.get("sequential", []):
        looks = test["looks"]
        if not looks:
            continue
        ratio = test.get("unit", "ratio") == "ratio"
        decided = f"decided {test['verdict']} at {test['decided_at']:.0f} s" if test.get("decided_at") is not None else "never decided"
        parts.append(f"<h3>{_(test['name'])}: {_(decided)}</h3>" + charts.over_time(
            [look[0] for look in looks], [Point(*look[1:4]) for look in looks], margin=test["margin"] + (1.0 if ratio else 0.0), decided_at=test.get("decided_at"),
            equal=1.0 if ratio else 0.0, title=f"{test['name']}, canary against control: {decided}", ylabel="canary / control" if ratio else "excess"))  # fmt: skip
    return "<section><h2>Canary against control</h2>" + "".join(parts) + "</section>" if parts else ""


def _timeline(view: ReportView) -> str:
    """How a rollback went: results.facts["timeline"], events in seconds from the first."""
    events = view.results.facts.get("timeline", [])
    rows = [(f"{event['at']:.1f} s", event["event"], event.get("host", ""), event.get("note", "")) for event in events]
    return "<section><h2>Rollback timeline</h2>" + _table(("after", "event", "host", "note"), rows, "rollback timeline") + "</section>" if rows else ""


def _change(view: ReportView) -> str:
    if view.change is None:
        return '<section><h2>Since the last approved checkpoint</h2><p class="muted">No earlier checkpoint of this phase is approved.</p></section>'
    change = view.change
    environment = _table(("fact", "then", "now"), change.environment, "environment changes") if change.environment else "<p>The environment is the same.</p>"
    return (
        f"<section><h2>Since {_(change.against)}</h2><h3>Source</h3>{_pre(change.source, 'source changes')}"
        f"<h3>Environment</h3>{environment}{_benchmark_change(view, change)}</section>"
    )


def _benchmark_change(view: ReportView, change: Change) -> str:
    old = {(r.case.key, r.variant): r for r in change.benchmark.benchmark if r.samples}
    rows = []
    for record in _timed(view):
        before = old.get((record.case.key, record.variant))
        if before:
            ratio = ratio_interval(record.samples, before.samples)
            rows.append((record.case.key, record.variant, f"{ratio.estimate:.3f}", f"{ratio.low:.3f} … {ratio.high:.3f}"))
    return "<h3>Benchmark</h3>" + _table(("case", "variant", "time now / then", "99 % interval"), rows, "benchmark changes") if rows else ""


def _tables(view: ReportView) -> str:
    parts = [f"<details><summary>{_(name)}</summary>{_pre(text, name)}</details>" for name, text in view.tables.items()]
    return "<section><h2>Tables</h2>" + "".join(parts) + "</section>" if parts else ""


def _origin(view: ReportView) -> str:
    facts = json.dumps(view.manifest.get("facts", {}), indent=2, sort_keys=True, ensure_ascii=False)
    files_ = [(path, row["bytes"], row["sha256"]) for path, row in view.manifest.get("files", {}).items()]
    predicate = view.provenance.get("predicate", {}).get("buildDefinition", {})
    return (
        f"<section><h2>Provenance</h2>{_definitions([('run', view.manifest.get('run')), ('build type', predicate.get('buildType'))])}"
        f"<details><summary>Toolchain and machine</summary>{_pre(facts, 'facts')}</details>"
        f"<details><summary>Files and their sha256</summary>{_table(('file', 'bytes', 'sha256'), files_, 'files')}</details></section>"
    )


def _pre(text: str, label: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_(label)}"><pre>{_(text)}</pre></div>'
