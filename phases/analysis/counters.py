"""Error counts, throughput and accept length of a server from its counters, between two scrapes."""

from __future__ import annotations

from dataclasses import dataclass

from phases.analysis.counts import kind_of
from phases.analysis.scrape import (
    ABORTED,
    GENERATING,
    PROMPT_TOKENS,
    RESPONSES,
    TOKENS,
    VERIFY_CALLS,
    Increases,
    Labels,
    Scrape,
)


@dataclass(frozen=True)
class CounterStep:
    """What one server did between two scrapes.

    Attributes:
        seconds: between the scrapes.
        responses: answers of generating endpoints by status; polls and scrapes are left out.
        aborted: requests given up after their answer had begun with 200, where the server counts them.
        tokens, prompt_tokens: tokens generated, and read. verify_calls: verification calls of speculative decoding.
        restarted: a counter was reset in between.
    """

    seconds: float
    responses: dict[int, float]
    tokens: float
    verify_calls: float
    restarted: bool
    aborted: float = 0.0
    prompt_tokens: float = 0.0

    def errors(self, kind: str) -> float:
        """Answers of an error kind, `5xx` or `4xx`; what was aborted is a 5xx, whatever status it began with."""
        found = sum(count for status, count in self.responses.items() if kind_of(status) == kind)
        return found + self.aborted if kind == "5xx" else found

    @property
    def requests(self) -> float:
        """Never fewer than its errors: an answer may have been counted a step before it was aborted."""
        return max(sum(self.responses.values()), self.errors("5xx") + self.errors("4xx"))

    @property
    def throughput(self) -> float | None:
        """Tokens per second; None if no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification call, each call weighing the same; None without calls (a gauge would keep its last value)."""
        return self.tokens / self.verify_calls if self.verify_calls > 0 else None


class CounterWindows:
    """Steps of any number of servers; names are resolved from each scrape."""

    def __init__(self) -> None:
        self._series = {name: Increases() for name in (RESPONSES, TOKENS, VERIFY_CALLS, ABORTED, PROMPT_TOKENS)}
        self._at: dict[str, float] = {}

    def add(self, scrape: Scrape) -> CounterStep | None:
        """What this source did since its previous scrape; None the first time.

        A server that has answered nobody yet exports no response counter: what appears later began at 0 then.

        Raises:
            AnalysisError: broken counters.
        """
        steps = {name: self._step(name, scrape) for name in self._series}
        previous = self._at.get(scrape.source)
        self._at[scrape.source] = scrape.t
        answered = steps[RESPONSES]
        if previous is None or answered is None:
            return None
        responses: dict[int, float] = {}
        for labels, value in answered[0].items():
            named = dict(labels)
            if named.get("endpoint") in GENERATING and named.get("status_code", "").isdigit():
                status = int(named["status_code"])
                responses[status] = responses.get(status, 0.0) + value
        totals = {
            name: sum(steps[name][0].values()) if steps[name] else 0.0
            for name in (TOKENS, VERIFY_CALLS, ABORTED, PROMPT_TOKENS)
        }
        restarted = any(step is not None and step[1] for step in steps.values())
        return CounterStep(
            scrape.t - previous,
            responses,
            totals[TOKENS],
            totals[VERIFY_CALLS],
            restarted,
            totals[ABORTED],
            totals[PROMPT_TOKENS],
        )

    def _step(self, name: str, scrape: Scrape) -> tuple[dict[Labels, float], bool] | None:
        found = scrape.resolve([name])
        return self._series[name].step(scrape.source, scrape.samples.get(found, {}) if found else {}, scrape.started)
