"""The sequential test on Prometheus histograms: the same evidence, with what buckets leave open left open.

A bucket edge q near the control's quantile is the threshold (so are edges near the levels around it); how many of the
control's requests exceed it is known exactly. How many of the canary's exceed r·q is only known between two bucket
edges, so evidence of a slowdown uses the lower count and evidence against one the upper count: both stay valid, and
coarse buckets give a wide interval instead of a wrong one.
"""

from __future__ import annotations

import numpy as np

from phases.analysis.cells import ARMS
from phases.analysis.decision import Decision
from phases.analysis.scores import QuantileScore
from phases.analysis.scrape import HISTOGRAMS, Buckets, Increases, Scrape, buckets_of
from phases.analysis.sequential import conclude
from phases.analysis.settings import TestSettings, candidate_ratios
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict

HALF_LIFE = 600.0
TOLERANCE = 1e-9  # relative, for comparing a product with a bucket edge


class HistogramWindows:
    """Increases of one latency histogram between scrapes, by arm; any number of servers an arm.

    Args:
        metric: ttft, itl, e2e or tpot; the metric's name is resolved from the scrapes themselves.
    """

    def __init__(self, metric: str) -> None:
        if metric not in HISTOGRAMS:
            raise AnalysisError(f"{metric!r} has no histogram.", hint=f"Histograms: {', '.join(HISTOGRAMS)}.")
        self.metric, self.name = metric, ""
        self._increases = Increases()
        self.scrapes = 0

    def add(self, scrape: Scrape) -> tuple[Buckets | None, bool]:
        """What was observed since this source's previous scrape (None for the first, or nothing), and whether it restarted."""
        self.scrapes += 1
        self.name = scrape.resolve(HISTOGRAMS[self.metric], suffix="_bucket") or self.name
        series = scrape.samples.get(f"{self.name}_bucket", {})
        step = self._increases.step(scrape.source, series, scrape.started)
        if step is None or not step[0]:
            return None, False
        buckets = buckets_of(step[0], scrape.source)
        return (buckets if buckets.total else None), step[1]

    def require_name(self, scrape: Scrape) -> None:
        """AnalysisError if no scrape so far had the histogram."""
        if not self.name:
            scrape.require(HISTOGRAMS[self.metric], suffix="_bucket")


class HistogramTest:
    """`SequentialTest` for scraped histograms.

    Args:
        settings: as for request records; a quantile is needed.
        source: where the scrapes come from, for the record.
    """

    def __init__(self, settings: TestSettings, *, source: str = "") -> None:
        if settings.quantile is None:
            raise AnalysisError("a histogram is compared by a quantile.", hint="Give one, or request records.")
        self.settings, self._source = settings, source
        self._windows = HistogramWindows(settings.metric)
        self._ratios = candidate_ratios(settings.threshold)
        self._score = QuantileScore(settings.quantile, len(self._ratios), dispersion=settings.dispersion)
        self._open: dict[str, Buckets | None] = dict.fromkeys(ARMS)
        self._used = dict.fromkeys(ARMS, 0.0)
        self._ignored = dict.fromkeys(ARMS, 0.0)
        self._newest = dict.fromkeys(ARMS, -np.inf)
        self._faded: Buckets | None = None
        self._edges: np.ndarray | None = None  # indices of the thresholds, shape (3,)
        self._ignore_until, self._folded_at = -np.inf, -np.inf
        self._started: float | None = None
        self._last: Scrape | None = None
        self._reached: tuple[Verdict, float] | None = None
        self._finished = False

    def add(self, arm: str, scrape: Scrape) -> None:
        """Hand in one scrape of one server of an arm.

        Raises:
            AnalysisError: unknown arm, a clock that goes back, broken counters, buckets that differ between servers.
        """
        if arm not in ARMS:
            raise AnalysisError(f"arm {arm!r} is neither canary nor control.", hint="Name the arm of each scrape.")
        if scrape.t < self._newest[arm] - self.settings.window:
            raise AnalysisError(
                f"{scrape.source}: the clock went back to {scrape.t:g}.", hint="Give scrapes in order of time."
            )
        self._newest[arm] = max(self._newest[arm], scrape.t)
        self._started = scrape.t if self._started is None else self._started
        self._last = scrape
        buckets, restarted = self._windows.add(scrape)
        if restarted:
            self._ignore_until = max(self._ignore_until, scrape.t + self.settings.settle)
            self._score.drop_open_unit()
        if buckets is not None:
            self._open[arm] = buckets if self._open[arm] is None else self._open[arm] + buckets

    def look(self, now: float) -> Decision:
        """Fold in what both arms served since the last look, and decide."""
        if min(self._newest.values()) > self._folded_at:
            self._fold(now)
        return self._decide(now)

    def finish(self, now: float) -> Decision:
        """The last look: what is undecided is INCONCLUSIVE; a histogram never seen is an error."""
        self._finished = True
        if self._last is not None:
            self._windows.require_name(self._last)
        return self.look(now)

    def _fold(self, now: float) -> None:
        seconds = self.settings.window if not np.isfinite(self._folded_at) else max(now - self._folded_at, 0.0)
        self._folded_at = min(self._newest.values())
        canary, control = self._open["canary"], self._open["control"]
        self._open = dict.fromkeys(ARMS)
        ignored = now < self._ignore_until
        for arm, buckets in (("canary", canary), ("control", control)):
            (self._ignored if ignored else self._used)[arm] += 0.0 if buckets is None else buckets.total
        if ignored or (canary is None and control is None):
            return
        known = canary if canary is not None else control
        empty = Buckets(known.edges, np.zeros_like(known.counts))
        canary, control = canary or empty, control or empty
        if self._edges is not None:
            low, high = self._over(canary)
            control_over = np.array([[control.over(int(edge))] for edge in self._edges])
            self._score.fold(low, np.array([canary.total]), control_over, np.array([control.total]), high[1])
        self._learn(control, seconds)

    def _over(self, canary: Buckets) -> tuple[np.ndarray, np.ndarray]:
        """The canary's requests over each ratio times each threshold, shape (3, lanes): at least, and at most."""
        wanted = self._ratios * canary.edges[self._edges][:, None]
        upper = np.searchsorted(canary.edges, wanted * (1 - TOLERANCE), side="left")
        lower = np.searchsorted(canary.edges, wanted * (1 + TOLERANCE), side="right") - 1
        above = np.append(canary.total - np.cumsum(canary.counts), canary.total)  # index -1: above no edge at all
        return np.maximum(above[np.minimum(upper, len(canary.edges) - 1)], 0.0), np.maximum(above[lower], 0.0)

    def _learn(self, control: Buckets, seconds: float) -> None:
        self._faded = (
            control
            if self._faded is None
            else Buckets(control.edges, self._faded.counts * 0.5 ** (seconds / HALF_LIFE) + control.counts)
        )
        level = self.settings.quantile
        if self._faded.total < 1 / min(level, 1 - level):
            return
        below = np.cumsum(self._faded.counts)[:-1] / self._faded.total
        usable = np.flatnonzero((below > 0) & (below < 1))
        if len(usable):
            distance = np.abs(below[usable] - np.array(self._score.levels)[:, None])
            self._edges = usable[np.argmin(distance, axis=1)]
            self._score.set_threshold(np.log(self._faded.edges[self._edges])[:, None])

    def _decide(self, now: float) -> Decision:
        settings = self.settings
        over = settings.deadline is not None and self._started is not None and now - self._started >= settings.deadline
        self._finished = self._finished or over
        decision, self._reached = conclude(
            settings,
            self._ratios,
            self._score.evidence,
            now=now,
            reached=self._reached,
            finished=self._finished,
            spoiled=self._spoiled(now),
            started=self._started,
            n=int(min(self._used.values())),
            counts={arm: {"used": int(self._used[arm]), "ignored": int(self._ignored[arm])} for arm in ARMS},
            source=self._source or self._windows.name,
            exact=False,
        )
        return decision

    def _spoiled(self, now: float) -> str:
        settings = self.settings
        for arm in ARMS:
            if now - self._newest[arm] > 2 * settings.window:
                return f"{arm} was not scraped for {now - self._newest[arm]:g} s"
            if self._used[arm] < settings.min_samples:
                return f"{arm} has {self._used[arm]:g} of the {settings.min_samples} requests that are needed"
        if self._edges is None:
            return "all of the control's requests fall in one bucket: too coarse to tell a quantile"
        return ""
