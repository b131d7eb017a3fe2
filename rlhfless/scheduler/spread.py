"""How far responses stray from what was expected of their prompts: the distribution behind a length estimate.

The logarithm of a response's length is taken to be a line in the logarithm of its prompt's estimate, plus a stray.
Line and strays are learned from the responses of past steps. The line's slope is below 1 for the usual reason: the
prompts that were longest last time owe part of it to chance. The strays' distribution is the one seen; beyond the
largest, its tail is exponential in log length. Strays are everybody's: a scale for each prompt, learned from its own
responses, predicted the longest of a group worse on every preset, because a single long response then widens its
prompt for good.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlhfless.scheduler.learned import Learned
from rlhfless.types.arrays import FloatArray, IntArray, floats

PRIOR_SPREAD = 0.5
"""Standard deviation of log lengths about their estimate before anything was seen (chosen: the spread of lengths over a
whole data set in the presets that are not measured; being wrong costs one step)."""
PRIOR_SLOPE = 0.5
"""What a reference answer twice as long says of the response, in doublings, before anything was seen (chosen: the
middle of the rank correlations of the presets)."""
PRIOR_POINTS = 255
"""Quantiles that stand for it."""
KEPT = 4096
"""Latest responses that are learned from (chosen: the 99.9 % quantile then rests on four of them)."""
TAIL_SHARE = 0.05
"""Share of the kept strays from which the exponential tail beyond the largest takes its mean excess (chosen)."""
LEAST_EXCESS = 1e-3
"""Mean excess of a tail at least: a thousandth of a length (chosen: no spread at all, in effect)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of one step's lengths: log length = centre + slope * log estimate + stray."""

    centre: float = 0.0
    """Where the line meets an estimate of 1."""
    slope: float = 1.0
    """What a longer estimate says of the length."""
    strays: FloatArray
    """float[samples]: strays, ascending."""
    excess: float
    """Mean excess of strays beyond the largest."""

    @classmethod
    def of(cls, strays: FloatArray, centre: float = 0.0, slope: float = 1.0) -> "Spread":
        """The distribution of these strays about a line."""
        ordered = np.sort(strays)
        tail = ordered[int((1 - TAIL_SHARE) * ordered.size) :]
        excess = max(float((tail - tail[0]).mean()), LEAST_EXCESS)
        return cls(centre=centre, slope=slope, strays=ordered, excess=excess)

    @classmethod
    def none(cls) -> "Spread":
        """Every response is as long as its estimate."""
        return cls.of(np.zeros(1))

    def exceeds(self, estimates: FloatArray, tokens: FloatArray) -> FloatArray:
        """float[prompts, tokens]: probability that a response is longer than each number of tokens."""
        stray = np.log(tokens)[None, :] - (self.centre + self.slope * np.log(estimates))[:, None]
        levels = np.arange(self.strays.size, 0, -1) / (self.strays.size + 1.0)
        longer: FloatArray = np.interp(stray, self.strays, levels, left=1.0)
        beyond = stray > self.strays[-1]
        longer[beyond] *= np.exp((self.strays[-1] - stray[beyond]) / self.excess)
        return longer


class SpreadHistory:
    """What spreads are learned from: lengths against first-epoch estimates, and against later ones, each by itself."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._seen: dict[bool, FloatArray] = {}  # later epoch -> float[2, kept]: log estimate, log length

    def __bool__(self) -> bool:
        return bool(self._seen)

    @property
    def seen(self) -> tuple[FloatArray, FloatArray]:
        """float[2, kept] each: log estimate and log length of responses of the first epoch, and of later ones."""
        first, later = (floats(self._seen.get(late, np.empty((2, 0)))) for late in (False, True))
        return first, later

    def relearn(self, learned: Learned) -> None:
        """Go on from what another planner's had learned."""
        found = {False: learned.first_epoch, True: learned.later_epochs}
        self._seen = {late: pairs for late, pairs in found.items() if pairs.size}

    def of(self, epoch: int, estimates: FloatArray) -> Spread:
        """The spread of a step's estimates, float[prompts].

        Before any step of later epochs has been seen, those stray as first-epoch estimates did, about a line of slope 1
        through 0: lengths of the epoch before are unbiased where those of reference answers are not.
        """
        later = epoch > 0
        if later in self._seen:
            return _fit(self._seen[later])
        if self._seen:
            return Spread.of(_fit(self._seen[not later]).strays)
        prior = NormalDist(0.0, PRIOR_SPREAD)
        levels = (np.arange(1, PRIOR_POINTS + 1) / (PRIOR_POINTS + 1)).tolist()
        centre = (1.0 - PRIOR_SLOPE) * float(np.log(estimates).mean())
        return Spread.of(np.array([prior.inv_cdf(level) for level in levels]), centre, PRIOR_SLOPE)

    def observe(self, epoch: int, estimates: FloatArray, tokens: IntArray) -> None:
        """Learn from a step: estimates float[prompts], tokens int[prompts, n]."""
        pairs = np.stack([np.repeat(np.log(estimates), tokens.shape[1]), np.log(tokens.ravel())])
        before = self._seen.get(epoch > 0, np.empty((2, 0)))
        self._seen[epoch > 0] = np.concatenate([before, pairs], axis=1)[:, -KEPT:]


def _fit(seen: FloatArray) -> Spread:
    """The line of least squares; flat where all estimates are the same."""
    x, y = seen
    about = x - x.mean()
    spread = float(about @ about)
    slope = float(about @ y) / spread if spread > 0 else 0.0
    centre = float(y.mean() - slope * x.mean())
    return Spread.of(y - centre - slope * x, centre, slope)
