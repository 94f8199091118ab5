"""Run the sequential tests over recorded data, look by look, as they would have run live."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phases.analysis.counters import CounterWindows
from phases.analysis.counts import ErrorTest
from phases.analysis.decision import Decision
from phases.analysis.histograms import HistogramTest
from phases.analysis.records import Records
from phases.analysis.scrape import Scrape
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError
from phases.base.extras import Extra
from phases.base.verdict import Verdict


@dataclass(frozen=True)
class Look:
    """One point of the interval over time."""

    t: float
    estimate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Replay:
    """What recorded data say.

    Attributes:
        verdict: of all decisions together: FAIL if any, PASS if all.
        decisions: one by metric, the latency first.
        looks: the latency's interval at every look.
    """

    verdict: Verdict
    decisions: tuple[Decision, ...]
    looks: tuple[Look, ...]

    @property
    def latency(self) -> Decision:
        return self.decisions[0]

    def to_json(self) -> dict[str, Any]:
        """Verdict, when it was reached, estimate and interval, by metric."""
        return {
            "schema": "phasegate/analysis/v1",
            "verdict": self.verdict.value,
            "decisions": [decision.to_json() for decision in self.decisions],
        }


def shares(settings: TestSettings, tests: int) -> TestSettings:
    """The settings with alpha divided among so many tests (Bonferroni)."""
    return replace(settings, alpha=settings.alpha / tests)


def replay_records(
    records: Records, settings: TestSettings, *, errors: Iterable[str] = (), tolerance: float = 0.01, source: str = ""
) -> Replay:
    """Request records of both arms, looked at every window.

    Args:
        errors: error kinds to compare as well; alpha is shared by all tests.

    Raises:
        AnalysisError: the metric, or an arm of it, was not recorded; whatever `SequentialTest` refuses.
    """
    kinds = tuple(errors)
    settings = shares(settings, 1 + len(kinds))
    arms = records.get(settings.metric)
    if arms is None:
        raise AnalysisError(f"{source} has no {settings.metric}.", hint=f"It has {', '.join(sorted(records))}.")
    if len(arms) < 2:
        raise AnalysisError(
            f"{source} has {settings.metric} of the {next(iter(arms))} only.", hint="Two arms are compared."
        )
    test = SequentialTest(settings, source=source)
    counts = [
        ErrorTest(
            kind,
            tolerance=tolerance,
            alpha=settings.alpha,
            window=settings.window,
            deadline=settings.deadline,
            min_samples=settings.min_samples,
            source=source,
        )
        for kind in kinds
    ]
    looks: list[Look] = []
    # Windows without any record need no look: a file may hold a gap of days.
    windows = np.unique(np.concatenate([np.floor(arm.t / settings.window) for arm in arms.values()])) + 1
    fed = dict.fromkeys(arms, 0)
    # Records are handed in by their order in the file, as they came in live: up to the first one at or after the look.
    arrived = {name: np.maximum.accumulate(arm.t) for name, arm in arms.items()}
    for now in (windows * settings.window).tolist():
        for name, arm in arms.items():
            upto = int(np.searchsorted(arrived[name], now))
            part = slice(fed[name], upto)
            succeeded = arm.succeeded[part]
            test.observe_many(name, arm.t[part][succeeded], arm.value[part][succeeded])
            for count in counts:
                count.observe_many(name, arm.t[part], arm.status[part])
            fed[name] = upto
        decision = test.look(now)
        others = [count.look(now) for count in counts]
        looks.append(Look(now, decision.estimate, decision.low, decision.high))
        if _over(decision, others):
            break
    return _finish(test, counts, now, looks)


def replay_snapshots(
    snapshots: Iterable[tuple[str, Scrape]],
    settings: TestSettings,
    *,
    errors: Iterable[str] = (),
    tolerance: float = 0.01,
    source: str = "",
) -> Replay:
    """Prometheus scrapes of both arms in order of time, looked at whenever a window has passed."""
    kinds = tuple(errors)
    settings = shares(settings, 1 + len(kinds))
    test, counters = HistogramTest(settings, source=source), CounterWindows()
    counts = [
        ErrorTest(
            kind,
            tolerance=tolerance,
            alpha=settings.alpha,
            window=settings.window,
            deadline=settings.deadline,
            min_samples=settings.min_samples,
            source=source,
        )
        for kind in kinds
    ]
    looks: list[Look] = []
    next_look, now = None, 0.0
    for arm, scrape in snapshots:
        now = scrape.t
        next_look = now + settings.window if next_look is None else next_look
        if now >= next_look:
            decision = test.look(now)
            others = [count.look(now) for count in counts]
            looks.append(Look(now, decision.estimate, decision.low, decision.high))
            next_look += settings.window * math.ceil((now - next_look + 1e-9) / settings.window)
            if _over(decision, others):
                break
        test.add(arm, scrape)
        step = counters.add(scrape) if counts else None
        for count in counts if step else ():
            count.add(arm, scrape.t, requests=step.requests, errors=step.errors(count.kind))
    return _finish(test, counts, now, looks)


def _over(decision: Decision, others: list[Decision]) -> bool:
    everything = [decision, *others]
    return any(one.verdict is Verdict.FAIL for one in everything) or all(one.verdict is not None for one in everything)


def _finish(test: SequentialTest | HistogramTest, counts: list[ErrorTest], now: float, looks: list[Look]) -> Replay:
    decisions = (test.finish(now), *(count.finish(now) for count in counts))
    found = {decision.verdict for decision in decisions}
    verdict = next((one for one in (Verdict.FAIL, Verdict.INCONCLUSIVE) if one in found), Verdict.PASS)
    return Replay(verdict, decisions, tuple(looks))


PLOTS = (".png", ".svg", ".pdf")


def plot(replay: Replay, path: Path) -> None:
    """Draw the interval over time to a file; its suffix, one of PLOTS, names the format.

    Raises:
        MissingExtra: this installation has no matplotlib.
    """
    Extra.PLOTS.require("A plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    decision, looks = replay.latency, replay.looks
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    start = decision.started or 0.0
    ends = [value for look in looks for value in (look.low, look.high, look.estimate) if value is not None]
    bottom, top = min([0.8, *ends]), max([1.3, *ends])
    times = [look.t - start for look in looks]
    low = [look.low if look.low is not None else bottom / 2 for look in looks]
    high = [look.high if look.high is not None else top * 2 for look in looks]
    axes.fill_between(
        times, low, high, step="post", alpha=0.25, label=f"{100 * (decision.confidence or 0):.1f} % interval"
    )
    known = [(t, look.estimate) for t, look in zip(times, looks, strict=True) if look.estimate is not None]
    axes.plot([t for t, _ in known], [value for _, value in known], label="estimate")
    axes.axhline(decision.threshold, linestyle="--", color="tab:red", label=f"limit {decision.threshold:g}")
    if decision.seconds_to_decide is not None:
        axes.axvline(decision.seconds_to_decide, linestyle=":", color="black", label=f"{decision.word}")
    axes.set(xlabel="seconds", ylabel="canary / control", ylim=(bottom * 0.95, top * 1.05), yscale="log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
    axes.set_title(f"{decision.metric} {decision.statistic}: {decision.word}, {decision.reason}", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path)
