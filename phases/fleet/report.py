"""The text table of a production phase, as its checkpoint holds it."""

from __future__ import annotations

from typing import Any

from phases.base.results import Measurement, Results
from phases.report import served as arms

STATES = {
    "restored": "restored, every worker observed on a release that was verified good",
    "undone": "the hot fallback was taken back: running servers use the kernel of their release",
    "safe": "safe, not restored: no rank runs the candidate's kernel; `phase rollback` restores by restarts",
    "incomplete": "INCOMPLETE, a person is needed",
}


def table(results: Results) -> str:
    """Each measurement with its interval, how the bake went, what the own load met in each step, and the rollback's timeline."""
    lines = [f"{results.phase} of {results.kernel}", ""]
    lines += [_row("measurement", "estimate", "interval", "n"), _row("-" * 24, "-" * 10, "-" * 20, "-" * 8)]
    lines += [_row(m.metric, _number(m.estimate), _interval(m), str(m.n)) for m in results.measurements]
    if results.ends:
        lines += ["", *(f"{e.stage}: {e.verdict.value} after {e.seconds:.0f} s: {e.reason}" for e in results.ends)]
    if served := results.facts.get("served"):
        lines += ["", "both arms in absolute numbers"]
        lines += [
            f"  {arm:18} {metric:5} p50 {p50:>16} s   p95 {p95:>16} s   n {n:>6}   {of}"
            for arm, metric, p50, p95, n, of in arms.rows(served)
        ]
        lines += [f"  {sentence}" for sentence in arms.sentences(served)]
    lines += _load(results.facts.get("load", []))
    events = results.facts.get("timeline", [])
    if events:
        lines += ["", "timeline (seconds since detection)"]
        lines += [
            f"  {event['at']:8.2f}  {event['event']:18} {event['host']:12} {event['note']}".rstrip() for event in events
        ]
    back = results.facts.get("end", {}).get("rollback") or results.facts.get("rollback")
    if back and back.get("state"):
        lines += ["", f"production: {STATES[back['state']]}"]
    return "\n".join(lines) + "\n"


def _load(shares: list[dict[str, Any]]) -> list[str]:
    """Requests of the own load by step; `again` are those the router repeated by itself."""
    if not shares:
        return []
    lines = [
        "",
        "own load through the router, by the step in which a request ended",
        _counts("", "sent", "failed", "again", "late"),
    ]
    lines += [
        _counts(s["during"], s["sent"], s["failed"], "-" if s["retried"] is None else s["retried"], s["late"])
        for s in shares
    ]
    failures = [failure for share in shares for failure in share["failures"]]
    return lines + [f"  failed: {f['prompt']}: {f['error'] or f['status']}" for f in failures[:5]]


def _counts(during: str, *numbers: object) -> str:
    return f"  {during:24}" + "".join(f" {number!s:>7}" for number in numbers)


def _row(*cells: str) -> str:
    return f"{cells[0]:26} {cells[1]:>10} {cells[2]:>22} {cells[3]:>8}".rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(measured: Measurement) -> Any:
    return (
        f"{_number(measured.low)} … {_number(measured.high)}"
        if measured.low is not None or measured.high is not None
        else "-"
    )
