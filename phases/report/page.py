"""A checkpoint as one HTML file: verdict first, then each rule with its numbers, then what they rest on.

The page loads nothing: style and charts are inline, there is no script, and its own policy forbids the rest.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

from phases.base.verdict import severity
from phases.gate.outcome import RuleOutcome
from phases.report import charts, sections, served
from phases.report.charts import Point
from phases.report.markup import definitions, folded, interval, number, pre, section, table, text
from phases.report.side_by_side import side_by_side
from phases.report.view import ReportView, tree_words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(view: ReportView) -> str:
    """The whole page."""
    style = files("phases.report").joinpath("report.css").read_text(encoding="utf-8")
    made = [
        sections.moved(view),
        _rules(view),
        sections.benchmark(view),
        side_by_side(view),
        sections.bake(view),
        sections.served(view),
        sections.load(view),
        sections.timeline(view),
        sections.change(view),
        _tables(view),
        _origin(view),
    ]
    shown = [part for part in made if part]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        f"<title>{text(view.title)}: {text(view.kernel)}</title><style>{style}</style></head>\n"
        f'<body><a class="skip" href="#rules">Skip to the rules</a>\n{_head(view)}\n{_contents(shown)}\n<main>\n'
        + "\n".join(shown)
        + f"\n</main>\n<footer>{text(' '.join(filter(None, ('phasegate', view.manifest.get('facts', {}).get('toolkit')))))}: this page loads nothing and runs no script.</footer></body></html>\n"
    )


def _contents(made: list[str]) -> str:
    """Links to the sections there are."""
    found = [match for part in made if (match := re.match(r'<section id="([\w-]+)"[^>]*><h2[^>]*>(.*?)</h2>', part))]
    links = "".join(f'<li><a href="#{match[1]}">{match[2]}</a></li>' for match in found)
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _head(view: ReportView) -> str:
    verdict = view.gate.verdict.value
    failed = [rule for rule in view.gate.rules if not rule.verdict.advances]
    said = (
        "every rule passed"
        if not failed
        else f"{len(failed)} of {len(view.gate.rules)} rules did not pass: {', '.join(r.label for r in failed)}"
    )
    source = view.manifest["source"]
    commit = (source.get("commit") or "none") + tree_words(source)
    decisions = "".join(
        f'<p class="decision">{text(a.decision)}: {text(a.person)}, {text(a.at)}: {text(a.reason)}</p>'
        for a in view.approvals
    )
    facts = [
        ("kernel", view.kernel),
        ("phase", view.phase),
        ("recorded", view.manifest["recorded_at"]),
        ("by", view.manifest["author"]),
        ("source", commit),
        ("playbook", view.manifest.get("playbook")),
        ("digest", view.digest),
    ]
    decisions = (
        "".join(f'<p class="decision">stands on an override: {text(words)}</p>' for words in view.overrides) + decisions
    )
    review = f"<span>{text(view.review)}</span>" if view.review else ""
    headline = f'<p class="headline">{text(told)}</p>' if (told := served.headline(view.results.facts)) else ""
    why = "".join(f"<p>{text(f'{end.stage}: {end.reason}')}</p>" for end in view.results.ends if end.reason)
    return (
        f'<header><h1>{text(view.title)}</h1><p class="verdict {verdict}"><strong>{verdict}</strong><span>{text(said)}</span>{review}</p>'
        f"{headline}{why}{_to_decide(view)}{decisions}{definitions(facts)}</header>"
    )


def _to_decide(view: ReportView) -> str:
    """The two commands, where a person is waited for; a checkpoint's own page does not know its digest."""
    if not view.digest or view.approvals or not view.gate.verdict.advances or not view.review:
        return ""
    number = view.title.partition("-")[0].lstrip("0")
    return "".join(
        f'<p><code>phase gate {verb} {text(number)} --digest {text(view.digest[:16])} --reason "…"</code></p>'
        for verb in ("approve", "reject")
    )


def _rules(view: ReportView) -> str:
    """An overview, then one card a rule; what did not pass comes first."""
    ordered = sorted(view.gate.rules, key=lambda rule: -severity(rule.verdict))
    rows = [
        (
            r.label,
            r.verdict.value,
            f"{number(r.estimate)} {r.unit}".strip(),
            interval(r.low, r.high),
            number(r.threshold),
            r.n,
        )
        for r in ordered
    ]
    overview = table(
        ("rule", "verdict", "estimate", "interval", "threshold", "n"), rows, "rules at a glance", numbers=(5,)
    )
    return section("rules", "Rules", overview + "".join(map(_rule, ordered)))


def _rule(rule: RuleOutcome) -> str:
    strip = ""
    if rule.estimate is not None:
        label = f"{rule.label}: estimate {number(rule.estimate)}, interval {interval(rule.low, rule.high)}, threshold {number(rule.threshold)} {rule.unit}".strip()
        strip = charts.interval_strip(Point(rule.estimate, rule.low, rule.high), rule.threshold, label)
    facts = [
        ("estimate", f"{number(rule.estimate)} {rule.unit}".strip()),
        ("interval", interval(rule.low, rule.high)),
        ("threshold", number(rule.threshold)),
        ("n", rule.n),
        ("source", rule.source),
    ]
    failed = "".join(f"<li><code>{text(line)}</code></li>" for line in rule.detail.get("failed", []))
    return (
        f'<article class="rule"><h3>{text(rule.label)} <span class="badge {rule.verdict.value}">{rule.verdict.value}</span></h3>'
        f"<p>{text(rule.reason)}</p>{strip}{definitions(facts, 'facts')}{f'<ul>{failed}</ul>' if failed else ''}</article>"
    )


def _tables(view: ReportView) -> str:
    parts = [folded(name, pre(content, name)) for name, content in view.tables.items()]
    return section("tables", "Tables and logs", "".join(parts)) if parts else ""


def _origin(view: ReportView) -> str:
    facts = json.dumps(view.manifest.get("facts", {}), indent=2, sort_keys=True, ensure_ascii=False)
    rows = [(path, row["bytes"], row["sha256"]) for path, row in view.manifest.get("files", {}).items()]
    build = view.provenance.get("predicate", {}).get("buildDefinition", {})
    inputs = "".join(f"<li>{_made_from(row)}</li>" for row in build.get("resolvedDependencies", []))
    content = definitions([("run", view.manifest.get("run")), ("build type", build.get("buildType"))])
    content += f"<h3>Made from</h3><ul>{inputs}</ul>" if inputs else ""
    content += folded("Toolchain and machine", pre(facts, "toolchain and machine")) + folded(
        "Files and their sha256", table(("file", "bytes", "sha256"), rows, "files", (1,))
    )
    return section("provenance", "Provenance", content)


def _made_from(row: dict[str, Any]) -> str:
    """One dependency of the provenance statement: its name or address, and its digests."""
    digests = ", ".join(f"{kind} {value}" for kind, value in row.get("digest", {}).items())
    return f"{text(row.get('uri') or row.get('name') or 'unnamed')} <code>{text(digests)}</code>"
