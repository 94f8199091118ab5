"""Output comparison of Phase 2.

What the candidate emitted through its verify path is judged by the incumbent: the incumbent teacher-forces the candidate's
tokens through plain prefill, where no verify kernel takes part. Compared are

    logprob_error   |log-probability the candidate's verify forward gave the token - the teacher's|, mean over tokens. This sees
                    numbers that are slightly wrong and a tree mask that is ignored, long before a token flips.
    wrong_tokens    share of emitted tokens that are worse than the teacher's best by more than the tie tolerance (greedy
                    decoding emits the best token, up to ties).
    token_equality  share of prompts answered token for token like the incumbent, over the prompts that the incumbent itself
                    answers twice alike. Differences that start at a tie do not count against the candidate.

The same quantities of the incumbent against itself say what this server's arithmetic allows. Intervals: bootstrap over
prompts. Acceptance is no check of correctness: a kernel that ignores the tree keeps its accept length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from phases.base.errors import ServingError
from phases.base.results import RATIO, Measurement
from phases.serving.client import Client, Completion, Score, ScoringError
from phases.serving.prompts import Prompt
from phases.serving.statistics import Interval, clustered_mean, ratio_of_sums

STREAMED = "streaming"


@dataclass(frozen=True)
class Answer:
    """One prompt's answer in one mode, and the teacher's score of it."""

    prompt: str
    mode: str  # concurrency 1, concurrency 16, streaming
    completion: Completion
    score: Score

    @property
    def errors(self) -> list[float]:
        return [abs(own - teacher) for own, teacher in zip(self.completion.logprobs, self.score.logprobs)]

    @property
    def gaps(self) -> list[float]:
        """How much worse each token is than the teacher's best; 0 where it is the best."""
        return [max(0.0, best - given) for best, given in zip(self.score.best, self.score.logprobs)]


Collected = Sequence[tuple[str, str, list[int], Completion]]  # prompt name, mode, prompt ids, completion


def collect(
    client: Client, prompts: Sequence[Prompt], tokens: int, levels: Sequence[int], progress: Callable[[str], None]
) -> Collected:
    """Answers of one server to every prompt in every mode.

    Each concurrency starts from an empty prefix cache; streaming finds the prompts cached. The same requests in the same
    order go to every server, since what was asked before decides what is cached, and that what a draft model proposes.

    Raises:
        ServingError: a request failed, or an answer lacks tokens or log-probabilities.
    """
    ids = {prompt.name: client.tokenize(prompt.text) for prompt in prompts}
    found = []
    for mode, level, stream in [*((f"concurrency {level}", level, False) for level in levels), (STREAMED, 1, True)]:
        progress(f"{client.name}: {len(prompts)} prompts, {mode}")
        chosen = prompts if not stream else prompts[:: max(1, len(prompts) // 6)]
        if not stream:
            client.flush_cache()
        with ThreadPoolExecutor(level) as pool:
            done = list(
                pool.map(
                    lambda prompt, streamed=stream: client.generate(ids[prompt.name], tokens, stream=streamed), chosen
                )
            )
        for prompt, completion in zip(chosen, done):
            _require_whole(client, prompt, completion, tokens)
            found.append((prompt.name, mode, ids[prompt.name], completion))
    return found


def score(teacher: Client, collected: Collected) -> list[Answer]:
    """Teacher-force every answer; equal answers to a prompt are scored once.

    Raises:
        ScoringError: the teacher scored something else; the prompt is named.
    """
    known: dict[tuple[str, tuple[int, ...]], Score] = {}
    answers = []
    for prompt, mode, ids, completion in collected:
        key = (prompt, completion.tokens)
        if key not in known:
            try:
                known[key] = teacher.score(ids, completion.tokens)
            except ScoringError as fault:
                where = f"prompt '{prompt}' of {len(ids)} tokens, {mode}"
                raise ScoringError(
                    f"{where}: {fault.message}", given=fault.given, rows=fault.rows, hint=fault.hint
                ) from fault
        answers.append(Answer(prompt, mode, completion, known[key]))
    return answers


def as_json(collected: Collected) -> list[dict[str, Any]]:
    """What a server answered, for a run's files: ids and log-probabilities, no text."""
    return [
        {
            "prompt": prompt,
            "mode": mode,
            "prompt_tokens": len(ids),
            "verify_steps": completion.verify_steps,
            "tokens": list(completion.tokens),
            "logprobs": [round(value, 6) if math.isfinite(value) else str(value) for value in completion.logprobs],
        }
        for prompt, mode, ids, completion in collected
    ]


def repeat(client: Client, prompts: Sequence[Prompt], tokens: int) -> dict[str, tuple[int, ...]]:
    """The answers once more, one by one: what a deterministic server gives again."""
    client.flush_cache()
    return {prompt.name: client.generate(client.tokenize(prompt.text), tokens).tokens for prompt in prompts}


def compare(
    candidate: Sequence[Answer], incumbent: Sequence[Answer], again: dict[str, tuple[int, ...]], tie: float
) -> tuple[tuple[Measurement, ...], dict[str, Any]]:
    """The measurements of the module's text, and the evidence behind them as plain JSON."""
    prompts = sorted({answer.prompt for answer in candidate})
    error = clustered_mean(_by_prompt(candidate, prompts, lambda answer: answer.errors))
    own_error = clustered_mean(_by_prompt(incumbent, prompts, lambda answer: answer.errors))
    wrong = clustered_mean(_by_prompt(candidate, prompts, lambda answer: [float(gap > tie) for gap in answer.gaps]))
    own_wrong = clustered_mean(_by_prompt(incumbent, prompts, lambda answer: [float(gap > tie) for gap in answer.gaps]))
    equality = _equality(candidate, incumbent, again, tie)
    tokens = sum(len(answer.completion.tokens) for answer in candidate)
    source = f"{len(prompts)} prompts, {len(candidate)} answers, teacher-forced by the incumbent"
    measurements = (
        _measured("logprob_error", error, tokens, "nats a token", source, incumbent=asdict(own_error)),
        _measured("wrong_tokens", wrong, tokens, "share", source, incumbent=asdict(own_wrong), tie=tie),
        equality,
        *_accept_lengths(candidate, incumbent, prompts),
    )
    worst = sorted(candidate, key=lambda answer: -max(answer.errors))[:5]
    evidence = {
        "worst": [_evidence(answer) for answer in worst],
        "modes": sorted({answer.mode for answer in candidate}),
    }
    return measurements, evidence


def _accept_lengths(
    candidate: Sequence[Answer], incumbent: Sequence[Answer], prompts: list[str]
) -> tuple[Measurement, ...]:
    """Tokens a verify step, weighted by steps, and the ratio of the two servers; nothing where a server does not speculate."""
    ours, theirs = _steps(candidate, prompts), _steps(incumbent, prompts)
    source = "spec_verify_ct of every answer"
    if not all(steps for _, steps in ours) or not all(steps for _, steps in theirs):
        return (
            Measurement("accept_length_ratio", None, source="a server reports no verify steps: speculation is off"),
        )
    total = sum(int(steps) for _, steps in ours)
    ratio = ratio_of_sums(ours, theirs)
    length = ratio_of_sums(ours, [(1.0, 1.0)] * len(ours))
    return (
        _measured("accept_length", length, total, "tokens a verify step", source),
        _measured("accept_length_ratio", ratio, total, RATIO, source),
    )


def _steps(answers: Sequence[Answer], prompts: list[str]) -> list[tuple[float, float]]:
    rows = []
    for prompt in prompts:
        own = [answer.completion for answer in answers if answer.prompt == prompt]
        rows.append((float(sum(len(c.tokens) for c in own)), float(sum(c.verify_steps for c in own))))
    return rows


def _equality(
    candidate: Sequence[Answer], incumbent: Sequence[Answer], again: dict[str, tuple[int, ...]], tie: float
) -> Measurement:
    reference = {answer.prompt: answer for answer in incumbent if answer.mode == "concurrency 1"}
    steady = {name for name, answer in reference.items() if again.get(name) == answer.completion.tokens}
    judged = [answer for answer in candidate if answer.prompt in steady]
    different = [answer for answer in judged if _differs(answer, reference[answer.prompt], tie)]
    detail = {
        "deterministic_prompts": len(steady),
        "prompts": len(reference),
        "different": [f"{a.prompt} ({a.mode})" for a in different][:10],
    }
    if not judged:
        return Measurement("token_equality", None, source="the incumbent answers no prompt twice alike", detail=detail)
    share = 1 - len(different) / len(judged)
    return Measurement(
        "token_equality", share, n=len(judged), unit="share of answers", source=f"{len(steady)} prompts", detail=detail
    )


def _differs(answer: Answer, reference: Answer, tie: float) -> bool:
    """Whether the answers part at a place where the candidate's token is not as good as the best."""
    ours, theirs = answer.completion.tokens, reference.completion.tokens
    first = next((place for place, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    return first is not None and answer.gaps[first] > tie


def _by_prompt(
    answers: Sequence[Answer], prompts: list[str], values: Callable[[Answer], list[float]]
) -> list[list[float]]:
    return [[value for answer in answers if answer.prompt == prompt for value in values(answer)] for prompt in prompts]


def _measured(metric: str, interval: Interval, n: int, unit: str, source: str, **detail: Any) -> Measurement:
    return Measurement(metric, interval.estimate, interval.low, interval.high, n, unit, source, detail)


def _evidence(answer: Answer) -> dict[str, Any]:
    errors = answer.errors
    place = max(range(len(errors)), key=errors.__getitem__)
    return {
        "prompt": answer.prompt,
        "mode": answer.mode,
        "token": place,
        "logprob": answer.completion.logprobs[place],
        "teacher": answer.score.logprobs[place],
        "best": answer.score.best[place],
    }


def _require_whole(client: Client, prompt: Prompt, completion: Completion, tokens: int) -> None:
    if len(completion.tokens) != tokens or len(completion.logprobs) != tokens:
        raise ServingError(
            f"{client.name} answered {prompt.name!r} with {len(completion.tokens)} tokens and {len(completion.logprobs)} "
            f"log-probabilities, {tokens} wanted.",
            hint="See its log.",
        )
