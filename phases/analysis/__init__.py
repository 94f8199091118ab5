"""Always-valid comparison of a canary with its simultaneous control; method in README.md.

Names are imported when they are first used: whoever reads a playbook needs the settings, not what is made of numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phases.analysis.comparison import Comparison, Joint
    from phases.analysis.counts import ErrorTest
    from phases.analysis.decision import Decision
    from phases.analysis.histograms import HistogramTest, HistogramWindows
    from phases.analysis.rolling import RollingTest
    from phases.analysis.scrape import Scrape
    from phases.analysis.sequential import SequentialTest
    from phases.analysis.settings import TestSettings

_MODULES = {
    "Comparison": "comparison",
    "Joint": "comparison",
    "ErrorTest": "counts",
    "Decision": "decision",
    "HistogramTest": "histograms",
    "HistogramWindows": "histograms",
    "RollingTest": "rolling",
    "Scrape": "scrape",
    "SequentialTest": "sequential",
    "TestSettings": "settings",
}

__all__ = [
    "Comparison",
    "Decision",
    "ErrorTest",
    "HistogramTest",
    "HistogramWindows",
    "Joint",
    "RollingTest",
    "Scrape",
    "SequentialTest",
    "TestSettings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
