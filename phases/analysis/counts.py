"""Error rates of two arms: an e-process for 0-versus-k counts, and a bound on the excess for PASS.

**FAIL.** Under the null (the canary errs no more often than the control) each error falls on the canary with probability at
most its share π of the requests in that window. Against odds θ times higher the likelihood ratio of an error is
`π₁/π` on the canary and `(1-π₁)/(1-π)` on the control, with `π₁ = θπ/(1-π+θπ)`; their running product, mixed over
θ, is a test supermartingale (Wald's ratio under a mixture; Johari et al. 2022, Ramdas et al. 2023), so it may be looked at
any time. No error in the control is needed: k errors against none count in full.

Errors come in clusters (one crash fails all requests in flight). All errors of an arm within `CLUSTER` seconds are one
*incident*, and incidents, not errors, are what is bet on.

**PASS.** The rate of each arm has a time-uniform interval from the Beta-binomial mixture (Robbins 1970), with counts
divided by the mean incident size. PASS when the upper end of the difference is within the tolerated excess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phases.analysis.cells import ARMS
from phases.analysis.decision import Decision
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict

CLUSTER = 1.0
MANY = 10**12  # requests
ODDS = np.array([1.5, 3.0, 8.0, 30.0, 200.0])
KINDS = {"5xx": "server errors, and requests without any answer", "4xx": "refused requests"}


def kind_of(status: int) -> str:
    """Error kind of an HTTP status: `5xx` (also for 0, no answer at all), `4xx`, or empty for success."""
    if status == 0 or status >= 500:
        return "5xx"
    return "4xx" if 400 <= status < 500 else ""


class ErrorTest:
    """Always-valid comparison of error counts.

    Args:
        kind: `5xx` or `4xx`.
        tolerance: excess error rate still acceptable for PASS, 0.01 for one in a hundred.
        alpha: chance of a wrong FAIL over all looks together, and of a wrong PASS.
        window: seconds; traffic shares are taken per window.
        deadline: seconds after the first request at which an open test is INCONCLUSIVE.
        source: where the counts come from.
    """

    def __init__(
        self,
        kind: str,
        *,
        tolerance: float = 0.01,
        alpha: float = 0.01,
        window: float = 10.0,
        deadline: float | None = None,
        min_samples: int = 100,
        source: str = "",
    ) -> None:
        if kind not in KINDS:
            raise AnalysisError(f"error kind {kind!r} is neither 5xx nor 4xx.", hint="Choose one of the two.")
        if not 0 <= tolerance < 1 or not 0 < alpha < 0.5:
            raise AnalysisError(
                f"tolerance {tolerance} or alpha {alpha} is out of range.", hint="Give small fractions."
            )
        self.kind, self.tolerance, self.alpha, self._window = kind, tolerance, alpha, window
        self._deadline, self._min_samples, self._source = deadline, min_samples, source
        self._log_evidence = np.zeros(len(ODDS))
        self._open: dict[int, np.ndarray] = {}  # window -> requests and incidents, rows by arm
        self._totals = np.zeros((2, 3))  # requests, errors, incidents; rows by arm
        self._last_incident = dict.fromkeys(ARMS, -math.inf)
        self._first, self._closed = math.nan, -math.inf
        self._reached: tuple[Verdict, float] | None = None
        self._finished = False

    def observe(self, arm: str, t: float, status: int) -> None:
        """Hand in one request that ended at `t` seconds with an HTTP status."""
        failed = kind_of(status) == self.kind
        self.add(arm, t, requests=1, errors=int(failed))

    def observe_many(self, arm: str, t: Sequence[float], status: Sequence[int]) -> None:
        """Hand in requests of one arm, shape (n,) each, in order of time."""
        for moment, code in zip(t, status, strict=True):
            self.observe(arm, float(moment), int(code))

    def add(self, arm: str, t: float, *, requests: float, errors: float) -> None:
        """Hand in counts, such as the increase of counters between two scrapes, that ended at `t`.

        Raises:
            AnalysisError: unknown arm, counts that are negative or not finite, more errors than requests.
        """
        if arm not in ARMS:
            raise AnalysisError(f"arm {arm!r} is neither canary nor control.", hint="Name the arm of each observation.")
        if not (math.isfinite(t) and math.isfinite(requests) and 0 <= errors <= requests):
            raise AnalysisError(
                f"{errors} errors of {requests} requests at t={t} make no sense.", hint="Check the counters."
            )
        self._first = t if math.isnan(self._first) else self._first
        incident = bool(errors) and t - self._last_incident[arm] >= CLUSTER
        if incident:
            self._last_incident[arm] = t
        row = ARMS.index(arm)
        self._totals[row] += (requests, errors, incident)
        # What comes after its window was judged is judged with the next one.
        index = int(max(math.floor(t / self._window), self._closed))
        self._open.setdefault(index, np.zeros((2, 2)))[row] += (requests, incident)

    def look(self, now: float) -> Decision:
        """Judge the windows that ended by `now`. FAIL is final; PASS holds only while the bound does."""
        end = math.floor(now / self._window + 1e-9)
        for index in sorted(index for index in self._open if index < end):
            self._bet(self._open.pop(index))
        self._closed = max(self._closed, end)
        return self._decide(now)

    def finish(self, now: float) -> Decision:
        """The last look: judges also the open window; what is undecided is INCONCLUSIVE."""
        self._finished = True
        for index in sorted(self._open):
            self._bet(self._open.pop(index))
        return self.look(now)

    def _bet(self, counts: np.ndarray) -> None:
        requests, incidents = counts[:, 0], counts[:, 1]
        if not requests.all():
            return  # an arm without traffic has no share: nothing to compare
        share = requests[0] / requests.sum()
        tilted = ODDS * share / (1 - share + ODDS * share)
        self._log_evidence += incidents[0] * np.log(tilted / share) + incidents[1] * np.log((1 - tilted) / (1 - share))

    def _decide(self, now: float) -> Decision:
        top = self._log_evidence.max()
        evidence = top + math.log(np.mean(np.exp(self._log_evidence - top)))
        (n1, k1, _), (n0, k0, _) = self._totals
        low, high, estimate = None, None, None
        if n1 and n0:
            bounds = [_rate_interval(*row, self.alpha / 2) for row in self._totals]
            low, high, estimate = bounds[0][0] - bounds[1][1], bounds[0][1] - bounds[1][0], k1 / n1 - k0 / n0
        enough = min(n1, n0) >= self._min_samples
        if evidence >= -math.log(self.alpha) and not (self._reached and self._reached[0] is Verdict.FAIL):
            self._reached = (Verdict.FAIL, now)
        if not (self._reached and self._reached[0] is Verdict.FAIL):  # a bound that was good once may be so no more
            within = enough and high is not None and high <= self.tolerance
            self._reached = (self._reached or (Verdict.PASS, now)) if within else None
        over = self._finished or (self._deadline is not None and now - self._first >= self._deadline)
        reached = self._reached[0] if self._reached else Verdict.INCONCLUSIVE if over else None
        counted = f"{k1:g} of {n1:g} requests failed on the canary, {k0:g} of {n0:g} on the control"
        verdict = {
            Verdict.FAIL: f"{counted}: evidence {math.exp(min(evidence, 700)):.3g} that the canary errs more, "
            f"{1 / self.alpha:.3g} is needed",
            Verdict.PASS: f"{counted}: at most {high or 0.0:.4f} more, within {self.tolerance:g}",
        }
        return Decision(
            verdict=reached,
            metric=self.kind,
            statistic="excess_rate",
            reason=verdict.get(reached, f"{counted}: an excess over {self.tolerance:g} is not excluded yet"),
            estimate=estimate,
            low=low,
            high=high,
            threshold=self.tolerance,
            n=int(min(n1, n0)),
            counts={
                arm: {"requests": int(n), "errors": int(k), "incidents": int(i)}
                for arm, (n, k, i) in zip(ARMS, self._totals, strict=True)
            },
            confidence=1 - 2 * self.alpha,
            at=now,
            since=self._reached[1] if self._reached else None,
            started=None if math.isnan(self._first) else self._first,
            unit="rate",
            source=self._source,
        )


def clean_requests(tolerance: float, alpha: float) -> int | None:
    """Requests an arm needs, none of them failed in either, before the excess is known to be within `tolerance`; None: never, or more than
    anybody ever sends."""
    few, enough = 0, 1
    while _rate_interval(enough, 0, 0, alpha / 2)[1] > tolerance:
        few, enough = enough, 2 * enough
        if enough > MANY:
            return None
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _rate_interval(middle, 0, 0, alpha / 2)[1] <= tolerance else (middle, enough)
    return enough


def _rate_interval(requests: float, errors: float, incidents: float, alpha: float) -> tuple[float, float]:
    """Time-uniform interval of a rate by the Beta(1/2, 1/2)-binomial mixture, counts divided by the mean incident size."""
    from scipy.optimize import brentq  # here: a rollback, which imports this module, must not wait for it
    from scipy.special import betaln

    scale = incidents / errors if errors else 1.0
    n, k = requests * scale, errors * scale
    mixture = betaln(0.5 + k, 0.5 + n - k) - betaln(0.5, 0.5)

    def excess(rate: float) -> float:
        return mixture - k * math.log(rate) - (n - k) * math.log1p(-rate) + math.log(alpha)

    centre, tiny = min(max(k / n, 1e-12), 1 - 1e-12), 1e-12
    low = brentq(excess, tiny, centre) if centre > tiny and excess(tiny) > 0 > excess(centre) else 0.0
    high = brentq(excess, centre, 1 - tiny) if excess(1 - tiny) > 0 > excess(centre) else 1.0
    return low, high
