"""Length estimators that are wrong by a known amount, made from the true outcomes. Only experiments can have them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler.lengths import LengthEstimator
from rlhfless.types.arrays import FloatArray, IntArray, floats
from rlhfless.types.outcome import Outcome
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload

BUCKETS = 10
"""Deciles: what the accuracy of a length predictor is counted in (chosen; the paper does not say what it counts)."""
PAPER_ACCURACY = 0.44
"""Accuracy of the paper's model-based predictor (RLHFless §6, Fig. 14)."""

Misses = Literal["anywhere", "near"]
"""Where a wrong prediction falls: any other bucket alike (the worse case; the paper does not say) or a neighbour."""


def buckets(mean_lengths: FloatArray, count: int = BUCKETS) -> IntArray:
    """int[prompts]: 0 for the shortest 1 / count of the prompts, by rank; equal lengths in the order of prompts."""
    found = np.empty(mean_lengths.size, dtype=np.int64)
    for number, part in enumerate(np.array_split(np.argsort(mean_lengths, kind="stable"), count)):
        found[part] = number
    return found


def share_right(estimates: FloatArray, mean_lengths: FloatArray, count: int = BUCKETS) -> float:
    """Accuracy: share of prompts whose estimate lies between the shortest and longest true length of their bucket."""
    own = buckets(mean_lengths, count)
    low, high = (reduce(mean_lengths, own, count) for reduce in (_least, _most))
    return float(np.mean((estimates >= low[own]) & (estimates <= high[own])))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEstimator:
    """Says of each prompt in which bucket of the step its mean length will be; right for a share of the prompts.

    The estimate of a bucket is the true mean length of its prompts. Of `prompts` prompts, round(accuracy * prompts) are
    right in every step, no more and no fewer, drawn with the seed.
    """

    outcomes: Mapping[int, Outcome]
    """True lengths by step."""
    accuracy: float
    """Share of prompts whose bucket is right."""
    seed: int = 0
    """Which prompts those are, and where the others go."""
    count: int = BUCKETS
    """Buckets of equal size."""
    misses: Misses = "anywhere"
    """Where the others go."""

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise InputError(f"accuracy is {self.accuracy}; it must lie in 0..1")
        if self.count < 2:
            raise InputError(f"{self.count} buckets; a prediction needs at least 2")
        if self.misses not in ("anywhere", "near"):
            raise InputError(f"misses {self.misses!r}: known are anywhere, near")

    def estimate(self, workload: Workload) -> FloatArray:
        """float[prompts]: length of the bucket that is named for each prompt, tokens.

        Raises InputError for fewer prompts than buckets.
        """
        truth = self.outcomes[workload.step].response_tokens.mean(axis=1)
        if truth.size < self.count:
            raise InputError(f"step {workload.step}: {truth.size} prompts, {self.count} buckets need as many")
        rng = stream(self.seed, "estimator", workload.step)
        named = buckets(truth, self.count)
        lengths = np.array([truth[named == number].mean() for number in range(self.count)])
        wrong = rng.permutation(truth.size)[round(self.accuracy * truth.size) :]
        if self.misses == "anywhere":
            named[wrong] = (named[wrong] + rng.integers(1, self.count, wrong.size)) % self.count
        else:
            step = rng.choice((-1, 1), wrong.size)
            inside = (named[wrong] + step >= 0) & (named[wrong] + step < self.count)
            named[wrong] += np.where(inside, step, -step)
        return floats(np.clip(lengths[named], 1, workload.max_response_tokens))

    def observe(self, report: StepReport) -> None:
        """Learns nothing."""


def of_accuracy(
    accuracy: float = PAPER_ACCURACY, *, seed: int = 0, count: int = BUCKETS, misses: Misses = "anywhere"
) -> Callable[[Mapping[int, Outcome]], LengthEstimator]:
    """For `Setting.estimator`: what makes a `BucketEstimator` from the true outcomes."""

    def make(outcomes: Mapping[int, Outcome]) -> LengthEstimator:
        return BucketEstimator(outcomes=outcomes, accuracy=accuracy, seed=seed, count=count, misses=misses)

    return make


def _least(values: FloatArray, own: IntArray, count: int) -> FloatArray:
    return floats([values[own == number].min(initial=np.inf) for number in range(count)])


def _most(values: FloatArray, own: IntArray, count: int) -> FloatArray:
    return floats([values[own == number].max(initial=-np.inf) for number in range(count)])
