"""The optional parts of an installation: which distribution an extra of phasegate brings, and how a missing one is told."""

from __future__ import annotations

import importlib.util
from enum import Enum

from phases.base.errors import PhaseError


class Extra(Enum):
    """An extra of phasegate, by the module that tells whether it is there."""

    BENCH = "torch"  # phasegate[bench]: Phase 1, and whatever else runs or builds a kernel on this machine
    PLOTS = "matplotlib"  # phasegate[plots]: charts of a page, plots in checkpoints

    @property
    def installed(self) -> bool:
        """Whether it can be imported; it is not, since that takes seconds."""
        return importlib.util.find_spec(self.value) is not None

    @property
    def cure(self) -> str:
        return f"pip install 'phasegate[{self.name.lower()}]'"

    @property
    def missing(self) -> str:
        return f"{self.value} is not installed"

    def require(self, what: str) -> None:
        """Raise MissingExtra unless it is installed; `what` needs it, a noun that begins a sentence."""
        if not self.installed:
            raise MissingExtra(f"{what} needs {self.value}, which is not installed.", hint=f"{self.cure}.")


class MissingExtra(PhaseError):
    """What was asked for needs an extra that this installation does not have."""

    stage = "install"
