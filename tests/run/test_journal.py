"""The journal: durable, torn ends forgiven, everything else found."""

from __future__ import annotations

import json

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import JournalError
from phases.run.journal import Journal, read


@pytest.fixture
def path(tmp_path):
    journal = Journal.create(tmp_path / "journal.jsonl", "run-1", SystemClock())
    for number in range(3):
        journal.append("step-finished", step=f"s{number}", facts={"value": 0.1 * number, 7: (1, 2)})
    return journal.path


def test_what_was_appended_is_read_back_as_plain_json(path):
    records = read(path, "run-1")
    assert [record.step for record in records] == ["s0", "s1", "s2"]
    assert records[2].data["facts"] == {"value": 0.2, "7": [1, 2]}


@pytest.mark.parametrize("cut", [1, 5, 40, 100])
def test_a_torn_last_line_is_dropped_and_overwritten(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert len(read(path, "run-1")) == 2
    journal = Journal.reopen(path, "run-1", SystemClock())
    journal.append("step-finished", step="again", facts={})
    assert [record.step for record in read(path, "run-1")] == ["s0", "s1", "again"]


def test_garbage_of_a_power_cut_at_the_end_is_dropped(path):
    path.write_bytes(path.read_bytes() + b"\x00" * 512)
    assert len(read(path, "run-1")) == 3
    path.write_bytes(path.read_bytes() + b"\n")
    assert len(read(path, "run-1")) == 3


def _lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_an_altered_line_is_found(path):
    path.write_bytes(path.read_bytes().replace(b'"s1"', b'"x1"'))
    with pytest.raises(JournalError, match=r"journal.jsonl:2 does not follow"):
        read(path, "run-1")


def test_an_altered_last_line_is_found(path):
    path.write_bytes(path.read_bytes().replace(b'"s2"', b'"x2"'))
    with pytest.raises(JournalError, match=":3 "):
        read(path, "run-1")


def test_a_removed_line_is_found(path):
    lines = _lines(path)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(JournalError, match=":2 "):
        read(path, "run-1")


def test_garbage_in_the_middle_is_found(path):
    lines = _lines(path)
    path.write_bytes(lines[0] + b"garbage\n" + lines[1])
    with pytest.raises(JournalError, match=":2 "):
        read(path, "run-1")


def test_another_runs_journal_is_found(path):
    with pytest.raises(JournalError, match="belongs to another run"):
        read(path, "run-2")


def test_another_runs_tail_is_found(path, tmp_path):
    other = Journal.create(tmp_path / "other.jsonl", "run-2", SystemClock())
    for number in range(4):
        other.append("step-finished", step=f"s{number}", facts={})
    path.write_bytes(path.read_bytes() + _lines(other.path)[3])
    with pytest.raises(JournalError, match=":4 "):
        read(path, "run-1")


def test_facts_that_are_not_json_name_the_step(path):
    journal = Journal.reopen(path, "run-1", SystemClock())
    for facts in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(JournalError, match="step-finished bad: its facts"):
            journal.append("step-finished", step="bad", facts=facts)
    assert len(read(path, "run-1")) == 3


def test_a_journal_is_not_created_twice(path):
    with pytest.raises(JournalError, match="--resume"):
        Journal.create(path, "run-1", SystemClock())


def test_each_line_is_one_json_object(path):
    assert all(json.loads(line)["number"] == number for number, line in enumerate(_lines(path)))
