"""The review page: whole, safe, and in the order a reviewer needs."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from phases.base.errors import UsageError
from phases.base.results import BenchmarkRecord, Case, Measurement, Results
from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger import checkpoint as cp
from phases.report import timeline
from phases.report.anchors import Anchor
from phases.report.page import render
from phases.report.view import Change, ReportView, _view, tree_words, with_anchors

EVIL = "<script>alert('x')</script>\"&"


def view(verdict: Verdict = Verdict.FAIL, text: str = "plain") -> ReportView:
    case = Case(f"q9/{text}/s1", "float32", {"heads": 64, "prefix": 1024})
    slow, fast = (tuple(base * (1 + 0.01 * (i % 5)) for i in range(30)) for base in (5e-3, 1e-3))
    records = (
        BenchmarkRecord(case, "naive", "baseline", "cpu", slow, parity_after=True, roofline_seconds=5e-4),
        BenchmarkRecord(case, text, "candidate", "cpu", fast, parity_after=True, roofline_seconds=5e-4),
    )
    looks = [[10.0 * n, 1.1, None if n < 3 else 0.9, None if n < 3 else 1.2] for n in range(1, 9)]
    facts = {
        "sequential": [
            {
                "name": f"ttft {text}",
                "unit": "ratio",
                "margin": 0.05,
                "looks": looks,
                "decided_at": 80.0,
                "verdict": "FAIL",
            }
        ],
        "timeline": [
            {"at": 0.0, "event": "detected", "host": text, "note": text},
            {"at": 3.2, "event": "traffic safe", "host": "", "note": ""},
        ],
    }
    results = Results("build-parity", text, benchmark=records, facts=facts)
    rules = (
        RuleOutcome("parity", Verdict.PASS, text, 0.4, 0.4, 0.4, 12, 1.0, "of the tolerance", text),
        RuleOutcome(
            "measurement", verdict, text, 0.99, 0.96, None, 44, 0.98, "", text, {"metric": text, "failed": [text]}
        ),
    )
    manifest = {
        "phase": "build-parity",
        "kernel": text,
        "recorded_at": "2026-01-01T00:00:00Z",
        "author": text,
        "source": {"commit": "ab" * 20, "dirty": True},
        "playbook": text,
        "facts": {"cpu": text},
        "files": {text: {"bytes": 3, "sha256": "0" * 64}},
        "run": text,
    }
    change = Change("0001-build-parity-PASS", text, (("torch", text, "2.13"),), results)
    return ReportView(
        "0003-build-parity-FAIL",
        "build-parity",
        text,
        GateOutcome("build-parity", rules),
        results,
        manifest,
        {"benchmark.txt": text},
        "f" * 64,
        text,
        (),
        change,
    )


class Tags(HTMLParser):
    """Which tags there are, and which are left open."""

    void = {"meta", "line", "circle", "path", "use", "rect"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_the_verdict_comes_first_then_the_rules_then_what_they_rest_on() -> None:
    page = render(view())
    places = [
        page.index(word)
        for word in (
            'class="verdict FAIL"',
            *(f'<section id="{name}"' for name in ("rules", "benchmark", "bake", "rollback", "change", "provenance")),
        )
    ]
    assert places == sorted(places)
    assert "1 of 2 rules did not pass: plain" in page
    assert "decided FAIL at 80 s" in page and "traffic safe" in page


def test_everything_foreign_is_escaped() -> None:
    page = render(view(text=EVIL))
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not [tag for tag, _ in Tags(page).seen if tag in ("script", "iframe", "object", "img")]


@pytest.mark.filterwarnings("error")
def test_names_are_no_formulas_no_escapes_and_no_orders() -> None:
    page = render(view(text="$\\bad{$ \\x \\1 \x1b[2J\x07\x00\x9b"))
    assert "$\\bad{$ \\x \\1 \ufffd[2J\ufffd\ufffd\ufffd" in page
    assert not [char for char in page if not char.isprintable() and char != "\n"]


def test_tags_are_balanced_and_nothing_is_loaded() -> None:
    page = render(view())
    tags = Tags(page)
    assert tags.open == []
    loads = [
        value
        for _, attrs in tags.seen
        for key, value in attrs.items()
        if key in ("src", "href", "xlink:href") and not (value or "").startswith("#")
    ]
    assert loads == []
    assert not re.search(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in next(
        attrs["content"] for tag, attrs in tags.seen if attrs.get("http-equiv") == "Content-Security-Policy"
    )


def test_a_screen_reader_gets_every_chart_in_words() -> None:
    charts = [attrs for tag, attrs in Tags(render(view())).seen if tag == "svg"]
    assert len(charts) >= 5
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in charts)


def test_the_same_view_gives_the_same_bytes() -> None:
    assert render(view()) == render(view())


def test_what_did_not_pass_is_met_first() -> None:
    page = render(view())
    assert page.index("<h3>plain <span") < page.index("<h3>parity <span")


def test_every_chart_comes_with_its_numbers() -> None:
    page = render(view())
    for summary in ("Numbers", "All medians", "Every look"):
        assert f"<summary>{summary}</summary>" in page
    assert ">10 s</th>" in page and ">80 s</th>" in page  # each look of the bake


def test_the_incumbent_and_recorded_kernels_stand_beside_the_baseline() -> None:
    one = view()
    base, fast = one.results.benchmark
    incumbent = dataclasses.replace(base, variant="prod", role="incumbent", samples=tuple(s / 2 for s in base.samples))
    results = dataclasses.replace(one.results, benchmark=(base, incumbent, fast))
    page = render(
        dataclasses.replace(
            one,
            results=results,
            anchors=(Anchor(base.case.key, "rival", 2e-3, True), Anchor("another case", "rival", 1.0, True)),
        )
    )
    assert "Times faster than the baseline, naive" in page and "Times faster than the incumbent, prod" in page
    assert page.count("rival") >= 4 and "another case" not in page


def test_a_file_of_anchors_is_read_or_refused(tmp_path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(
        '{"about": "elsewhere", "rows": [{"case": "k", "microseconds": {"rival": 3}}, {"shape": "no case"}]}'
    )
    bad.write_text('{"rows": [{"case": "k", "microseconds": {"rival": -3}}]}')
    read = with_anchors(view(), good)
    assert read.anchors == (Anchor("k", "rival", 3e-6, True),) and read.anchors_about == "elsewhere"
    with pytest.raises(UsageError, match="bad.json"):
        with_anchors(view(), bad)
    with pytest.raises(UsageError, match="is a device"):
        with_anchors(view(), Path("/dev/zero"))


def test_a_slower_benchmark_and_a_changed_measurement_are_called() -> None:
    one = view()
    slower = dataclasses.replace(
        one.results,
        benchmark=tuple(dataclasses.replace(r, samples=tuple(s * 3 for s in r.samples)) for r in one.results.benchmark),
        measurements=(Measurement("accept_length", 3.2, 3.0, 3.4, 50),),
    )
    page = render(dataclasses.replace(one, results=slower))
    assert page.count("<td>slower</td>") == 2 and "accept_length" in page and "absent" in page


def test_recorded_kernels_kept_in_the_results_are_on_the_page() -> None:
    one = view()
    key = one.results.benchmark[0].case.key
    fact = {"about": "elsewhere", "recorded": True, "rows": [{"case": key, "microseconds": {"rival": 2000.0}}]}
    files = {
        cp.GATE: cp.canonical_json(one.gate.to_json()),
        cp.RESULTS: cp.canonical_json(dataclasses.replace(one.results, facts={"anchors": fact}).to_json()),
    }
    made = _view("1", files, {**one.manifest, "kernel": "k", "phase": "build-parity"})
    assert made.anchors == (Anchor(key, "rival", 2e-3, True),) and "elsewhere" in render(made)


def _with_events(events: list[dict[str, object]]) -> ReportView:
    one = view()
    return dataclasses.replace(one, results=dataclasses.replace(one.results, facts={"timeline": events}))


def test_a_rollback_of_a_large_fleet_is_drawn_by_kind_and_loses_no_event() -> None:
    events = [
        {"at": float(n), "event": ("out of service", "restored")[n % 2], "host": f"host-{n:04d}", "note": f"note {n}"}
        for n in range(3000)
    ]
    page = render(_with_events(events))
    chart = next(
        attrs["aria-label"]
        for tag, attrs in Tags(page).seen
        if tag == "svg" and "timeline" in (attrs["aria-label"] or "")
    )
    assert chart == "rollback timeline: out of service ×1500 after 2998.0 s; restored ×1500 after 2999.0 s"
    assert "<summary>All 3000 events</summary>" in page
    assert [n for n in range(3000) if page.count(f"<td>host-{n:04d}</td><td>note {n}</td>") != 1] == []


def test_events_of_countless_kinds_are_gathered_and_all_are_counted() -> None:
    events = [{"at": float(n), "event": f"event {n}", "host": "", "note": ""} for n in range(100)]
    found = timeline.kinds(events)
    assert len(found) == timeline.MOST and sum(kind.times for kind in found) == 100
    assert found[-1] == timeline.Kind("61 other kinds", 61, 39.0, 99.0)
    assert page_rows(render(_with_events(events)), "rollback timeline") == 100


def page_rows(page: str, caption: str) -> int:
    """Rows in the body of the table with this caption."""
    return page.split(f'aria-label="{caption}"', 1)[1].split("</table>", 1)[0].count("<tr>") - 1


def test_what_changed_is_named_in_words_and_digests_are_short():
    from phases.report.view import _environment_change

    old, new = (
        {"facts": {"section_digest": digit * 64, "torch": "2.13.0", "threads": threads}}
        for digit, threads in (("a", 2), ("b", 4))
    )
    assert _environment_change(old, new) == (
        ("this phase's section of the playbook", "a" * 16 + "…", "b" * 16 + "…"),
        ("threads", "2", "4"),
    )


def test_a_page_that_waits_for_a_person_has_both_commands_and_one_that_does_not_has_none() -> None:
    waiting = dataclasses.replace(
        view(Verdict.PASS), title="0012-build-parity-PASS", digest="ab" * 32, review="waiting for review"
    )
    page = render(waiting)
    for verb in ("approve", "reject"):
        assert f"phase gate {verb} 12 --digest {'ab' * 8}" in page.replace("&quot;", '"')
    for other in (
        dataclasses.replace(waiting, gate=view().gate),
        dataclasses.replace(waiting, review=""),
        dataclasses.replace(waiting, digest=""),
    ):
        assert "phase gate approve" not in render(other)


def test_a_tree_that_was_not_the_commits_is_described() -> None:
    assert tree_words({"dirty": False}) == ""
    assert tree_words({"dirty": True}) == " with uncommitted changes (the run had no --allow-dirty)"
    assert tree_words({"dirty": True, "allow_dirty": True}) == " with uncommitted changes (--allow-dirty)"
    assert tree_words({"dirty": False, "converted": {"run.bat": "ab"}, "left_out": 3}) == (
        ", 1 files as that clone's filters or line ends wrote them (run.bat), 3 files left out by a sparse checkout"
    )
