"""The one loop of every trial: take a sample, look, and end when there is a verdict. Bake, switchback and soak are samplers of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from phases.analysis.decision import Decision
from phases.base.clock import Clock
from phases.base.verdict import Verdict
from phases.trial.end import Fault, TrialEnd


class Sampler(Protocol):
    """Where samples come from, and when."""

    def begin(self) -> Fault | None:
        """What comes before the trial's time counts."""
        ...

    def sample(self) -> Fault | None:
        """Take the next sample and hand it to the judge. A Fault ends the trial."""
        ...

    def at(self) -> float:
        """Now, on the clock of what was handed in."""
        ...

    def last_look(self) -> Fault | None:
        """Whether everything answers at this very moment: asked before a trial ends as anything but a failure."""
        ...

    def pause(self) -> None:
        """Until the next sample is due."""
        ...


class Judging(Protocol):
    """What makes of samples a verdict."""

    def look(self, now: float, elapsed: float) -> list[Decision]: ...
    def verdict(self, decisions: Sequence[Decision], elapsed: float) -> Verdict | None: ...
    def end(self, verdict: Verdict, decisions: Sequence[Decision], seconds: float, fault: Fault | None) -> TrialEnd: ...


def run_trial(sampler: Sampler, judge: Judging, clock: Clock) -> TrialEnd:
    """Until the judge has a verdict or something is at fault. Nothing passes or stays open without a last look; no verdict is kept from an
    earlier one."""
    fault = sampler.begin()
    started = clock.now()
    while True:
        fault = fault or sampler.sample()
        elapsed = clock.now() - started
        decisions = judge.look(sampler.at(), elapsed)
        verdict = fault.verdict if fault else judge.verdict(decisions, elapsed)
        if verdict in (Verdict.PASS, Verdict.INCONCLUSIVE) and not fault and (fault := sampler.last_look()):
            verdict = fault.verdict
        if verdict is not None:
            return judge.end(verdict, decisions, elapsed, fault)
        sampler.pause()
