"""The table of Phase 2, for a terminal."""

from __future__ import annotations

from phases.base.results import Measurement, Results


def table(results: Results) -> str:
    """Measurements one a line, then what the servers said about themselves."""
    lines = [
        f"{results.phase} of {results.kernel}",
        "",
        f"{'metric':<24}{'estimate':>12}{'low':>12}{'high':>12}{'n':>7}  unit",
    ]
    lines += [_row(row) for row in results.measurements]
    for row in results.measurements:
        for key in ("lines", "different"):
            lines += [f"  {row.metric}: {text}" for text in row.detail.get(key, [])]
    activity = results.facts.get("activity")
    if activity:
        lines += [
            "",
            f"kernel: {', '.join(activity['variants'])}; {activity['kernel_calls']} calls in {activity['verify_forwards']} "
            f"verify forwards, counted by {activity['counted']} of {activity['ranks']} rank(s)",
        ]
    failed = results.facts.get("candidate_failed")
    if failed:
        lines += ["", f"candidate failed: {failed['reason']}", *(f"  {line}" for line in failed["evidence"])]
    return "\n".join(lines) + "\n"


def _row(row: Measurement) -> str:
    numbers = "".join(f"{'-' if value is None else f'{value:.5g}':>12}" for value in (row.estimate, row.low, row.high))
    return f"{row.metric:<24}{numbers}{row.n:>7}  {row.unit or row.source}"
