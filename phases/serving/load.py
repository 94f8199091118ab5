"""An open-loop load: requests at Poisson times whatever the server does, each timed from when it was due.

Closed loops wait for a slow server and so hide its slowness (coordinated omission). Here arrival times are drawn in
advance; a request that had to wait because too many were in flight keeps its due time, and that wait is part of its
latency. What could not even be started in time is counted apart.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from phases.serving.finish import not_as_asked
from phases.serving.own import HEADER, OwnRequests

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Prompt:
    """One kind of request: its text and how much to generate."""

    name: str
    text: str
    max_new_tokens: int = 16
    extra: dict[str, Any] = field(default_factory=dict)  # further sampling parameters, such as a JSON schema


@dataclass(frozen=True)
class RequestRecord:
    """One request. Times are seconds on the clock of `time.time`.

    Attributes:
        due: when it should have been sent; latencies count from here.
        first: when its first token came, None without one.
        status: HTTP status; 0 when there was no answer, -1 when the stream broke off before its end or did not end as asked.
        gaps: seconds between consecutive chunks of tokens.
        worker: the worker that served it, where known.
    """

    prompt: str
    due: float
    sent: float
    first: float | None
    finished: float
    status: int
    tokens: int = 0
    gaps: tuple[float, ...] = ()
    worker: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.due

    @property
    def e2e(self) -> float:
        return self.finished - self.due

    def metrics(self) -> dict[str, float]:
        """Latencies in seconds by metric; only those the request got far enough to have."""
        found = {"ttft": self.ttft, "e2e": self.e2e if self.ok else None}
        if self.gaps:
            found["itl"] = sum(self.gaps) / len(self.gaps)
        if self.ok and self.first is not None and self.tokens > 1:
            found["tpot"] = (self.finished - self.first) / (self.tokens - 1)
        return {name: value for name, value in found.items() if value is not None}


Send = Callable[[Prompt, float], RequestRecord]


class HttpSender:
    """Sends one streaming `/generate` request to an SGLang server or router.

    Args:
        url: base address. headers: such as the one that pins a worker. timeout: seconds without any data.
        worker: recorded with each request when the address is one worker's. own: counts answers, where that is so.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        headers: dict[str, str] | None = None,
        worker: str = "",
        own: OwnRequests | None = None,
    ) -> None:
        self.url, self.timeout, self.headers, self.worker = (
            url.rstrip("/"),
            timeout,
            {**HEADER, **(headers or {})},
            worker,
        )
        self._own = own
        self._local = threading.local()

    def __call__(self, prompt: Prompt, due: float) -> RequestRecord:
        sent = time.time()
        seen = _Seen()
        status, error = 0, ""
        try:
            sampling = {"max_new_tokens": prompt.max_new_tokens, "temperature": 0, **prompt.extra}
            body = {"text": prompt.text, "sampling_params": sampling, "stream": True}
            with self._session().post(
                f"{self.url}/generate",
                json=body,
                headers=self.headers,
                stream=True,
                timeout=(_CONNECT_SECONDS, self.timeout),
            ) as answer:
                status = answer.status_code
                if self._own:
                    self._own.answered(self.url, status)
                if answer.ok:
                    error = seen.read(answer, prompt)
                    status = status if not error else -1
                else:
                    error = answer.text[:200]
        except requests.RequestException as fault:
            status, error = (-1 if seen.first else 0), f"{type(fault).__name__}: {fault}"[:200]
        except (ValueError, LookupError, TypeError, AttributeError) as fault:
            status, error = -1, f"not SGLang's answer ({type(fault).__name__}: {fault})"[:200]
        return RequestRecord(
            prompt.name, due, sent, seen.first, time.time(), status, seen.tokens, tuple(seen.gaps), self.worker, error
        )

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        return self._local.session


class _Seen:
    """What a stream of server-sent events has brought so far."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.gaps: list[float] = []
        self.tokens = 0

    def read(self, answer: requests.Response, prompt: Prompt) -> str:
        """Read to the end; returns why the stream is not the whole answer that was asked for, or an empty text."""
        finish: Any = None
        for line in answer.iter_lines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                exactly = bool(prompt.extra.get("ignore_eos"))
                return not_as_asked(finish, self.tokens, prompt.max_new_tokens, exactly=exactly)
            event = json.loads(data)
            if "error" in event:
                return str(event["error"])[:200]
            meta = event.get("meta_info", {})
            finish = meta.get("finish_reason") or finish
            self._count(int(meta.get("completion_tokens", self.tokens + 1)))
        return "the stream ended without [DONE]"

    def _count(self, tokens: int) -> None:
        now = time.time()
        if tokens <= self.tokens:
            return
        if self.first is None:
            self.first = now
        else:
            self.gaps.append((now - self.last) / (tokens - self.tokens))
        self.last, self.tokens = now, tokens


@dataclass(frozen=True)
class LoadSummary:
    """What a load did; `late` requests could not be started within a second of their due time."""

    sent: int
    failed: int
    late: int
    worst_wait: float


class OpenLoopLoad:
    """Sends prompts at Poisson times from a background thread until it is stopped.

    Args:
        send: sends one request and returns its record; called from several threads.
        rate: requests a second. max_in_flight: requests that may be open at once. seed: of times and choice of prompts.
        on_record: called for every finished request, from the thread that sent it.
    """

    def __init__(
        self,
        send: Send,
        prompts: Sequence[Prompt],
        rate: float,
        *,
        max_in_flight: int = 32,
        seed: int = 0,
        on_record: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        if not prompts or not rate > 0:
            raise ValueError("a load needs at least one prompt and a rate above zero")
        self._send, self._prompts, self._rate, self._on_record = send, tuple(prompts), rate, on_record
        self._random = random.Random(seed)
        self._due: queue.Queue[tuple[Prompt, float] | None] = queue.Queue()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._summary = LoadSummary(0, 0, 0, 0.0)
        self._open: Counter[float] = Counter()  # requests that have not ended, by when they were due
        self._threads = [threading.Thread(target=self._work, name="load", daemon=True) for _ in range(max_in_flight)]
        self._pacer = threading.Thread(target=self._pace, name="load-pacer", daemon=True)

    def start(self) -> OpenLoopLoad:
        for thread in (*self._threads, self._pacer):
            thread.start()
        return self

    def stop(self, timeout: float = 60.0) -> LoadSummary:
        """Send nothing new, wait for what is in flight, and say what was done."""
        self._stop.set()
        self._pacer.join()
        for _ in self._threads:
            self._due.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return self.summary()

    def abandon(self) -> None:
        """Send nothing new and wait for nothing: what was due is dropped, what is in flight ends by itself."""
        self._stop.set()
        self._pacer.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._due.get_nowait()
        for _ in self._threads:
            self._due.put(None)

    def summary(self) -> LoadSummary:
        with self._lock:
            return self._summary

    def waiting(self, seconds: float) -> int:
        """Requests that were due more than so many seconds ago and have not ended."""
        before = time.time() - seconds
        with self._lock:
            return sum(count for due, count in self._open.items() if due < before)

    def __enter__(self) -> OpenLoopLoad:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _arrivals(self) -> Iterator[float]:
        at = time.time()
        while True:
            at += self._random.expovariate(self._rate)
            yield at

    def _pace(self) -> None:
        for due in self._arrivals():
            if self._stop.wait(max(0.0, due - time.time())):
                return
            with self._lock:
                self._open[due] += 1
            self._due.put((self._random.choice(self._prompts), due))

    def _work(self) -> None:
        while (item := self._due.get()) is not None:
            prompt, due = item
            record = self._send(prompt, due)
            wait = record.sent - due
            with self._lock:
                self._open[due] -= 1
                if not self._open[due]:
                    del self._open[due]
                old = self._summary
                self._summary = LoadSummary(
                    old.sent + 1, old.failed + (not record.ok), old.late + (wait > 1.0), max(old.worst_wait, wait)
                )
            self._on_record(record)
