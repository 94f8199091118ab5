"""Always-valid comparison of a canary with its simultaneous control (DESIGN §6); method in README.md."""

from phases.analysis.comparison import Comparison, Joint
from phases.analysis.counts import ErrorTest
from phases.analysis.decision import Decision, Outcome
from phases.analysis.histograms import HistogramTest, HistogramWindows
from phases.analysis.rolling import RollingTest
from phases.analysis.scrape import Scrape
from phases.analysis.sequential import SequentialTest
from phases.analysis.settings import TestSettings

__all__ = [
    "Comparison",
    "Decision",
    "ErrorTest",
    "HistogramTest",
    "HistogramWindows",
    "Joint",
    "Outcome",
    "RollingTest",
    "Scrape",
    "SequentialTest",
    "TestSettings",
]
