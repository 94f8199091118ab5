"""The output comparison on answers made by hand."""

from __future__ import annotations

import random

import pytest

from phases.serving.client import Completion, Score
from phases.serving.outputs import STREAMED, Answer, compare

PROMPTS = [f"p{i}" for i in range(8)]
TOKENS = 20


def answers(noise: float = 0.0, flip: float = 0.0, steps: int = 10, seed: int = 1) -> list[Answer]:
    """Answers whose own log-probabilities are off the teacher's by `noise`; a share `flip` of tokens is clearly not the best."""
    draw = random.Random(seed)
    made = []
    for prompt in PROMPTS:
        tokens = tuple(random.Random(prompt).randrange(100) for _ in range(TOKENS))
        best = tuple(-draw.random() for _ in tokens)
        wrong = [draw.random() < flip for _ in tokens]
        given = tuple(b - (1.0 if w else 0.0) for b, w in zip(best, wrong))
        shown = tuple(t + 1 if w else t for t, w in zip(tokens, wrong))
        own = tuple(g + draw.choice((-1, 1)) * noise for g in given)
        for mode in ("concurrency 1", "concurrency 16", STREAMED):
            made.append(Answer(prompt, mode, Completion(shown, own, "", 5, steps, 1.0, 0.1, 0.9), Score(given, best)))
    return made


def measured(candidate, incumbent=None, again=None, tie=0.02):
    incumbent = incumbent or answers()
    again = (
        again if again is not None else {a.prompt: a.completion.tokens for a in incumbent if a.mode == "concurrency 1"}
    )
    rows, evidence = compare(candidate, incumbent, again, tie)
    return {row.metric: row for row in rows}, evidence


def test_equal_servers():
    rows, _ = measured(answers())
    assert rows["logprob_error"].estimate == 0 and rows["logprob_error"].n == 8 * 3 * TOKENS
    assert rows["wrong_tokens"].estimate == 0
    assert rows["token_equality"].estimate == 1 and rows["token_equality"].n == 24
    assert rows["accept_length"].estimate == pytest.approx(2.0)
    assert (rows["accept_length_ratio"].low, rows["accept_length_ratio"].high) == pytest.approx((1.0, 1.0))


def test_numbers_slightly_wrong_show_before_a_token_flips():
    rows, evidence = measured(answers(noise=0.01))
    assert rows["logprob_error"].estimate == pytest.approx(0.01) and rows["logprob_error"].low > 0.009
    assert rows["token_equality"].estimate == 1 and rows["wrong_tokens"].estimate == 0
    assert rows["logprob_error"].detail["incumbent"]["estimate"] == 0
    assert len(evidence["worst"]) == 5 and evidence["worst"][0]["prompt"] in PROMPTS


def test_wrong_tokens_are_counted_with_an_interval_over_prompts():
    rows, _ = measured(answers(flip=0.1))
    row = rows["wrong_tokens"]
    assert 0 < row.low <= row.estimate <= row.high < 0.3
    assert rows["token_equality"].estimate < 1 and rows["token_equality"].detail["different"]


def test_a_difference_at_a_tie_does_not_count():
    rows, _ = measured(answers(flip=0.1), tie=2.0)
    assert rows["token_equality"].estimate == 1 and rows["wrong_tokens"].estimate == 0


def test_prompts_the_incumbent_itself_answers_differently_are_left_out():
    incumbent = answers()
    again = {a.prompt: a.completion.tokens for a in incumbent if a.mode == "concurrency 1"}
    again["p0"] = (0,) * TOKENS
    rows, _ = measured(answers(), incumbent, again)
    assert rows["token_equality"].detail["deterministic_prompts"] == 7 and rows["token_equality"].n == 21
    rows, _ = measured(answers(), incumbent, {})
    assert rows["token_equality"].estimate is None  # absent, not passed


def test_accept_length_falls():
    rows, _ = measured(answers(steps=12), answers(steps=10))
    assert rows["accept_length_ratio"].estimate == pytest.approx(10 / 12)
    assert rows["accept_length_ratio"].high < 0.9


def test_no_speculation_is_absent():
    rows, _ = measured(answers(steps=0), answers(steps=10))
    assert rows["accept_length_ratio"].estimate is None
