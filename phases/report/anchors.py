"""Times of other kernels to show beside ours: read from a file, kept in results.json, so that tables and pages have them for good.

    {"about": "where and how they were measured", "recorded": true, "rows": [{"case": "q9/1024/s1/h8/bfloat16", "microseconds": {"rival": 31.2}}]}

`recorded`: measured elsewhere or earlier, not in this run; true when absent. Rows without a `case` are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phases.base.errors import UsageError
from phases.base.reading import open_regular

FACT = "anchors"  # results.facts[FACT] is what `read` returns


@dataclass(frozen=True)
class Anchor:
    """Another kernel's time on one of our cases. `recorded`: elsewhere or earlier, not in this run."""

    case: str  # the case's key
    name: str
    seconds: float
    recorded: bool


def read(path: Path) -> dict[str, Any]:
    """The file's content as a fact of the results.

    Raises:
        UsageError: the file is not that.
    """
    try:
        with open_regular(path) as file:
            data = json.loads(file.read())
        kept = {
            "about": str(data.get("about", "")),
            "recorded": bool(data.get("recorded", True)),
            "rows": [
                {"case": str(row["case"]), "microseconds": {str(n): float(us) for n, us in row["microseconds"].items()}}
                for row in data["rows"]
                if "case" in row
            ],
        }
        if any(not 0 < anchor.seconds < 1e6 for anchor in anchors_of(kept)):
            raise ValueError("a time is not positive")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise UsageError(
            f"{path} holds no times of other kernels: {fault!r}.", hint="`phase report --help` shows its form."
        ) from None
    return kept


def anchors_of(fact: dict[str, Any]) -> tuple[Anchor, ...]:
    """Every time of the fact; none of an empty one."""
    return tuple(
        Anchor(row["case"], name, us * 1e-6, fact["recorded"])
        for row in fact.get("rows", [])
        for name, us in row["microseconds"].items()
    )


def by_case(fact: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds by case and name, as the text table takes them."""
    found: dict[str, dict[str, float]] = {}
    for anchor in anchors_of(fact):
        found.setdefault(anchor.case, {})[anchor.name] = anchor.seconds
    return found
