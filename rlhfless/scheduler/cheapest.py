"""The cheapest plan of a step that ends by a time limit: group borders, number of actors, the size of each.

Prompts stand in a row, longest expected first, and GPUs in a row, nearest to the learner first. A plan goes along both:
it gives the next prompts to an actor of some size on the next GPUs, or leaves a GPU out. The cheapest plan whose groups
all end by a time limit is then a shortest path over (prompts given out, GPUs passed), and free GPUs, transfers and
starts are all in the place. It is found exactly, among contiguous groups with the borders that are offered, on actors
that stand on rising GPUs in the order of their groups. What this leaves out: a longer group on GPUs farther than those
of a shorter one, and prompts that change places in the row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhfless.types.arrays import FloatArray, IntArray

Groups = tuple[tuple[int, int, int], ...]
"""(first border, last border, seat) of each actor of a plan, in order."""


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

    def begin_s(self, seat: int) -> FloatArray:
        """float[borders]: when an actor whose group ends at each border can begin."""
        seats = self.seats
        sent_s = self.kv_bytes * seats.kv_byte_s[seat]
        if self.kv_bytes[-1]:
            sent_s += seats.kv_latency_s[seat]
        begin_s: FloatArray = np.maximum(sent_s + self.prefill_s, seats.ready_s[seat])
        return begin_s


def cheapest(problem: Problem, limits: FloatArray) -> list[Path | None]:
    """For each time limit [limits] the cheapest plan whose groups all end by it; None where there is none.

    Exact for the problem as stated, where `cut_s` is `held_s`. Seats that cannot make any plan cheaper are not looked
    at: once a finished plan costs no more than any unfinished one and the least that its rest can cost on the seats
    that are left, it is final.
    """
    seats, last = problem.seats, problem.kv_bytes.size - 1
    size, end = int(seats.tp.max()), int((seats.offset + seats.tp).max())
    cost = np.full((end + 1, limits.size, last + 1), np.inf)
    cost[0, :, 0] = 0.0
    seat_of = np.full(cost.shape, -1, dtype=np.int64)
    from_border = np.zeros(cost.shape, dtype=np.int64)
    active, final = np.arange(limits.size), np.full(limits.size, end)
    first = np.searchsorted(seats.offset, np.arange(end + 2)).tolist()
    for offset in range(end):
        if offset % (2 * size) == 0:
            rest = _rest(problem, limits[active], first[offset])
            window = cost[offset : offset + size + 1, active]
            unfinished = (window[:, :, :-1] + rest[:, :-1]).min(axis=(0, 2))
            ready = window[:, :, -1]
            done = ready.min(axis=0) <= unfinished  # also where neither is possible
            final[active[done]] = offset + ready[:, done].argmin(axis=0)
            active = active[~done]
            if active.size == 0:
                break
        here = cost[offset, active]
        rows, borders = np.nonzero(here < cost[offset + 1, active])
        cost[offset + 1, active[rows], borders] = here[rows, borders]
        seat_of[offset + 1, active[rows], borders] = -1
        begins = np.flatnonzero(np.isfinite(here[:, :-1]).any(axis=0))
        if begins.size == 0:
            continue
        for seat in range(first[offset], first[offset + 1]):
            kind, tp = int(seats.kind[seat]), int(seats.tp[seat])
            begin_s = problem.begin_s(seat)
            held_s = problem.cut_s[kind, begins]
            if begins[0] == 0:
                held_s[0] = problem.held_s[kind, 0]
            total = np.where(
                problem.ends_s[kind, begins] + begin_s <= limits[active, None, None],
                tp * (held_s + (begin_s + seats.start_s[seat])),
                np.inf,
            )
            total += here[:, begins, None]
            choice = total.argmin(axis=1)
            best = total[np.arange(active.size)[:, None], choice, np.arange(last + 1)]
            rows, borders = np.nonzero(best < cost[offset + tp, active])
            target = active[rows]
            cost[offset + tp, target, borders] = best[rows, borders]
            seat_of[offset + tp, target, borders] = seat
            from_border[offset + tp, target, borders] = begins[choice[rows, borders]]
    return [
        _path(problem, seat_of[:, row], from_border[:, row], int(final[row]))
        if np.isfinite(cost[final[row], row, last])
        else None
        for row in range(limits.size)
    ]


def _rest(problem: Problem, limits: FloatArray, first_seat: int = 0) -> FloatArray:
    """float[limits, borders]: least cost of the prompts from each border on, if every actor had the best of the seats
    from one on; infinite where not even that ends in time."""
    seats, last = problem.seats, problem.kv_bytes.size - 1
    least = np.full((limits.size, last + 1, last + 1), np.inf)
    for kind in range(problem.ends_s.shape[0]):
        own = first_seat + np.flatnonzero(seats.kind[first_seat:] == kind)
        if own.size == 0:
            continue
        begin_s = np.maximum(seats.ready_s[own], problem.prefill_s)
        held_s = problem.cut_s[kind].copy()
        held_s[0] = problem.held_s[kind, 0]
        cost = seats.tp[own[0]] * (held_s + (begin_s + seats.start_s[own]).min())
        fits = problem.ends_s[kind] + begin_s.min() <= limits[:, None, None]
        np.minimum(least, np.where(fits, cost, np.inf), out=least)
    rest = np.full((limits.size, last + 1), np.inf)
    rest[:, last] = 0.0
    for border in range(last - 1, -1, -1):
        rest[:, border] = (least[:, border, border + 1 :] + rest[:, border + 1 :]).min(axis=1)
    return rest


def _path(problem: Problem, seat_of: IntArray, from_border: IntArray, offset: int) -> Path:
    border, groups = problem.kv_bytes.size - 1, []
    while border:
        seat = int(seat_of[offset, border])
        if seat < 0:
            offset -= 1
            continue
        begin = int(from_border[offset, border])
        groups.append((begin, border, seat))
        offset, border = int(problem.seats.offset[seat]), begin
    return path_of(problem, tuple(reversed(groups)))


def path_of(problem: Problem, groups: Groups) -> Path:
    """A plan by its groups."""
    seats, ends_s, moved_s, cost, gpus = problem.seats, 0.0, 0.0, problem.fixed_gpu_s, 0
    kinds: set[int] = set()
    for begin, end, seat in groups:
        kind, tp = int(seats.kind[seat]), int(seats.tp[seat])
        begin_s = float(problem.begin_s(seat)[end])
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


def least_cost_gpu_s(problem: Problem) -> float:
    """No plan costs less than its prompts would, if every actor had the best seat, however late they end."""
    return problem.fixed_gpu_s + float(_rest(problem, np.array([np.inf]))[0, 0])
