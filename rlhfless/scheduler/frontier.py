"""The time-cost frontier of a step, and which of its plans is wanted.

Each plan is the cheapest that ends by some time limit (`rlhfless.scheduler.cheapest`). All of them are found by going
down the limits; for one goal, limits are tried together and then refined next to the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.scheduler.cheapest import Path, Problem, cheapest, least_costs_gpu_s, least_end_s
from rlhfless.types.arrays import FloatArray, floats, ints
from rlhfless.types.plan import FrontierTable

LIMITS = 12
"""Time limits that are solved together (chosen: one sweep of a step of 512 prompts takes some 10 ms)."""
SWEEPS = 8
"""Most sweeps over limits after the first (chosen; steps of 512 prompts take some two)."""
GAPS = 3
"""Gaps between known plans among which the limits of a sweep are divided (chosen)."""
NEAR = 0.01
"""Share of time and cost together by which a knee may miss the best (chosen: estimates are not so good)."""
BEHIND = 100.0
"""Weight of falling behind the floor, in time or cost, against all else (chosen: it decides first)."""
AHEAD = np.array([0.93, 0.90])
"""Shares of the floor's time and of its cost that the knee must keep (chosen: the best of many estimates is optimistic,
by 3 to 7 % in simulation)."""
BEYOND = np.geomspace(1.0, 1.4, 8)
"""Limits, in terms of the time wanted, that are solved for a plan of that time: a plan may end before its limit."""
FASTEST = 1e-3
"""Share by which the fastest plan that may be had may miss the least time (chosen)."""
LOOKS, WIDE = 32, 4.0
"""Time limits at which another problem is looked at for a better plan, and how far beyond a known plan they go
(chosen: some percent apart)."""
PRICE = 6.0
"""What the mid-step rule takes a second of the step to be worth, in terms of cost / time of the plan (measured against
the simulator on five presets: 1 trades 10 % of time for 20 % of cost, 4 trades 2 % for 15 %, 16 hardly anything)."""
EVEN, STEEP, PRICES = 2.0, 20.0, (1.0, 60.0)
"""The same beside a floor: its worth where a plan is as far ahead of the floor in time as in cost, the power of the
ratio of the two by which it rises, its least and most (measured on eleven of the shipped lengths and models, so that
neither time nor cost falls behind)."""
ROUNDING = 1e-9
"""Relative difference of seconds that is rounding."""

GoalKind = Literal["knee", "weight", "deadline_s", "budget_gpu_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Which point of the frontier is wanted.

    knee: the least product of time and cost, where one percent of time costs one percent of money, among the plans that
    are neither slower nor dearer than the paper's equal groups would be (RLHFless §4.4), where there are any. weight:
    the least time ** value * cost ** (1 - value), whatever the paper does; 0.5 is the product. Such a trade depends on
    no range of candidates, as min-max norms do, and on no unit. deadline_s: the cheapest plan that ends in time.
    budget_gpu_s: the fastest plan that holds no more GPU-seconds.
    """

    kind: GoalKind = "knee"
    """What is asked for."""
    value: float = 0.5
    """Weight of time in 0..1, of the knee too, seconds, or GPU-seconds."""

    def __post_init__(self) -> None:
        if self.kind in ("knee", "weight"):
            if not 0.0 <= self.value <= 1.0:
                raise InputError(f"weight {self.value}: the weight of time against cost must lie in 0..1")
        elif not (0.0 < self.value < float("inf")):
            raise InputError(f"{self.kind} {self.value}: it must be above 0 and finite")

    def __str__(self) -> str:
        return "knee" if self.kind == "knee" else f"{self.kind} {self.value:g}"


def scores(goal: Goal, paths: Sequence[Path], floor: Path | None = None) -> FloatArray:
    """float[paths]: how far each is from what is wanted, the least the nearest; infinite where it is not allowed.

    Scores are logarithms, so that a difference of 0.01 is one percent. `floor`: a plan that the knee must not fall
    behind in time or cost.
    """
    time_s, cost = np.array([path.time_s for path in paths]), np.array([path.cost_gpu_s for path in paths])
    if goal.kind == "deadline_s":
        return np.where(time_s <= goal.value * (1 + ROUNDING), np.log(cost), np.inf)
    if goal.kind == "budget_gpu_s":
        return np.where(cost <= goal.value * (1 + ROUNDING), np.log(time_s), np.inf)
    weight = goal.value
    score: FloatArray = weight * np.log(time_s) + (1.0 - weight) * np.log(cost)
    if goal.kind == "knee" and floor is not None:
        early_s = np.array([path.early_s for path in paths])
        behind = np.maximum(np.log(time_s / (floor.time_s * AHEAD[0])), np.log(cost / (floor.cost_gpu_s * AHEAD[1])))
        behind = np.maximum(behind, np.log(early_s / (floor.early_s * AHEAD[0])))
        score += BEHIND * np.maximum(behind, 0.0)
    return score


def undominated(paths: list[Path]) -> list[Path]:
    """Those that no other one beats in time and cost, by rising time."""
    kept: list[Path] = []
    for path in sorted(paths, key=lambda each: (each.time_s, each.cost_gpu_s, each.gpus)):
        if not kept or path.cost_gpu_s < kept[-1].cost_gpu_s * (1 - ROUNDING):
            kept.append(path)
    return kept


def frontier(problem: Problem, least_step: float = 0.0) -> list[Path]:
    """Every undominated plan of the problem, by rising time.

    From the cheapest of all on, each next one is the cheapest that is faster by a share of more than `least_step`: all
    points for 0. Raises InfeasibleError where there is no plan at all.
    """
    found: list[Path] = []
    limit = np.inf
    while True:
        path = cheapest(problem, np.array([limit]))[0]
        if path is None:
            break
        found.append(path)
        limit = path.ends_s * (1 - max(least_step, ROUNDING))
    if not found:
        raise InfeasibleError("no free GPUs take the step's prompts")
    return undominated(found)


def choose(problem: Problem, goal: Goal, floor: Path | None = None) -> tuple[Path, FrontierTable]:
    """The plan that the goal asks for, and the points of the frontier that were looked at.

    The cheapest of all is among them, and others at limits in even ratios down to the least that may be possible. Then
    limits are refined in the gaps between known plans that may hide a better one: a plan in a gap holds no less than
    the one at the gap's end and takes no less than its beginning (an estimate where `Problem.together_s` is given), so
    that most gaps need no look. It ends when no gap can hide one that is better by NEAR (FASTEST for a deadline
    or a budget), or after SWEEPS. Raises InfeasibleError, naming the nearest feasible one, for a
    deadline or budget that no plan keeps.
    """
    known = _Known(problem)
    low = known.missed_s
    wanted = goal.value if goal.kind == "deadline_s" else floor.time_s if goal.kind == "knee" and floor else None
    if wanted is None:
        known.solve(np.array([np.inf]))
    else:
        faster = np.geomspace(low, max(wanted, low), LIMITS - BEYOND.size + 1)[:-1]
        known.solve(np.concatenate([[np.inf], wanted * BEYOND, faster]))
    if not known.points:
        raise InfeasibleError("no free GPUs take the step's prompts")
    if wanted is None:
        known.solve(np.geomspace(low, known.points[-1].ends_s, LIMITS + 1)[:-1])
    for _ in range(SWEEPS):
        limits = known.promising(goal, floor)
        if limits.size == 0:
            break
        known.solve(limits)
    points = known.points
    score = scores(goal, points, floor)
    chosen = int(score.argmin())
    if not np.isfinite(score[chosen]):
        if goal.kind == "deadline_s":
            best = _fastest(problem, points[0])
            raise InfeasibleError(
                f"deadline_s {goal.value:g}: no plan of generation ends by then; the fastest takes "
                f"{best.time_s:.4g} s and holds {best.cost_gpu_s:.4g} GPU-seconds"
            )
        raise InfeasibleError(
            f"budget_gpu_s {goal.value:g}: no plan of generation holds so little; the cheapest holds "
            f"{points[-1].cost_gpu_s:.4g} GPU-seconds and takes {points[-1].time_s:.4g} s"
        )
    return points[chosen], table_of(points, goal, chosen)


def table_of(points: Sequence[Path], goal: Goal, chosen: int) -> FrontierTable:
    """The table of undominated plans, by rising time."""
    return FrontierTable(
        time_s=floats([p.time_s for p in points]),
        cost_gpu_s=floats([p.cost_gpu_s for p in points]),
        gpus=ints([p.gpus for p in points]),
        actors=ints([len(p.groups) for p in points]),
        goal=str(goal),
        chosen=chosen,
    )


def price_of(path: Path, floor: Path | None) -> float:
    """GPU-seconds that a second of the step is worth to the mid-step rule.

    Beside a floor, what a plan has to spare of the one may be given for the other: the cheaper it is, the more.
    """
    price = path.cost_gpu_s / path.time_s
    if floor is None:
        return PRICE * price
    behind = (path.time_s / floor.time_s) / (path.cost_gpu_s / floor.cost_gpu_s)
    return float(np.clip(EVEN * behind**STEEP, *PRICES)) * price


def hopeless(problem: Problem, goal: Goal, path: Path, floor: Path | None) -> bool:
    """Whether no plan of a problem can come nearer to the goal than one of another problem.

    A plan that ends between two time limits takes no less than the first of them (an estimate where
    `Problem.together_s` is given: `path` says how much sooner) and holds no less than by the second, even if all its
    actors had the best seats.
    """
    low = least_end_s(problem)
    limits = np.append(np.geomspace(low, max(low, path.ends_s) * WIDE, LOOKS), np.inf)
    sooner, early = min(path.time_s / path.ends_s, 1.0), min(path.early_s / path.ends_s, 1.0)
    ideal = [
        Path(time_s=begin_s * sooner, early_s=begin_s * early, ends_s=begin_s, cost_gpu_s=cost, gpus=0, groups=())
        for begin_s, cost in zip([low, *limits[:-1].tolist()], least_costs_gpu_s(problem, limits).tolist(), strict=True)
        if cost < np.inf
    ]
    score = scores(goal, [*ideal, path], floor)
    return bool(score[:-1].min(initial=np.inf) >= score[-1])


class _Known:
    """What has been found of a problem's frontier."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.points: list[Path] = []  # undominated, by rising time
        self.missed_s = least_end_s(problem)  # a limit that no plan keeps, or that might be the first that one does
        self._until_s: dict[Path, float] = {}  # the largest limit to which each plan was the answer

    def solve(self, limits: FloatArray) -> None:
        """Add what these limits show."""
        found = []
        for limit, path in zip(limits.tolist(), cheapest(self.problem, limits), strict=True):
            if path is None:
                self.missed_s = max(self.missed_s, limit)
            else:
                self._until_s[path] = max(limit, self._until_s.get(path, 0.0))
                found.append(path)
        self.points = undominated([*self.points, *found])

    def promising(self, goal: Goal, floor: Path | None) -> FloatArray:
        """Limits in the gaps that may hide a better plan, the most promising first to be given some; none where none
        may."""
        answers = sorted(self._until_s, key=lambda path: path.ends_s)
        begins_s = [self.missed_s, *(self._until_s[path] for path in answers[:-1])]
        gaps = [(low, path) for low, path in zip(begins_s, answers, strict=True) if path.ends_s > low * (1 + FASTEST)]
        if not gaps:
            return np.empty(0)
        score = scores(goal, [_ideal(low, path) for low, path in gaps], floor)
        best = scores(goal, self.points, floor).min() - (NEAR if goal.kind in ("knee", "weight") else FASTEST)
        wanted = [row for row in np.argsort(score, kind="stable").tolist() if score[row] < best][:GAPS]
        each = LIMITS // max(len(wanted), 1)
        return np.concatenate(
            [np.empty(0), *(np.geomspace(gaps[row][0], gaps[row][1].ends_s, each + 2)[1:-1] for row in wanted)]
        )


def _ideal(begin_s: float, end: Path) -> Path:
    """The best plan that a gap from one time limit to a known plan may hide."""
    share = begin_s / end.ends_s
    return replace(end, time_s=end.time_s * share, early_s=end.early_s * share)


def _fastest(problem: Problem, known: Path) -> Path:
    """The quickest of `known` and the plans at the least time limits that can be kept, those up to FASTEST.

    Limits are refined between the largest that no plan keeps and the least that one does. A plan may take longer than
    its limit (`Problem.moved_s`), so the one at the least limit need not be the quickest.
    """
    best, low, high = known, least_end_s(problem), known.ends_s
    while high > low * (1 + FASTEST):
        limits = np.geomspace(low, high, LIMITS + 2)[1:-1]
        for limit, path in zip(limits.tolist(), cheapest(problem, limits), strict=True):
            if path is None:
                low = limit
            else:
                best, high = min(best, path, key=lambda each: each.time_s), min(high, path.ends_s)
    return best
