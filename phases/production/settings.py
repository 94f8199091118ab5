"""The `production` section of a playbook: what runs, what is to run, and the rules for changing it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from phases.playbook.located import Mistakes, Node
from phases.playbook.typed import setting
from phases.serving.settings import ServerSettings, SideSettings, check_flags


@dataclass(frozen=True)
class Amount:
    """A number of workers, as a count or as a share of the fleet."""

    count: int | None = setting(None, at_least=0, help="so many workers")
    percent: float | None = setting(
        None, at_least=0, at_most=100, help="share of the fleet; fractions of a worker count as one"
    )

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
class LoadSettings:
    """Own traffic through the router, on top of the users': open loop, Poisson, streaming."""

    rate: float = setting(0.0, at_least=0, at_most=10000, help="requests a second; 0: the users' traffic only")
    url: str = setting("", pattern=r"|https?://\S+", help="where it is sent; empty: the sglang router")
    prompts: Path | None = setting(
        None, help="JSON list of {name, kind, text} and, for a long one, repeat; none: the built-in set"
    )
    tokens: int = setting(16, at_least=1, help="tokens generated a request")
    max_in_flight: int = setting(
        32, at_least=1, at_most=1024, help="requests open at once; more wait, and the wait counts"
    )
    seed: int = setting(1, help="of arrival times and choice of prompts")


@dataclass(frozen=True)
class WarmUpSettings:
    """Requests each restarted worker gets before it is judged or sent users."""

    requests: int = setting(6, at_least=2, help="requests a sweep")
    agree: float = setting(
        0.3, above=0, at_most=2, help="two sweeps agree when their medians differ by less than this share"
    )
    sweeps: int = setting(8, at_least=2, help="sweeps at the most; a worker still warming then is a fault")


@dataclass(frozen=True)
class FallbackSettings:
    """The hot fallback: running servers back to the incumbent's kernel without a restart, where the kernel's plugin can."""

    hot: bool = setting(True, help="a rollback begins with it; false: restarts only")
    wait: float = setting(
        2.0, duration=True, above=0, help="time the ranks get to acknowledge; those that do not are restarted"
    )
    restore: bool = setting(
        True,
        help="automatic rollbacks then restore by restarts; false: a safe fleet without leases waits for `phase rollback`",
    )


@dataclass(frozen=True)
class AgreementSettings:
    """Outputs of workers on the candidate, judged by a worker on the incumbent: before users see them, and while a canary bakes."""

    prompts: int = setting(
        6,
        at_least=0,
        at_most=64,
        help="prompts asked, of the built-in set, long ones first; 0: outputs are not compared in production",
    )
    tokens: int = setting(12, at_least=4, at_most=256, help="tokens generated a prompt")
    every: float = setting(
        30.0,
        duration=True,
        at_least=0,
        help="time between comparisons during a bake; 0: only before a worker gets traffic",
    )
    error: float = setting(
        0.05,
        above=0,
        help="mean difference of log-probabilities, nats a token, that is acceptable beyond the incumbent's own",
    )
    wrong: float = setting(
        0.05,
        at_least=0,
        at_most=1,
        help="share of tokens worse than the incumbent's best that is acceptable beyond its own",
    )
    tie: float = setting(0.05, at_least=0, help="a token this close to the best one, in nats, is as good")


@dataclass(frozen=True)
class LivenessSettings:
    """Own completions of every worker that is judged or watched: a worker that does not answer them is at fault, whatever /health says."""

    every: float = setting(
        10.0, duration=True, at_least=0, help="time between completions of a worker; 0: none are asked"
    )
    within: float = setting(
        30.0, duration=True, above=0, help="time an answer may take; longer than requests may wait in a full queue"
    )


@dataclass(frozen=True)
class ProductionSettings:
    """What production runs and is to run, shared by the canary, the rollout, rollback and watch."""

    server: ServerSettings = setting(help="Python, model and flags of every worker", factory=ServerSettings)
    incumbent: SideSettings = setting(help="what production runs today", factory=SideSettings)
    candidate: SideSettings = setting(help="what it is to run", factory=SideSettings)
    architectures: tuple[str, ...] = setting(
        (), help="objects the releases carry; none: those of kernel.yaml for the device"
    )
    min_available: Amount = setting(
        help="workers that must stay in service at any time", factory=lambda: Amount(percent=50)
    )
    failure_budget: Amount = setting(
        help="workers that may fail or be lost before everything goes back", factory=lambda: Amount(count=0)
    )
    fallback: FallbackSettings = setting(
        help="back to the incumbent's kernel without a restart", factory=FallbackSettings
    )
    warm_up: WarmUpSettings = setting(help="before a worker is judged", factory=WarmUpSettings)
    agreement: AgreementSettings = setting(help="outputs compared in production", factory=AgreementSettings)
    liveness: LivenessSettings = setting(help="own completions of workers under judgement", factory=LivenessSettings)
    load: LoadSettings = setting(help="own traffic", factory=LoadSettings)
    prometheus: str = setting(
        "", pattern=r"|https?://\S+", help="Prometheus server to read metrics from; empty: the workers' own /metrics"
    )

    def check(self, node: Node, mistakes: Mistakes) -> None:
        if not self.incumbent.backend:
            mistakes.add(
                node.get("incumbent") or node,
                f"{node.path}: key 'incumbent.backend' is missing (what production runs today)",
            )
        check_flags(self.server, {"incumbent": self.incumbent, "candidate": self.candidate}, node, mistakes)
