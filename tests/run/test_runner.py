"""Executing steps: order, resume, failures, interruption."""

from __future__ import annotations

import errno

import pytest

from phases.base.clock import SystemClock
from phases.base.errors import BuildError, Exit, JournalError, LedgerError, PhaseError
from phases.run.journal import Journal, read
from phases.run.runner import Interrupted, Silent, StepError, execute
from phases.run.steps import Step


class World:
    """What the steps did, and what they shall do wrong."""

    def __init__(self, path):
        self.path, self.did, self.faults, self.gone = path, [], {}, set()

    def step(self, name, **more):
        def run(context):
            self.did.append(name)
            if name in self.faults:
                raise self.faults.pop(name)
            return {"saw": sorted(context.facts)}

        return Step(name, f"do {name}", run, holds=lambda context, facts: name not in self.gone, **more)

    def execute(self, *steps, watcher=None):
        journal = self.path / "journal.jsonl"
        opener = Journal.reopen if journal.exists() else Journal.create
        return execute(steps, opener(journal, "r", SystemClock()), self.path, SystemClock(), watcher or Silent())

    def events(self):
        return [(record.event, record.step) for record in read(self.path / "journal.jsonl", "r")]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_steps_run_in_order_and_see_earlier_facts(world):
    facts = world.execute(world.step("a"), world.step("b"))
    assert world.did == ["a", "b"] and facts["b"] == {"saw": ["a"]}
    assert world.events() == [
        ("run-started", ""),
        ("step-started", "a"),
        ("step-finished", "a"),
        ("step-started", "b"),
        ("step-finished", "b"),
    ]


def test_resume_keeps_what_holds_and_goes_on(world):
    steps = world.step("a"), world.step("b"), world.step("c")
    world.faults["b"] = BuildError("no compiler")
    with pytest.raises(BuildError):
        world.execute(*steps)
    assert world.events()[-1] == ("step-failed", "b")
    facts = world.execute(*steps)
    assert world.did == ["a", "b", "b", "c"] and facts["c"] == {"saw": ["a", "b"]}


def test_what_no_longer_holds_is_repeated_with_all_that_follows(world):
    steps = world.step("a"), world.step("b"), world.step("c")
    world.execute(*steps)
    world.gone.add("b")
    world.execute(*steps)
    assert world.did == ["a", "b", "c", "b", "c"]


def test_a_step_begun_again_by_a_killed_process_is_not_taken_for_finished(world):
    steps = world.step("a"), world.step("b"), world.step("c")
    world.execute(*steps)
    Journal.reopen(world.path / "journal.jsonl", "r", SystemClock()).append("step-started", step="b")
    world.execute(*steps)
    assert world.did == ["a", "b", "c", "b", "c"]


def test_other_steps_are_not_resumed(world):
    world.execute(world.step("a"))
    with pytest.raises(JournalError, match="other steps"):
        world.execute(world.step("a"), world.step("b"))


def test_ctrl_c_says_how_to_go_on(world):
    world.faults["b"] = KeyboardInterrupt()
    with pytest.raises(Interrupted, match="--resume"):
        world.execute(world.step("a"), world.step("b"))
    assert world.events()[-1] == ("step-interrupted", "b")
    world.execute(world.step("a"), world.step("b"))
    assert world.did == ["a", "b", "b"]


@pytest.mark.parametrize(("code", "words"), [(7, "Production was rolled back, as observed"), (8, "a person is needed")])
@pytest.mark.parametrize(
    "fault",
    [
        LedgerError("it is checked out."),
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, "No space left on device", "/data/x"),
    ],
    ids=str,
)
def test_how_production_ended_stands_when_the_record_of_it_fails_and_again_when_that_is_tried_again(
    world, fault, code, words
):
    end = Step("end", "observe", lambda context: {"exit_code": code})
    steps = world.step("a"), end, world.step("record")
    for _ in range(2):
        world.faults["record"] = fault
        with pytest.raises(
            PhaseError, match=f"{words}.*; the record of it is still to be written, which --resume does"
        ) as caught:
            world.execute(*steps)
        assert caught.value.exit_code is Exit(code)
    assert world.execute(*steps)["end"]["exit_code"] == code and world.did == ["a", "record", "record", "record"]


def test_nothing_is_said_of_production_before_it_has_been_observed(world):
    world.faults["a"] = LedgerError("it is checked out.")
    with pytest.raises(LedgerError) as caught:
        world.execute(world.step("a"), Step("end", "observe", lambda context: {"exit_code": 7}))
    assert caught.value.exit_code is Exit.OPERATIONAL and "roduction" not in str(caught.value)


def test_steps_marked_always_run_after_a_failure_and_do_not_hide_it(world):
    steps = (
        world.step("a"),
        world.step("b"),
        world.step("stop servers", always=True),
        world.step("release", always=True),
    )
    world.faults = {"a": BuildError("first"), "stop servers": RuntimeError("second")}
    with pytest.raises(BuildError, match="first"):
        world.execute(*steps)
    assert world.did == ["a", "stop servers", "release"]


def test_a_full_disk_in_a_step_is_one_clear_error(world):
    world.faults["a"] = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    with pytest.raises(StepError, match=r"a: no space left to write at /data/x\. Free some space .* --resume"):
        world.execute(world.step("a"))


def test_two_steps_of_one_name_are_refused(world):
    with pytest.raises(JournalError, match="two steps are called a"):
        world.execute(world.step("a"), world.step("a"))
    assert world.did == []


def test_the_watcher_sees_everything(world):
    class Recorder(Silent):
        seen = []

        def step_finished(self, step, facts, seconds, kept):
            self.seen.append((step.name, kept))

        def step_failed(self, step, fault):
            self.seen.append((step.name, type(fault).__name__))

    world.faults["b"] = KeyboardInterrupt()
    with pytest.raises(Interrupted):
        world.execute(world.step("a"), world.step("b"), watcher=Recorder())
    world.execute(world.step("a"), world.step("b"), watcher=Recorder())
    assert Recorder.seen == [("a", False), ("b", "Interrupted"), ("a", True), ("b", False)]
