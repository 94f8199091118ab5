"""The table of what both arms of a trial served, the same in terminal, page and text: results.facts["served"], one entry an arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TITLE = "Both arms in absolute numbers"
COLUMNS = ("arm", "metric", "p50 s", "p95 s", "n", "from")
OWN = "own requests"


def rows(served: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each arm, metric and source of latencies."""
    return [row for arm in served for row in _of_arm(arm)]


def sentences(served: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table has no column for: a line an arm with rate, lengths and what its servers are."""
    return [_sentence(arm) for arm in served]


def headline(facts: Mapping[str, Any]) -> str:
    """What a trial came to in one line: "e2e p50: 0.53 s canary, 0.55 s control, ratio 0.92 to 1.04, limit 1.1".

    Of the first latency that was judged; own requests before users' where there are any. Empty where there is no such trial.
    """
    for test in facts.get("sequential", []):
        metric, statistic = test.get("metric"), test.get("statistic", "")
        if not test["looks"] or not metric or test.get("unit") != "ratio" or not statistic.startswith("p"):
            continue
        arms = [
            f"{_seconds(level)} s {arm['arm']}"
            for arm in facts.get("served", [])
            if (level := _level(arm, metric, statistic))
        ]
        _, _, low, high = test["looks"][-1][:4]
        bounds = [f"{word} {value:.3g}" for word, value in (("at least", low), ("at most", high)) if value is not None]
        ratio = f"ratio {' and '.join(bounds)}" if bounds else "ratio not known"
        return ", ".join([f"{test['name']}: " + ", ".join([*arms, ratio]), f"limit {1 + test['margin']:.3g}"])
    return ""


def _level(arm: Mapping[str, Any], metric: str, statistic: str) -> Mapping[str, Any] | None:
    levels = [v for v in arm["levels"] if v["metric"] == metric and f"p{v['quantile'] * 100:g}" == statistic]
    return max(levels, key=lambda level: bool(level["kind"] == OWN), default=None)


def _of_arm(arm: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    of: dict[tuple[str, str], dict[float, Mapping[str, Any]]] = {}
    for level in arm["levels"]:
        of.setdefault((level["metric"], level["kind"]), {})[level["quantile"]] = level
    for (metric, kind), levels in of.items():
        median, tail = levels.get(0.5), levels.get(0.95)
        n = next(iter(levels.values()))["n"]
        shown = [_seconds(level) if level else "-" for level in (median, tail)]
        yield arm["arm"], metric, *shown, str(n), kind or "all requests, histogram"


def _seconds(level: Mapping[str, Any]) -> str:
    low, high = level["low"], level["high"]
    if low == high:
        return f"{low:.4g}"
    return f"{low:.4g}–{high:.4g}" if high < 1e8 else f"over {low:.4g}"


def _sentence(arm: Mapping[str, Any]) -> str:
    traffic = arm["traffic"] or {}
    rate = f"{arm['requests'] / arm['seconds']:.3g} users' requests/s" if arm["seconds"] else "no time"
    lengths = [f"{traffic[key]:.0f} {key} tokens" for key in ("prompt", "answer") if traffic.get(key) is not None]
    server = [f"{key} {value}" for key, value in sorted(arm["server"].items())]
    return f"{arm['arm']}: " + ", ".join([f"{arm['requests']:.0f} users' requests", rate, *lengths, *server])
