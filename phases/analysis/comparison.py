"""Several metrics of the same two arms judged together, with alpha spent over them.

The chance that *any* metric of an equal canary is called a regression stays within alpha: each test gets alpha / k (Bonferroni).
FAIL as soon as one metric fails, PASS only when all pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phases.analysis.counts import ErrorTest
from phases.analysis.decision import Decision
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict


@dataclass(frozen=True)
class Joint:
    """All metrics at one look; `verdict` is None while one of them asks for more data."""

    verdict: Verdict | None
    decisions: tuple[Decision, ...]


class Comparison:
    """Canary against control on several metrics.

    Args:
        tests: what is compared; their own alpha is replaced by a share of `alpha`.
        errors: error kinds compared as well.
        alpha: chance of a wrong FAIL over all metrics and looks.
        tolerance: excess error rate still acceptable.
        source: where the observations come from.
    """

    def __init__(
        self,
        tests: Sequence[TestSettings],
        *,
        errors: Sequence[str] = ("5xx", "4xx"),
        alpha: float = 0.01,
        tolerance: float = 0.01,
        source: str = "",
    ) -> None:
        if not tests and not errors:
            raise AnalysisError("there is nothing to compare.", hint="Name at least one metric.")
        share = alpha / (len(tests) + len(errors))
        self._tests = [SequentialTest(replace(test, alpha=share), source=source) for test in tests]
        window = tests[0].window if tests else 10.0
        deadline = tests[0].deadline if tests else None
        self._errors = [
            ErrorTest(kind, tolerance=tolerance, alpha=share, window=window, deadline=deadline, source=source)
            for kind in errors
        ]

    def observe(self, arm: str, t: float, metrics: dict[str, float], status: int = 200) -> None:
        """Hand in one request that ended at `t`: its latencies in seconds by metric, and its HTTP status."""
        for test in self._tests:
            if not 200 <= status < 300:
                test.observe(arm, t, 0.0, status)
            elif test.settings.metric in metrics:
                test.observe(arm, t, metrics[test.settings.metric], status)
        for test in self._errors:
            test.observe(arm, t, status)

    def ignore(self, start: float, end: float) -> None:
        """Leave out [start, end) of the latencies in both arms; errors always count."""
        for test in self._tests:
            test.ignore(start, end)

    def look(self, now: float) -> Joint:
        """Where everything stands at `now`."""
        return _joint([test.look(now) for test in (*self._tests, *self._errors)])

    def finish(self, now: float) -> Joint:
        """The last look."""
        return _joint([test.finish(now) for test in (*self._tests, *self._errors)])


def _joint(decisions: list[Decision]) -> Joint:
    found = {decision.verdict for decision in decisions}
    for verdict in (Verdict.FAIL, None, Verdict.INCONCLUSIVE):
        if verdict in found:
            return Joint(verdict, tuple(decisions))
    return Joint(Verdict.PASS, tuple(decisions))
