"""A checkpoint for a reviewer at a terminal: what the page of `phases.report.page` shows, in text, verdict first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phases.base.results import BenchmarkRecord
from phases.gate.intervals import ratio_interval
from phases.report import served, side_by_side, timeline
from phases.report.blocks import Block, line
from phases.report.markup import figures
from phases.report.strips import strip
from phases.report.view import Change, ReportView, tree_words

COLOURS = {"PASS": "green", "FAIL": "red", "ERROR": "red", "INCONCLUSIVE": "yellow", "ABORTED": "magenta"}
SHOWN_FACTS = 24  # lines of environment changes and of provenance; the rest is counted
_RULE_COLUMNS = ("verdict", "rule", "estimate", "interval", "n", "threshold", "unit")


def review_blocks(view: ReportView, *, age: str = "") -> list[Block]:
    """The review.

    Args:
        age: how long ago it was recorded, in words.
    """
    parts = [
        _head(view, age),
        _moved(view),
        _rules(view),
        _benchmark(view),
        _sides(view),
        _bake(view),
        _served(view),
        _load(view),
        _timeline(view),
        _change(view),
        _provenance(view),
    ]
    return [block for part in parts for block in part]


def _head(view: ReportView, age: str) -> list[Block]:
    verdict, source = view.gate.verdict.value, view.manifest["source"]
    failed = [rule for rule in view.gate.rules if not rule.verdict.advances]
    said = (
        "every rule passed"
        if not failed
        else f"{len(failed)} of {len(view.gate.rules)} rules did not pass: {', '.join(r.label for r in failed)}"
    )
    tree = tree_words(source)
    recorded = f"{str(view.manifest['recorded_at']).replace('T', ' ')[:16]} UTC" + (f" ({age} ago)" if age else "")
    state = view.review if view.approvals or view.gate.verdict.advances else ""  # only what passed waits for anybody
    return [
        line(f"{verdict}  {view.title}" + (f"  {state}" if state else ""), COLOURS.get(verdict, ""), bold=True),
        line(f"  {said}"),
        *([line(f"  {told}")] if (told := served.headline(view.results.facts)) else []),
        line(f"  kernel {view.kernel}, commit {(source.get('commit') or 'none')[:12]}{tree}"),
        line(f"  by {view.manifest['author']}, {recorded}, run {view.manifest.get('run')}"),
        line(f"  digest {view.digest[:16]}"),
        *(line(f"  stands on an override: {words}", "yellow") for words in view.overrides),
        *(
            line(f"  {row.decision}: {row.person}, {row.at.replace('T', ' ')[:16]}: {row.reason}")
            for row in view.approvals
        ),
    ]


def _moved(view: ReportView) -> list[Block]:
    """Above the rules, since it says what they were before: what is looser, what was tried in between, the playbook's diff."""
    change = view.change
    lines = [line(f"  {move}", "" if move.looser is False else "yellow") for move in change.moves] if change else []
    lines += [line(f"  {text}", "yellow" if number == 0 else "") for number, text in enumerate(view.attempts)]
    if change and change.playbook:
        lines += [line("  the playbook:"), *(line(f"    {text}") for text in change.playbook.splitlines())]
    if not lines and change is None:
        return []
    since = f"since {change.against}, the last approved" if change else "before this one; nothing is approved yet"
    return [*_title(f"What moved {since}"), *(lines or [line("  no rule, no case, nothing tried in between")])]


def _title(text: str) -> list[Block]:
    return [line(""), line(text, bold=True)]


def _rules(view: ReportView) -> list[Block]:
    rows = tuple(
        (
            rule.verdict.value,
            rule.label,
            _number(rule.estimate),
            _interval(rule.low, rule.high),
            str(rule.n),
            _number(rule.threshold),
            rule.unit,
        )
        for rule in view.gate.rules
    )
    reasons = [
        line(f"  {rule.label}: {rule.reason} ({rule.source})" if rule.source else f"  {rule.label}: {rule.reason}")
        for rule in view.gate.rules
    ]
    failed = [line(f"    {text}") for rule in view.gate.rules for text in rule.detail.get("failed", [])]
    return [*_title("Rules"), Block(_RULE_COLUMNS, rows), *reasons, *failed]


def _timed(records: Iterable[BenchmarkRecord]) -> list[BenchmarkRecord]:
    return [record for record in records if record.samples and record.parity_after]


def _benchmark(view: ReportView) -> list[Block]:
    """Medians, speedup over the baseline of the same case, share of the floor."""
    timed = _timed(view.results.benchmark)
    if not timed:
        return []
    baseline = {record.case.key: record for record in timed if record.role == "baseline"}
    rows = []
    for record in timed:
        base, floor = baseline.get(record.case.key), ""
        if record.roofline_seconds and record.median:
            floor = f"{record.roofline_seconds / record.median:.0%}"
        faster = ("", "")
        if base and base is not record:
            ratio = ratio_interval(base.samples, record.samples)
            faster = (f"{ratio.estimate:.3g}x", _interval(ratio.low, ratio.high))
        rows.append(
            (
                record.case.key,
                record.variant,
                record.role,
                figures((record.median or 0) * 1e6),
                str(len(record.samples)),
                *faster,
                floor,
            )
        )
    return [
        *_title("Benchmark"),
        Block(("case", "variant", "role", "median µs", "n", "speedup", "99 % interval", "of floor"), tuple(rows)),
    ]


def _sides(view: ReportView) -> list[Block]:
    rows = tuple(ratio.row() for ratio in side_by_side.ratios(view))
    return [*_title(side_by_side.TITLE), Block(side_by_side.COLUMNS, rows)] if rows else []


def _bake(view: ReportView) -> list[Block]:
    """Canary against control: where each test stood at its last look, and when it had decided."""
    lines = []
    for test in view.results.facts.get("sequential", []):
        if not test["looks"]:
            continue
        equal = 1.0 if test.get("unit", "ratio") == "ratio" else 0.0
        at, estimate, low, high = test["looks"][-1][:4]
        decided = (
            f"decided {test['verdict']} at {test['decided_at']:.0f} s"
            if test.get("decided_at") is not None
            else "never decided"
        )
        limit = test["margin"] + equal
        numbers = f"  {test['name']}: {decided}; at {at:.0f} s {_number(estimate)}, {_interval(low, high)}, limit {_number(limit)}, {len(test['looks'])} looks"
        lines += [line(numbers), line(f"    {strip(estimate, low, high, limit, equal)}")]
    key = line("  ● estimate, ─ interval, ┼ no difference, │ limit; ◂ and ▸: it goes on")
    return [*_title("Canary against control"), *lines, key] if lines else []


def _served(view: ReportView) -> list[Block]:
    arms = view.results.facts.get("served")
    if not arms:
        return []
    said = [line(f"  {sentence}") for sentence in served.sentences(arms)]
    return [*_title(served.TITLE), Block(served.COLUMNS, tuple(served.rows(arms))), *said]


def _load(view: ReportView) -> list[Block]:
    columns, rows = view.load_table
    return [*_title("Own load through the router"), Block(columns, tuple(rows))] if rows else []


def _timeline(view: ReportView) -> list[Block]:
    events = view.results.facts.get("timeline", [])
    if len(events) <= timeline.MOST:
        return [*_title(view.going_back), Block(timeline.COLUMNS, tuple(timeline.rows(events)))] if events else []
    kinds = Block(timeline.KIND_COLUMNS, tuple(kind.row() for kind in timeline.kinds(events)))
    return [*_title(view.going_back), kinds, line(f"  {len(events)} events, each in results.json and on the page")]


def _change(view: ReportView) -> list[Block]:
    change = view.change
    if change is None:
        return [
            *_title("Since the last approved checkpoint"),
            line("  no earlier checkpoint of this phase is approved"),
        ]
    source = [line(f"  {text}") for text in change.source.splitlines()]
    if change.environment:
        shown = change.environment[:SHOWN_FACTS]
        environment = [
            Block(("fact", "then", "now"), tuple(shown)),
            *_more(len(change.environment) - len(shown), "facts"),
        ]
    else:
        environment = [line("  the environment is the same")]
    return [
        *_title(f"Since {change.against}, the last approved"),
        *source,
        *environment,
        *_benchmark_change(view, change),
    ]


def _benchmark_change(view: ReportView, change: Change) -> list[Block]:
    old = {(record.case.key, record.variant): record for record in change.benchmark.benchmark if record.samples}
    rows = []
    for record in _timed(view.results.benchmark):
        before = old.get((record.case.key, record.variant))
        if before:
            ratio = ratio_interval(record.samples, before.samples)
            rows.append((record.case.key, record.variant, f"{ratio.estimate:.3f}", _interval(ratio.low, ratio.high)))
    return [Block(("case", "variant", "time now / then", "99 % interval"), tuple(rows))] if rows else []


def _provenance(view: ReportView) -> list[Block]:
    facts = list(_flat(view.manifest.get("facts", {})))
    shown = [line(f"  {name}: {value}") for name, value in facts[:SHOWN_FACTS]]
    kept = view.manifest.get("files", {})
    size = sum(row["bytes"] for row in kept.values())
    files = line(
        f"  {len(kept)} files, {size >> 10} KiB, each with its sha256 in manifest.json; `phase checkpoint verify` proves them"
    )
    return [
        *_title("Provenance"),
        line(f"  playbook: {view.manifest.get('playbook')}"),
        *shown,
        *_more(len(facts) - len(shown), "facts in manifest.json"),
        files,
    ]


def _more(count: int, what: str) -> list[Block]:
    return [line(f"  and {count} more {what}")] if count > 0 else []


def _flat(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Facts as lines: dotted name and value, long lists shortened."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _flat(value[key], f"{path}.{key}" if path else str(key))
        return
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    yield path, text if len(text) <= 96 else f"{text[:95]}…"


def _number(value: float | None) -> str:
    return "-" if value is None else figures(value)


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None and high is None else f"{_number(low)} … {_number(high)}"
