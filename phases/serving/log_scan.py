"""Errors in a server's log that the incumbent's log does not have."""

from __future__ import annotations

import re
from collections.abc import Sequence

SUSPECT = re.compile(
    r"Traceback|\b(ERROR|CRITICAL|FATAL)\b|Error:|Exception:|CUDA error|illegal memory access|out of memory|\bnan\b|Segmentation fault|"
    r"watchdog|Failed to (load|execute)",
    re.IGNORECASE,
)
BENIGN = re.compile(r"Ignore import error|server_args=|'watchdog_timeout'|watchdog_timeout=")
_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+|/\S+")


def errors(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if SUSPECT.search(line) and not BENIGN.search(line)]


def new_errors(candidate: Sequence[str], incumbent: Sequence[str]) -> list[str]:
    """Suspect lines of the candidate whose like (numbers, addresses and paths aside) the incumbent did not log."""
    known = {_shape(line) for line in errors(incumbent)}
    return [line for line in errors(candidate) if _shape(line) not in known]


def _shape(line: str) -> str:
    return _VARIABLE.sub("#", line)
