"""Playbook settings of production phases: the shared `production` section, `tp8-canary`, `full-rollout`, `watch`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from phases.analysis.settings import LATENCIES, TestSettings
from phases.errors import AnalysisError
from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import read, setting
from phases.serving.settings import ServerSettings, SideSettings

ERRORS = ("5xx", "4xx")  # 4xx are mostly the users' own, but a kernel that makes the server refuse what it took before shows there


@dataclass(frozen=True)
class Amount:
    """A number of workers, as a count or as a share of the fleet."""

    count: int | None = setting(None, at_least=0, help="so many workers")
    percent: float | None = setting(None, at_least=0, at_most=100, help="share of the fleet; fractions of a worker count as one")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if (self.count is None) == (self.percent is None):
            mistakes.add(node, f"{node.path}: give exactly one of count and percent")

    def of(self, fleet: int) -> int:
        """Workers out of a fleet of so many, never more than there are."""
        wanted = self.count if self.percent is None else math.ceil(fleet * self.percent / 100)
        return min(fleet, wanted or 0)

    def __str__(self) -> str:
        return f"{self.count}" if self.percent is None else f"{self.percent:g} %"


@dataclass(frozen=True)
class MetricSettings:
    """One latency that is judged, canary against control."""

    metric: str = setting(choices=LATENCIES, help="ttft, itl, e2e or tpot")
    quantile: float = setting(0.95, above=0, at_most=0.999, help="which quantile")
    margin: float = setting(0.05, at_least=0, at_most=5, help="slowdown that is acceptable: 0.05 is 5 %")


@dataclass(frozen=True)
class JudgeSettings:
    """How a canary is judged while it bakes."""

    metrics: tuple[MetricSettings, ...] = setting(not_empty=True, help="latencies judged together; one that fails is enough")
    alpha: float = setting(0.01, above=0, at_most=0.2, help="chance of a false alarm over all metrics and looks")
    window: float = setting(10.0, duration=True, above=0, help="time between looks")
    bake: float = setting(300.0, duration=True, above=0, help="shortest time under watch, even when all metrics passed")
    deadline: float = setting(1800.0, duration=True, above=0, help="what is undecided then is INCONCLUSIVE")
    min_samples: int = setting(100, at_least=1, help="requests an arm needs before anything can pass")
    settle: float = setting(10.0, duration=True, at_least=0, help="time ignored after a worker came back")
    probes: float = setting(0.0, at_least=0, at_most=1000, help="own requests a second sent straight to each arm and judged one by one; "
                            "0: judge the histograms of /metrics, whose buckets make it slower and coarser")
    error_tolerance: float = setting(0.01, at_least=0, at_most=0.5, help="excess share of failed requests that is acceptable")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.deadline < self.bake:
            mistakes.add(node, f"{node.path}: deadline {self.deadline:g} s is before the end of the bake, {self.bake:g} s")
        for metric in self.metrics:
            try:
                self.test(metric)
            except AnalysisError as fault:
                mistakes.add(node, f"{node.path}: {fault.message}")

    @property
    def share(self) -> float:
        """Alpha of each test: spent evenly over the metrics and the error rates."""
        return self.alpha / (len(self.metrics) + len(ERRORS))

    def test(self, metric: MetricSettings) -> TestSettings:
        """One metric's test."""
        return TestSettings(
            metric=metric.metric, quantile=metric.quantile, margin=metric.margin, alpha=self.share,
            window=self.window, min_samples=self.min_samples, settle=self.settle, deadline=self.deadline,
        )  # fmt: skip


@dataclass(frozen=True)
class LoadSettings:
    """Own traffic through the router, on top of the users': open loop, Poisson, streaming."""

    rate: float = setting(0.0, at_least=0, at_most=10000, help="requests a second; 0: the users' traffic only")
    url: str = setting("", pattern=r"|https?://\S+", help="where it is sent; empty: the sglang router")
    prompts: Path | None = setting(None, help="JSON list of {name, kind, text} and, for a long one, repeat; none: the built-in set")
    tokens: int = setting(16, at_least=1, help="tokens generated a request")
    max_in_flight: int = setting(32, at_least=1, at_most=1024, help="requests open at once; more wait, and the wait counts")
    seed: int = setting(1, help="of arrival times and choice of prompts")


@dataclass(frozen=True)
class WarmUpSettings:
    """Requests each restarted worker gets before it is judged or sent users."""

    requests: int = setting(6, at_least=2, help="requests a sweep")
    agree: float = setting(0.3, above=0, at_most=2, help="two sweeps agree when their medians differ by less than this share")
    sweeps: int = setting(8, at_least=2, help="sweeps at the most; a worker still warming then is a fault")


@dataclass(frozen=True)
class FallbackSettings:
    """The hot fallback: running servers back to the incumbent's kernel without a restart, where the kernel's plugin can."""

    hot: bool = setting(True, help="a rollback begins with it; false: restarts only")
    wait: float = setting(2.0, duration=True, above=0, help="time the ranks get to acknowledge; those that do not are restarted")
    restore: bool = setting(True, help="automatic rollbacks then restore by restarts; false: a safe fleet without leases waits for `phase rollback`")


@dataclass(frozen=True)
class AgreementSettings:
    """Outputs of workers on the candidate, judged by a worker on the incumbent: before users see them, and while a canary bakes."""

    prompts: int = setting(6, at_least=0, at_most=64, help="prompts asked, of the built-in set, long ones first; 0: outputs are not compared in production")
    tokens: int = setting(12, at_least=4, at_most=256, help="tokens generated a prompt")
    every: float = setting(30.0, duration=True, at_least=0, help="time between comparisons during a bake; 0: only before a worker gets traffic")
    error: float = setting(0.05, above=0, help="mean difference of log-probabilities, nats a token, that is acceptable beyond the incumbent's own")
    wrong: float = setting(0.05, at_least=0, at_most=1, help="share of tokens worse than the incumbent's best that is acceptable beyond its own")
    tie: float = setting(0.05, at_least=0, help="a token this close to the best one, in nats, is as good")


@dataclass(frozen=True)
class ProductionSettings:
    """What production runs and is to run, shared by the canary, the rollout, rollback and watch."""

    server: ServerSettings = setting(help="Python, model and flags of every worker", factory=ServerSettings)
    incumbent: SideSettings = setting(help="what production runs today", factory=SideSettings)
    candidate: SideSettings = setting(help="what it is to run", factory=SideSettings)
    architectures: tuple[str, ...] = setting((), help="objects the releases carry; none: those of kernel.yaml for the device")
    min_available: Amount = setting(help="workers that must stay in service at any time", factory=lambda: Amount(percent=50))
    failure_budget: Amount = setting(help="workers that may fail or be lost before everything goes back", factory=lambda: Amount(count=0))
    fallback: FallbackSettings = setting(help="back to the incumbent's kernel without a restart", factory=FallbackSettings)
    warm_up: WarmUpSettings = setting(help="before a worker is judged", factory=WarmUpSettings)
    agreement: AgreementSettings = setting(help="outputs compared in production", factory=AgreementSettings)
    load: LoadSettings = setting(help="own traffic", factory=LoadSettings)
    prometheus: str = setting("", pattern=r"|https?://\S+", help="Prometheus server to read metrics from; empty: the workers' own /metrics")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if not self.incumbent.backend:
            mistakes.add(node.get("incumbent") or node, f"{node.path}: key 'incumbent.backend' is missing (what production runs today)")


class Design(Enum):
    """How candidate and incumbent are compared."""

    PARALLEL = "parallel"  # other workers, same time
    SWITCHBACK = "switchback"  # the same workers, alternating by hot fallback


@dataclass(frozen=True)
class SwitchbackSettings:
    """Turns of candidate and incumbent on the same workers, in random order."""

    period: float = setting(30.0, duration=True, at_least=1, help="time of one turn; longer than a request takes")
    washout: float = setting(5.0, duration=True, at_least=0, help="beginning of each turn that is not judged: requests of the other kernel end in it")
    lead_in: float = setting(0.0, duration=True, at_least=0, help="time under load before the first turn, not judged: caches and n-gram memory fill in it")
    seed: int = setting(1, help="of the order")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if self.washout > self.period / 2:
            mistakes.add(node, f"{node.path}: a washout of {self.washout:g} s leaves less than half of a period of {self.period:g} s")


@dataclass(frozen=True)
class CanarySettings:
    """Phase 3: a few workers on the candidate beside as many control workers of the same age."""

    judge: JudgeSettings = setting(help="how they are judged")
    canary: Amount = setting(help="workers that get the candidate", factory=lambda: Amount(count=1))
    control: Amount = setting(help="workers restarted with the incumbent, to compare with", factory=lambda: Amount(count=1))
    labels: dict[str, str] = setting(help="only workers with these labels are chosen", factory=dict)
    design: Design = setting(Design.PARALLEL, help="parallel: beside control workers; switchback: in turns on the canary workers themselves, by the hot fallback")
    turns: SwitchbackSettings = setting(help="switchback: how the turns are taken", factory=SwitchbackSettings)
    share_tolerance: float = setting(0.15, above=0, at_most=1, help="how far the observed share of the canary may be from its share of workers")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        for name in ("canary", "control"):
            amount: Amount = getattr(self, name)
            if amount.count == 0 or amount.percent == 0:
                mistakes.add(node.get(name) or node, f"{node.path}: {name} needs at least one worker")
        if self.design is Design.SWITCHBACK:
            self._check_turns(node.get("turns") or node, mistakes)

    def _check_turns(self, node: Node, mistakes: Mistakes) -> None:
        """The deadline is looked at after each pair of turns, and counts from the first: neither may keep a canary under users for longer."""
        for what, seconds in (("two turns take", 2 * self.turns.period), ("a lead_in takes", self.turns.lead_in)):
            if seconds > self.judge.deadline:
                mistakes.add(node, f"{node.path}: {what} {seconds:g} s, longer than the judge's deadline of {self.judge.deadline:g} s")


@dataclass(frozen=True)
class RolloutSettings:
    """Phase 4: wave by wave, judged against workers not yet moved, then a soak."""

    judge: JudgeSettings = setting(help="how each wave is judged")
    waves: tuple[Amount, ...] = setting((Amount(percent=25), Amount(percent=50), Amount(percent=100)), not_empty=True, help="cumulative size of each wave")
    soak: float = setting(300.0, duration=True, at_least=0, help="time under watch with the whole fleet moved")

    def check(self, node: Node, mistakes: Mistakes) -> None:
        last = self.waves[-1]
        if last.percent != 100:
            mistakes.add(node.get("waves") or node, f"{node.path}: the last wave must be percent: 100")


@dataclass(frozen=True)
class WatchSettings:
    """`phase watch`: production after a rollout against the reference recorded then."""

    judge: JudgeSettings = setting(help="what counts as a regression")
    interval: float = setting(60.0, duration=True, above=0, help="time between looks")
    roll_back: bool = setting(True, help="go back by itself when a regression is found; false: only say so")


def production_from_node(node: Node, mistakes: Mistakes) -> ProductionSettings:
    return read(ProductionSettings, node, mistakes)


def canary_from_node(node: Node, mistakes: Mistakes) -> CanarySettings:
    return read(CanarySettings, node, mistakes)


def rollout_from_node(node: Node, mistakes: Mistakes) -> RolloutSettings:
    return read(RolloutSettings, node, mistakes)


def watch_from_node(node: Node, mistakes: Mistakes) -> WatchSettings:
    return read(WatchSettings, node, mistakes)
