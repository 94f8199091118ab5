import json

import numpy as np
import pytest

from phases.analysis import records, sources
from phases.analysis.replay import replay_records
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError

GOOD = {"t": 1.5, "arm": "canary", "metric": "ttft", "value": 0.2, "status": 200}


def line(**changes):
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value != "absent"})


def test_good_lines_are_read_by_metric_and_arm():
    found = records.read([line(), "", line(t=2, status=503, value=None), line(arm="control"), line(metric="itl")], "f")
    assert set(found) == {"ttft", "itl"} and set(found["ttft"]) == {"canary", "control"}
    canary = found["ttft"]["canary"]
    assert canary.t.tolist() == [1.5, 2.0] and canary.succeeded.tolist() == [True, False] and np.isnan(canary.value[1])


@pytest.mark.parametrize(
    "wrong",
    [
        "not json",
        "[1]",
        line(arm="baseline"),
        line(metric="speed"),
        line(t="absent"),
        line(t="soon"),
        line(t=True),
        line(value="absent"),
        line(value=-1.0),
        line(status="ok"),
        line(status=2.5),
        line(status=-3),
        line().replace("0.2", "NaN"),
        line().replace("0.2", "Infinity"),
        line().replace("1.5", "-Infinity"),
    ],
)
def test_a_bad_line_is_named(wrong):
    with pytest.raises(AnalysisError, match="^analysis: f:2: "):
        records.read([line(), wrong], "f")


def test_no_records_at_all_are_an_error():
    with pytest.raises(AnalysisError, match="no records"):
        records.read(["", " "], "f")


def test_files_are_merged_by_time(tmp_path):
    (tmp_path / "a").write_text(line(t=5) + "\n" + line(t=9))
    (tmp_path / "b").write_text(line(t=7))
    merged = sources.read([str(tmp_path / "a"), str(tmp_path / "b")]).records
    assert merged["ttft"]["canary"].t.tolist() == [5.0, 7.0, 9.0]


def test_records_and_snapshots_do_not_mix(tmp_path):
    (tmp_path / "a").write_text(line())
    (tmp_path / "b").write_text("# scrape 1 canary\nx 1\n")
    with pytest.raises(AnalysisError, match="mixed"):
        sources.read([str(tmp_path / "a"), str(tmp_path / "b")])


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"\x1f\x8bbroken"])
def test_files_that_are_no_text_are_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(AnalysisError):
        sources.read([str(tmp_path / "a")])


def test_a_gap_of_years_takes_no_time():
    arms = {}
    for name in ("canary", "control"):
        t = np.concatenate([np.arange(0, 100, 0.5), 1.7e9 + np.arange(0, 100, 0.5)])
        arms[name] = records.ArmRecords(t, np.full(len(t), 0.1), np.full(len(t), 200))
    found = replay_records({"ttft": arms}, TestSettings(metric="ttft"))
    assert len(found.looks) == 20


def test_a_metric_or_an_arm_that_was_not_recorded_is_an_error():
    found = records.read([line()], "f")
    with pytest.raises(AnalysisError, match="no e2e"):
        replay_records(found, TestSettings(metric="e2e"), source="f")
    with pytest.raises(AnalysisError, match="canary only"):
        replay_records(found, TestSettings(metric="ttft"), source="f")
