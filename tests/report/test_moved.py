"""What moved since the last approval stands on top, and what became looser is marked, in terminal, page, JSON and `checkpoint diff`."""

from __future__ import annotations

import dataclasses

import pytest

from phases.base.results import Case, ParityRecord, Results
from phases.base.verdict import Verdict
from phases.cli.common import show_blocks
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.ledger.checkpoint import Checkpoint
from phases.report.moved import Move, attempts, moves, playbook_diff
from phases.report.page import render
from phases.report.review_text import review_blocks
from tests.report.test_page import view


def _side(*rules, cases=()):
    parity = tuple(ParityRecord(Case(case, "float32"), "mine", "cpu", True) for case in cases)
    return GateOutcome("build-parity", rules), Results("build-parity", "k", parity=parity)


def _rule(kind, threshold, reason="", **detail):
    return RuleOutcome(kind, Verdict.PASS, reason, threshold=threshold, detail=detail)


def _said(before, after):
    return [str(move) for move in moves(before, after)]


def test_a_looser_threshold_and_a_dropped_case_are_told_first():
    speedup = lambda at_least: _rule("speedup", at_least, candidate="cpu/torch_gemm")  # noqa: E731
    before = _side(speedup(1.01), cases=("3x7168", "1x64"))
    after = _side(speedup(0.5), cases=("1x64", "9x9"))
    assert _said(before, after) == [
        "- parity 3x7168/float32 (looser)",
        "~ speedup cpu/torch_gemm at_least 1.01 → 0.5 (looser)",
        "+ parity 9x9/float32",
    ]
    assert _said(after, before)[1:] == ["~ speedup cpu/torch_gemm at_least 0.5 → 1.01", "+ parity 3x7168/float32"]
    assert _said(before, before) == []


@pytest.mark.parametrize(
    ("rule", "then", "now", "looser"),
    [
        (_rule("measurement", 0, metric="m", bound="at_most"), 1.05, 1.10, True),
        (_rule("measurement", 0, metric="m", bound="at_most"), 1.10, 1.05, False),
        (_rule("measurement", 0, metric="m", bound="at_least"), 0.9, 0.8, True),
        (_rule("measurement", 0, "upper bound 1 is within 2", metric="m"), 1.05, 1.10, True),
        (_rule("measurement", 0, "lower bound 1 reaches 0.5", metric="m"), 0.9, 1.0, False),
        (_rule("measurement", 0, "interval 1 to 2 includes 1.5", metric="m"), 1.0, 1.1, None),
        (_rule("speedup", 0), 1.5, None, True),
    ],
)
def test_which_way_is_looser(rule, then, now, looser):
    before, after = (_side(dataclasses.replace(rule, threshold=threshold)) for threshold in (then, now))
    (move,) = moves(before, after)
    assert move.sign == "~" and move.looser is looser


def test_a_rule_that_went_and_a_variant_that_is_refused_now_are_looser():
    before, after = _side(_rule("parity", 1.0), _rule("build", None), cases=("a",)), _side(_rule("parity", 1.0))
    assert _said(before, after) == ["- rule build (looser)", "- parity a/float32 (looser)"]
    record = before[1].parity[0]
    other = dataclasses.replace(record, variant="other")
    both = before[0], dataclasses.replace(before[1], parity=(record, other))
    refused = before[0], dataclasses.replace(both[1], parity=(record, dataclasses.replace(other, refused="no")))
    assert _said(both, refused) == ["- parity a/float32 of other (looser)"]


def _checkpoint(number, verdict, commit, **facts):
    manifest = {"source": {"commit": commit}, "facts": facts, "playbook": "p"}
    return Checkpoint(number, "build-parity", verdict, "d", "c", f"x/{number:04d}", manifest)


def test_attempts_in_between_with_what_changed_from_each_to_the_next():
    earlier = [
        _checkpoint(2, Verdict.INCONCLUSIVE, "a" * 40, section_digest="1"),
        _checkpoint(3, Verdict.FAIL, "a" * 40, section_digest="1"),
        _checkpoint(4, Verdict.FAIL, "b" * 40, section_digest="1"),
    ]
    now = _checkpoint(5, Verdict.PASS, "b" * 40, section_digest="2").manifest
    head, *steps = attempts(earlier, now)
    assert head == "attempts before this one: INCONCLUSIVE, FAIL, FAIL (0002, 0003, 0004)"
    assert steps == [
        "0002 → 0003: nothing changed: the same was tried again",
        "0003 → 0004: commit aaaaaaaaaa → bbbbbbbbbb",
        "0004 → this one: this phase's section of the playbook",
    ]
    assert attempts([], now) == ()


def test_the_playbooks_diff_is_a_diff_and_absent_where_one_was_not_kept():
    diff = playbook_diff(b"a: 1\nat_least: 1.01\n", b"a: 1\nat_least: 0.5\n")
    assert "-at_least: 1.01" in diff and "+at_least: 0.5" in diff
    assert playbook_diff(None, b"x") == playbook_diff(b"x", b"x") == ""


def test_review_and_page_show_it_above_the_rules_and_as_text(capsys):
    shown = view()
    change = dataclasses.replace(
        shown.change, moves=(Move("~", "speedup <b>x</b> at_least 1.01 → 0.5", True),), playbook="-<i>\n+b"
    )
    shown = dataclasses.replace(shown, change=change, attempts=("attempt before this one: FAIL (0002)",))
    show_blocks(review_blocks(shown))
    text, page = capsys.readouterr().out, render(shown)
    for words in ("at_least 1.01 → 0.5 (looser)", "attempt before this one: FAIL (0002)"):
        assert 0 < text.index(words) < text.index("\nRules\n")
        assert 0 < page.index(words) < page.index('<section id="rules"')
    assert "+b" in text and "&lt;i&gt;" in page and "<b>x" not in page
