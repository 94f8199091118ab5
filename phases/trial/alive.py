"""Whether workers answer: own completions through the scheduler, with a deadline. A green /health says nothing of a stuck scheduler.

Asked at an interval of its own while a trial runs, and once more at its end: nothing passes beside a worker that does not answer now.
Beside it, what the workers say themselves: requests running or queued, and no token for as long as the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from phases.analysis.scrape import HISTOGRAMS, TOKENS, Scrape
from phases.base.clock import Clock
from phases.base.errors import PhaseError

Ask = Callable[[], object]  # one own completion; raises a PhaseError, or takes for ever
STEP = 0.05  # seconds between looks for an answer that is waited for
WAITING = ("num_running_reqs", "num_queue_reqs")


def in_a_thread(ask: Ask) -> Future[object]:
    """Ask from a thread of its own, which nobody waits for."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="alive")
    answer = pool.submit(ask)
    pool.shutdown(wait=False)
    return answer


@dataclass
class Liveness:
    """Own completions of any number of workers.

    Attributes:
        asks: a completion of each worker, by its name.
        every, within: seconds between completions of a worker; until one must have come.
    """

    asks: Mapping[str, Ask]
    every: float
    within: float
    clock: Clock
    submit: Callable[[Ask], Future[object]] = in_a_thread
    _asked: dict[str, float] = field(default_factory=dict)
    _open: dict[str, Future[object]] = field(default_factory=dict)

    def check(self) -> tuple[str, str] | None:
        """A worker that owes an answer, and why that is a fault; asks those whose turn it is."""
        if self.every <= 0:
            return None
        for name in self.asks:
            if (reason := self._reason(name)) is not None:
                return name, reason
            if name not in self._open and self.clock.monotonic() - self._asked.get(name, -self.every) >= self.every:
                self._ask(name)
        return None

    def prove(self) -> tuple[str, str] | None:
        """As `check`, but every worker is asked now and waited for: what a trial ends with."""
        if self.every <= 0:
            return None
        for name in self.asks:
            if (reason := self._reason(name)) is not None:
                return name, reason
            if name not in self._open:
                self._ask(name)
        while self._open:
            for name in list(self._open):
                if (reason := self._reason(name)) is not None:
                    return name, reason
            if self._open:
                self.clock.sleep(STEP)
        return None

    def _ask(self, name: str) -> None:
        self._asked[name] = self.clock.monotonic()
        self._open[name] = self.submit(self.asks[name])

    def _reason(self, name: str) -> str | None:
        """Why the worker's open completion is a fault; a completion that has come is open no more."""
        if (answer := self._open.get(name)) is None:
            return None
        waited = self.clock.monotonic() - self._asked[name]
        if answer.done():
            del self._open[name]
            fault = answer.exception()
            if fault is None:
                return None
            told = fault.message if isinstance(fault, PhaseError) else f"{type(fault).__name__}: {fault}"
            return f"an own completion failed: {told}"
        return (
            f"an own completion has not come for {waited:.0f} s, {self.within:g} s are allowed"
            if waited > self.within
            else None
        )


class Stalls:
    """Workers that have requests and produce no token, by their own metrics."""

    def __init__(self, within: float) -> None:
        self._within = within
        self._last: dict[str, tuple[float, float]] = {}  # tokens, and since when they stand still while something waits

    def add(self, scrape: Scrape) -> str:
        """Why a worker is stuck; empty while it is not, or does not say."""
        names = [name for metric in WAITING if (name := scrape.resolve([metric]))]
        waiting = sum(sum(scrape.samples[name].values()) for name in names)
        tokens = _tokens(scrape)
        before, since = self._last.get(scrape.source, (None, scrape.t))
        if waiting <= 0:
            self._last.pop(scrape.source, None)  # what comes next begins to wait then
        elif tokens != before:
            self._last[scrape.source] = (tokens, scrape.t)
        elif (still := scrape.t - since) > self._within:
            return f"{waiting:.0f} requests run or wait in it, and no token came for {still:.0f} s"
        return ""


def _tokens(scrape: Scrape) -> float:
    """Whatever grows with tokens: some counters only do when a request ends."""
    counters = [scrape.resolve([TOKENS])]
    counters += [scrape.resolve(HISTOGRAMS[metric], suffix="_count") for metric in ("itl", "ttft")]
    found = [counters[0], *(f"{name}_count" for name in counters[1:] if name)]
    return sum(sum(scrape.samples[name].values()) for name in found if name)
