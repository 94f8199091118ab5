"""Does a worker on the candidate say what the incumbent says? Asked before it gets traffic, and again while it bakes.

As in Phase 2 (`phases.serving.outputs`), the candidate's answers are judged by a worker on the incumbent, which teacher-forces the
same tokens through plain prefill, where no verify kernel takes part. The incumbent's own answers, judged the same way, say what this
fleet's arithmetic allows; only what goes beyond it counts. Both workers get the same requests, so that asking under judgement
makes neither arm look slower.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from phases.base.errors import PhaseError, ServingError
from phases.base.results import Measurement
from phases.production.settings import AgreementSettings
from phases.serving import outputs
from phases.serving.client import Completion, Score
from phases.serving.prompts import Prompt, load_prompts

KINDS = ("long", "json", "language", "code")  # long ones first: a prefix of many blocks is where kernels go wrong


class Asked(Protocol):
    """The part of a client that is used."""

    name: str

    def generate(self, prompt: str, tokens: int) -> Completion: ...
    def tokenize(self, prompt: str) -> list[int]: ...
    def score(self, prompt: list[int], tokens: tuple[int, ...]) -> Score: ...


@dataclass(frozen=True)
class Agreement:
    """One comparison.

    Attributes:
        error, own_error: mean |difference of log-probabilities| a token, of the candidate and of the incumbent itself, nats.
        wrong, own_wrong: share of tokens worse than the best by more than the tie tolerance.
        n: tokens compared.
        reason: why they do not agree; empty when they do.
    """

    worker: str
    teacher: str
    error: float
    own_error: float
    wrong: float
    own_wrong: float
    n: int
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def chosen_prompts(count: int) -> list[Prompt]:
    """So many of the built-in prompts, of different kinds."""
    known = load_prompts(None)
    by_kind = [[prompt for prompt in known if prompt.kind == kind] for kind in KINDS]
    order = [group[at] for at in range(max(map(len, by_kind))) for group in by_kind if at < len(group)]
    return [*order, *(prompt for prompt in known if prompt not in order)][:count]


def compare(worker: Asked, teacher: Asked, settings: AgreementSettings) -> Agreement:
    """Ask both the same and judge both.

    Raises:
        ServingError: one of them does not answer.
    """
    prompts = chosen_prompts(settings.prompts)
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda client: _answers(client, prompts, settings.tokens), (worker, teacher))
        known = {prompt.name: teacher.tokenize(prompt.text) for prompt in prompts}
        asked = [(known[name], answer.tokens) for answers in (ours, theirs) for name, answer in answers.items()]
        # The worker is asked the same, for the same load; its opinion of itself does not count.
        judged, _ = pool.map(lambda client: [client.score(*item) for item in asked], (teacher, worker))
    half = len(ours)
    error, wrong = _judge(list(ours.values()), judged[:half], settings.tie)
    own_error, own_wrong = _judge(list(theirs.values()), judged[half:], settings.tie)
    found = Agreement(
        worker.name,
        teacher.name,
        error,
        own_error,
        wrong,
        own_wrong,
        sum(len(answer.tokens) for answer in ours.values()),
    )
    return Agreement(**{**found.to_json(), "reason": _reason(found, settings)})


def measurements(found: Sequence[dict[str, Any]]) -> tuple[Measurement, ...]:
    """The worst comparison as gate rows, `canary_logprob_error` and `canary_wrong_tokens`; nothing without any."""
    if not found:
        return ()
    worst = max(found, key=lambda row: (bool(row["reason"]), row["error"] - row["own_error"]))
    source = f"{worst['worker']} judged by {worst['teacher']}, the worst of {len(found)} comparisons"
    n = sum(row["n"] for row in found)
    error, wrong = worst["error"], max(row["wrong"] for row in found)
    return (
        Measurement(
            "canary_logprob_error",
            error,
            n=n,
            unit="nats a token",
            source=source,
            detail={"incumbent": worst["own_error"]},
        ),
        Measurement(
            "canary_wrong_tokens", wrong, n=n, unit="share", source=source, detail={"incumbent": worst["own_wrong"]}
        ),
    )


class AgreementWatch:
    """Compares now and then from a thread of its own while the block runs, each worker in turn.

    Args:
        compare: one comparison of a worker, by its place in the turn; a PhaseError is no disagreement: a worker that does not
            answer is found by other checks.
        settings: how often, if at all.
        at_once: the first one does not wait.
    """

    def __init__(
        self, compare: Callable[[int], Agreement], settings: AgreementSettings, *, at_once: bool = False
    ) -> None:
        self._compare, self._every, self._first = compare, settings.every, 0.0 if at_once else settings.every
        self._wanted = settings.prompts > 0 and settings.every > 0
        self._found: list[Agreement] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)

    def __enter__(self) -> AgreementWatch:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """A comparison under way is not waited for: what was found may call for going back now."""
        self._stopped.set()

    @property
    def found(self) -> list[Agreement]:
        return list(self._found)

    def disagreement(self) -> Agreement | None:
        """The first comparison that failed so far."""
        return next((found for found in self.found if found.reason), None)

    def _run(self) -> None:
        wait = self._first
        for turn in itertools.count():
            if self._stopped.wait(wait):
                return
            wait = self._every
            with contextlib.suppress(PhaseError):
                self._found.append(self._compare(turn))


def _answers(client: Asked, prompts: Sequence[Prompt], tokens: int) -> dict[str, Completion]:
    found = {prompt.name: client.generate(prompt.text, tokens) for prompt in prompts}
    for answer in found.values():
        if len(answer.logprobs) != len(answer.tokens):  # with none, there would be nothing to be off by
            raise ServingError(
                f"{client.name} answered with {len(answer.tokens)} tokens and {len(answer.logprobs)} log-probabilities.",
                hint="See its log.",
            )
    return found


def _judge(answers: Sequence[Completion], scores: Sequence[Score], tie: float) -> tuple[float, float]:
    """Mean error and share of wrong tokens."""
    judged = [outputs.Answer("", "", answer, score) for answer, score in zip(answers, scores, strict=True)]
    errors = [error for answer in judged for error in answer.errors]
    wrong = [gap > tie for answer in judged for gap in answer.gaps]
    return sum(errors) / max(1, len(errors)), sum(wrong) / max(1, len(wrong))


def _reason(found: Agreement, settings: AgreementSettings) -> str:
    """NaN agrees with nothing, so the comparisons are written the way that lets it fail."""
    if found.n == 0:
        return f"{found.worker} answered without tokens"
    if not found.error <= found.own_error + settings.error:
        return (
            f"outputs of {found.worker} differ: log-probabilities are off by {found.error:.3g} nats a token, judged by {found.teacher}, "
            f"whose own are off by {found.own_error:.3g}"
        )
    if not found.wrong <= found.own_wrong + settings.wrong:
        return f"outputs of {found.worker} differ: {found.wrong:.0%} of its tokens are worse than the best, by {found.teacher}'s judgement"
    return ""
