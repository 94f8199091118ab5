"""What is judged: two arms by their latencies and errors, over all of a trial and over its most recent part.

PASS is what holds at the moment of the verdict: of all data since the start *and* of the most recent part (`recent` of the bake), with
users on both arms and the canary near its share of them. What was true an hour ago is no verdict. FAIL stands at once: a test over all data
that fails, or a change inside the trial (`phases.analysis.changes`), whichever sees it first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from phases.analysis.changes import ChangeTest
from phases.analysis.counters import CounterWindows
from phases.analysis.counts import ErrorTest
from phases.analysis.decision import Decision
from phases.analysis.histograms import HistogramTest, HistogramWindows
from phases.analysis.scrape import Buckets, Scrape
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings
from phases.base.verdict import Verdict
from phases.serving.load import RequestRecord
from phases.trial.end import Fault, TrialEnd
from phases.trial.looks import Looks
from phases.trial.reference import Recorder
from phases.trial.served import ServedBy
from phases.trial.settings import ERRORS, JudgeSettings

ARMS = ("canary", "control")
LEAST = 8  # requests of each arm in a window whose ratio is looked at; windows with fewer are joined
STEPS = 1.5  # each test of the recent part begins this much later than the one before
Z = 2.576  # of a share's own noise, 99 % both sides
Look = Callable[[float, Sequence[Decision]], None]
Test = HistogramTest | SequentialTest


class Judge:
    """The evidence on two arms.

    Args:
        probes: latencies come from own requests (`record`), else from the workers' histograms (`fold`).
        window: seconds between looks, on the clock of what is handed in. turns: that clock counts half of the trial's time.
        expected: the canary's share of both arms' requests if traffic is spread evenly; None where the arms take turns.
        share_tolerance: how far from that it may be, as a share of it; None: not looked at.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        probes: bool,
        source: str,
        window: float,
        turns: bool = False,
        expected: float | None = None,
        share_tolerance: float | None = None,
        on_look: Look = lambda elapsed, decisions: None,
    ) -> None:
        self.settings, self._source, self._window = settings, source, window
        self._expected, self._tolerance, self._on_look = expected, share_tolerance, on_look
        self._probes = probes
        deadline = None if turns else settings.deadline
        whole = [self._of(settings.test(metric), deadline, turns) for metric in settings.metrics]
        self._all: list[Test] = [self._test(test) for test in whole]
        few = math.ceil(settings.min_samples * settings.recent)
        self._recent_settings = [dataclasses.replace(test, deadline=None, min_samples=few) for test in whole]
        self._recent: list[tuple[float, list[Test]]] = []  # by the time each began
        self._recent_shown = False
        self._began: float | None = None
        self._first = max(window, settings.bake * (1 - settings.recent) / (2 if turns else 1))
        self._errors = {kind: self._error_test(kind, deadline) for kind in ERRORS}
        self._own_errors = self._error_test("5xx", deadline) if probes else None
        horizon = math.ceil(settings.deadline / (window * (2 if turns else 1)))
        self._changes = [Changes(test, settings.change_share, horizon, probes=probes) for test in whole]
        self._counters = CounterWindows()
        self._reference = Recorder(settings.metrics)
        self._served, self._arms_share = {arm: ServedBy(arm) for arm in ARMS}, 2 if turns else 1
        self._kept: list[
            tuple[float, str, float, dict[str, float]]
        ] = []  # time, arm, requests, errors: of the recent part
        self._waiting: dict[str, int] = {}
        self._own_ended = dict.fromkeys(ARMS, 0)
        self.looks, self.requests = Looks(), dict.fromkeys(ARMS, 0.0)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def reference(self, scrape: Scrape, kind: str = "") -> None:
        """A worker on the incumbent: part of what later watches are held against."""
        self._reference.add(scrape, kind)

    def fold(self, arm: str, scrape: Scrape) -> None:
        """One scrape of one worker of an arm, own requests taken out of its response counters. Raises AnalysisError for broken numbers."""
        for test in self._tests():
            if isinstance(test, HistogramTest):
                test.add(arm, scrape)
        for change in self._changes:
            change.scrape(arm, scrape)
        self._served[arm].scrape(scrape)
        step = self._counters.add(scrape)
        if step is None:
            return
        self.requests[arm] += step.requests
        errors = {kind: step.errors(kind) for kind in self._errors}
        for kind, counted in self._errors.items():
            counted.add(arm, scrape.t, requests=step.requests, errors=errors[kind])
        self._kept.append((scrape.t, arm, step.requests, errors))

    def record(self, arm: str, record: RequestRecord, at: float) -> None:
        """One own request that ended at `at`; one without the whole answer it asked for is an error that no response counter shows."""
        for test in self._tests():
            value = record.metrics().get(test.settings.metric)
            if isinstance(test, SequentialTest) and record.ok and value is not None:
                test.observe(arm, at, value, record.status)
        for change in self._changes:
            change.value(arm, record)
        self._own_ended[arm] += 1
        self._served[arm].record(record)
        if self._own_errors:
            self._own_errors.add(arm, at, requests=1, errors=int(record.status <= 0 or record.status >= 500))

    def waiting(self, requests: Mapping[str, int]) -> None:
        """Own requests without an answer for too long, by arm, as of now: they are counted against their arm though they have no end."""
        self._waiting = dict(requests)

    # -- what comes out ------------------------------------------------------------------------------------------------

    def look(self, now: float, elapsed: float) -> list[Decision]:
        """Where every test stands. now: on the clock of what was handed in. elapsed: seconds since the trial began."""
        self._begin_recent(now)
        found = [test.look(now) for test in self._all]
        found += [decision for change in self._changes if (decision := change.look(now))]
        recent = [
            (began, test.look(now)) for began, tests in self._recent for test in tests
        ]  # each folds its windows as they end
        shown = {began for began, _ in self._recent[:1] if began <= self._recent_from(now)}
        if elapsed >= self.settings.bake:
            found += [_of_recent(decision, now - began) for began, decision in recent if began in shown]
        self._recent_shown = bool(shown)
        found += [test.look(now) for test in self._errors.values()]
        if self._own_errors:
            own = self._own_errors.look(now)
            found.append(
                dataclasses.replace(own, metric="own_5xx", reason=own.reason.replace("requests", "own requests"))
            )
        self._kept = [row for row in self._kept if row[0] > self._recent_from(now)]
        self.looks.add(elapsed, found)
        self._on_look(elapsed, found)
        return found

    def verdict(self, decisions: Sequence[Decision], elapsed: float) -> Verdict | None:
        """One test that fails is enough; a pass needs all of them at this moment, the whole bake and users; the deadline ends it."""
        if any(d.verdict is Verdict.FAIL for d in decisions):
            return Verdict.FAIL
        # The users' own mistakes may leave 4xx open for ever.
        well = {d.verdict for d in decisions if d.metric != "4xx"} == {Verdict.PASS} and not self.withheld()
        if elapsed >= self.settings.deadline:
            return Verdict.PASS if well else Verdict.INCONCLUSIVE
        return Verdict.PASS if well and elapsed >= self.settings.bake else None

    def withheld(self) -> tuple[str, ...]:
        """Why nothing may pass, beside the tests: too few users, not the share of them it should have, errors in the recent part."""
        return tuple(
            reason
            for reason in (
                self._few_users(),
                self._share(),
                self._no_recent(),
                self._recent_errors(),
                self._unanswered(),
            )
            if reason
        )

    def end(self, verdict: Verdict, decisions: Sequence[Decision], seconds: float, fault: Fault | None) -> TrialEnd:
        withheld = self.withheld() if verdict is Verdict.INCONCLUSIVE and not fault else ()
        return TrialEnd(
            verdict,
            tuple(decisions),
            self.looks,
            seconds,
            fault,
            self._reference.levels(),
            dict(self.requests),
            withheld=withheld,
            traffic=self._reference.traffic(),
            served=tuple(self._served[arm].end(self.requests[arm], seconds / self._arms_share) for arm in ARMS),
        )

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _of(self, test: TestSettings, deadline: float | None, turns: bool) -> TestSettings:
        settle = 0.0 if turns else test.settle
        return dataclasses.replace(test, window=self._window, settle=settle, deadline=deadline)

    def _test(self, settings: TestSettings) -> Test:
        if self._probes:
            return SequentialTest(settings, source=f"own requests to {self._source}")
        return HistogramTest(settings, source=self._source)

    def _error_test(self, kind: str, deadline: float | None) -> ErrorTest:
        return ErrorTest(
            kind,
            tolerance=self.settings.error_tolerance,
            alpha=self.settings.share,
            window=self._window,
            deadline=deadline,
            min_samples=self.settings.min_samples,
            source=self._source,
        )

    def _tests(self) -> list[Test]:
        return [*self._all, *(test for _, tests in self._recent for test in tests)]

    def _begin_recent(self, now: float) -> None:
        """Tests of the recent part begin ever further apart, so that one always holds little more than the most recent part."""
        self._began = now if self._began is None else self._began
        age, due = now - self._began, self._first
        if self._recent:
            due = max(self._window, STEPS * (self._recent[-1][0] - self._began))
        if age >= due * (1 - 1e-9):
            self._recent.append((now, [self._test(test) for test in self._recent_settings]))
        old = [began for began, _ in self._recent if began <= self._recent_from(now)]
        self._recent = [item for item in self._recent if not old or item[0] >= old[-1]]

    def _recent_from(self, now: float) -> float:
        """When the most recent part began, at the latest: `recent` of the trial so far ago."""
        began = now if self._began is None else self._began
        return now - self.settings.recent * (now - began) * (1 - 1e-9)

    def _no_recent(self) -> str:
        return "" if self._recent_shown else "the most recent part has only begun"

    def _few_users(self) -> str:
        arm = min(ARMS, key=lambda name: self.requests[name])
        few = self.requests[arm] < self.settings.min_samples
        return (
            f"{self.requests[arm]:.0f} users' requests came to the {arm}, {self.settings.min_samples} are needed"
            if few
            else ""
        )

    def _share(self) -> str:
        """Whether the canary's share is further off than tolerated, and than chance would have it."""
        total = sum(self.requests.values())
        if self._expected is None or self._tolerance is None or not total:
            return ""
        ratio = self.requests["canary"] / total / self._expected
        noise = Z * math.sqrt((1 - self._expected) / self._expected / total)
        if abs(ratio - 1) <= self._tolerance + noise:
            return ""
        return (
            f"the canary got {ratio:.2f} of its share of {total:.0f} users' requests, "
            f"{1 - self._tolerance:g} to {1 + self._tolerance:g} is tolerated"
        )

    def _unanswered(self) -> str:
        waiting, sent = self._waiting.get("canary", 0), self._own_ended["canary"]
        if waiting <= self.settings.error_tolerance * (sent + waiting):
            return ""
        return f"{waiting} own requests to the canary wait for an answer, {sent} have one or have failed"

    def _recent_errors(self) -> str:
        rates = dict.fromkeys(ARMS, 0.0)
        for arm in ARMS:
            rows = [(requests, errors["5xx"]) for _, name, requests, errors in self._kept if name == arm]
            if requests := sum(row[0] for row in rows):
                rates[arm] = sum(row[1] for row in rows) / requests
        excess = rates["canary"] - rates["control"]
        if excess > self.settings.error_tolerance:
            return f"in the most recent part {excess:.4f} more failed on the canary, {self.settings.error_tolerance:g} is tolerated"
        return ""


class Changes:
    """The change-point test of one metric, fed a window at a time."""

    def __init__(self, settings: TestSettings, alpha: float, horizon: int, *, probes: bool) -> None:
        self._settings = settings
        self._test = ChangeTest(
            settings.metric, settings.statistic, margin=settings.margin, alpha=alpha, horizon=horizon
        )
        self._windows = None if probes else HistogramWindows(settings.metric)
        self._buckets: dict[str, Buckets | None] = dict.fromkeys(ARMS)
        self._values: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def scrape(self, arm: str, scrape: Scrape) -> None:
        if self._windows is None:
            return
        buckets, restarted = self._windows.add(scrape)
        if buckets is not None and not restarted:
            known = self._buckets[arm]
            self._buckets[arm] = buckets if known is None else known + buckets

    def value(self, arm: str, record: RequestRecord) -> None:
        value = record.metrics().get(self._settings.metric)
        if self._windows is None and record.ok and value is not None:
            self._values[arm].append(value)

    def look(self, now: float) -> Decision | None:
        level = self._settings.quantile or 0.5
        if self._windows is None:
            canary, control = (self._values[arm] for arm in ARMS)
            if min(len(canary), len(control)) >= LEAST:
                low, high = float(np.quantile(canary, level)), float(np.quantile(control, level))
                self._test.add(now, low, high, min(len(canary), len(control)))
                self._values = {arm: [] for arm in ARMS}
        else:
            counted = [self._buckets[arm] for arm in ARMS]
            if all(buckets is not None and buckets.total >= LEAST for buckets in counted):
                ours, theirs = (buckets.quantile_bounds(level) for buckets in counted if buckets is not None)
                assert ours and theirs
                self._test.add(now, ours[0], theirs[1], int(min(b.total for b in counted if b is not None)))
                self._buckets = dict.fromkeys(ARMS)
        return self._test.found()


def _of_recent(decision: Decision, seconds: float) -> Decision:
    return dataclasses.replace(
        decision, statistic=f"{decision.statistic}_recent", reason=f"of the last {seconds:.0f} s {decision.reason}"
    )
