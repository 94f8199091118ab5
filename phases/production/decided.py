"""What a run has decided stays decided: written down before it is acted on.

A verdict is acted on at once, by going back, and a run may be killed while it does. The process that goes on then reads the verdict
here and finishes what it asks for; it neither judges nor moves anything again.
"""

from __future__ import annotations

from pathlib import Path

from phases.base.results import Results
from phases.run.phase_run import keep, load_results

JUDGED = "judged"  # Phase 3: the bake's verdict, good for one switch of the canary only
GOING_BACK = "going-back"  # Phase 4: nothing moves forward any more


def decide(work: Path, what: str, results: Results) -> Results:
    """Put a decision on disk, with the measurements and facts it rests on."""
    keep(work / f"{what}.json", results)
    return results


def decided(work: Path, what: str) -> Results | None:
    """What an earlier process of this run decided, or this one; None when nothing was."""
    path = work / f"{what}.json"
    return load_results(path) if path.exists() else None
