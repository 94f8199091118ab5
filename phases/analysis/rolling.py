"""A test for ever: what guards production after a rollout.

One sequential test that has long seen equal arms has evidence *for* equality, which a later slowdown must first undo. So two
tests run half a span apart, each is replaced when its span is over, and the younger one is never older than half a
span. Each test errs with probability alpha, so a wrong FAIL comes once in `span / (2 alpha)` seconds on average at worst.
"""

from __future__ import annotations

from collections.abc import Sequence

from phases.analysis.decision import Decision
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings
from phases.base.errors import AnalysisError
from phases.base.verdict import Verdict


class RollingTest:
    """Two staggered sequential tests of `span` seconds.

    Args:
        settings: of each; its deadline is not used.
        span: seconds one test lasts, at least four windows.
        source: where the observations come from.
    """

    def __init__(self, settings: TestSettings, *, span: float = 3600.0, source: str = "") -> None:
        if span < 4 * settings.window:
            raise AnalysisError(f"a span of {span:g} s holds no four windows.", hint="Choose a longer span.")
        self._settings, self._span, self._source = settings, span, source
        self._tests: list[tuple[float, SequentialTest]] = []
        self._failed: Decision | None = None

    def observe_many(
        self, arm: str, t: Sequence[float], value: Sequence[float], status: Sequence[int] | None = None
    ) -> None:
        """As `SequentialTest.observe_many`."""
        if not self._tests and len(t):
            self._tests = [(float(min(t)), self._new())]
        for _, test in self._tests:
            test.observe_many(arm, t, value, status)

    def observe(self, arm: str, t: float, value: float, status: int = 200) -> None:
        """As `SequentialTest.observe`."""
        self.observe_many(arm, [t], [value], [status])

    def ignore(self, start: float, end: float) -> None:
        """As `SequentialTest.ignore`."""
        for _, test in self._tests:
            test.ignore(start, end)

    def look(self, now: float) -> Decision:
        """The worse of both tests' decisions; a FAIL is kept until `reset`."""
        if self._failed is None and not self._tests:
            return self._new().look(now)
        if self._failed is None:
            decisions = [test.look(now) for _, test in self._tests]
            failed = [decision for decision in decisions if decision.verdict is Verdict.FAIL]
            self._failed = failed[0] if failed else None
            self._renew(now)
            return self._failed or decisions[0]
        return self._failed

    def reset(self) -> None:
        """Start anew, after a rollback or a new release."""
        self._tests, self._failed = [], None

    def _renew(self, now: float) -> None:
        if now - self._tests[-1][0] >= self._span / 2:
            self._tests.append((now, self._new()))
        if now - self._tests[0][0] >= self._span:
            self._tests.pop(0)

    def _new(self) -> SequentialTest:
        return SequentialTest(self._settings, source=self._source)
