"""Exceptions of the toolkit and the exit codes they end in.

Every stage has a type of its own. Each carries the stage, the host it happened on and what the user can do next, so
that the command line prints one paragraph and never a traceback for a foreseeable fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `phase`."""

    PASSED = 0
    OPERATIONAL = 1
    USAGE = 2
    WAITING_FOR_REVIEW = 3
    GATE_FAILED = 4
    INCONCLUSIVE = 5
    LOCKED = 6
    ROLLED_BACK = 7
    ROLLBACK_INCOMPLETE = 8


class PhaseError(Exception):
    """A foreseeable failure: what happened, where, and what to do.

    Args:
        message: one sentence saying what is wrong, naming the file, line, host or tensor.
        hint: one sentence saying what to do next.
        host: host it happened on, if not this machine.
    """

    stage = "phase"
    exit_code = Exit.OPERATIONAL

    def __init__(self, message: str, *, hint: str = "", host: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.host = message, hint, host

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"{self.stage}{where}: {self.told}"

    @property
    def told(self) -> str:
        """What happened and what to do, for where stage and host are named anyway."""
        return f"{self.message} {self.hint}" if self.hint else self.message


class UsageError(PhaseError):
    """The command line asks for something that does not exist or cannot be combined."""

    stage = "usage"
    exit_code = Exit.USAGE


class PlaybookError(PhaseError):
    """One or more mistakes in a playbook or kernel.yaml, each with file:line.

    Attributes:
        mistakes: (file, line, text) of each.
    """

    stage = "playbook"
    exit_code = Exit.USAGE

    def __init__(
        self, message: str, *, hint: str = "", host: str = "", mistakes: tuple[tuple[str, int, str], ...] = ()
    ) -> None:
        super().__init__(message, hint=hint, host=host)
        self.mistakes = mistakes


class BuildError(PhaseError):
    stage = "build"


class KernelContractError(PhaseError):
    """A kernel does not keep the contract of kernel.yaml."""

    stage = "kernel"


class LedgerError(PhaseError):
    stage = "ledger"


class GateError(PhaseError):
    stage = "gate"


class LockedError(PhaseError):
    """Another run holds the lock; the message names its owner and age."""

    stage = "lock"
    exit_code = Exit.LOCKED


class JournalError(PhaseError):
    stage = "journal"


class AnalysisError(PhaseError):
    stage = "analysis"


class FleetError(PhaseError):
    """Something failed on a host; `host` is always set."""

    stage = "fleet"


class ServingError(PhaseError):
    """An SGLang server, the router or a metrics source misbehaved."""

    stage = "serving"


def joined(parts: Iterable[str]) -> str:
    """One text of several: a semicolon after a clause, none after a sentence, which has its own end."""
    text = ""
    for part in parts:
        text += part if not text else f" {part}" if text.endswith((".", "?", "!")) else f"; {part}"
    return text


def ended(text: str) -> str:
    """The text with a full stop unless it has an end of its own."""
    return text if text.endswith((".", "?", "!")) else f"{text}."
