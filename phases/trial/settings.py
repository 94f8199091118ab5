"""How two arms are judged: metrics, margins, windows, and the turns of a switchback."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from phases.analysis.settings import LATENCIES, TestSettings
from phases.base.errors import AnalysisError
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting

ERRORS = (
    "5xx",
    "4xx",
)  # 4xx are mostly the users' own, but a kernel that makes the server refuse what it took before shows there

CHANGES = 0.2  # of a metric's chance of a false alarm: for changes inside the bake


@dataclass(frozen=True)
class MetricSettings:
    """One latency that is judged, canary against control."""

    metric: str = setting(choices=LATENCIES, help="ttft, itl, e2e or tpot")
    quantile: float = setting(0.95, above=0, at_most=0.999, help="which quantile")
    margin: float = setting(0.05, at_least=0, at_most=5, help="slowdown that is acceptable: 0.05 is 5 %")


@dataclass(frozen=True)
class JudgeSettings:
    """How a canary is judged while it bakes."""

    metrics: tuple[MetricSettings, ...] = setting(
        not_empty=True, help="latencies judged together; one that fails is enough"
    )
    alpha: float = setting(0.01, above=0, at_most=0.2, help="chance of a false alarm over all metrics and looks")
    window: float = setting(10.0, duration=True, above=0, help="time between looks")
    bake: float = setting(300.0, duration=True, above=0, help="shortest time under watch, even when all metrics passed")
    deadline: float = setting(1800.0, duration=True, above=0, help="what is undecided then is INCONCLUSIVE")
    min_samples: int = setting(100, at_least=1, help="requests an arm needs before anything can pass")
    settle: float = setting(10.0, duration=True, at_least=0, help="time ignored after a worker came back")
    probes: float = setting(
        0.0,
        at_least=0,
        at_most=1000,
        help="own requests a second sent straight to each arm and judged one by one; "
        "0: judge the histograms of /metrics, whose buckets make it slower and coarser",
    )
    recent: float = setting(
        0.5,
        above=0,
        at_most=1,
        help="the most recent part of the bake, as a share of it, that must show by itself what all of it shows",
    )
    error_tolerance: float = setting(
        0.01, at_least=0, at_most=0.5, help="excess share of failed requests that is acceptable"
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.deadline < self.bake:
            mistakes.add(
                node, f"{node.path}: deadline {self.deadline:g} s is before the end of the bake, {self.bake:g} s"
            )
        for metric in self.metrics:
            try:
                self.test(metric)
            except AnalysisError as fault:
                mistakes.add(node, f"{node.path}: {fault.message}")

    @property
    def share(self) -> float:
        """Alpha of each test: spent evenly over the metrics and the error rates, those of own requests included."""
        return self.alpha / (len(self.metrics) + len(ERRORS) + bool(self.probes))

    @property
    def change_share(self) -> float:
        """Alpha of a metric's change-point test, out of the metric's own."""
        return CHANGES * self.share

    def test(self, metric: MetricSettings) -> TestSettings:
        """One metric's test."""
        return TestSettings(
            metric=metric.metric,
            quantile=metric.quantile,
            margin=metric.margin,
            alpha=self.share - self.change_share,
            window=self.window,
            min_samples=self.min_samples,
            settle=self.settle,
            deadline=self.deadline,
        )


@dataclass(frozen=True)
class ReferenceSettings:
    """When latencies recorded in Phase 3 may still judge."""

    max_age: float = setting(7 * 86400.0, duration=True, above=0, help="age from which on nothing passes by it")
    traffic: float = setting(
        3.0,
        above=1,
        help="how many times more or less than then the rate of requests, prompt and answer lengths may be; beyond, nothing passes by it",
    )


class Design(Enum):
    """How candidate and incumbent are compared."""

    PARALLEL = "parallel"  # other workers, same time
    SWITCHBACK = "switchback"  # the same workers, alternating by hot fallback


@dataclass(frozen=True)
class SwitchbackSettings:
    """Turns of candidate and incumbent on the same workers, in random order."""

    period: float = setting(30.0, duration=True, at_least=1, help="time of one turn; longer than a request takes")
    washout: float = setting(
        5.0,
        duration=True,
        at_least=0,
        help="beginning of each turn that is not judged: requests of the other kernel end in it",
    )
    lead_in: float = setting(
        0.0,
        duration=True,
        at_least=0,
        help="time under load before the first turn, not judged: caches and n-gram memory fill in it",
    )
    seed: int = setting(1, help="of the order")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.washout > self.period / 2:
            mistakes.add(
                node,
                f"{node.path}: a washout of {self.washout:g} s leaves less than half of a period of {self.period:g} s",
            )
