"""What a sequential test concluded at a look, with exactly the quantities it tested."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from phases.base.results import Measurement
from phases.base.verdict import Verdict

OPEN = "open"  # how a test without a verdict yet is called


@dataclass(frozen=True)
class Decision:
    """One look at one metric.

    Attributes:
        verdict: PASS, FAIL or INCONCLUSIVE; None while it asks for more data, which is no verdict yet.
        metric: ttft, itl, e2e, tpot, 5xx …
        statistic: p95, mean, excess_rate.
        reason: one sentence a reviewer understands.
        estimate, low, high: of the quantity tested (a ratio canary/control, or an excess rate); None when unknown.
        threshold: what the bound is compared with, 1 + margin for a ratio.
        n: requests used of the smaller arm.
        counts: requests used, dropped and failed, by arm.
        confidence: of the interval at all looks together.
        at: time of the look, seconds on the observations' clock.
        since: from when on FAIL stands, or PASS has stood at every look; None without either.
        started: time of the first observation.
        unit: of estimate and interval, "ratio" or "rate".
        source: where the observations came from.
    """

    verdict: Verdict | None
    metric: str
    statistic: str
    reason: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    n: int = 0
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    confidence: float | None = None
    at: float | None = None
    since: float | None = None
    started: float | None = None
    unit: str = "ratio"
    source: str = ""

    @property
    def word(self) -> str:
        """The verdict as people read it."""
        return self.verdict.value if self.verdict else OPEN

    @property
    def seconds_to_decide(self) -> float | None:
        """From the first observation to PASS or FAIL."""
        return None if self.since is None or self.started is None else self.since - self.started

    def to_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        verdict = self.verdict.value if self.verdict else None
        return {**row, "verdict": verdict, "seconds_to_decide": self.seconds_to_decide}

    def measurement(self) -> Measurement:
        """The same as a record of results.json."""
        return Measurement(
            metric=f"{self.metric}_{self.statistic}",
            estimate=self.estimate,
            low=self.low,
            high=self.high,
            n=self.n,
            unit=self.unit,
            source=self.source,
            detail=self.to_json(),
        )
