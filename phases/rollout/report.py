"""The text table of a production phase, as its checkpoint holds it."""

from __future__ import annotations

from typing import Any

from phases.results import Measurement, Results


def table(results: Results) -> str:
    """Each measurement with its interval, how the bake went, and the rollback's timeline."""
    lines = [f"{results.phase} of {results.kernel}", ""]
    lines += [_row("measurement", "estimate", "interval", "n"), _row("-" * 24, "-" * 10, "-" * 20, "-" * 8)]
    lines += [_row(m.metric, _number(m.estimate), _interval(m), str(m.n)) for m in results.measurements]
    bake = results.facts.get("bake")
    if bake:
        lines += ["", f"bake: {bake['outcome']} after {bake['seconds']:.0f} s: {bake['reason']}"]
    for load in results.facts.get("load", []):
        lines.append(f"own load: {load['sent']} requests, {load['failed']} failed, {load['late']} sent late")
    events = results.facts.get("timeline", [])
    if events:
        lines += ["", "timeline (seconds since detection)"]
        lines += [f"  {event['at']:8.2f}  {event['event']:18} {event['host']:12} {event['note']}".rstrip() for event in events]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"{cells[0]:26} {cells[1]:>10} {cells[2]:>22} {cells[3]:>8}".rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _interval(measured: Measurement) -> Any:
    return f"{_number(measured.low)} … {_number(measured.high)}" if measured.low is not None or measured.high is not None else "-"
