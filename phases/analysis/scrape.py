"""Prometheus text scrapes: parsing, the names of SGLang's metrics, and increases of counters and histograms.

Increases are taken series by series (a series is a name, its labels and its source): a counter that went down, or vanished, was reset, and
its whole new value is the increase; a series that appears in a source scraped before was born since, and its first value
counts in full; only the first scrape of a source is a mere starting point.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from phases.base.errors import AnalysisError

PREFIXES = ("sglang:", "sglang_")
# Names by metric kind, newest first; SGLang renamed one of them.
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",),
    "itl": ("inter_token_latency_seconds",),
    "e2e": ("e2e_request_latency_seconds",),
    "tpot": ("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
}
TOKENS, VERIFY_CALLS, RESPONSES = "generation_tokens_total", "spec_verify_calls_total", "http_responses_total"
PROMPT_TOKENS = "prompt_tokens_total"
STARTED = "process_start_time_seconds"  # of the Prometheus client libraries
CLOCK_STEP = 1.0  # seconds by which a host's clock may be set without that being a restart
ABORTED = "num_aborted_requests_total"  # requests given up, by the server or because their user left; no response counter shows it
# Endpoints that generate. Only their answers are users' requests: polls would dilute an error rate.
GENERATING = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
    "/invocations",
    "/vertex_generate",
)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """One parsed scrape: value by sample name and labels (sorted pairs)."""

    t: float
    source: str
    samples: dict[str, dict[Labels, float]]

    @staticmethod
    def parse(text: str, *, t: float, source: str) -> Scrape:
        """Parse the text format.

        Raises:
            AnalysisError: what is no Prometheus text, naming the source.
        """
        samples: dict[str, dict[Labels, float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = float(sample.value)
        except (ValueError, KeyError, IndexError) as error:
            raise AnalysisError(f"{source}: not Prometheus text: {error}.", hint="Point at /metrics.") from None
        return Scrape(t, source, samples)

    @property
    def started(self) -> float | None:
        """When the process started, seconds since the epoch; None where it does not say."""
        known = self.samples.get(STARTED, {}).values()
        return max((value for value in known if math.isfinite(value) and value > 0), default=None)

    def resolve(self, names: Iterable[str], *, suffix: str = "") -> str | None:
        """The first of the names present here, with either prefix or as given; None if none is."""
        for name in names:
            for prefix in (*PREFIXES, ""):
                if prefix + name + suffix in self.samples:
                    return prefix + name
        return None

    def require(self, names: Iterable[str], *, suffix: str = "") -> str:
        """As `resolve`.

        Raises:
            AnalysisError: none is present; with the nearest names that are.
        """
        names = tuple(names)
        found = self.resolve(names, suffix=suffix)
        if found is None:
            known = sorted({name.removesuffix(suffix) for name in self.samples if name.endswith(suffix)})
            near = difflib.get_close_matches("sglang:" + names[0], known, n=3, cutoff=0.5)
            hint = f"Nearest: {', '.join(near)}." if near else "Is --enable-metrics set, and has a request been served?"
            raise AnalysisError(f"{self.source} has no metric {names[0]!r}.", hint=hint)
        return found


def split_snapshots(text: str, name: str) -> Iterator[tuple[str, Scrape]]:
    """Scrapes kept in one file, each after a comment line `# scrape <seconds> <arm> [<source>]`; yields (arm, scrape).

    Raises:
        AnalysisError: a header that does not read so, as name:line.
    """
    header: tuple[float, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate([*text.splitlines(), "# scrape end"], 1):
        if not line.startswith("# scrape "):
            body.append(line)
            continue
        if header:
            t, arm, source = header
            yield arm, Scrape.parse("\n".join(body) + "\n", t=t, source=source)
        body, words = [], line.split()[2:]
        if words == ["end"]:
            return
        try:
            header = (float(words[0]), words[1], words[2] if len(words) > 2 else f"{name}:{words[1]}")
        except (IndexError, ValueError):
            raise AnalysisError(f"{name}:{number}: {line!r}.", hint="Write: # scrape SECONDS ARM [SOURCE].") from None
        if header[1] not in ("canary", "control") or not math.isfinite(header[0]):
            raise AnalysisError(f"{name}:{number}: {line!r} names no arm.", hint="It is canary or control.") from None


class Increases:
    """Increases of one counter-like sample between scrapes, summed over what is asked, resets handled.

    A series that is new since the previous scrape began at 0 after it. A process that says when it started was restarted when that has
    moved, and only then; one that does not, when a value is lower than it was or a series is gone.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float | None, dict[Labels, float]]] = {}

    def step(
        self, source: str, values: dict[Labels, float], started: float | None = None
    ) -> tuple[dict[Labels, float], bool] | None:
        """Increase by series since this source's previous scrape, and whether a counter was reset; None the first time.

        Args:
            started: when the process started, where the scrape says so (`Scrape.started`).

        Raises:
            AnalysisError: a counter that is NaN, infinite or negative.
        """
        for labels, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise AnalysisError(f"{source}: counter {dict(labels)} is {value}.", hint="The exporter is broken.")
        if source not in self._last:
            self._last[source] = (started, dict(values))
            return None
        since, previous = self._last[source]
        if since is not None and started is not None:
            reset = abs(started - since) > CLOCK_STEP
        elif previous and not values:  # the whole counter is missing once: nothing is known, and it began nowhere anew
            return {}, False
        else:
            reset = bool(previous.keys() - values.keys()) or any(
                value < previous.get(labels, 0.0) for labels, value in values.items()
            )
        self._last[source] = (started, dict(values) if reset else {**previous, **values})
        # One process owns all series of a source: when one was reset, all were.
        base = {} if reset else previous
        return {labels: max(0.0, value - base.get(labels, 0.0)) for labels, value in values.items()}, reset


@dataclass(frozen=True)
class Buckets:
    """Observations by histogram bucket: `counts[i]` lie in (edges[i-1], edges[i]], the last edge is infinite."""

    edges: np.ndarray
    counts: np.ndarray

    @property
    def total(self) -> float:
        return float(self.counts.sum())

    def __add__(self, other: Buckets) -> Buckets:
        if not np.array_equal(self.edges, other.edges):
            raise AnalysisError("two histograms have different buckets.", hint="Start all servers with the same ones.")
        return Buckets(self.edges, self.counts + other.counts)

    def over(self, edge: int) -> float:
        """Observations above `edges[edge]`; with edge -1, all."""
        return float(self.counts[edge + 1 :].sum())

    def quantile_bounds(self, level: float) -> tuple[float, float] | None:
        """The bucket that holds the quantile, as (lower edge, upper edge) in seconds; None without observations.

        The quantile lies somewhere between the two: buckets say no more, and no interpolation is made up.
        """
        if not self.total > 0:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), level * self.total * (1 - 1e-12), side="left"))
        return (float(self.edges[place - 1]) if place else 0.0, float(self.edges[place]))


def buckets_of(increase: dict[Labels, float], source: str) -> Buckets:
    """Sum the cumulative `_bucket` increases of all series of one histogram into plain buckets.

    Raises:
        AnalysisError: series with different buckets, counts that fall with `le`, no +Inf bucket.
    """
    series: dict[Labels, dict[float, float]] = {}
    for labels, value in increase.items():
        rest = tuple(pair for pair in labels if pair[0] != "le")
        series.setdefault(rest, {})[float(dict(labels)["le"])] = value
    total: Buckets | None = None
    for cumulative in series.values():
        edges = np.array(sorted(cumulative))
        steps = np.diff([0.0, *(cumulative[edge] for edge in edges)])
        if not math.isinf(edges[-1]) or (steps < 0).any():
            raise AnalysisError(f"{source}: a histogram's buckets do not add up.", hint="The exporter is broken.")
        total = Buckets(edges, steps) if total is None else total + Buckets(edges, steps)
    if total is None:
        raise AnalysisError(f"{source}: a histogram without buckets.", hint="The exporter is broken.")
    return total
