"""Phase 3's `design: switchback`: candidate and incumbent in turns on the same warm workers, by the hot fallback.

The cleanest comparison there is: same process, same cache, same users, same neighbours; only the kernel changes. Time is cut into
blocks of two periods, one for each kernel in random order. A period begins with the switch, acknowledged by every rank, and a washout
that is not judged, in which requests that began under the other kernel finish; so both should be longer than a request takes. The two
stretches of a block are a pair of windows for the same tests as in the parallel design. Before the first block there may be a lead-in,
judged neither: what a restarted server still has to learn (prompts in its prefix cache, answers in the memory of n-gram speculation)
would count as slowness of the kernel that happens to have the first turn.

Blocks in random order are a randomised block design (switchback experiment: Bojinov, Simchi-Levi, Zhao, "Design and Analysis of
Switchback Experiments", Management Science 2023, where the washout is the order of the carry-over effect).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from phases.analysis.scrape import RESPONSES, Labels, Scrape
from phases.base.clock import Clock
from phases.base.errors import AnalysisError
from phases.trial.bake import Own, Probes
from phases.trial.end import Fault, TrialEnd
from phases.trial.judge import ARMS, Judge, Look
from phases.trial.loop import run_trial
from phases.trial.metrics import Read, as_scrape, read_metrics
from phases.trial.settings import JudgeSettings, SwitchbackSettings
from phases.trial.users import UsersOnly

CHECK_SECONDS = 5.0
LATE = 0.999  # where in its block a stretch's counters are put: the two stretches of a block share its time


class Switched(Protocol):
    """What became of an order to switch: whether every rank acknowledged it, the kernel's side, and why some did not."""

    @property
    def safe(self) -> bool: ...
    @property
    def to(self) -> str: ...
    @property
    def missing(self) -> Mapping[str, str]: ...


class Clipped:
    """A worker's counters as if only its observed stretches had happened.

    `begin` and `end` frame a stretch; `end` returns a scrape whose values are the sums over all stretches so far.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._counted: dict[str, dict[Labels, float]] = {}
        self._begun: Scrape | None = None

    def begin(self, scrape: Scrape) -> Scrape:
        """The starting point: what is known of the series, without what happened outside stretches."""
        self._begun = scrape
        for name, rows in scrape.samples.items():
            known = self._counted.setdefault(name, {})
            for labels in rows:
                known.setdefault(labels, 0.0)
        return self._as_scrape(scrape.t)

    def end(self, scrape: Scrape, t: float) -> Scrape:
        """Raises AnalysisError when a response counter went back: the worker restarted."""
        assert self._begun is not None, "a stretch begins before it ends"
        name = scrape.resolve([RESPONSES])
        before = self._begun.samples.get(name, {}) if name else {}
        if name and any(scrape.samples[name].get(labels, 0.0) < value for labels, value in before.items()):
            raise AnalysisError(f"{self.source} restarted: its counters went back.", hint="See its log.")
        for name, rows in scrape.samples.items():
            known, old = self._counted.setdefault(name, {}), self._begun.samples.get(name, {})
            for labels, value in rows.items():
                known[labels] = known.get(labels, 0.0) + value - old.get(labels, 0.0)
        return self._as_scrape(t)

    def _as_scrape(self, t: float) -> Scrape:
        return Scrape(t, self.source, {name: dict(rows) for name, rows in self._counted.items()})


@dataclass
class Switchback:
    """One bake of this design.

    Attributes:
        workers: name to URL; all switch together.
        switch: puts all workers on an arm's kernel; every rank must acknowledge.
        check: asked every few seconds; a Fault ends the bake. It also sees to the leases. prove: asked before anything passes.
        own: answers to our own requests, which are no users'.
    """

    settings: JudgeSettings
    turns: SwitchbackSettings
    workers: dict[str, str]
    clock: Clock
    switch: Callable[[str], Switched]
    check: Callable[[], Fault | None]
    on_look: Look = lambda now, decisions: None
    read: Read = read_metrics
    probes: Probes | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    prove: Callable[[], Fault | None] = lambda: None
    own: Own = lambda url: {}
    order: list[str] = field(default_factory=list)  # arms in the order in which they were observed

    def run(self) -> TrialEnd:
        """Take turns until every test has decided and the bake is over, one fails, a worker is at fault, or the deadline has come.

        Servers that cannot be switched end it as INCONCLUSIVE, before anything was observed.
        """
        source = f"turns on {', '.join(self.workers)}"
        self._judge = Judge(
            self.settings,
            probes=self.probes is not None,
            source=source,
            window=self.turns.period,
            turns=True,
            on_look=self.on_look,
        )
        self._clipped = {(arm, name): Clipped(f"{name} {arm}") for arm in ARMS for name in self.workers}
        self._users = {name: UsersOnly() for name in self.workers}
        self._begun: set[tuple[str, str]] = set()
        self._check_took, self._block = 0.0, 0
        self._blocks = self._shuffled()
        return run_trial(self, self._judge, self.clock)

    # -- as a sampler of the loop ----------------------------------------------------------------------------------------

    def begin(self) -> Fault | None:
        return self._wait(self.turns.lead_in)

    def sample(self) -> Fault | None:
        """One block: a turn of each arm."""
        for arm in next(self._blocks):
            if fault := self._observe(arm, self._block):
                return fault
        self._block += 1
        return None

    def at(self) -> float:
        return self._block * self.turns.period

    def last_look(self) -> Fault | None:
        return self.prove()

    def pause(self) -> None:
        """The next turn follows at once."""

    def _shuffled(self) -> Iterator[Sequence[str]]:
        draw = random.Random(self.turns.seed)
        while True:
            arms = list(ARMS)
            draw.shuffle(arms)
            yield arms

    def _observe(self, arm: str, block: int) -> Fault | None:
        """One period: what went wrong in it."""
        switched = self.switch(arm)
        if not switched.safe:
            host, why = next(iter(switched.missing.items()), ("the fleet", "no server was switched"))
            reason = f"it cannot be switched to the {switched.to}'s kernel: {why}"
            return Fault(host, reason, incumbent=False, untried=not self.order)
        self.order.append(arm)
        if fault := self._wait(self.turns.washout):
            return fault
        begun = self.clock.now()
        try:
            for name, scrape in self._scrape().items():
                self._begin(arm, name, scrape, block)
            if fault := self._wait(self.turns.period - self.turns.washout):
                return fault
            ended = self.clock.now()
            for name, scrape in self._scrape().items():
                self._fold(arm, name, self._clipped[arm, name].end(scrape, (block + LATE) * self.turns.period))
        except AnalysisError as trouble:
            return Fault(", ".join(self.workers), trouble.message, incumbent=False)
        self._take(arm, block, begun, ended)
        return None

    def _wait(self, seconds: float) -> Fault | None:
        """So many seconds, with a check every few of them and one that is over when they are: a check takes a second or more (SGLang's
        /health answers after one), which must neither lengthen a turn nor leave its end unchecked, since a rank that fell back by
        itself must be seen before it is told to go forwards."""
        until = self.clock.monotonic() + seconds
        while True:
            self.clock.sleep(max(0.0, min(until - self.clock.monotonic() - self._check_took, CHECK_SECONDS)))
            begun = self.clock.monotonic()
            if fault := self.check():
                return fault
            self._check_took = self.clock.monotonic() - begun
            if (left := until - self.clock.monotonic()) <= self._check_took:
                self.clock.sleep(max(0.0, left))
                return None

    def _scrape(self) -> dict[str, Scrape]:
        """All workers at the same moment. Raises AnalysisError when one cannot be read."""
        with ThreadPoolExecutor(len(self.workers)) as pool:
            found = list(pool.map(self.read, self.workers.values()))
        scrapes = {
            name: as_scrape(text, t=self.clock.now(), source=name)
            for name, text in zip(self.workers, found, strict=True)
        }
        return {name: self._users[name](scrape, self.own(self.workers[name])) for name, scrape in scrapes.items()}

    def _begin(self, arm: str, name: str, scrape: Scrape, block: int) -> None:
        start = self._clipped[arm, name].begin(scrape)
        if (arm, name) not in self._begun:  # the tests' starting point; later stretches go on from where the last ended
            self._begun.add((arm, name))
            self._fold(arm, name, dataclasses.replace(start, t=block * self.turns.period))

    def _fold(self, arm: str, name: str, scrape: Scrape) -> None:
        if arm == "control":
            self._judge.reference(scrape, self.kinds.get(name, ""))
        self._judge.fold(arm, scrape)

    def _take(self, arm: str, block: int, begun: float, ended: float) -> None:
        """Own requests that ended within the stretch, at the time of their block: as histograms count them.

        Not only those that began in it too: a slow kernel's requests would then be left out the more the slower they are.
        """
        for _, record in self.probes.take() if self.probes else []:
            if begun <= record.finished <= ended:
                self._judge.record(arm, record, block * self.turns.period + record.finished - begun)
