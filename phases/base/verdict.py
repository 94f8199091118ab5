"""The verdict of a rule, a gate, a phase: one algebra for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Verdict(Enum):
    """What a rule or a gate concluded. Only PASS advances."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"
    ABORTED = "ABORTED"

    @property
    def advances(self) -> bool:
        return self is Verdict.PASS


_BADNESS = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL, Verdict.ERROR, Verdict.ABORTED]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of the verdicts; of none at all it is ERROR, since a gate that evaluated nothing proves nothing."""
    return max(verdicts, key=_BADNESS.index, default=Verdict.ERROR)


def severity(verdict: Verdict) -> int:
    """0 for PASS, more for worse: what a reviewer sees first."""
    return _BADNESS.index(verdict)
