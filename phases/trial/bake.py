"""A bake: both arms under the same traffic at the same time, looked at every window.

Latencies come from the workers' own histograms or, with probes, from own requests sent to both arms at the same rate; either way
paired in the same windows. Share and errors are the users': the workers' response counters less what they answered to us. Besides the tests,
each window asks whether every worker is alive and what it should be; a fault there ends the bake at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from phases.analysis.scrape import Scrape
from phases.base.clock import Clock
from phases.base.errors import AnalysisError
from phases.serving.load import RequestRecord
from phases.trial.alive import Stalls
from phases.trial.end import Fault, TrialEnd
from phases.trial.judge import Judge, Look
from phases.trial.loop import run_trial
from phases.trial.metrics import Read, as_scrape, read_metrics
from phases.trial.prometheus_source import SourceError
from phases.trial.settings import JudgeSettings
from phases.trial.users import UsersOnly

SILENT = 3  # looks in a row without readable metrics that are a fault
Own = Callable[[str], dict[int, int]]  # base URL of a worker -> its answers to our own requests, by status


class Probes(Protocol):
    """Own requests to each arm, one by one."""

    def take(self) -> list[tuple[str, RequestRecord]]:
        """What has finished since the last call: (arm, record)."""
        ...

    def waiting(self, seconds: float) -> dict[str, int]:
        """Requests that have waited longer than so many seconds for the end of their answer, by arm."""
        ...


@dataclass
class Bake:
    """One bake.

    Attributes:
        canary, control: workers of each arm, name to URL.
        others: workers in neither arm that run what the control runs, name to URL: only for the reference.
        kinds: kind of each worker by name, where workers differ: the reference is kept by kind.
        check: asked every window; a Fault ends the bake. It also renews leases. prove: asked before anything passes.
        on_look: told of every look.
        own: answers to our own requests, which are no users'.
        share_tolerance: how far the canary's share of users' requests may be from its share of workers; None: not looked at.
        stalled: seconds a worker may have requests and produce no token.
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
    prove: Callable[[], Fault | None] = lambda: None
    own: Own = lambda url: {}
    share_tolerance: float | None = None
    stalled: float = 60.0

    def run(self) -> TrialEnd:
        """Look until every test has decided and the bake is over, one fails, a worker is at fault, or the deadline has come."""
        self._judge = Judge(
            self.settings,
            probes=self.probes is not None,
            source=f"/metrics of {', '.join([*self.canary, *self.control])}" if not self.probes else "each arm",
            window=self.settings.window,
            expected=len(self.canary) / (len(self.canary) + len(self.control)),
            share_tolerance=self.share_tolerance,
            on_look=self.on_look,
        )
        named = {"canary": self.canary, "control": self.control, "": self.others}
        self._workers = [(arm, *item) for arm, urls in named.items() for item in urls.items()]
        self._users = {name: UsersOnly() for _, name, _ in self._workers}
        self._silent = dict.fromkeys(self._users, 0)
        self._stalls = Stalls(self.stalled)
        return run_trial(self, self._judge, self.clock)

    # -- as a sampler of the loop ----------------------------------------------------------------------------------------

    def begin(self) -> Fault | None:
        self._next = self.clock.now()
        return None

    def sample(self) -> Fault | None:
        fault = self.check() or self._scrape()
        if self.probes:
            for arm, record in self.probes.take():
                self._judge.record(arm, record, record.finished)
            self._judge.waiting(self.probes.waiting(self.stalled))
        return fault

    def at(self) -> float:
        return self.clock.now()

    def last_look(self) -> Fault | None:
        return self.prove()

    def pause(self) -> None:
        self._next += self.settings.window
        self.clock.sleep(max(0.0, self._next - self.clock.now()))

    def _scrape(self) -> Fault | None:
        """Scrape all at the same moment; a worker of an arm that stays silent, or says nothing that can be read, for three windows is a fault."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            scraped = list(pool.map(self._read_one, self._workers))
        for (arm, name, _), found in zip(self._workers, scraped, strict=True):
            if isinstance(found, SourceError):
                continue  # says nothing about the worker; an arm that is not scraped for two windows is not judged
            unreadable = found if isinstance(found, AnalysisError) else self._folded(arm, found)
            self._silent[name] = self._silent[name] + 1 if unreadable else 0
            if unreadable and arm and self._silent[name] >= SILENT:
                return Fault(name, f"its metrics cannot be read: {unreadable.message}", incumbent=arm == "control")
            if arm and isinstance(found, Scrape) and (stuck := self._stalls.add(found)):
                return Fault(name, stuck, incumbent=arm == "control")
        return None

    def _read_one(self, worker: tuple[str, str, str]) -> Scrape | AnalysisError:
        _, name, url = worker
        try:
            found = self.read(url)
            return self._users[name](as_scrape(found, t=self.clock.now(), source=name), self.own(url))
        except AnalysisError as fault:
            return fault

    def _folded(self, arm: str, scrape: Scrape) -> AnalysisError | None:
        """What is wrong with its numbers, if anything is."""
        try:
            if arm != "canary":
                self._judge.reference(scrape, self.kinds.get(scrape.source, ""))
            if arm:
                self._judge.fold(arm, scrape)
        except AnalysisError as fault:
            return fault
        return None
