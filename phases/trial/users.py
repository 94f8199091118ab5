"""Users' requests alone: a worker's response counters less what it answered to us."""

from __future__ import annotations

import dataclasses
import math

from phases.analysis.scrape import CLOCK_STEP, RESPONSES, Labels, Scrape

OURS = "/generate"  # the endpoint our own requests go to


class UsersOnly:
    """One worker's scrapes with our own requests taken out of its response counters.

    What was answered before the first scrape is no part of it. Our count and the worker's may be a moment apart, so a counter stands still
    until it has caught up, and never goes back unless the worker's own does: then it restarted, and our count begins anew with it.
    """

    def __init__(self) -> None:
        self._raw: dict[Labels, float] = {}
        self._shown: dict[Labels, float] = {}
        self._base: dict[int, int] | None = None
        self._started: float | None = None

    def __call__(self, scrape: Scrape, own: dict[int, int]) -> Scrape:
        """The scrape without our own. own: answers to us so far, by status."""
        name = scrape.resolve([RESPONSES])
        if name is None:
            return scrape
        raw = scrape.samples[name]
        if not all(math.isfinite(value) and value >= 0 for value in raw.values()):
            return scrape  # whoever counts with it says so
        if self._base is None or self._restarted(scrape.started, raw):
            self._base, self._shown = dict(own), {}
        self._started = scrape.started
        left = {status: count - self._base.get(status, 0) for status, count in own.items()}
        shown = {}
        for labels, value in raw.items():
            named = dict(labels)
            code = named.get("status_code", "")
            if named.get("endpoint") == OURS and code.isdigit():
                taken = min(left.get(int(code), 0), value)
                left[int(code)] = left.get(int(code), 0) - int(taken)
                shown[labels] = max(self._shown.get(labels, 0.0), value - taken)
            else:
                shown[labels] = value
        self._raw, self._shown = dict(raw), shown
        return dataclasses.replace(scrape, samples={**scrape.samples, name: shown})

    def _restarted(self, started: float | None, raw: dict[Labels, float]) -> bool:
        if self._started is not None and started is not None:
            return abs(started - self._started) > CLOCK_STEP
        return any(raw.get(labels, 0.0) < value for labels, value in self._raw.items())
