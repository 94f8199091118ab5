"""What each arm of a trial served, in absolute numbers: seconds, requests a second, lengths. Ratios decide; these say of what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phases.analysis.scrape import Scrape
from phases.serving.load import RequestRecord
from phases.trial.reference import Level, Recorder, Traffic
from phases.trial.settings import MetricSettings

METRICS = ("ttft", "itl", "e2e")
QUANTILES = (0.5, 0.95)
OWN = "own requests"  # `kind` of levels that are known to the number, from our own requests


@dataclass(frozen=True)
class Served:
    """One arm.

    Attributes:
        requests, seconds: users' requests that were counted, and for how long.
        levels: p50 and p95 of each metric in seconds: between the edges of a histogram's bucket, or exact for own requests.
        traffic: of users, per worker; None where nothing was counted.
        server: what its workers say of themselves: `model`, `sglang`, `gpu`, as far as they do.
    """

    arm: str
    requests: float
    seconds: float
    levels: tuple[Level, ...]
    traffic: Traffic | None
    server: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "server": dict(self.server)}


class ServedBy:
    """Sums up one arm while it is judged."""

    def __init__(self, arm: str) -> None:
        self._arm = arm
        self._recorder = Recorder([MetricSettings(metric, quantile) for metric in METRICS for quantile in QUANTILES])
        self._own: dict[str, list[float]] = {metric: [] for metric in METRICS}

    def scrape(self, scrape: Scrape) -> None:
        self._recorder.add(scrape)

    def record(self, record: RequestRecord) -> None:
        for metric, value in record.metrics().items() if record.ok else ():
            if metric in self._own and value is not None:
                self._own[metric].append(value)

    def end(self, requests: float, seconds: float) -> Served:
        own = tuple(
            Level(metric, quantile, *[float(np.quantile(values, quantile))] * 2, len(values), OWN)
            for metric, values in self._own.items()
            if values
            for quantile in QUANTILES
        )
        return Served(self._arm, requests, seconds, (*self._recorder.levels(), *own), self._recorder.traffic())
