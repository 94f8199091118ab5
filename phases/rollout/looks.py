"""One look at a canary as plain facts, for whoever shows it while it bakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phases.analysis.decision import Decision
from phases.fleet.host import Host
from phases.rollout.settings import JudgeSettings


def look_facts(elapsed: float, decisions: Sequence[Decision], settings: JudgeSettings, arms: Mapping[str, Sequence[Host]],
               seconds: float | None = None) -> dict[str, Any]:  # fmt: skip
    """What a look found.

    Args:
        seconds: how long it goes on, where that is not as `settings` say (a soak).
    Returns:
        elapsed, bake, deadline: seconds. arms: names of the workers by arm. requests: answered so far by arm, as far as a test
        counts them. tests: a row each with name, unit, estimate, low, high, threshold, n and outcome.
    """
    counted = [{arm: row["requests"] for arm, row in decision.counts.items() if "requests" in row} for decision in decisions]
    return {
        "elapsed": elapsed, "bake": settings.bake if seconds is None else seconds, "deadline": settings.deadline if seconds is None else seconds,
        "arms": {arm: [host.name for host in hosts] for arm, hosts in arms.items()},
        "requests": next((row for row in counted if row), {}),
        "tests": [
            {"name": f"{d.metric} {d.statistic}", "unit": d.unit, "estimate": d.estimate, "low": d.low, "high": d.high, "threshold": d.threshold, "n": d.n,
             "outcome": d.outcome.value}
            for d in decisions
        ],
    }  # fmt: skip
