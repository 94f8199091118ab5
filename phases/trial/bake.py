"""A bake: both arms under the same traffic at the same time, looked at every window until the verdict is in.

Latencies come from the workers' own histograms or, with probes, from own requests sent to both arms at the same rate; either way
paired in the same windows. Errors come from the workers' response counters, so users' requests count, and from own requests that
broke off, which no counter shows. Besides the tests, each window asks whether every worker is alive and what it should be; a
fault there ends the bake at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from phases.analysis.counters import CounterWindows
from phases.analysis.counts import ErrorTest
from phases.analysis.decision import Decision
from phases.analysis.histograms import HistogramTest
from phases.analysis.scrape import Scrape
from phases.analysis.sequential import SequentialTest
from phases.base.clock import Clock
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from phases.serving.load import RequestRecord
from phases.trial.end import Fault, TrialEnd
from phases.trial.looks import Looks
from phases.trial.metrics import Read, as_scrape, read_metrics
from phases.trial.prometheus_source import SourceError
from phases.trial.reference import Recorder
from phases.trial.settings import ERRORS, JudgeSettings


class Probes(Protocol):
    """Own requests to each arm, one by one."""

    def take(self) -> list[tuple[str, RequestRecord]]:
        """What has finished since the last call: (arm, record)."""
        ...


Look = Callable[[float, Sequence[Decision]], None]


@dataclass
class Bake:
    """One bake.

    Attributes:
        canary, control: workers of each arm, name to URL.
        others: workers in neither arm that run what the control runs, name to URL: only for the reference.
        kinds: kind of each worker by name, where workers differ: the reference is kept by kind.
        check: asked every window; a Fault ends the bake. It also renews leases.
        on_look: told of every look.
    """

    settings: JudgeSettings
    canary: dict[str, str]
    control: dict[str, str]
    clock: Clock
    check: Callable[[], Fault | None]
    on_look: Look = lambda now, decisions: None
    read: Read = read_metrics
    probes: Probes | None = None
    others: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    _silent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source = f"/metrics of {', '.join([*self.canary, *self.control])}"
        tests = [self.settings.test(metric) for metric in self.settings.metrics]
        self._histograms = [] if self.probes else [HistogramTest(test, source=source) for test in tests]
        self._records = (
            [SequentialTest(test, source="own requests to each arm") for test in tests] if self.probes else []
        )
        self._errors = {
            kind: ErrorTest(
                kind,
                tolerance=self.settings.error_tolerance,
                alpha=self.settings.share,
                window=self.settings.window,
                deadline=self.settings.deadline,
                min_samples=self.settings.min_samples,
                source=source,
            )
            for kind in ERRORS
        }
        self._counters = CounterWindows()
        self._looks = Looks()
        self._reference = Recorder(self.settings.metrics)
        self._requests = {"canary": 0.0, "control": 0.0}

    def run(self) -> TrialEnd:
        """Look until every test has decided and the bake is over, one fails, a worker is at fault, or the deadline has come."""
        started = self.clock.now()
        next_look = started
        while True:
            fault = self.check() or self._scrape()
            now = self.clock.now()
            decisions = self._look(now, now - started)
            if fault:
                return self._end(
                    Verdict.INCONCLUSIVE if fault.incumbent else Verdict.FAIL, decisions, now - started, fault
                )
            verdict = verdict_of(decisions, now - started, self.settings)
            if verdict is not None:
                return self._end(verdict, decisions, now - started, None)
            next_look += self.settings.window
            self.clock.sleep(max(0.0, next_look - self.clock.now()))

    def _scrape(self) -> Fault | None:
        """Scrape all at the same moment; a worker of an arm that stays silent, or says nothing that can be read, for three windows is a fault."""
        named = {"canary": self.canary, "control": self.control, "": self.others}
        workers = [(arm, *item) for arm, urls in named.items() for item in urls.items()]
        with ThreadPoolExecutor(len(workers)) as pool:
            scraped = list(pool.map(self._read_one, workers))
        for (arm, name, _), found in zip(workers, scraped, strict=True):
            if isinstance(found, SourceError):
                continue  # says nothing about the worker; an arm that is not scraped for two windows is not judged
            unreadable = found if isinstance(found, AnalysisError) else self._folded(arm, found)
            self._silent[name] = self._silent.get(name, 0) + 1 if unreadable else 0
            if unreadable and arm and self._silent[name] >= 3:
                return Fault(name, f"its metrics cannot be read: {unreadable.message}", incumbent=arm == "control")
        return None

    def _read_one(self, worker: tuple[str, str, str]) -> Scrape | AnalysisError:
        try:
            found = self.read(worker[2])
            return as_scrape(found, t=self.clock.now(), source=worker[1])
        except AnalysisError as fault:
            return fault

    def _folded(self, arm: str, scrape: Scrape) -> AnalysisError | None:
        """What is wrong with its numbers, if anything is."""
        try:
            self._fold(arm, scrape)
        except AnalysisError as fault:
            return fault
        return None

    def _fold(self, arm: str, scrape: Scrape) -> None:
        if arm != "canary":
            self._reference.add(scrape, self.kinds.get(scrape.source, ""))
        if not arm:
            return
        for test in self._histograms:
            test.add(arm, scrape)
        step = self._counters.add(scrape) if scrape.resolve(["http_responses_total"]) else None
        if step:
            self._requests[arm] += step.requests
            for kind, test in self._errors.items():
                test.add(arm, scrape.t, requests=step.requests, errors=step.errors(kind))

    def _take(self) -> None:
        """Own requests that have ended. One without a whole answer is an error no response counter knows of."""
        for arm, record in self.probes.take() if self.probes else []:
            for test in self._records:
                value = record.metrics().get(test.settings.metric)
                if record.ok and value is not None:
                    test.observe(arm, record.finished, value, record.status)
            if record.status <= 0:
                self._errors["5xx"].add(arm, record.finished, requests=1, errors=1)

    def _look(self, now: float, elapsed: float) -> list[Decision]:
        self._take()
        decisions = [test.look(now) for test in (*self._histograms, *self._records, *self._errors.values())]
        self._looks.add(elapsed, decisions)
        self.on_look(elapsed, decisions)
        return decisions

    def _end(self, verdict: Verdict, decisions: Sequence[Decision], seconds: float, fault: Fault | None) -> TrialEnd:
        return TrialEnd(
            verdict, tuple(decisions), self._looks, seconds, fault, self._reference.levels(), dict(self._requests)
        )


def verdict_of(decisions: Sequence[Decision], elapsed: float, settings: JudgeSettings) -> Verdict | None:
    """Where a bake stands: one test that fails is enough, a pass needs all of them and the whole bake, the deadline ends it."""
    if any(d.verdict is Verdict.FAIL for d in decisions):
        return Verdict.FAIL
    found = {
        d.verdict for d in decisions if d.metric != "4xx"
    }  # the users' own mistakes may leave that one open for ever
    if elapsed >= settings.deadline:
        return Verdict.PASS if found == {Verdict.PASS} else Verdict.INCONCLUSIVE
    return Verdict.PASS if found == {Verdict.PASS} and elapsed >= settings.bake else None
