"""Watching a fleet that has no control left: every worker answers, and latencies against a recorded reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from phases.analysis.decision import Decision
from phases.analysis.scrape import Scrape
from phases.base.clock import Clock
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from phases.trial.alive import Stalls
from phases.trial.bake import Own
from phases.trial.end import Fault, TrialEnd
from phases.trial.judge import Look
from phases.trial.looks import Looks
from phases.trial.loop import run_trial
from phases.trial.metrics import Read, as_scrape, read_metrics
from phases.trial.prometheus_source import SourceError
from phases.trial.reference import Recorder, Reference, against
from phases.trial.settings import JudgeSettings, ReferenceSettings
from phases.trial.users import UsersOnly

MOST = 4096  # times as long as it was watched: what would take longer is said to be out of reach


class ReferenceJudge:
    """What is served now against a recorded reference, for so many seconds.

    PASS when the whole range is within the limit for every metric, and the reference is young and of like traffic; FAIL at once when a whole
    range is over it. What is neither at the end is INCONCLUSIVE, with how much longer it would take.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        fit: ReferenceSettings,
        reference: Reference,
        seconds: float,
        clock: Clock,
        on_look: Look,
    ) -> None:
        self._settings, self._fit, self._reference = settings, fit, reference
        self._seconds, self._clock, self._on_look = seconds, clock, on_look
        self.recorder, self.looks = Recorder(settings.metrics), Looks()

    def look(self, now: float, elapsed: float) -> list[Decision]:
        found = [dataclasses.replace(d, source=self._source()) for d in self._against(now)]
        self.looks.add(elapsed, [d for d in found if d.estimate is not None])
        self._on_look(elapsed, found)
        return found

    def verdict(self, decisions: Sequence[Decision], elapsed: float) -> Verdict | None:
        if any(d.verdict is Verdict.FAIL for d in decisions) and not self._unfit():
            return Verdict.FAIL
        if elapsed < self._seconds:
            return None
        well = decisions and all(d.verdict is Verdict.PASS for d in decisions)
        return Verdict.PASS if well and not self._unfit() else Verdict.INCONCLUSIVE

    def end(self, verdict: Verdict, decisions: Sequence[Decision], seconds: float, fault: Fault | None) -> TrialEnd:
        withheld: tuple[str, ...] = ()
        if verdict is Verdict.INCONCLUSIVE and not fault:
            withheld = self._unfit() or self._longer(decisions, seconds)
        return TrialEnd(
            verdict, tuple(decisions), self.looks, seconds, fault, self.recorder.levels(), withheld=withheld
        )

    def _against(self, now: float, times: float = 1.0) -> list[Decision]:
        levels, settings = self.recorder.levels(times), self._settings
        return against(self._reference.levels, levels, settings.metrics, settings.min_samples, now)

    def _unfit(self) -> tuple[str, ...]:
        return self._reference.unfit(self._clock.now(), self.recorder.traffic(), self._fit)

    def _source(self) -> str:
        return self._reference.describe(self._clock.now()) or "no reference"

    def _longer(self, decisions: Sequence[Decision], seconds: float) -> tuple[str, ...]:
        if any(d.verdict is not Verdict.PASS and not d.n for d in decisions):
            return ()
        times = 2
        while times <= MOST:
            if all(d.verdict is Verdict.PASS for d in self._against(0.0, times)):
                return (f"about {seconds * (times - 1):.0f} s more of the same would tell",)
            times *= 2
        return (
            "no more time of the same would tell: the histograms' buckets are too coarse for the margin, or it is slower",
        )


@dataclass
class Soak:
    """One watch over many workers.

    Attributes:
        workers: name to URL. kinds: of each, where they differ.
        reference, fit: what is compared with, and when that may still judge.
        check, prove: a Fault of a worker ends it; `prove` is asked before it passes.
        own: answers to our own requests, which are no users'. say: told what is not a fault yet.
        stalled: seconds a worker may have requests and produce no token.
    """

    settings: JudgeSettings
    reference: Reference
    workers: Mapping[str, str]
    clock: Clock
    check: Callable[[], Fault | None]
    fit: ReferenceSettings = field(default_factory=ReferenceSettings)
    kinds: Mapping[str, str] = field(default_factory=dict)
    prove: Callable[[], Fault | None] = lambda: None
    read: Read = read_metrics
    own: Own = lambda url: {}
    on_look: Look = lambda elapsed, decisions: None
    say: Callable[[str], None] = lambda line: None
    stalled: float = 60.0

    def run(self, seconds: float) -> TrialEnd:
        """Watch so long."""
        self._judge = ReferenceJudge(self.settings, self.fit, self.reference, seconds, self.clock, self.on_look)
        self._users = {name: UsersOnly() for name in self.workers}
        self._stalls = Stalls(self.stalled)
        self._seconds, self._started = seconds, self.clock.now()
        return run_trial(self, self._judge, self.clock)

    # -- as a sampler of the loop ----------------------------------------------------------------------------------------

    def begin(self) -> Fault | None:
        return None

    def sample(self) -> Fault | None:
        with ThreadPoolExecutor(max(1, len(self.workers))) as pool:
            scraped = list(pool.map(self._read_one, self.workers.items()))
        stuck = None
        for name, found in zip(self.workers, scraped, strict=True):
            try:
                if isinstance(found, AnalysisError):
                    raise found
                self._judge.recorder.add(found, self.kinds.get(name, ""))
            except AnalysisError as fault:
                if not isinstance(fault, SourceError):
                    self.say(f"{name}: its metrics cannot be read: {fault.message}")
                continue
            if stuck is None and (reason := self._stalls.add(found)):
                stuck = Fault(name, reason, incumbent=False)
        return self.check() or stuck

    def at(self) -> float:
        return self.clock.now()

    def last_look(self) -> Fault | None:
        return self.prove()

    def pause(self) -> None:
        left = self._seconds - (self.clock.now() - self._started)
        self.clock.sleep(min(self.settings.window, max(0.1, left)))

    def _read_one(self, worker: tuple[str, str]) -> Scrape | AnalysisError:
        name, url = worker
        try:
            return self._users[name](as_scrape(self.read(url), t=self.clock.now(), source=name), self.own(url))
        except AnalysisError as fault:
            return fault
