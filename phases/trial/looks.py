"""Looks at a canary: one as plain facts, for whoever shows it while it bakes; all of them, for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phases.analysis.decision import Decision
from phases.base.verdict import Verdict
from phases.engines.ssh.host import Host
from phases.trial.settings import JudgeSettings


def look_facts(
    elapsed: float,
    decisions: Sequence[Decision],
    settings: JudgeSettings,
    arms: Mapping[str, Sequence[Host]],
    seconds: float | None = None,
) -> dict[str, Any]:
    """What a look found.

    Args:
        seconds: how long it goes on, where that is not as `settings` say (a soak).
    Returns:
        elapsed, bake, deadline: seconds. arms: names of the workers by arm. requests: answered so far by arm, as far as a test
        counts them. tests: a row each with name, unit, estimate, low, high, threshold, n and verdict (`open` before there is one).
    """
    counted = [
        {arm: row["requests"] for arm, row in decision.counts.items() if "requests" in row} for decision in decisions
    ]
    return {
        "elapsed": elapsed,
        "bake": settings.bake if seconds is None else seconds,
        "deadline": settings.deadline if seconds is None else seconds,
        "arms": {arm: [host.name for host in hosts] for arm, hosts in arms.items()},
        "requests": next((row for row in counted if row), {}),
        "tests": [
            {
                "name": name_of(d),
                "unit": d.unit,
                "estimate": d.estimate,
                "low": d.low,
                "high": d.high,
                "threshold": d.threshold,
                "n": d.n,
                "verdict": d.word,
            }
            for d in decisions
        ],
    }


@dataclass
class Looks:
    """What every look found, by the name of the test.

    Times are seconds since the bake began, as people count them. A test has a clock of its own, which counts nothing of a lead-in
    and half of a switchback's turns.

    Attributes:
        rows: [seconds, estimate, low, high] of each look.
        decided: the first look of those that all say what the last one says; tests that are still open have none.
    """

    rows: dict[str, list[list[float | None]]] = field(default_factory=dict)
    decided: dict[str, float] = field(default_factory=dict)
    _last: dict[str, Verdict | None] = field(default_factory=dict)

    def add(self, elapsed: float, decisions: Sequence[Decision]) -> None:
        for d in decisions:
            name = name_of(d)
            self.rows.setdefault(name, []).append([round(elapsed, 2), d.estimate, d.low, d.high])
            if d.verdict is None:
                self.decided.pop(name, None)
            elif d.verdict is not self._last.get(name):
                self.decided[name] = round(elapsed, 2)
            self._last[name] = d.verdict


def name_of(decision: Decision) -> str:
    return f"{decision.metric} {decision.statistic}"
