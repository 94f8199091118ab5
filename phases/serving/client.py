"""HTTP to one SGLang server: completions, scoring of given tokens, what it says about itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import requests

from phases.base.errors import ServingError
from phases.base.scraping import TooLong, get_text
from phases.serving.finish import not_as_asked
from phases.serving.own import HEADER, OwnRequests


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        tokens: ids generated.
        logprobs: natural log-probability of each, as the server's own forward that emitted it computed it.
        prompt_tokens: number of prompt tokens.
        verify_steps: tree-verify steps it took; 0 when the server does not speculate.
        seconds: from sending to the whole answer, on this side.
        first_seconds: until its first token, as the server measured it; None when it does not say.
        server_seconds: whole request as the server measured it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    prompt_tokens: int
    verify_steps: int
    seconds: float
    first_seconds: float | None
    server_seconds: float | None

    @property
    def accept_length(self) -> float | None:
        """Tokens a verify step."""
        return len(self.tokens) / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True)
class Score:
    """Teacher-forced log-probabilities of given tokens after a prompt, by plain prefill: no speculation, no verify.

    Attributes:
        logprobs: of each given token.
        best: of the most probable token at the same place.
    """

    logprobs: tuple[float, ...]
    best: tuple[float, ...]


class ScoringError(ServingError):
    """A server says that it scored other tokens than it was given.

    Attributes:
        given: ids that were to be scored.
        rows: what the server answered: [log-probability, id, text] a token.
    """

    def __init__(self, message: str, *, given: tuple[int, ...], rows: list[list[Any]], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.given, self.rows = given, rows


class Client:
    """One server. Every failure is a ServingError naming the server and what it answered. `own` counts what it answers to us."""

    def __init__(self, url: str, name: str, timeout: float = 120.0, own: OwnRequests | None = None) -> None:
        self.url, self.name, self.timeout, self._own = url, name, timeout, own
        self._session = requests.Session()
        self._session.headers.update(HEADER)
        self._session.trust_env = False  # no proxies between us and our own server

    def generate(self, prompt: str | list[int], tokens: int, *, stream: bool = False) -> Completion:
        """Greedy completion of exactly `tokens` tokens with their log-probabilities; ServingError for one that ends otherwise."""
        body = self._body(prompt, tokens)
        started = time.monotonic()
        with self._understood("/generate"):
            data = self._stream(body) if stream else self._post("/generate", body)
            completion = _completion(data, time.monotonic() - started)
            wrong = not_as_asked(data["meta_info"].get("finish_reason"), len(completion.tokens), tokens, exactly=True)
        if wrong:
            raise ServingError(f"{self.name} did not answer as asked: {wrong}.", hint="See its log.")
        return completion

    def tokenize(self, prompt: str) -> list[int]:
        """The server's own ids of a prompt (SGLang says 0 for the vocabulary's last, which no text of a real model has)."""
        body = self._body(prompt, 1) | {"logprob_start_len": 0}
        with self._understood("/generate"):
            return [int(row[1]) for row in self._prompt_rows(body)["input_token_logprobs"]]

    def score(self, prompt: list[int], tokens: tuple[int, ...]) -> Score:
        """Teacher-force `tokens` after `prompt`.

        Raises:
            ScoringError: the rows that came back are not those of `tokens`.
        """
        with self._understood("/generate"):
            return self._score(prompt, tokens)

    def _score(self, prompt: list[int], tokens: tuple[int, ...]) -> Score:
        body = self._body([*prompt, *tokens], 1) | {"logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1}
        meta = self._prompt_rows(body)
        given, best = meta["input_token_logprobs"][-len(tokens) :], meta["input_top_logprobs"][-len(tokens) :]
        wrong = _difference(tokens, [row[1] for row in given], last=max((*prompt, *tokens)))
        if wrong:
            raise ScoringError(
                f"{self.name} scored other tokens than it was given: {wrong}.",
                given=tokens,
                rows=meta["input_token_logprobs"],
                hint="This SGLang is not supported.",
            )
        return Score(tuple(float(row[0]) for row in given), tuple(float(row[0][0]) for row in best))

    def _prompt_rows(self, body: dict[str, Any]) -> dict[str, Any]:
        """What the server says of the prompt's own tokens."""
        meta: dict[str, Any] = self._post("/generate", body).get("meta_info", {})
        if "input_token_logprobs" not in meta or ("top_logprobs_num" in body and "input_top_logprobs" not in meta):
            raise ServingError(
                f"{self.name} gives no log-probabilities of a prompt.",
                hint="This SGLang is not supported, or something between us and it drops them.",
            )
        return meta

    def flush_cache(self) -> None:
        """Forget cached prefixes, so that what was asked before does not decide how a prompt is computed."""
        try:
            self._checked(self._session.post(f"{self.url}/flush_cache", timeout=self.timeout), "POST /flush_cache")
        except requests.RequestException as fault:
            raise self._failed("POST /flush_cache", fault) from None

    def health(self, timeout: float = 5.0) -> bool:
        try:
            return self._session.get(f"{self.url}/health", timeout=timeout).status_code == 200
        except requests.RequestException:
            return False

    def server_info(self) -> dict[str, Any]:
        with self._understood("/server_info"):
            return dict(self._get("/server_info").json())

    def metrics(self) -> str:
        """The Prometheus text of /metrics."""
        try:
            return get_text(f"{self.url}/metrics", self.timeout, self._session)
        except TooLong as fault:
            raise ServingError(f"{self.name}: {fault}.", hint=fault.hint) from None
        except requests.HTTPError as fault:
            raise ServingError(
                f"{self.name} answered GET /metrics with {fault.response.status_code}.", hint="See its log."
            ) from None
        except requests.RequestException as fault:
            raise self._failed("GET /metrics", fault) from None

    @contextlib.contextmanager
    def _understood(self, path: str) -> Iterator[None]:
        """What cannot be read as the answer it should be: a sick server, or another program, says 200 to anything."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as fault:
            reason = f"{type(fault).__name__} {fault}"[:200]
            raise ServingError(
                f"{self.name} answered {path} with something else than SGLang does ({reason}).", hint="See its log."
            ) from fault

    def _body(self, prompt: str | list[int], tokens: int) -> dict[str, Any]:
        key = "text" if isinstance(prompt, str) else "input_ids"
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {key: prompt, "sampling_params": sampling, "return_logprob": True}

    def _get(self, path: str) -> requests.Response:
        try:
            answer = self._session.get(f"{self.url}{path}", timeout=self.timeout)
        except requests.RequestException as fault:
            raise self._failed(f"GET {path}", fault) from None
        return self._checked(answer, f"GET {path}")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._session.post(f"{self.url}{path}", json=body, timeout=self.timeout)
            self._count(answer)
            return self._checked(answer, f"POST {path}").json()
        except requests.RequestException as fault:
            raise self._failed(f"POST {path}", fault) from None

    def _stream(self, body: dict[str, Any]) -> dict[str, Any]:
        """Server-sent events; each holds the whole answer so far, and the last one counts."""
        last = None
        try:
            with self._session.post(
                f"{self.url}/generate", json=body | {"stream": True}, timeout=self.timeout, stream=True
            ) as answer:
                self._count(answer)
                self._checked(answer, "POST /generate (streaming)")
                for line in answer.iter_lines():
                    if line == b"data: [DONE]":
                        break
                    if line.startswith(b"data:"):
                        last = json.loads(line[5:])
                        if "error" in last:
                            raise ServingError(
                                f"{self.name} broke off a stream: {str(last['error'])[:200]}.", hint="See its log."
                            )
                else:
                    raise ServingError(f"{self.name} cut a stream before its end.", hint="See its log.")
        except requests.RequestException as fault:
            raise self._failed("POST /generate (streaming)", fault) from None
        if last is None:
            raise ServingError(f"{self.name} streamed an empty answer.", hint="See its log.")
        return last

    def _count(self, answer: requests.Response) -> None:
        if self._own:
            self._own.answered(self.url, answer.status_code)

    def _checked(self, answer: requests.Response, what: str) -> requests.Response:
        if answer.status_code != 200:
            raise ServingError(
                f"{self.name} answered {what} with {answer.status_code}: {answer.text[:300]}", hint="See its log."
            )
        return answer

    def _failed(self, what: str, fault: requests.RequestException) -> ServingError:
        reason = f"no answer within {self.timeout:g} s" if isinstance(fault, requests.Timeout) else type(fault).__name__
        return ServingError(f"{self.name} did not answer {what}: {reason}.", hint="See its log.")


def _difference(tokens: tuple[int, ...], said: list[Any], last: int) -> str:
    """How the ids a server says it scored differ from those it was given; empty when they do not.

    SGLang up to 0.5.23 at least says 0 for the vocabulary's last id (`x if x < vocab_size - 1 else 0`, meant for the padding of images);
    the log-probability beside it is that of the given token. Such an id is the largest of the request, `last`.
    """
    if len(said) != len(tokens):
        return f"{len(tokens)} tokens given, {len(said)} rows came back"
    wrong = [
        place
        for place, (token, found) in enumerate(zip(tokens, said))
        if found != token and not (found == 0 and token == last)
    ]
    if wrong:
        first = wrong[0]
        return f"{len(tokens)} tokens given, as many rows came back, {len(wrong)} differ, first token {first + 1}: id {said[first]} instead of {tokens[first]}"
    return ""


def _completion(data: dict[str, Any], seconds: float) -> Completion:
    meta = data["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    tokens = tuple(data.get("output_ids") or (int(row[1]) for row in rows))
    return Completion(
        tokens=tokens,
        logprobs=tuple(float(row[0]) for row in rows),
        text=data.get("text", ""),
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        verify_steps=int(meta.get("spec_verify_ct") or 0),
        seconds=seconds,
        first_seconds=meta.get("first_token_latency"),
        server_seconds=meta.get("e2e_latency"),
    )
