"""Two results compared benchmark by benchmark (`phase checkpoint diff`).

The quantity is the ratio of medians, after over before. Its interval divides two order-statistic intervals of the medians
(see `phases.gate.intervals`): no assumption about how timings are distributed, conservative, deterministic. A change is
called only when the interval lies wholly on one side of 1; `unclear` is the honest answer otherwise. Comparing many
benchmarks at once, each interval gets its share of the error (Bonferroni), so that the chance of any false call stays
within 1 - confidence. What differs between the two machines is listed first: a ratio between two devices is no regression.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phases.base.results import BenchmarkRecord, Results
from phases.gate.intervals import ratio_interval
from phases.report.tables import Column, seconds, table, wrap

_CHANGES = {
    "slower": "SLOWER",
    "faster": "faster",
    "unclear": "unclear",
    "removed": "only before",
    "added": "only after",
    "no number": "no number",
}
_ORDER = {"slower": 0, "removed": 1, "no number": 2, "unclear": 3, "faster": 4, "added": 5}


@dataclass(frozen=True)
class Change:
    """One benchmark in both results. `ratio` is after over before: above 1 is slower."""

    case: str
    variant: str
    device: str
    what: str  # slower | faster | unclear | removed | added | no number
    before: float | None = None  # median seconds
    after: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    n: tuple[int, int] = (0, 0)
    note: str = ""


@dataclass(frozen=True)
class Diff:
    confidence: float
    changes: tuple[Change, ...]
    facts: dict[str, tuple[Any, Any]]  # what differs between the two runs: (before, after)
    parity: tuple[str, ...]  # parity cases whose outcome changed, in words

    def to_json(self) -> dict[str, Any]:
        return {"schema": "phasegate/diff/v1", **dataclasses.asdict(self)}


def compare(before: Results, after: Results, confidence: float = 0.99) -> Diff:
    """Compare all benchmarks of two results; worst news first.

    Args:
        confidence: chance that no interval of the whole comparison misses its true ratio.
    """
    old, new = _by_key(before), _by_key(after)
    timed = [key for key in old if key in new and old[key].samples and new[key].samples]
    level = 1 - (1 - confidence) / max(len(timed), 1)
    changes = [_change(key, old.get(key), new.get(key), level) for key in dict.fromkeys([*old, *new])]
    changes.sort(key=lambda c: (_ORDER[c.what], -(c.ratio or 0), c.case, c.variant))
    return Diff(confidence, tuple(changes), _facts(before.facts, after.facts), _parity(before, after))


def text(diff: Diff, names: tuple[str, str] = ("before", "after")) -> str:
    """The comparison for a terminal."""
    lines = [wrap(f"{key} differs: {old} -> {new}") for key, (old, new) in diff.facts.items()]
    lines += [wrap(f"parity: {line}") for line in diff.parity]
    if not diff.changes:
        return "\n".join([*lines, "no benchmark on either side"]) + "\n"
    rows = diff.changes
    columns = [
        Column("benchmark", tuple(c.case for c in rows), left=True),
        Column("variant", tuple(c.variant for c in rows), left=True),
        Column(names[0][:12], tuple(seconds(c.before) for c in rows)),
        Column(names[1][:12], tuple(seconds(c.after) for c in rows)),
        Column("ratio", tuple("-" if c.ratio is None else f"{c.ratio:.3f}" for c in rows)),
        Column("interval", tuple(_interval(c) for c in rows)),
        Column("n", tuple(f"{c.n[0]}/{c.n[1]}" for c in rows)),
        Column("", tuple(_CHANGES[c.what] for c in rows), left=True),
    ]
    lines.append(table(columns))
    lines += [wrap(f"  {c.variant} {c.case}: {c.note}") for c in rows if c.note]
    counts = {what: sum(c.what == what for c in rows) for what in _ORDER}
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    lines.append(f"{summary} (joint confidence {diff.confidence:.0%}; ratio of medians, after over before)")
    return "\n".join(lines) + "\n"


def _by_key(results: Results) -> dict[tuple[str, str, str], BenchmarkRecord]:
    return {(r.case.key, r.variant, r.device): r for r in results.benchmark}


def _change(
    key: tuple[str, str, str], old: BenchmarkRecord | None, new: BenchmarkRecord | None, level: float
) -> Change:
    case, variant, device = key
    made = Change(
        case,
        variant,
        device,
        "unclear",
        old and old.median,
        new and new.median,
        n=(len(old.samples) if old else 0, len(new.samples) if new else 0),
    )
    if old is None or new is None:
        return dataclasses.replace(made, what="added" if old is None else "removed")
    if not old.samples or not new.samples:
        why = {
            when: r.refused or r.reason or "no samples"
            for when, r in (("before", old), ("after", new))
            if not r.samples
        }
        both = len(why) == 2 and len(set(why.values())) == 1
        return dataclasses.replace(
            made,
            what="no number",
            note=f"both: {why['before']}" if both else "; ".join(f"{k}: {v}" for k, v in why.items()),
        )
    part = ratio_interval(new.samples, old.samples, level)
    what = "slower" if part.low > 1 else "faster" if part.high < 1 else "unclear"
    note = (
        ""
        if (old.bytes_needed, old.flops) == (new.bytes_needed, new.flops)
        else "the two count different work: bytes or operations changed"
    )
    return dataclasses.replace(
        made, what=what, ratio=part.estimate, low=_finite(part.low), high=_finite(part.high), note=note
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(change: Change) -> str:
    if change.ratio is None:
        return "-"
    return f"{change.low or 0:.3f} .. {'inf' if change.high is None else f'{change.high:.3f}'}"


def _facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Facts on machine and libraries that are plain values and differ."""
    plain = (str, int, float, bool, type(None))
    keys = [
        key
        for key in dict.fromkeys([*before, *after])
        if isinstance(before.get(key), plain) and isinstance(after.get(key), plain)
    ]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _parity(before: Results, after: Results) -> tuple[str, ...]:
    def state(record: Any) -> str:
        return "absent" if record is None else "right" if record.ok else "refused" if record.refused else "WRONG"

    old = {(r.case.key, r.variant, r.device): r for r in before.parity}
    new = {(r.case.key, r.variant, r.device): r for r in after.parity}
    both = [(key, state(old.get(key)), state(new.get(key))) for key in dict.fromkeys([*old, *new])]
    return tuple(f"{key[1]} {key[0]}: {was} -> {now}" for key, was, now in both if was != now)
