"""Settings of a sequential test and the grid of candidate ratios it inverts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phases.base.errors import AnalysisError, Exit

if TYPE_CHECKING:
    import numpy as np

LATENCIES = ("ttft", "itl", "e2e", "tpot")  # time to first token, inter-token, end to end, time per output token
HIGHER_IS_BETTER = ("throughput", "accept_length")
METRICS = LATENCIES + HIGHER_IS_BETTER
CELLS_PER_WINDOW = 4


class SettingsError(AnalysisError):
    """A setting that makes no sense, whatever the data are."""

    exit_code = Exit.USAGE


@dataclass(frozen=True)
class TestSettings:
    """How one metric of two arms is compared.

    Attributes:
        metric: one of METRICS.
        quantile: in (0, 1), or None for the mean log ratio.
        margin: slowdown that is still acceptable, 0.05 for 5 %.
        alpha: chance of a wrong FAIL over all looks together, and of a wrong PASS.
        window: seconds between looks; units are at least a quarter of it.
        min_samples: requests of each arm without which there is no PASS.
        settle: seconds ignored after an arm came back from a restart.
        deadline: seconds after the first observation at which an open test is INCONCLUSIVE; None for never.
        dispersion: variance inflation known from an A/A run, at least 1.
    """

    __test__ = False  # not a test class, whatever the name says

    metric: str = "e2e"
    quantile: float | None = 0.95
    margin: float = 0.05
    alpha: float = 0.01
    window: float = 10.0
    min_samples: int = 100
    settle: float = 30.0
    deadline: float | None = None
    dispersion: float = 1.0

    def __post_init__(self) -> None:
        self._require(self.metric in METRICS, f"metric {self.metric!r} is none of {', '.join(METRICS)}")
        self._require(
            self.quantile is None or 0 < self.quantile < 1, f"quantile {self.quantile} is not between 0 and 1"
        )
        self._require(0 <= self.margin < 5, f"margin {self.margin} is not a fraction such as 0.05")
        self._require(0 < self.alpha < 0.5, f"alpha {self.alpha} is not between 0 and 0.5")
        self._require(0 < self.window < float("inf"), f"window {self.window} is not a positive number of seconds")
        self._require(self.settle >= 0, f"settle {self.settle} is negative")
        self._require(self.deadline is None or self.deadline > 0, f"deadline {self.deadline} is not positive")
        self._require(1 <= self.dispersion < float("inf"), f"dispersion {self.dispersion} is below 1")
        higher = self.metric in HIGHER_IS_BETTER
        self._require(
            not (higher and self.quantile is not None), f"{self.metric} is compared by its mean: leave quantile out"
        )

    @staticmethod
    def _require(ok: bool, problem: str) -> None:
        if not ok:
            raise SettingsError(f"{problem}.", hint="Correct the setting.")

    @property
    def cell(self) -> float:
        """Seconds of the finest time step."""
        return self.window / CELLS_PER_WINDOW

    @property
    def threshold(self) -> float:
        return 1.0 + self.margin

    @property
    def statistic(self) -> str:
        return "mean" if self.quantile is None else f"p{self.quantile * 100:g}"

    @property
    def sign(self) -> float:
        """-1 where more is better: the ratio tested is then control over canary."""
        return -1.0 if self.metric in HIGHER_IS_BETTER else 1.0


def candidate_ratios(threshold: float) -> np.ndarray:
    """Ratios the confidence interval is read off, ascending: 1 % apart near 1, 4 % apart out to 1/5 and 10, 10 % apart out to 1/50 and 100."""
    import numpy as np  # here: a playbook is read by `phase rollback --hot` too, which must not wait for this

    near = np.geomspace(0.8, 1.6, 70)
    far = [
        np.geomspace(0.02, 0.2, 24),
        np.geomspace(0.2, 0.8, 36),
        np.geomspace(1.6, 10.0, 48),
        np.geomspace(10.0, 100.0, 24),
    ]
    return np.unique(np.concatenate([*far, near, [1.0, threshold]]))
