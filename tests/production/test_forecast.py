"""The forecast of `phase plan`: who is touched, what is exposed, how long it takes and what each gate can see."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from phases.cli.main import cli
from tests.production.light_fleet import LightFleet

TIMES = {"ready": 15.0, "drain": 3.0, "deadline": 20.0}


@pytest.fixture
def fleet(tmp_path: Path) -> LightFleet:
    """A playbook of four workers; nothing of it runs."""
    made = LightFleet(tmp_path, ssh=0).prepare()
    made.configure(**TIMES)
    return made


def plan(fleet: LightFleet, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", "-p", str(fleet.repo / "playbook.yaml"), *arguments])


def forecast(fleet: LightFleet, *arguments: str) -> dict:
    done = plan(fleet, "--json", *arguments)
    assert done.exit_code == 0, done.output
    (phase,) = json.loads(done.stdout)["phases"]
    return phase["forecast"]


def recording(path: Path, seconds: int = 600, rate: int = 20, metric: str = "e2e") -> Path:
    """Two equal arms with lognormal latencies, made here so that the truth is known."""
    random = np.random.default_rng(1)
    rows = [
        json.dumps(
            {
                "t": round(t, 3),
                "arm": arm,
                "metric": metric,
                "value": float(0.1 * np.exp(0.3 * random.standard_normal())),
                "status": 200,
            }
        )
        for t in np.arange(0, seconds, 1 / rate)
        for arm in ("canary", "control")
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_one_line_tells_the_whole_plan(fleet: LightFleet) -> None:
    said = plan(fleet).output.strip().splitlines()[-1]
    assert said.startswith("In all: 2 phases, 1 canary, "), said
    assert "4 workers" in said and "of requests on the candidate before a verdict" in said
    moved = forecast(fleet, "tp8-canary")["moved"]
    assert f"at most {max(row['share'] for row in moved):.0%} of requests" in said


def test_the_canary_touches_two_workers_and_exposes_its_share(fleet: LightFleet) -> None:
    found = forecast(fleet, "tp8-canary")
    assert [(row["step"], row["hosts"], row["share"]) for row in found["moved"]] == [
        ("restart the control", ["w2"], 0.0),
        ("switch the canary", ["w1"], 0.25),
        ("put production back", ["w1"], 0.0),
    ]
    assert found["untouched"] == ["w3", "w4"] and found["exposed"] == 0.25
    # three restarts of at most drain 3 + ready 15 seconds; one bake of 1 to 20 seconds
    assert (found["shortest"], found["longest"]) == (1.0, 3 * 18.0 + 20.0)


def test_the_rollout_exposes_everybody_wave_by_wave(fleet: LightFleet) -> None:
    found = forecast(fleet, "full-rollout")
    assert [(row["hosts"], row["share"]) for row in found["moved"]] == [(["w1", "w2"], 0.5), (["w3", "w4"], 1.0)]
    assert found["untouched"] == [] and found["exposed"] == 1.0
    assert [row["gate"] for row in found["sights"]] == ["wave 1"]  # the last wave has no control: the soak judges it
    # two waves of one batch each under a floor of two; one bake and a soak of two seconds
    assert (found["shortest"], found["longest"]) == (1.0 + 2.0, 2 * 18.0 + 20.0 + 2.0)


def test_a_higher_floor_takes_more_restarts_one_after_another(fleet: LightFleet) -> None:
    wide = forecast(fleet, "full-rollout")["longest"]
    fleet.configure(floor=3, **TIMES)
    assert forecast(fleet, "full-rollout")["longest"] == wide + 2 * 18.0


def test_where_nothing_is_recorded_that_is_said(fleet: LightFleet) -> None:
    found = forecast(fleet, "tp8-canary")
    assert found["expected"] is None and found["expected_from"].startswith("no run of this phase")
    assert found["sights"][0]["slowdown"] is None and "no A/A recording" in found["sights"][0]["source"]
    text = plan(fleet, "tp8-canary").output
    assert (
        "the candidate then serves 25% of requests" in text
        and "expected unknown" in text
        and "bake can see in e2e p50: unknown (nothing is recorded yet" in text
    )


def test_a_tolerance_that_the_traffic_cannot_show_is_seen_before_the_bake(fleet: LightFleet) -> None:
    judge = "{metrics: [{metric: e2e, quantile: 0.5, margin: 0.05}], probes: 4, bake: 80, deadline: 200, error_tolerance: %s}"
    text = re.sub(r"judge: \{metrics.*\}", "judge: JUDGE", (fleet.repo / "playbook.yaml").read_text())
    fleet.configure(text=text.replace("JUDGE", judge % 0.01))
    found = forecast(fleet, "tp8-canary")
    assert 1000 < found["clean"] < 1100 and found["own"] == 800
    assert (
        "requests of each arm without a failure (error_tolerance 1.00%); own requests alone are 800 by the deadline, the rest must be users'"
        in plan(fleet, "tp8-canary").output
    )
    turns = "design: switchback\n    turns: {period: 10, washout: 2}\n    judge: "
    fleet.configure(
        text=text.replace("    judge: JUDGE", f"    {turns}{judge % 0.05}", 1).replace("JUDGE", judge % 0.05)
    )
    found = forecast(fleet, "tp8-canary")
    fleet.configure(
        text=text.replace(
            "    judge: JUDGE", f"    {turns.replace('washout: 2', 'washout: 2, lead_in: 7')}{judge % 0.05}", 1
        ).replace("JUDGE", judge % 0.05)
    )
    led_in = forecast(fleet, "tp8-canary")
    assert (led_in["shortest"], led_in["longest"]) == (found["shortest"] + 7, found["longest"] + 7)
    fleet.configure(
        text=text.replace("    judge: JUDGE", f"    {turns}{judge % 0.05}", 1).replace("JUDGE", judge % 0.05)
    )
    assert found["own"] == 320 and found["clean"] < 200 and "the rest must" not in plan(fleet, "tp8-canary").output
    fleet.configure(text=text.replace("JUDGE", judge % 0))
    assert (
        forecast(fleet, "tp8-canary")["clean"] is None
        and "never pass with error_tolerance 0" in plan(fleet, "tp8-canary").output
    )
    fleet.configure(text=text.replace("JUDGE", judge % 1e-15))
    assert "never pass with error_tolerance 1e-15" in plan(fleet, "tp8-canary").output


def test_an_a_a_recording_says_what_can_be_seen_and_more_traffic_sees_more(fleet: LightFleet, tmp_path: Path) -> None:
    judge = "{metrics: [{metric: e2e, quantile: 0.5, margin: 0.05}], window: 5, bake: 120, deadline: 600}"
    text = (fleet.repo / "playbook.yaml").read_text()
    fleet.configure(text=re.sub(r"judge: \{metrics.*\}", f"judge: {judge}", text))
    recorded = str(recording(tmp_path / "quiet.jsonl"))
    (seen,) = forecast(fleet, "tp8-canary", "--a-a", recorded)["sights"]
    assert (
        1.05 < seen["slowdown"] <= 1.3
        and "requests/s an arm, found with 95 % probability within 120 s" in seen["source"]
    )
    (more,) = forecast(fleet, "tp8-canary", "--a-a", recorded, "--rate", "80")["sights"]
    (less,) = forecast(fleet, "tp8-canary", "--a-a", recorded, "--rate", "2")["sights"]
    assert more["slowdown"] < seen["slowdown"] and (less["slowdown"] is None or less["slowdown"] > seen["slowdown"])


def test_a_recording_of_something_else_is_refused(fleet: LightFleet, tmp_path: Path) -> None:
    done = plan(fleet, "tp8-canary", "--a-a", str(recording(tmp_path / "ttft.jsonl", metric="ttft")))
    assert done.exit_code != 0 and "the A/A recording has no e2e of both arms" in str(done.exception)


def test_planning_writes_nothing(fleet: LightFleet) -> None:
    before = sorted(path for path in fleet.repo.rglob("*") if ".git/" not in str(path))
    assert plan(fleet).exit_code == 0
    assert sorted(path for path in fleet.repo.rglob("*") if ".git/" not in str(path)) == before
