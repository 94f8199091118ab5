"""Workers' metrics from a Prometheus server instead of from the workers: instant queries by PromQL, as the same scrapes.

A worker is the `instance` its address names, or its label `instance` in the playbook where Prometheus calls it otherwise. A scrape
carries the time Prometheus took it, not the time it was asked for, so that nothing is counted twice and what is stale is seen to be.
Whatever goes wrong between us and Prometheus says nothing about the workers, and is raised as a `SourceError`.

The HTTP interface and the staleness rules: https://prometheus.io/docs/prometheus/latest/querying/api/ and .../basics/#staleness.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests

from phases.analysis.scrape import (
    ABORTED,
    HISTOGRAMS,
    PREFIXES,
    PROMPT_TOKENS,
    RESPONSES,
    STARTED,
    TOKENS,
    VERIFY_CALLS,
    Labels,
    Scrape,
)
from phases.base.errors import AnalysisError
from phases.engines.ssh.host import Host

QUERY_SECONDS = 10.0
LABEL = "instance"
TARGET_LABELS = ("__name__", LABEL, "job")  # what Prometheus adds to a worker's own labels


class SourceError(AnalysisError):
    """Prometheus does not answer, or not about this worker."""


class PrometheusSource:
    """Reads workers through one Prometheus server (or what speaks its query API).

    Args:
        url: base address; user and password in it are used for basic authentication.
        workers: the fleet's hosts.
        stale: seconds after which what Prometheus last scraped is no news any more.
    """

    def __init__(self, url: str, workers: Sequence[Host], *, stale: float = 60.0) -> None:
        self.url, self.stale = url.rstrip("/"), stale
        self._instances = {host.url: host.labels.get(LABEL) or urlsplit(host.url).netloc for host in workers}
        self._shown = _without_password(self.url)

    def __call__(self, url: str) -> Scrape:
        """A worker's counters and histograms as Prometheus last scraped them; `t` is seconds since the epoch by its clock.

        Raises:
            SourceError: no answer, no such target, more than one, a target that is down or stale, or none of SGLang's metrics.
        """
        instance = self._instances.get(url) or urlsplit(url).netloc
        self._require_up(instance)
        rows = self._query(f"{{__name__=~{_quoted(_names())}, {LABEL}={_quoted(instance)}}}")
        if not rows:
            raise SourceError(
                f"Prometheus at {self._shown} has no metrics of SGLang for {instance}.",
                hint="Is --enable-metrics set, and are they kept by its relabelling?",
            )
        return Scrape(self._scraped_at(instance), instance, _samples(rows, instance))

    def require(self) -> None:
        """That Prometheus knows every worker and has fresh metrics of it: asked before anything moves. Raises: SourceError."""
        for url in self._instances:
            self(url)

    def _require_up(self, instance: str) -> None:
        rows = self._query(f"up{{{LABEL}={_quoted(instance)}}}")
        if not rows:
            known = sorted({row["metric"].get(LABEL, "") for row in self._query(f"group by ({LABEL}) (up)")})
            near = difflib.get_close_matches(instance, known, n=3, cutoff=0.3) or known[:3]
            raise SourceError(
                f"Prometheus at {self._shown} has no target with {LABEL}={instance!r}.",
                hint=f"It knows {', '.join(near) or 'none'}; give the worker a label `{LABEL}` with the name it has there.",
            )
        jobs = sorted({row["metric"].get("job", "") for row in rows})
        if len(jobs) > 1:
            raise SourceError(
                f"Prometheus at {self._shown} scrapes {instance} in {len(jobs)} jobs ({', '.join(jobs)}).",
                hint="Its requests would count twice; scrape it once.",
            )
        if float(rows[0]["value"][1]) != 1:
            raise SourceError(
                f"Prometheus at {self._shown} cannot scrape {instance}.",
                hint="Is the worker up, and may Prometheus reach it?",
            )

    def _scraped_at(self, instance: str) -> float:
        """When the target was last scraped; both times are of the server's clock."""
        rows = self._query(f"timestamp(up{{{LABEL}={_quoted(instance)}}})")
        if not rows:
            raise SourceError(
                f"Prometheus at {self._shown} no longer scrapes {instance}.", hint="See its page of targets."
            )
        asked, scraped = float(rows[0]["value"][0]), float(rows[0]["value"][1])
        if asked - scraped > self.stale:
            raise SourceError(
                f"Prometheus at {self._shown} last scraped {instance} {asked - scraped:.0f} s ago.",
                hint=f"Scrape it at least every {self.stale / 2:g} s.",
            )
        return scraped

    def _query(self, query: str) -> list[dict[str, Any]]:
        """One instant query; the vector's rows."""
        try:
            answer = requests.post(f"{self.url}/api/v1/query", data={"query": query}, timeout=QUERY_SECONDS)
        except requests.RequestException as fault:
            raise SourceError(
                f"Prometheus at {self._shown} does not answer ({type(fault).__name__}).",
                hint="Check `production.prometheus`.",
            ) from None
        if answer.status_code in (401, 403):
            raise SourceError(
                f"Prometheus at {self._shown} refuses us ({answer.status_code}).",
                hint="Put user and password into its address, or let this machine in.",
            )
        try:
            said = answer.json()
            if said["status"] != "success":
                raise SourceError(
                    f"Prometheus at {self._shown} refuses {query}: {said.get('error', 'without a reason')}.",
                    hint="Does it speak this dialect of PromQL?",
                )
            if said["data"]["resultType"] != "vector":
                raise ValueError(said["data"]["resultType"])
            return list(said["data"]["result"])
        except (ValueError, KeyError, TypeError):
            raise SourceError(
                f"{self._shown}/api/v1/query answers {answer.status_code} and no vector.",
                hint="Is this the address of a Prometheus server?",
            ) from None


def _names() -> str:
    """A pattern of every name that is read, with or without SGLang's prefixes; PromQL anchors it by itself."""
    histograms = sorted({name for names in HISTOGRAMS.values() for name in names})
    prefixes = "|".join(PREFIXES)
    return f"({prefixes})?(({'|'.join(histograms)})_(bucket|count|sum)|{'|'.join((RESPONSES, TOKENS, VERIFY_CALLS, ABORTED, PROMPT_TOKENS, STARTED, 'num_running_reqs', 'num_queue_reqs'))})"


def _samples(rows: list[dict[str, Any]], instance: str) -> dict[str, dict[Labels, float]]:
    samples: dict[str, dict[Labels, float]] = {}
    for row in rows:
        labels = tuple(sorted((name, value) for name, value in row["metric"].items() if name not in TARGET_LABELS))
        series = samples.setdefault(row["metric"]["__name__"], {})
        if labels in series:
            raise SourceError(
                f"Prometheus has {row['metric']['__name__']} of {instance} twice.",
                hint="Two targets share this name; scrape the worker once.",
            )
        series[labels] = float(row["value"][1])
    return samples


def _quoted(text: str) -> str:
    """A PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2])
