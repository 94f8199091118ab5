"""The review in a terminal: the same content as the page, verdict first, and nothing in it that a terminal obeys."""

from __future__ import annotations

import dataclasses

import click

from phases.base.verdict import Verdict
from phases.cli.common import show_blocks
from phases.ledger.checkpoint import Approval
from phases.report.page import render
from phases.report.review_text import SHOWN_FACTS, review_blocks
from tests.report.test_page import view


def _text(capsys, shown, **more):
    show_blocks(review_blocks(shown, **more))
    return capsys.readouterr().out


def test_the_verdict_comes_first_then_what_it_rests_on(capsys):
    text = _text(capsys, view(), age="3 h")
    first = text.splitlines()[0]
    assert first.startswith("FAIL  0003-build-parity-FAIL")
    titles = [
        "\nRules\n",
        "\nBenchmark\n",
        "\nCanary against control\n",
        "\nRollback timeline\n",
        "\nSince 0001-build-parity-PASS",
        "\nProvenance\n",
    ]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    for words in (
        "1 of 2 rules did not pass: plain",
        "commit abababababab with uncommitted changes",
        "2026-01-01 00:00 UTC (3 h ago)",
        "digest ffffffffffffffff",
        "0.96 … -",
        "decided FAIL at 80 s",
        "traffic safe",
        "detected",
        "5x",
        "10%",
        "torch",
        "2.13",
        "cpu: plain",
    ):
        assert words in text, words


def test_it_says_what_the_page_says(capsys):
    """Every number of the rules and every part the page has is in the text too."""
    shown = view()
    page, text = render(shown), _text(capsys, shown)
    for rule in shown.gate.rules:
        for value in (rule.estimate, rule.low, rule.threshold, rule.n):
            assert f"{value:.4g}" in page and f"{value:.4g}" in text
        assert rule.reason in page and rule.reason in text and rule.source in text


def test_what_requests_met_in_each_step_is_in_both(capsys):
    shares = [
        {"during": "wave 1", "sent": 107, "failed": 0, "retried": 2, "late": 1, "failures": []},
        {"during": "soak", "sent": 55, "failed": 3, "retried": None, "late": 0, "failures": []},
    ]
    shown = view()
    shown = dataclasses.replace(
        shown, results=dataclasses.replace(shown.results, facts={**shown.results.facts, "load": shares})
    )
    page, text = render(shown), _text(capsys, shown)
    for words in ("Own load through the router", "repeated by the router", "wave 1", "107", "unknown"):
        assert words in page and words in text, words


def test_a_canary_that_passed_goes_back_as_planned(capsys):
    assert "Rollback timeline" in _text(capsys, dataclasses.replace(view(Verdict.FAIL), phase="tp8-canary"))
    passed = _text(capsys, dataclasses.replace(view(Verdict.PASS), phase="tp8-canary"))
    assert "Going back to the incumbent, as planned" in passed and "Rollback" not in passed


def test_who_decided_what(capsys):
    decided = Approval(3, "f" * 64, "reject", "Ada <ada@example.org>", "slower at q65", "2026-01-02T03:04:05Z")
    text = _text(capsys, dataclasses.replace(view(), approvals=(decided,), review="rejected"))
    assert (
        text.splitlines()[0].endswith("rejected")
        and "reject: Ada <ada@example.org>, 2026-01-02 03:04: slower at q65" in text
    )


def test_only_what_passed_waits_for_anybody(capsys):
    waiting = "waiting for review"
    assert waiting in _text(capsys, dataclasses.replace(view(Verdict.PASS), review=waiting)).splitlines()[0]
    assert waiting not in _text(capsys, dataclasses.replace(view(Verdict.INCONCLUSIVE), review=waiting))


def test_nothing_before_it_and_much_after_it(capsys):
    bare = view()
    many = {f"fact{n:03}": n for n in range(SHOWN_FACTS + 7)}
    bare = dataclasses.replace(
        bare,
        change=None,
        manifest={**bare.manifest, "facts": many},
        results=dataclasses.replace(bare.results, benchmark=(), facts={}),
    )
    text = _text(capsys, bare)
    assert "no earlier checkpoint of this phase is approved" in text and "and 7 more facts" in text
    assert "Benchmark" not in text and "Rollback" not in text and "Canary" not in text


def test_a_terminal_is_not_given_orders(capsys):
    text = _text(capsys, view(text="red\x1b[31m\x07 title\x1b]0;x"))
    assert "\x1b" not in click.unstyle(text) and "\x07" not in text and "red\N{REPLACEMENT CHARACTER}[31m" in text


def test_thousands_of_events_are_told_by_kind(capsys):
    shown = view()
    events = [{"at": float(n), "event": "restored", "host": f"host-{n}", "note": ""} for n in range(3000)]
    text = _text(
        capsys, dataclasses.replace(shown, results=dataclasses.replace(shown.results, facts={"timeline": events}))
    )
    assert ["restored", "3000", "0.0", "s", "2999.0", "s"] in [line.split() for line in text.splitlines()]
    assert "3000 events, each in results.json and on the page" in text and "host-7" not in text
