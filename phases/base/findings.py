"""What a check of `phase doctor` finds, whoever checks: this machine, the fleet, or who would be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    OK = "ok"
    WARNING = "warning"  # something works less well, or only some phases cannot run
    PROBLEM = "problem"  # something will fail


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    health: Health
    found: str
    cure: str = ""
    host: str = "local"


Check = Callable[[], Iterable[Finding]]
