"""Outputs compared in production, with stand-ins for servers whose log-probabilities are known."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases.base.errors import ServingError
from phases.production.agreement import Agreement, AgreementWatch, chosen_prompts, compare, measurements
from phases.production.settings import AgreementSettings
from phases.serving.client import Completion, Score
from tests.production.light_fleet import LightFleet

SETTINGS = AgreementSettings(prompts=4, tokens=8)


@dataclasses.dataclass
class Server:
    """Stand-in: the token after n tokens is n, the best one, with log-probability -0.5; `off` is added to what verify reports."""

    name: str
    off: float = 0.0
    wrong_tokens: int = 0  # of each answer, emitted though another is better by 1 nat
    noise: float = 0.0
    requests: int = 0

    def generate(self, prompt: str, tokens: int) -> Completion:
        self.requests += 1
        ids = tuple(-n - 1 if n < self.wrong_tokens else n for n in range(tokens))
        truth = [-1.5 if token < 0 else -0.5 for token in ids]
        return Completion(ids, tuple(t + self.off + self.noise for t in truth), "", 1, 1, 0.1, None, None)

    def tokenize(self, prompt: str) -> list[int]:
        self.requests += 1
        return [1, 2]

    def score(self, prompt: list[int], tokens: tuple[int, ...]) -> Score:
        self.requests += 1
        return Score(tuple(-1.5 if token < 0 else -0.5 for token in tokens), tuple(-0.5 for _ in tokens))


def test_equal_servers_agree():
    found = compare(Server("canary"), Server("control"), SETTINGS)
    assert (found.error, found.wrong, found.n, found.reason) == (0.0, 0.0, 32, "")


def test_shifted_log_probabilities_disagree_and_say_who():
    found = compare(Server("canary", off=0.2), Server("control"), SETTINGS)
    assert found.error == pytest.approx(0.2)
    assert "outputs of canary differ" in found.reason and "judged by control" in found.reason


def test_what_the_incumbent_does_itself_does_not_count():
    assert compare(Server("canary", off=0.2), Server("control", off=0.18), SETTINGS).reason == ""


def test_worse_tokens_disagree():
    found = compare(Server("canary", wrong_tokens=2), Server("control"), SETTINGS)
    assert found.wrong == 0.25 and found.error == 0.0
    assert "25% of its tokens are worse" in found.reason


def test_not_a_number_never_agrees():
    assert compare(Server("canary", off=math.nan), Server("control"), SETTINGS).reason != ""


def test_an_answer_without_log_probabilities_is_no_agreement(monkeypatch):
    whole = Server.generate
    monkeypatch.setattr(Server, "generate", lambda self, *asked: dataclasses.replace(whole(self, *asked), logprobs=()))
    with pytest.raises(ServingError, match="(canary|control) answered with 8 tokens and 0 log-probabilities"):
        compare(Server("canary"), Server("control"), SETTINGS)


def test_both_get_the_same_load():
    """Else asking would make one arm of a bake look slower. Only tokenizing, one short prefill a prompt, is the teacher's alone."""
    canary, control = Server("canary"), Server("control")
    compare(canary, control, SETTINGS)
    assert control.requests - canary.requests == SETTINGS.prompts


def test_prompts_are_of_different_kinds_and_the_first_is_long():
    chosen = chosen_prompts(6)
    assert len(chosen) == len({prompt.name for prompt in chosen}) == 6
    assert chosen[0].kind == "long" and len({prompt.kind for prompt in chosen}) >= 4
    assert len(chosen_prompts(1000)) == len({prompt.name for prompt in chosen_prompts(1000)})


def agreement(reason: str = "", error: float = 0.0) -> Agreement:
    return Agreement("w1", "w2", error, 0.0, 0.0, 0.0, 10, reason)


def test_rows_show_the_worst():
    rows = {row.metric: row for row in measurements([agreement().to_json(), agreement("differs", 0.3).to_json()])}
    assert rows["canary_logprob_error"].estimate == 0.3 and rows["canary_logprob_error"].n == 20
    assert measurements([]) == ()


def test_watch_finds_a_disagreement_that_comes_later_and_outlives_a_worker_that_does_not_answer():
    asked, done = [], threading.Event()

    def ask(turn: int) -> Agreement:
        asked.append(turn)
        if turn == 0:
            raise ServingError("w1 did not answer.")
        if turn == 3:
            done.set()
        return agreement("differs" if turn >= 2 else "")

    with AgreementWatch(ask, dataclasses.replace(SETTINGS, every=0.001), at_once=True) as watch:
        assert done.wait(120)
    assert asked[:4] == [0, 1, 2, 3]
    assert watch.disagreement().reason == "differs" and watch.found[0].reason == ""


@pytest.mark.parametrize("off", [{"every": 0.0}, {"prompts": 0}])
def test_switched_off_it_asks_nobody(off):
    with AgreementWatch(lambda turn: pytest.fail("asked"), dataclasses.replace(SETTINGS, **off), at_once=True) as watch:
        assert not watch._thread.is_alive()
    assert watch.found == [] and watch.disagreement() is None


# -- the whole of Phase 3, with stand-in workers behind the real router ---------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LightFleet]:
    fleet = LightFleet(tmp_path / "light", ssh=0, count=3)
    try:
        yield fleet.up()
    finally:
        fleet.close()


@pytest.mark.slow
@pytest.mark.fleet
def test_a_wrong_canary_serves_nobody_and_one_that_turns_wrong_is_found_while_it_bakes(fleet):
    fleet.configure(candidate={"WRONG": 0.5})
    ended = fleet.phase("run", "tp8-canary", "--yes")
    assert ended.returncode == 7, ended.stdout
    assert "the canary will not bake" in ended.stdout and "not begun: the canary was not switched" in ended.stdout
    assert (
        "outputs of w1 differ" in ended.stdout
        and "on the candidate" not in ended.stdout.split("switch the canary")[-1].split("bake")[0]
    )
    assert fleet.not_converged(fleet.digests["incumbent"]) == []

    text = (fleet.repo / "playbook.yaml").read_text().replace("every: 0}", "every: 1}")
    assert "every: 1}" in text
    fleet.configure(
        text=text.replace('"STANDIN_WRONG": "0.5"', '"STANDIN_WRONG": "0.5", "STANDIN_WRONG_AFTER": "100"').replace(
            "bake: 1,", "bake: 60,"
        )
    )
    ended = fleet.phase("run", "tp8-canary", "--yes")
    assert ended.returncode == 7, ended.stdout
    assert "outputs agree with" in ended.stdout and "FAIL: w1: outputs of w1 differ" in ended.stdout
    assert fleet.not_converged(fleet.digests["incumbent"]) == []
