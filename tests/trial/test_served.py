"""What both arms served, in absolute numbers: in the trial's end, and in every report of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from phases.base.results import Results, StageEnd
from phases.base.verdict import Verdict
from phases.fleet.report import table
from phases.report import served
from phases.serving.activity import identity
from phases.trial.end import TrialEnd
from tests.production.test_bake import SimulatedProbes, SimulatedTime, probed


def ended(slowdown: float) -> TrialEnd:
    clock = SimulatedTime()
    return probed(clock, SimulatedProbes(clock, slowdown=slowdown))


def facts(end: TrialEnd) -> dict[str, object]:
    about = {"model": "kimi", "sglang": "0.5.23", "gpu": "H200"}
    rows = [dataclasses.replace(arm, server=about).to_json() for arm in end.served]
    return json.loads(json.dumps({"sequential": end.facts(), "served": rows}))


@pytest.mark.parametrize("slowdown", [1.0, 1.8])
def test_each_arm_has_its_own_numbers_rates_and_lengths(slowdown: float) -> None:
    end = ended(slowdown)
    canary, control = end.served
    assert (canary.arm, control.arm) == ("canary", "control")
    assert canary.requests == end.requests["canary"] and canary.seconds == end.seconds
    own = {arm.arm: {(v.metric, v.quantile): v for v in arm.levels if v.kind == "own requests"} for arm in end.served}
    ratio = own["canary"]["e2e", 0.5].low / own["control"]["e2e", 0.5].low
    assert ratio == pytest.approx(slowdown, rel=0.15)
    histogram = [level for level in canary.levels if not level.kind]
    assert histogram and all(level.low < level.high and level.n for level in histogram)


def test_terminal_page_and_text_tell_the_same() -> None:
    found = facts(ended(1.0))
    said = table(Results("tp8-canary", "k", ends=(StageEnd("bake", Verdict.PASS, "well"),), facts=found))
    for row in served.rows(found["served"]):
        assert all(cell in said for cell in row[2:5])
    for sentence in served.sentences(found["served"]):
        assert (
            sentence in said and "gpu H200, model kimi, sglang 0.5.23" in sentence and "users' requests/s" in sentence
        )
    headline = served.headline(found)
    assert (
        headline.count(" s c") == 2 and "ratio at least" in headline and "at most" in headline and "limit" in headline
    )


def test_a_canary_of_an_older_toolkit_has_no_headline_and_no_table() -> None:
    old = {"sequential": [{"name": "e2e p50", "unit": "ratio", "margin": 0.1, "looks": [[1, 1, 1, 1]]}]}
    assert served.headline(old) == "" and "absolute" not in table(Results("tp8-canary", "k", facts=old))


@pytest.mark.parametrize(
    ("info", "wanted"),
    [
        ({}, {}),
        (
            {"version": "0.5.23", "model_path": "m", "internal_states": [{"verify_attn": [{"gpu": "H200"}]}]},
            {"sglang": "0.5.23", "model": "m", "gpu": "H200"},
        ),
        ({"version": None, "internal_states": [None, {"a": 3, "b": [], "c": [{}]}]}, {}),
    ],
)
def test_what_a_server_says_of_itself(info: dict[str, object], wanted: dict[str, str]) -> None:
    assert identity(info) == wanted
