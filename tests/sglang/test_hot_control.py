"""The control byte, its acknowledgement in the fact file and the shadow, without SGLang."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from verify_attn.sglang.control import CANDIDATE, INCUMBENT, Control
from verify_attn.sglang.facts import FactFile
from verify_attn.sglang.identity import hot_facts
from verify_attn.sglang.shadow import TOLERANCES, Shadow, errors


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "control"
    path.write_bytes(b"c")
    return path


def put(path: Path, byte: bytes) -> None:
    """Write as the toolkit does: in place, never cutting the file."""
    handle = os.open(path, os.O_WRONLY)
    os.pwrite(handle, byte, 0)
    os.close(handle)


def test_the_byte_decides_at_the_very_next_forward(file):
    control = Control(str(file))
    assert control.decide(1) and control.choice == CANDIDATE
    put(file, b"i")
    assert not control.decide(2)
    known = control.acknowledged
    assert (known.choice, known.from_forward, known.confirmed) == (INCUMBENT, 2, 2)
    put(file, b"c")
    assert control.decide(3)


@pytest.mark.parametrize("byte", [b"i", b"\0", b"C", b"?", b"\xff"])
def test_any_other_byte_is_the_incumbent(file, byte):
    file.write_bytes(byte)
    assert not Control(str(file)).decide(1)


@pytest.mark.parametrize("word, wanted", [("candidate\n", True), ("incumbent\n", False)])
def test_a_word_written_by_hand_means_what_it_says(file, word, wanted):
    file.write_text(word)
    assert Control(str(file)).decide(1) is wanted


def test_missing_empty_replaced_and_unusable_files(file):
    control = Control(str(file))
    file.unlink()
    control.follow()
    assert not control.decide(1)  # removed while it was mapped
    file.write_bytes(b"c")
    control.follow()
    assert control.decide(2)  # there again, another inode
    os.truncate(file, 0)
    control.follow()
    assert not control.decide(3)
    file.unlink()
    file.mkdir()
    control.follow()
    assert not control.decide(4)
    assert not Control(str(file.parent / "never")).decide(1)


def test_without_a_file_the_candidate_serves_and_the_facts_say_it_cannot_be_switched():
    control = Control(None)
    control.follow()
    assert control.decide(1)
    facts = hot_facts(control)
    assert not facts["able"] and "VERIFY_ATTN_CONTROL" in facts["reason"]


def test_an_idle_rank_acknowledges_what_would_run_next_within_its_fact_file(file, tmp_path):
    control = Control(str(file))
    control.decide(7)
    facts = FactFile(str(tmp_path / "facts"), {"rank": 0, "ranks": 1}, lambda: {"hot": hot_facts(control)}, control)
    written = threading.Event()

    def hot() -> dict:
        return json.loads(facts.path.read_text())["hot"]

    put(file, b"i")
    for _ in range(12000):  # the limit is only there so that a failure ends
        if hot()["choice"] == INCUMBENT:
            break
        written.wait(0.01)
    assert (hot()["from_forward"], hot()["confirmed"]) == (8, None)  # no forward since
    control.decide(8)
    for _ in range(12000):
        if hot()["confirmed"]:
            break
        written.wait(0.01)
    assert hot()["confirmed"] == 8


def test_a_living_rank_keeps_its_file_fresh_without_news(tmp_path):
    facts = FactFile(str(tmp_path), {"rank": 0}, lambda: {"counters": {}})
    os.utime(facts.path, (1, 1))
    before = facts.path.read_text()
    until = time.monotonic() + 120
    while facts.path.stat().st_mtime < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert facts.path.read_text() == before


def test_a_trip_reaches_the_other_ranks_and_holds_until_somebody_decides_anew(file):
    mine, other = Control(str(file)), Control(str(file))
    mine.decide(5)
    mine.trip("layer 3 is wrong")
    assert not mine.decide(6) and file.read_bytes() == b"i" and not other.decide(9)
    assert "layer 3" in mine.acknowledged.why
    put(file, b"c")
    assert mine.decide(7) and mine.tripped == ""


def test_a_trip_holds_where_the_file_cannot_be_written(tmp_path, caplog):
    control = Control(str(tmp_path / "none" / "control"))
    control._candidate = True
    control.trip("wrong")
    control.follow()
    assert not control.decide(1) and "only this rank has fallen back" in caplog.text


# ---- the shadow


def outputs(requests: int = 3, rows: int = 4, heads: int = 2, width: int = 8) -> torch.Tensor:
    return torch.randn(requests * rows, heads, width, generator=torch.Generator().manual_seed(1))


def compare(shadow: Shadow, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    q = torch.zeros(ours.shape[0], ours.shape[1], 12, dtype=ours.dtype)
    return shadow.agrees(ours, theirs, q=q, lengths=[7, 900, 30], layer=4, variant="cpu")


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_rounding_in_the_type_agrees_and_ten_times_the_tolerance_does_not(file, dtype):
    theirs = outputs()
    shadow = Shadow(1.0, Control(str(file)))
    rounded = theirs.to(dtype)
    assert compare(shadow, rounded, theirs.to(dtype))
    wrong = theirs + 10 * TOLERANCES[dtype].frobenius * theirs.norm() / math.sqrt(theirs.numel()) * torch.randn_like(
        theirs
    )
    assert not compare(shadow, wrong.to(dtype), theirs.to(dtype))


def test_one_wrong_request_does_not_hide_and_the_evidence_holds_no_data(file, tmp_path, caplog):
    control = Control(str(file))
    shadow = Shadow(1.0, control, str(tmp_path / "facts"))
    control.decide(41)
    theirs = outputs()
    ours = theirs.clone()
    ours[4:8] = ours[8:12]  # the second request got the third's output
    assert not compare(shadow, ours, theirs)
    assert control.choice == INCUMBENT and file.read_bytes() == b"i"
    evidence = json.loads((tmp_path / "facts" / "shadow-0.json").read_text())
    assert (evidence["worst_request"], evidence["layer"], evidence["forward"]) == (1, 4, 41)
    assert (
        evidence["prefix_lengths"] == [7, 900, 30]
        and evidence["query_shape"] == [12, 2, 12]
        and evidence["draft_tokens"] == 4
    )
    known = {
        "schema",
        "at",
        "rank",
        "forward",
        "layer",
        "variant",
        "dtype",
        "query_shape",
        "draft_tokens",
        "prefix_lengths",
        "worst_request",
        "frobenius",
        "maximum",
        "tolerance",
    }
    assert set(evidence) == known
    assert shadow.facts()["tripped"]["layer"] == 4 and "evidence" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_trips_and_can_be_written_down(file, tmp_path, value):
    shadow = Shadow(1.0, Control(str(file)), str(tmp_path))
    ours = outputs()
    ours[0, 0, 0] = value
    assert not compare(shadow, ours, outputs())
    assert json.loads((tmp_path / "shadow-0.json").read_text())["frobenius"] == "inf"


def test_errors_against_their_definition():
    theirs = outputs()
    ours = theirs + 0.01
    frobenius, maximum = errors(ours, theirs, 3)
    rows = theirs.view(3, -1)
    assert torch.allclose(frobenius, (rows - rows - 0.01).norm(dim=1) / rows.norm(dim=1), rtol=1e-3)
    assert torch.allclose(maximum, 0.01 / (rows.square().mean(1).sqrt()), rtol=1e-3)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 1.0])
def test_the_sampled_share_is_the_rate(file, rate):
    shadow = Shadow(rate, Control(str(file)), seed=3)
    seen = sum(shadow.due() for _ in range(20000)) / 20000
    assert seen == rate if rate in (0.0, 1.0) else abs(seen - rate) < 0.2 * rate


@pytest.mark.parametrize("text", ["2", "-0.1", "often", "nan", "0,5"])
def test_a_rate_that_is_none_ends_the_server_at_its_start(monkeypatch, text):
    monkeypatch.setenv("VERIFY_ATTN_SHADOW", text)
    with pytest.raises(ValueError, match="VERIFY_ATTN_SHADOW is '?" + text):
        Shadow.from_environment(Control(None))
