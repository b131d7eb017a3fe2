"""The cheapest plan of a step that ends by a time limit: group borders, number of actors, the size of each.

Prompts stand in a row, longest expected first, and GPUs in a row, nearest to the learner first. A plan goes along both:
it gives the next prompts to an actor of some size on the next GPUs, or leaves a GPU out. The cheapest plan whose groups
all end by a time limit is then a shortest path over (prompts given out, GPUs passed), and free GPUs, transfers and
starts are all in the place. It is found exactly, among contiguous groups with the borders that are offered, on actors
that stand on rising GPUs in the order of their groups. What this leaves out: a longer group on GPUs farther than those
of a shorter one, and prompts that change places in the row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from rlhfless.types.arrays import FloatArray, IntArray

Groups = tuple[tuple[int, int, int], ...]
"""(first border, last border, seat) of each actor of a plan, in order."""
STALE = 1e-3
"""Share of the longest prompts' time by which seats may have got worse before rests are reckoned anew (chosen)."""
ROUNDING = 1e-12
"""Relative difference of costs that is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One plan."""

    time_s: float
    """When its last group ends."""
    early_s: float
    """When it ends if responses turn out short."""
    ends_s: float
    """The least time limit that it keeps."""
    cost_gpu_s: float
    """GPU-seconds that it holds."""
    gpus: int
    """GPUs of its actors."""
    groups: Groups
    """Its actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Room for actors of every size, nearest first; columns [seats]."""

    offset: IntArray
    """Usable GPUs before it; ascending. It takes the next `tp`."""
    kind: IntArray
    """Row of its size in the tables of groups."""
    tp: IntArray
    """GPUs."""
    ready_s: FloatArray
    """When weights and process are there."""
    start_s: FloatArray
    """Seconds before the step for which its start holds the GPUs."""
    kv_latency_s: FloatArray
    """Latency of the link by which its prompts' KV comes."""
    kv_byte_s: FloatArray
    """Seconds of that link for a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A step to be planned. Tables are [sizes, borders, borders]: groups from one border to a later one."""

    ends_s: FloatArray
    """Seconds from an actor's beginning by which its group has ended."""
    held_s: FloatArray
    """Seconds for which it holds its GPUs to the end."""
    cut_s: FloatArray
    """The same where its last responses are moved to others of its size, and what those hold theirs longer for them.
    The first group of each size has none to move to; the search knows of the very first only, the plan is put right."""
    moved_s: FloatArray
    """Seconds by which the whole step takes longer because a group is cut; no limit knows of them beforehand."""
    seats: Seats
    """Where actors can be."""
    kv_bytes: FloatArray
    """float[borders]: KV that is sent for the prompts before each border; a link is taken to serve all of them."""
    prefill_s: float
    """End of prefill, 0 without a prefill actor."""
    fixed_gpu_s: float
    """GPU-seconds of generation that no choice changes: those of the prefill actor."""
    together_s: Callable[[Groups], tuple[float, float]] | None = None
    """When a plan's groups have all ended, where that is sooner than the slowest of `ends_s`, since those add up the
    risks of being late as if each group were as slow as the slowest; and when if responses turn out short. None for the
    slowest."""
    begins_s: FloatArray = field(init=False, repr=False)
    """float[seats, borders]: when an actor on a seat whose group ends at a border can begin."""

    def __post_init__(self) -> None:
        seats = self.seats
        sent_s = self.kv_bytes * seats.kv_byte_s[:, None]
        if self.kv_bytes[-1]:
            sent_s += seats.kv_latency_s[:, None]
        object.__setattr__(self, "begins_s", np.maximum(sent_s + self.prefill_s, seats.ready_s[:, None]))


def cheapest(problem: Problem, limits: FloatArray) -> list[Path | None]:
    """For each time limit [limits] the cheapest plan whose groups all end by it; None where there is none.

    Exact for the problem as stated, where `cut_s` is `held_s`. A plan is given up as soon as it, and the least that its
    rest can cost on the seats that are left, come to no less than a finished one.
    """
    order = np.argsort(limits, kind="stable")
    search = _Search(problem, limits[order])
    search.run()
    made: dict[Groups, Path] = {}
    found: list[Path | None] = []
    for row in np.argsort(order, kind="stable").tolist():
        groups = search.groups(row)
        if groups is not None and groups not in made:
            made[groups] = path_of(problem, groups)
        found.append(None if groups is None else made[groups])
    return found


def _work_s(problem: Problem) -> FloatArray:
    """float[sizes, borders, borders]: seconds for which a group holds its actor, as the search counts them."""
    work_s: FloatArray = problem.cut_s.copy()
    work_s[:, 0] = problem.held_s[:, 0]
    return work_s


class _Search:
    """The shortest paths of all limits at once."""

    def __init__(self, problem: Problem, limits: FloatArray) -> None:
        self.problem, self.limits = problem, limits
        seats = problem.seats
        self.last, self.end = problem.kv_bytes.size - 1, int((seats.offset + seats.tp).max())
        # [GPUs passed, limits, prompts given out]
        self.cost = np.full((self.end + 1, limits.size, self.last + 1), np.inf)
        self.cost[0, :, 0] = 0.0
        self.seat_of = np.full(self.cost.shape, -1, dtype=np.int32)
        self.work_s = _work_s(problem)

    def run(self) -> None:
        problem, seats, cost, seat_of = self.problem, self.problem.seats, self.cost, self.seat_of
        rests, size = _Rests(problem, self.limits), int(seats.tp.max())
        first = np.searchsorted(seats.offset, np.arange(self.end + 2)).tolist()
        kinds, tps, starts_s = seats.kind.tolist(), seats.tp.tolist(), seats.start_s.tolist()
        limits = self.limits[:, None, None]
        of_kind = rests.of_kind
        least = np.full((self.limits.size, 1), np.inf)  # cost of the cheapest finished plan
        idle = 0  # offsets in a row at which no plan goes on
        for offset in range(self.end):
            here = cost[offset, :, :-1]
            goes_on = here + rests.at(first[offset]) < least
            begins = np.logical_or.reduce(goes_on, axis=0).nonzero()[0]
            idle = 0 if begins.size else idle + 1
            if idle > size:
                break
            if not begins.size:
                continue
            on = np.logical_or.reduce(goes_on, axis=1).nonzero()[0]
            rows, low, high = slice(on[0], on[-1] + 1), int(begins[0]), int(begins[-1]) + 1
            here = np.where(goes_on[rows, low:high], here[rows, low:high], np.inf)
            target = cost[offset + 1, rows, low:high]
            passed = here < target
            np.copyto(target, here, where=passed)
            np.copyto(seat_of[offset + 1, rows, low:high], -1, where=passed)
            within = limits[rows]
            for seat in range(first[offset], first[offset + 1]):
                kind, tp = kinds[seat], tps[seat]
                if not (here + of_kind[kind][rows, low:high] < least[rows]).any():
                    continue
                begin_s = problem.begins_s[seat, low + 1 :]
                held_s = self.work_s[kind, low:high, low + 1 :] + (begin_s + starts_s[seat])
                total = here[:, :, None] + tp * held_s
                late = problem.ends_s[kind, low:high, low + 1 :] + begin_s > within
                np.copyto(total, np.inf, where=late)
                best = np.minimum.reduce(total, axis=1)
                target = cost[offset + tp, rows, low + 1 :]
                found = best < target
                np.copyto(target, best, where=found)
                np.copyto(seat_of[offset + tp, rows, low + 1 :], seat, where=found)
                np.minimum(least[rows], best[:, -1:] * (1 - ROUNDING), out=least[rows])

    def groups(self, row: int) -> Groups | None:
        """The plan of one limit."""
        problem, limit = self.problem, self.limits[row]
        seats, border = problem.seats, self.last
        offset = int(self.cost[:, row, border].argmin())
        if not np.isfinite(self.cost[offset, row, border]):
            return None
        found = []
        while border:
            seat = int(self.seat_of[offset, row, border])
            if seat < 0:
                offset -= 1
                continue
            offset, kind = int(seats.offset[seat]), int(seats.kind[seat])
            begin_s = problem.begins_s[seat, border]
            held_s = self.work_s[kind, :border, border] + (begin_s + seats.start_s[seat])
            total = self.cost[offset, row, :border] + int(seats.tp[seat]) * held_s
            total[problem.ends_s[kind, :border, border] + begin_s > limit] = np.inf
            begin = int(total.argmin())
            found.append((begin, border, seat))
            border = begin
        return tuple(reversed(found))


class _Rests:
    """Least costs of what a plan has still to do, if every actor had the best of the seats from one on."""

    def __init__(self, problem: Problem, limits: FloatArray) -> None:
        self._problem, self._limits, self._work_s = problem, limits, _work_s(problem)
        seats, kinds = problem.seats, range(problem.ends_s.shape[0])
        held_s = problem.begins_s + seats.start_s[:, None]
        own = [seats.kind == kind for kind in kinds]
        self._tp = [int(seats.tp[at][0]) if at.any() else 0 for at in own]
        # [seats of a kind, borders]: the least from one on
        self._begin_s = [np.minimum.accumulate(problem.begins_s[at][::-1])[::-1] for at in own]
        self._held_s = [np.minimum.accumulate(held_s[at][::-1])[::-1] for at in own]
        grain_s = STALE * float(problem.ends_s[:, 0, 1].min())
        before = np.stack([np.append(0, np.cumsum(at)) for at in own], axis=1)
        worth = [held[:, -1] + begin[:, -1] for held, begin in zip(self._held_s, self._begin_s, strict=True)]
        level = [np.append(np.floor(each / grain_s), -1.0)[before[:, kind]] for kind, each in enumerate(worth)]
        # [seats + 1]: the next seat of each kind, and what it is worth
        self._next, self._level = before.tolist(), np.stack(level, axis=1).tolist()
        costs = self._costs(self._next[0])
        self._at, self._rest = self._level[0], _rest(costs)
        self.of_kind = [(each + self._rest).min(axis=1).T for each in costs]
        """For each kind float[limits, borders - 1]: what is left costs no less if the next actor is of it."""

    def at(self, seat: int) -> FloatArray:
        """float[limits, borders - 1]: from each border on, on the seats from `seat` on; infinite where not even that
        ends in time. What was found for an earlier seat is given while that is hardly less."""
        if self._level[seat] != self._at:
            self._at, self._rest = self._level[seat], _rest(self._costs(self._next[seat]))
        return self._rest.T[:, :-1]

    def _costs(self, now: list[int]) -> list[FloatArray]:
        """float[borders - 1, borders, limits] each: cost of each group, infinite where it is late."""
        problem, costs = self._problem, []
        for kind, at in enumerate(now):
            cost = np.full((*problem.ends_s[kind, :-1].shape, self._limits.size), np.inf)
            if at < len(self._begin_s[kind]):
                held = self._tp[kind] * (self._work_s[kind, :-1] + self._held_s[kind][at])
                late = (problem.ends_s[kind, :-1] + self._begin_s[kind][at])[:, :, None] > self._limits
                cost = np.where(late, np.inf, held[:, :, None])
            costs.append(cost)
        return costs


def _rest(costs: list[FloatArray]) -> FloatArray:
    """float[borders, limits]: the least that is left from each border on, by `_Rests._costs`."""
    least = reduce(np.minimum, costs)
    rest = np.zeros(least.shape[1:])
    for border in range(least.shape[0] - 1, -1, -1):
        np.minimum.reduce(least[border, border + 1 :] + rest[border + 1 :], axis=0, out=rest[border])
    return rest


def path_of(problem: Problem, groups: Groups) -> Path:
    """A plan by its groups."""
    seats, ends_s, moved_s, cost, gpus = problem.seats, 0.0, 0.0, problem.fixed_gpu_s, 0
    kinds: set[int] = set()
    for begin, end, seat in groups:
        kind, tp = int(seats.kind[seat]), int(seats.tp[seat])
        begin_s = float(problem.begins_s[seat, end])
        ends_s = max(ends_s, begin_s + float(problem.ends_s[kind, begin, end]))
        held_s = float((problem.cut_s if kind in kinds else problem.held_s)[kind, begin, end])
        moved_s += float(problem.moved_s[kind, begin, end]) if kind in kinds else 0.0
        cost += tp * (begin_s + float(seats.start_s[seat]) + held_s)
        gpus += tp
        kinds.add(kind)
    last_s = early_s = ends_s
    if problem.together_s is not None:
        last_s, early_s = np.minimum(problem.together_s(groups), ends_s).tolist()
    return Path(
        time_s=last_s + moved_s, early_s=early_s + moved_s, ends_s=ends_s, cost_gpu_s=cost, gpus=gpus, groups=groups
    )


def least_end_s(problem: Problem) -> float:
    """No plan ends before every stretch between neighbouring borders could, each alone on the best seat."""
    seats, last = problem.seats, problem.kv_bytes.size - 1
    ends = np.full(last, np.inf)
    for kind in np.unique(seats.kind).tolist():
        own = seats.kind == kind
        begin_s = float(np.maximum(seats.ready_s[own], problem.prefill_s).min())
        ends = np.minimum(ends, np.diagonal(problem.ends_s[kind], 1) + begin_s)
    return float(ends.max())


def least_costs_gpu_s(problem: Problem, limits: FloatArray) -> FloatArray:
    """float[limits]: no plan that ends by a time limit costs less than its prompts would, if every actor had the best
    seat; infinite where not even that ends in time."""
    costs: FloatArray = problem.fixed_gpu_s + _Rests(problem, limits).at(0)[:, 0]
    return costs
