"""Evidence that a paired difference leans one way, valid at every look.

**Method.** Two arms serve the same traffic at the same time. Cut time into units; in unit k a score D_k compares the arms
after the canary's values were divided by a candidate ratio r. If r is the true slowdown, swapping the arms changes
nothing, so D_k is symmetric about zero given the past. For a symmetric D and any λ,

    E[1 + tanh(λ D)] = 1,

because tanh is odd: the product of these factors is a test martingale, a gambler who bets on the sign of D with a stake
that grows with |D|. By Ville's inequality it exceeds 1/α at *any* time with probability at most α, so the test may be
looked at as often as one likes. Given |D|, the factor is the likelihood ratio of the sign under logistic odds 2λ|D|; no
variance is estimated, no tail is assumed, and one unit, however wild, multiplies the evidence by less than 2.

λ is mixed over a fixed grid (method of mixtures), since the size of the effect is unknown. What a mixture costs is
the weight of the bet that fits, -log of it once: most of it lies where a bake has to decide, the rest keeps small
differences decidable at all.

**A quantile and its neighbourhood** (`QuantileEvidence`). If the slowdown is a factor r around the quantile, the arms
are exchangeable after division by r at every level there, so the mean of the scores at three levels (the quantile's
odds, a quarter and four times of them) is symmetric, too, and carries more of what the requests say than a lone 5 %
of them. The mean of this evidence and of the quantile's own is a test martingale again. That the slowdown is a factor
*there* is an assumption, so it is not all that counts: no more than the square of the quantile's own evidence does. A
wrong FAIL then has probability at most α under the assumption, and at most √α without it, whatever happens around the
quantile. PASS rests on the quantile alone.

**Dependence left after pairing** (batches, a stall, a noisy neighbour of one arm) breaks symmetry given the past for short
units but not for long ones. So the product is kept for units and for blocks of 2, 4, 8 … units, and the evidence is the
*minimum* over the block sizes that have at least `MIN_BLOCKS` blocks. If any of them is long enough for the dependence,
that one alone is a test martingale and the minimum is below it. Block sizes grow with the run, as in batch means.

What is known beforehand about such dependence, from a run of the same release in both arms, is used from the first unit on:
evidence is raised to the power 1/dispersion, where `dispersion` (`power.dispersion`) is the variance of long blocks over
that of independent units. A power in (0, 1] of a test martingale is a supermartingale (Jensen), so this never costs validity.

**Assumptions.** Under the null the arms are exchangeable within a block given the past: same router policy, similar
request mix, comparable request counts. Unequal counts make D skewed; `cells.py` closes a unit only when
both arms have enough requests for the skew to be small.

Sources: Ramdas, Grünwald, Vovk, Shafer, "Game-theoretic statistics and safe anytime-valid inference" (Stat. Sci. 2023);
Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS-B 2024); Howard, Ramdas,
McAuliffe, Sekhon, "Time-uniform Chernoff bounds via nonnegative supermartingales" (Prob. Surveys 2020), for symmetric
increments; Johari et al., "Always valid inference" (Oper. Res. 2022), for A/B tests.
"""

from __future__ import annotations

import numpy as np

# λ is the log odds ratio of an exceedance divided by the design effect: 0.02 is a 2 % shift, 1.1 a crash.
BETS = np.array([0.02, 0.045, 0.1, 0.225, 0.5, 1.1])
WEIGHTS = np.array([1.0, 1.0, 2.0, 3.0, 3.0, 2.0]) / 12
AROUND = 0.75  # weight of the neighbourhood's evidence, beside the quantile's own
MIN_BLOCKS = 16
SCALES = 10
MAX_STAKE = 9.0


class SymmetricEvidence:
    """Test martingales for and against a slowdown, in parallel lanes (candidate ratios, or replays of a simulation).

    Args:
        lanes: number of independent tests held side by side.
        scales: block sizes 1, 2, 4, … 2**(scales-1) units.
        min_blocks: blocks a size needs before it counts.
        bets, weights: the λ grid and the mixture's weights, which add up to 1; shape (J,) each.
        dispersion: known variance inflation of long blocks, at least 1.

    Memory is `scales × J × lanes` floats whatever the length of the run.
    """

    def __init__(
        self,
        lanes: int,
        *,
        scales: int = SCALES,
        min_blocks: int = MIN_BLOCKS,
        bets: np.ndarray = BETS,
        weights: np.ndarray = WEIGHTS,
        dispersion: float = 1.0,
    ) -> None:
        self._power = 1.0 / max(1.0, dispersion)
        self._bets = np.asarray(bets, dtype=float)[:, None]
        self._log_weights = np.log(weights)[:, None]
        self._min_blocks = min_blocks
        self._units = np.zeros(lanes, dtype=np.int64)
        shape = (scales, len(bets), lanes)
        self._above, self._below = np.zeros(shape), np.zeros(shape)
        self._pending_low, self._pending_high = np.zeros((scales, lanes)), np.zeros((scales, lanes))
        self._sum_low, self._sum_high = np.zeros(lanes), np.zeros(lanes)

    @property
    def units(self) -> np.ndarray:
        """Units folded in so far, shape (lanes,)."""
        return self._units

    @property
    def total(self) -> np.ndarray:
        """Sum of all scores, shape (lanes,): zero where the candidate ratio fits the data best."""
        return (self._sum_low + self._sum_high) / 2

    def update(self, score: np.ndarray, closed: np.ndarray | None = None, *, high: np.ndarray | None = None) -> None:
        """Fold in one unit.

        Args:
            score: D of this unit, shape (lanes,), positive when the canary looks slower than the candidate ratio.
            closed: lanes for which a unit ended now, bool, shape (lanes,); all when absent.
            high: when the score is only known to lie in [score, high] (histogram buckets), its upper end.
        """
        if closed is None or closed.all():
            here: slice | np.ndarray = slice(None)  # all lanes in step, as in production: views instead of copies
        else:
            here = np.flatnonzero(closed)
        low = score[here]
        high = low if high is None else high[here]
        self._sum_low[here] += low
        self._sum_high[here] += high
        self._units[here] += 1
        for scale in range(len(self._above)):
            units = self._units[here]
            if not units.size:
                return
            self._bet(scale, here, low, high)
            if scale + 1 == len(self._above):
                return
            # The block now over waits in the next size until its sibling is over, too.
            joined_low, joined_high = self._pending_low[scale, here] + low, self._pending_high[scale, here] + high
            second = (units >> scale) % 2 == 0
            self._pending_low[scale, here] = np.where(second, 0.0, joined_low)
            self._pending_high[scale, here] = np.where(second, 0.0, joined_high)
            if second.all():
                low, high = joined_low, joined_high if high is not low else joined_low
            elif not second.any():
                return
            else:
                here = (np.arange(len(self._units)) if isinstance(here, slice) else here)[second]
                exact = high is low
                low, high = joined_low[second], joined_high[second]
                high = low if exact else high

    def _bet(self, scale: int, here: slice | np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        stake = _stake(self._bets, low)
        above = np.log1p(np.tanh(stake))
        # 1 - tanh(x) = (1 + tanh(x)) exp(-2x): one transcendental serves both sides when the score is exact.
        below = above - 2 * stake if high is low else np.log1p(np.tanh(-_stake(self._bets, high)))
        self._above[scale][:, here] += above
        self._below[scale][:, here] += below

    def log_evidence(self) -> tuple[np.ndarray, np.ndarray]:
        """Natural logs of the evidence that the true ratio lies above, and below, each lane's candidate; (lanes,) each."""
        above = np.full(len(self._units), np.inf)
        below = above.copy()
        for scale in range(len(self._above)):
            active = (self._units >> scale) >= self._min_blocks if scale else np.ones(len(self._units), dtype=bool)
            if not active.any():
                break
            above = np.where(active, np.minimum(above, self._mixed(self._above[scale])), above)
            below = np.where(active, np.minimum(below, self._mixed(self._below[scale])), below)
        return above, below

    def _mixed(self, wealth: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce(wealth * self._power + self._log_weights, axis=0)


class QuantileEvidence(SymmetricEvidence):
    """Evidence on a quantile, where that of a slowdown is drawn from its neighbourhood as well; see the module."""

    def __init__(self, lanes: int, *, dispersion: float = 1.0) -> None:
        super().__init__(lanes, dispersion=dispersion)
        self._around = SymmetricEvidence(lanes, dispersion=dispersion)

    def update_levels(self, score: np.ndarray, closed: np.ndarray, *, high: np.ndarray | None = None) -> None:
        """Fold in one unit: scores at the levels of `scores.neighbourhood`, shape (3, lanes).

        `high` is the upper end of the quantile's own score, shape (lanes,), when buckets only bound it.
        """
        self.update(score[1], closed, high=high)
        self._around.update(score.mean(axis=0), closed)

    def log_evidence(self) -> tuple[np.ndarray, np.ndarray]:
        own, below = super().log_evidence()
        around, _ = self._around.log_evidence()
        above = np.logaddexp(np.log(AROUND) + around, np.log1p(-AROUND) + own)
        return np.minimum(above, 2 * own), below


def _stake(bets: np.ndarray, score: np.ndarray) -> np.ndarray:
    """λ D, clipped where tanh has long reached ±1: an odd function of D, so symmetry and validity are kept."""
    return np.minimum(np.maximum(bets * score, -MAX_STAKE), MAX_STAKE)
