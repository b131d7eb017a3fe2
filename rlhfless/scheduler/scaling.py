"""How many decode actors: the trade of time against cost over all candidates (RLHFless §4.4)."""

from collections.abc import Callable

import numpy as np

from rlhfless.errors import InputError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, ints
from rlhfless.types.plan import CandidateTable

WEIGHT = 0.7
"""lambda, the weight of time against cost (RLHFless §6.1, default; best of 0.3..0.9 in Fig. 15)."""
SLACK_TOLERANCE_S = 1e-9
"""Slack that still counts as 0: rounding of sums of seconds."""
TIE = 1e-12
"""Relative spread below which all candidates count as tied: rounding, not a difference to normalise."""
LEAST_CANDIDATES = 20
"""Candidates evaluated however large the step is (chosen): a ladder of 10, as many to refine it."""

Evaluate = Callable[[IntArray], tuple[FloatArray, FloatArray, FloatArray]]
"""Candidates N to (T(N) in seconds, C(N) in GPU-seconds, hiding slack in seconds), each [candidates]."""


def check_weight(weight: float) -> None:
    """Raise InputError unless lambda lies in [0, 1]."""
    if not 0.0 <= weight <= 1.0:
        raise InputError(f"lambda {weight}: the weight of time against cost must lie in 0..1")


def min_max(values: FloatArray) -> FloatArray:
    """`values` scaled to 0..1; all 0 where they tie, for which the paper's norm is 0/0."""
    low, high = float(values.min()), float(values.max())
    if high - low <= TIE * max(abs(low), abs(high)):
        return np.zeros_like(values)
    return (values - low) / (high - low)


def choose(
    actors: IntArray,
    time_s: FloatArray,
    cost_gpu_s: FloatArray,
    hiding_slack_s: FloatArray,
    weight: float = WEIGHT,
) -> CandidateTable:
    """The candidate with the least lambda * norm(T) + (1 - lambda) * norm(C) (RLHFless §4.4).

    Only candidates that hide their transfers (slack at least 0, up to SLACK_TOLERANCE_S) are eligible; if there are
    none, the best of all is taken and no row is marked eligible. Ties go to the fewest actors. `actors` ascends; all
    inputs are [candidates]. Raises InputError for a weight outside 0..1, no candidates, or values that are not finite.
    """
    check_weight(weight)
    if actors.size == 0:
        raise InputError("no candidate numbers of decode actors to choose from; at least one is needed")
    if bool(np.any(np.diff(actors) <= 0)):
        raise InputError("candidate numbers of decode actors must ascend without repeats")
    for name, column in (("time_s", time_s), ("cost_gpu_s", cost_gpu_s), ("hiding_slack_s", hiding_slack_s)):
        if column.shape != actors.shape:
            raise InputError(f"{name} has shape {column.shape}, {actors.size} candidates need ({actors.size},)")
        if not np.isfinite(column).all():
            raise InputError(f"{name} of {actors[~np.isfinite(column)][0]} decode actors is not a finite number")
    time_norm, cost_norm = min_max(time_s), min_max(cost_gpu_s)
    score = weight * time_norm + (1.0 - weight) * cost_norm
    eligible: BoolArray = hiding_slack_s >= -SLACK_TOLERANCE_S
    return CandidateTable(
        actors=actors,
        time_s=time_s,
        cost_gpu_s=cost_gpu_s,
        time_norm=time_norm,
        cost_norm=cost_norm,
        score=score,
        hiding_slack_s=hiding_slack_s,
        eligible=eligible,
        chosen=int(np.argmin(np.where(eligible, score, np.inf) if eligible.any() else score)),
    )


def ladder(low: int, high: int, rungs: int) -> IntArray:
    """At most `rungs` whole numbers from low to high, both among them, in even ratios; all of them where they fit."""
    if high - low < rungs:
        return ints(np.arange(low, high + 1))
    return ints(np.unique(np.rint(np.geomspace(low, high, max(rungs, 2))).astype(np.int64)))


def search(low: int, high: int, evaluate: Evaluate, affordable: int, weight: float = WEIGHT) -> CandidateTable:
    """`choose` over the N in low..high, of which at most max(affordable, LEAST_CANDIDATES) are evaluated.

    All of them, if that many are affordable. Otherwise a geometric ladder with both ends, then numbers between the
    neighbours of the best so far, half of what is left of the budget at a time, until the neighbours are adjacent or
    the budget is spent. Each row is exact.
    """
    affordable = max(affordable, LEAST_CANDIDATES)
    actors = ladder(low, high, affordable if high - low < affordable else affordable // 2)
    columns = evaluate(actors)
    while True:
        table = choose(actors, *columns, weight=weight)
        left = affordable - actors.size
        around = actors[max(table.chosen - 1, 0) : table.chosen + 2]
        untried = np.setdiff1d(np.arange(around[0], around[-1] + 1), around)
        count = min(untried.size, (left + 1) // 2)
        if count == 0:
            return table
        more = untried[np.rint(np.linspace(0, untried.size - 1, count)).astype(np.int64)]
        joined = np.concatenate([actors, more])
        order = np.argsort(joined)
        actors = ints(joined[order])
        times, costs, slacks = (
            np.concatenate([old, new])[order] for old, new in zip(columns, evaluate(ints(more)), strict=True)
        )
        columns = (times, costs, slacks)
