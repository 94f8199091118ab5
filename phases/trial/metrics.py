"""Where the metrics of production's workers are read from, and that they are there before anything rests on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import requests

from phases.analysis.scrape import HISTOGRAMS, RESPONSES, Scrape
from phases.base.errors import AnalysisError
from phases.base.scraping import TooLong, get_text
from phases.engines.ssh.host import Host
from phases.production.settings import ProductionSettings
from phases.trial.prometheus_source import PrometheusSource
from phases.trial.settings import JudgeSettings

if TYPE_CHECKING:
    from phases.production.production import Production

SCRAPE_SECONDS = 5.0
APPEAR_SECONDS = 30.0  # a series exists from the first request on, and Prometheus knows of it one scrape later

Read = Callable[
    [str], str | Scrape
]  # base URL of a worker -> the text of its metrics, or a scrape taken by somebody else


def read_metrics(url: str) -> str:
    """The Prometheus text of a worker's /metrics; AnalysisError when it does not answer, or with more than can be metrics."""
    try:
        return get_text(f"{url}/metrics", SCRAPE_SECONDS)
    except TooLong as fault:
        raise AnalysisError(f"{fault}.", hint=fault.hint) from None
    except requests.RequestException as fault:
        raise AnalysisError(
            f"{url}/metrics cannot be read: {type(fault).__name__}.", hint="Is the worker up?"
        ) from None


def reader(settings: ProductionSettings, workers: Sequence[Host]) -> Read:
    """The workers themselves, or the Prometheus server the playbook names."""
    return PrometheusSource(settings.prometheus, workers) if settings.prometheus else read_metrics


def as_scrape(found: str | Scrape, *, t: float, source: str) -> Scrape:
    """What was read, as one scrape of a worker. A scrape taken by somebody else keeps its own time."""
    return (
        dataclasses.replace(found, source=source)
        if isinstance(found, Scrape)
        else Scrape.parse(found, t=t, source=source)
    )


def require_metrics(production: Production, judge: JudgeSettings) -> None:
    """That every worker has what the judge will read: a name that matches nothing would make every canary look the same.

    Raises:
        AnalysisError: a series does not exist even after the worker has served; with the nearest names that do.
        SourceError: Prometheus does not answer, or not about a worker.
    """
    read = reader(production.settings, production.workers)
    histograms = [] if judge.probes else [HISTOGRAMS[metric.metric] for metric in judge.metrics]
    for host in production.workers:
        if _lacking(_scrape(read, host), histograms):
            production.prove(host)
        until = production.clock.monotonic() + APPEAR_SECONDS
        while (
            _lacking(scrape := _scrape(read, host), histograms)
            and production.settings.prometheus
            and production.clock.monotonic() < until
        ):
            production.clock.sleep(1.0)
        for names in histograms:
            scrape.require(names, suffix="_bucket")
        scrape.require([RESPONSES])


def _scrape(read: Read, host: Host) -> Scrape:
    return as_scrape(read(host.url), t=0.0, source=f"/metrics of {host.name}")


def _lacking(scrape: Scrape, histograms: Sequence[tuple[str, ...]]) -> bool:
    return scrape.resolve([RESPONSES]) is None or any(
        scrape.resolve(names, suffix="_bucket") is None for names in histograms
    )
