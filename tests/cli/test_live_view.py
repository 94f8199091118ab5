"""What is seen of a run while it works, on its own terminal and from another one."""

from __future__ import annotations

import contextlib
import io

import pytest
from rich.console import Console

from phases.analysis.decision import Decision
from phases.base.verdict import Verdict
from phases.cli.live_view import RunningStep, look_head, look_row
from phases.cli.watchers import Brief, Lines, watcher
from phases.engines.ssh.host import Host
from phases.run import live_state
from phases.run.expected import step_seconds
from phases.run.live_state import Noting
from phases.run.steps import Step
from phases.trial.looks import look_facts
from phases.trial.settings import JudgeSettings, MetricSettings


def _host(name):
    return Host(name, "local", "/x")


@pytest.fixture
def look():
    judge = JudgeSettings((MetricSettings("itl"),), bake=300.0, deadline=1800.0)
    decisions = [
        Decision(None, "itl", "p95", "not yet", 1.02, 0.93, 1.14, threshold=1.05, n=231),
        Decision(
            Verdict.PASS,
            "5xx",
            "excess_rate",
            "none",
            0.0,
            -0.002,
            0.004,
            threshold=0.01,
            n=231,
            unit="rate",
            counts={"canary": {"requests": 231, "errors": 0}, "control": {"requests": 240, "errors": 0}},
        ),
        Decision(None, "ttft", "p95", "nothing yet"),
    ]
    return look_facts(130.0, decisions, judge, {"canary": [_host("w1")], "control": [_host("w2"), _host("w3")]})


def _drawn(step, width=140):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(step)
    return console.file.getvalue()


def test_hosts_share_time_and_intervals_of_a_canary(look):
    step = RunningStep("[5/9] bake", "itl p95 within 5%")
    step.look = look
    step.say("  130 s  itl p95: 1.02")
    step.say("w1: its log is quiet")
    shown = _drawn(step)
    for words in (
        "[5/9] bake",
        "canary w1 against control w2, w3",
        "130 s of 300 s",
        "49% of 471 requests",
        "itl p95",
        "1.02 [0.93, 1.14]",
        "limit 1.05",
        "n 231",
        "open",
        "PASS",
        "nothing to compare yet",
        "its log is quiet",
    ):
        assert words in shown, words
    assert "130 s  itl" not in shown  # the table tells it better


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_gets_one_line_a_row(look, width):
    step = RunningStep("[5/9] bake", "itl p95 within 5%")
    step.look = look
    assert all(len(line) <= width for line in _drawn(step, width).splitlines())
    assert len(_drawn(step, width).splitlines()) == len(_drawn(step, 200).splitlines())


def test_a_look_is_plain_json(look):
    import json

    assert json.loads(json.dumps(look)) == look
    assert look_row(look["tests"][0], 93).count("●") == 1 and "●" not in look_row(look["tests"][0], 92)


def test_a_soak_has_one_arm_and_its_own_length():
    judge = JudgeSettings((MetricSettings("itl"),), bake=300.0, deadline=1800.0)
    head = look_head(look_facts(5.0, [], judge, {"all workers": [_host(f"w{n}") for n in range(1, 7)]}, 50.0))
    assert head == "all workers w1, w2, w3, w4 and 2 more: 5 s of 50 s"


def test_a_switchback_has_both_kernels_on_the_same_workers():
    judge = JudgeSettings((MetricSettings("itl"),), bake=300.0, deadline=300.0)
    head = look_head(look_facts(5.0, [], judge, {"canary": [_host("w1")], "control": [_host("w1")]}))
    assert head == "both kernels in turns on w1: 5 s of 300 s"


def test_a_run_can_be_looked_at_from_elsewhere_while_it_works(repository):
    runs, seen = repository.path / ".phase" / "runs", []

    class Spy(Lines):
        def step_progress(self, step, line):
            super().step_progress(step, line)
            seen.append(live_state.read(runs / "light-build-parity-0001"))

        def step_started(self, step, number):
            seen.append(live_state.read(runs / "light-build-parity-0001"))

    repository.run(watcher=Noting(Spy(io.StringIO()), runs))
    assert (
        {state["step"] for state in seen} >= {"prepare", "prove", "judge the gate"}
        and seen[0]["number"] == 1
        and seen[0]["steps"] == 5
    )
    assert live_state.read(runs / "light-build-parity-0001") is None  # over
    with pytest.raises(KeyError):
        repository.run(watcher=Noting(Lines(io.StringIO()), runs), script="tests.run.light_phase:failing_phase")
    assert live_state.read(runs / "light-build-parity-0002") is None


def test_what_cannot_be_written_or_read_stops_nothing(repository, tmp_path):
    noting = Noting(Lines(io.StringIO()), tmp_path / "nowhere")
    repository.run(watcher=noting)
    (tmp_path / "live.json").write_text("[1")
    assert live_state.read(tmp_path) is None


class Hand:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def _steps(*names):
    return [Step(name, f"do {name}", lambda context: {}) for name in names]


def test_a_log_gets_a_line_a_step_and_what_must_not_be_missed():
    out, clock, steps = io.StringIO(), Hand(), _steps("look", "prove", "judge")
    brief = Brief(out, expected={"look": 2.0, "prove": 100.0, "judge": 20.0}, monotonic=clock)
    brief.run_started("x-0001", steps)
    for number, step in enumerate(steps, 1):
        brief.step_started(step, number)
        for line in range(200 if step.name == "prove" else 0):
            clock.now += 0.5
            brief.step_progress(step, f"case {line + 1} of 200")
        if step.name == "judge":
            brief.step_progress(step, "FAIL         speedup cpu / torch: slower")
            brief.step_progress(step, "PASS         parity: right")
        brief.step_finished(step, {}, 1.0, kept=step.name == "look")
    assert out.getvalue().splitlines() == [
        "run x-0001: 3 steps, about 2 min as the last one here",
        "[1/3] look: do look (already done, about 2 min left)",
        "[2/3] prove, 15 s, about 20 s after this step: case 30 of 200",
        "[2/3] prove, 75 s, about 20 s after this step: case 150 of 200",
        "[2/3] prove: case 200 of 200 (1.0 s, about 20 s left)",
        "      FAIL         speedup cpu / torch: slower",
        "[3/3] judge: PASS         parity: right (1.0 s)",
    ]


def test_without_a_run_before_nothing_is_promised():
    out, steps = io.StringIO(), _steps("look", "prove")
    brief = Brief(out, expected={"look": 2.0})
    brief.run_started("x-0001", steps)
    brief.step_started(steps[0], 1)
    brief.step_finished(steps[0], {}, 1.0, kept=False)
    assert "about" not in out.getvalue()


def test_the_newest_attempt_that_came_to_its_end_says_how_long_it_will_take(repository):
    state = repository.path / ".phase"
    assert step_seconds(state, "light", "build-parity") == {}
    repository.run()
    with pytest.raises(KeyError):
        repository.run(script="tests.run.light_phase:failing_phase")
    first = step_seconds(state, "light", "build-parity")
    assert first and all(seconds >= 0 for seconds in first.values())


def test_redirected_is_brief_and_verbose_is_every_line(repository):
    said = {}
    for verbose in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            repository.run(watcher=watcher(False, verbose=verbose, expected={}))
        said[verbose] = out.getvalue().splitlines()
    brief, every = said[False], said[True]
    assert len(brief) < len(every) and sum(line.startswith("[") for line in brief) == len(brief) - 2
    assert isinstance(watcher(True), Brief) and isinstance(watcher(True, verbose=True), Lines)
