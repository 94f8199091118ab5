"""Watching a fleet that has no control left: health of every worker, and latencies against a recorded reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from phases.analysis.decision import Decision
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict
from phases.production.production import Production
from phases.run.steps import StepContext
from phases.trial.arms import kinds_of
from phases.trial.end import Fault, TrialEnd
from phases.trial.looks import Looks, look_facts, name_of
from phases.trial.metrics import as_scrape, reader
from phases.trial.prometheus_source import SourceError
from phases.trial.reference import Level, Recorder, against
from phases.trial.settings import JudgeSettings


@dataclass
class Soak:
    """One watch over the whole fleet.

    Attributes:
        digest: release every worker must run; empty: whatever it runs.
        lost: workers that could not be moved and are not looked at; the failure budget allows them.
    """

    production: Production
    settings: JudgeSettings
    reference: Sequence[Level]
    digest: str
    context: StepContext
    lost: Collection[str] = ()
    _looks: Looks = field(default_factory=Looks)

    def __post_init__(self) -> None:
        self._read = reader(self.production.settings, self.production.workers)

    def run(self, seconds: float) -> TrialEnd:
        """Watch so long. FAIL at once on a fault or a regression; PASS at the end when every metric with a reference is within
        its margin; INCONCLUSIVE when too little was served to tell."""
        clock = self.context.clock
        started, recorder = clock.now(), Recorder(self.settings.metrics)
        while True:
            fault = self._scrape(recorder)
            elapsed = clock.now() - started
            decisions = against(
                self.reference, recorder.levels(), self.settings.metrics, self.settings.min_samples, clock.now()
            )
            self._note(elapsed, decisions, seconds)
            if fault or any(d.verdict is Verdict.FAIL for d in decisions):
                return TrialEnd(Verdict.FAIL, tuple(decisions), self._looks, elapsed, fault, recorder.levels())
            if elapsed >= seconds:
                return self._end(decisions, elapsed, recorder)
            clock.sleep(min(self.settings.window, max(0.1, seconds - elapsed)))

    def _end(self, decisions: list[Decision], elapsed: float, recorder: Recorder) -> TrialEnd:
        """Without any reference, the fleet being well for the whole time is all there is to tell."""
        told = [d for d in decisions if d.verdict is not None]
        open_tests = bool(self.reference) and len(told) < len(decisions)
        return TrialEnd(
            Verdict.INCONCLUSIVE if open_tests else Verdict.PASS,
            tuple(decisions),
            self._looks,
            elapsed,
            None,
            recorder.levels(),
        )

    def _scrape(self, recorder: Recorder) -> Fault | None:
        kinds = kinds_of(self.production.workers)
        for host in (host for host in self.production.workers if host.name not in self.lost):
            try:
                recorder.add(
                    as_scrape(self._read(host.url), t=self.context.clock.now(), source=host.name), kinds[host.name]
                )
            except AnalysisError as fault:
                if not self.production.client(host, 10.0).health():
                    return Fault(host.name, f"does not answer: {fault.message}", incumbent=False)
                if not isinstance(fault, SourceError):
                    self.context.progress(f"{host.name} is up, but its metrics cannot be read: {fault.message}")
            reason = self.production.seen_mixed(host, self.digest) if self.digest else self.production.tripped(host)
            if reason:
                return Fault(host.name, reason, incumbent=False)
        lost = self.production.lost_leases()
        return next(
            (Fault(name, f"its lease cannot be renewed: {why}", incumbent=False) for name, why in lost.items()), None
        )

    def _note(self, elapsed: float, decisions: list[Decision], seconds: float) -> None:
        self._looks.add(elapsed, [d for d in decisions if d.estimate is not None])
        told = ", ".join(
            f"{name_of(d)} {d.estimate:.2f}x the reference: {d.word}" for d in decisions if d.estimate is not None
        )
        self.context.progress(f"{elapsed:5.0f} s  {told or 'every worker well, too little served to tell latencies'}")
        watched = [host for host in self.production.workers if host.name not in self.lost]
        self.context.look(look_facts(elapsed, decisions, self.settings, {"all workers": watched}, seconds))
