"""Groups of responses whose lengths are only known in distribution: how long actors of each size take for them.

The step's prompts stand in a row, longest expected first; a group is what lies between two borders. For every length t,
sums over the row of the expected number of responses longer than t, of their context, and of the logarithm of the
chance that none is that long give those of any group by subtraction. So an actor's batch, its context and the chance
that it still runs are known at every token, for all groups at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scheduler.estimate import KV_SHARE, DecodeModel
from rlhfless.scheduler.spread import Spread
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray

BORDERS = 32
"""Borders between groups that are tried for more prompts than that (chosen: planning 512 prompts takes some 20 ms)."""
CELLS = 28
"""Stretches of response length over which iterations are summed (chosen: see BORDERS)."""
BEND = 1.5
"""Stretches grow as (number / CELLS) ** BEND: finer where most responses end (chosen)."""
SURE = 1e-4
"""Chance of a longer response that is passed over when the longest length is fixed (chosen)."""
RELEASE = 0.92
"""Share of a group's responses after which the rule `elastic` releases its actor, in effect (measured: see MOVES)."""
MOVES = 1.0
"""What moved responses cost those who take them, over what they would add to each iteration of an actor as full as the
one that they leave was (measured, with RELEASE, against the simulator on five presets: together they put time at +1 to
3 % and cost at -10 to -23 %)."""
QUEUEING = 1.15
"""Time of queueing responses over their estimate (measured: where slots are short, up to 15 % more)."""
ROWS = 1 << 12
"""Prompts handled at a time (chosen: temporaries of a megabyte)."""


def borders_of(prompts: int, most: int = BORDERS) -> IntArray:
    """int[borders]: places between prompts where groups may begin or end, 0 and `prompts` among them.

    All of them where there are few. Otherwise half in even steps and half in even ratios from the longest prompt on:
    it is the few longest that a plan treats one by one.
    """
    if prompts <= most:
        return np.arange(prompts + 1)
    even = np.linspace(0, prompts, most // 2 + 1)
    ratio = np.geomspace(1, prompts, most - most // 2)
    return np.unique(np.rint(np.concatenate([even, ratio])).astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The row of prompts, as sums up to each border; columns [borders, cells] unless said otherwise."""

    borders: IntArray
    """int[borders]: prompts before each border."""
    middle: FloatArray
    """float[cells]: tokens at the middle of each stretch."""
    width: FloatArray
    """float[cells]: tokens of each stretch."""
    alive: FloatArray
    """Expected responses longer than `middle`."""
    context: FloatArray
    """Their expected prompt tokens."""
    held: FloatArray
    """Expected prompt tokens whose KV they hold: a prompt counts once for all of its responses."""
    none: FloatArray
    """Logarithm of the chance that no response is longer than `middle`."""
    responses: IntArray
    """int[borders]: responses."""

    @classmethod
    def of(
        cls, estimates: FloatArray, spread: Spread, prompt_tokens: IntArray, n: int, cap: int, borders: IntArray
    ) -> "Crowd":
        """The row of prompts, `estimates` falling; all columns [prompts] in that order."""
        edges = _longest(estimates, spread, cap) * np.linspace(0.0, 1.0, CELLS + 1) ** BEND
        middle = (edges[1:] + edges[:-1]) / 2
        sums = np.zeros((4, borders.size, CELLS))
        for low in range(0, estimates.size, ROWS):
            rows = slice(low, min(low + ROWS, estimates.size))
            longer = spread.exceeds(estimates[rows], middle)
            gone = np.minimum(longer, 1.0 - 1e-12)
            none = n * np.log1p(-gone)
            tokens = prompt_tokens[rows, None].astype(np.float64)
            columns = (n * longer, n * longer * tokens, -np.expm1(none) * tokens, none)
            at = np.searchsorted(borders, np.arange(rows.start, rows.stop), side="right")
            first = np.flatnonzero(np.diff(at, prepend=-1))
            for total, column in zip(sums, columns, strict=True):
                total[at[first]] += np.add.reduceat(column, first, axis=0)
        alive, context, held, none = np.cumsum(sums, axis=1)
        return cls(
            borders=borders,
            middle=middle,
            width=np.diff(edges),
            alive=alive,
            context=context,
            held=held,
            none=none,
            responses=borders * n,
        )

    def at(self, borders: IntArray) -> "Crowd":
        """The same with some of its borders."""
        rows = np.searchsorted(self.borders, borders)
        names = ("borders", "alive", "context", "held", "none", "responses")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


def _longest(estimates: FloatArray, spread: Spread, cap: int) -> float:
    """Tokens beyond which no response of the step is to be expected."""
    tokens = np.geomspace(1.0, float(cap), 64)
    top = spread.exceeds(estimates[:1], tokens)[0] * min(estimates.size, 1 / SURE)
    beyond = np.flatnonzero(top < SURE)
    return float(tokens[beyond[0]]) if beyond.size else float(cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """What every group takes on an actor of one size; float[borders, borders], infinite unless begin < end."""

    ends_s: FloatArray
    """Seconds of decoding by which a group has ended with the chance asked for; rises with the group."""
    works_s: FloatArray
    """Expected seconds of decoding."""
    cut_s: FloatArray
    """The same up to the moment at which the group's last responses are moved to other actors."""
    moved_s: FloatArray
    """Seconds by which those others take longer for them."""
    row: IntArray
    """int[borders, borders]: the group's row in the columns below."""
    at_s: FloatArray
    """float[groups, cells]: seconds of decoding at which each length is reached."""
    none: FloatArray
    """float[groups, cells]: logarithm of the chance that the group has ended by then."""


def group_times(
    models: Sequence[DecodeModel], crowd: Crowd, chance: float, release: float = RELEASE, neighbours: bool = False
) -> list[GroupTimes]:
    """All groups on actors of each size, without prefill; of `neighbours` only those from one border to the next.
    `release`: share of a group's responses after which the last ones are moved away.

    `chance`: that the whole step has ended in the time of its slowest group. A group's own chance of ending by `ends_s`
    is `chance` to the power of its share of the responses, so that those of a plan's groups multiply to `chance`.

    Where a group's KV or responses exceed the actor at any length, responses queue, and its time is that of
    `estimate.group_times` for queues, where what is last admitted takes the place of rounds.
    """
    begin, end = np.triu_indices(crowd.borders.size, 1)
    if neighbours:
        begin, end = np.arange(crowd.borders.size - 1), np.arange(1, crowd.borders.size)
    none = crowd.none[end] - crowd.none[begin]
    runs = -np.expm1(none)
    np.maximum(runs, 1e-12, out=runs)
    alive = np.maximum(crowd.alive[end] - crowd.alive[begin], runs)
    responses = crowd.responses[end] - crowd.responses[begin]
    level = 1.0 - chance ** _risk(crowd, chance, begin, end)
    left: FloatArray = np.asarray((1.0 - release) * responses, dtype=np.float64)
    groups = _Groups(
        begin=begin,
        end=end,
        responses=responses,
        level=level,
        left=left,
        alive=alive,
        runs=runs,
        none=none,
        context=(crowd.context[end] - crowd.context[begin]) / alive + crowd.middle,
        kv=crowd.held[end] - crowd.held[begin] + alive * crowd.middle,
        batch=np.rint(alive / runs),
        later=np.where(alive <= left[:, None], alive, 0.0),
        ends=_Fall.of(runs, level),
        cut=_Fall.of(alive, left),
    )
    return [_on(model, crowd, groups, neighbours) for model in models]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """What is the same on actors of every size; columns [groups] or [groups, cells]."""

    begin: IntArray
    """First border."""
    end: IntArray
    """Last border."""
    responses: IntArray
    """Their number."""
    level: FloatArray
    """Chance of not having ended by `GroupTimes.ends_s`."""
    left: FloatArray
    """Responses that run when the last ones are moved."""
    alive: FloatArray
    """Expected responses that run."""
    runs: FloatArray
    """Chance that any does."""
    none: FloatArray
    """Logarithm of the chance that none does."""
    context: FloatArray
    """Mean context of those that run."""
    kv: FloatArray
    """Tokens of KV that they hold."""
    batch: FloatArray
    """How many run if any does."""
    later: FloatArray
    """Responses that others have taken."""
    ends: "_Fall"
    """Of `runs` to `level`."""
    cut: "_Fall"
    """Of `alive` to `left`."""


def _on(model: DecodeModel, crowd: Crowd, groups: _Groups, neighbours: bool) -> GroupTimes:
    """The groups on actors of one size."""
    data, begin, end, context = model.profile.data, groups.begin, groups.end, groups.context
    batch = np.clip(groups.batch, 1, data.max_slots).astype(np.int64)
    seconds = model.iteration_s(batch, context) * crowd.width
    ends = groups.ends.seconds(seconds)
    works = (seconds * groups.runs).sum(axis=1)
    cut = np.minimum(groups.cut.seconds(seconds), works)
    # those who take them are about as full as the group was when it was cut
    fuller = np.minimum(batch + np.rint(groups.left)[:, None].astype(np.int64), data.max_slots - 1)
    slower = model.iteration_s(fuller + 1, context) - model.iteration_s(np.maximum(fuller, 1), context)
    moved = MOVES * (groups.later * slower * crowd.width).sum(axis=1)
    queue = (groups.responses > data.max_slots) | (groups.kv.max(axis=1) > data.kv_capacity_tokens)
    at_s = np.cumsum(seconds, axis=1) - seconds / 2
    if queue.any():
        slow = _queued(model, crowd, groups, queue)
        at_s[queue] *= (slow / np.maximum(ends[queue], 1e-12))[:, None]
        ends[queue] = works[queue] = cut[queue] = slow  # an actor is held until its last response has ended
        moved[queue] = 0.0
    shape = (crowd.borders.size, crowd.borders.size)
    tables = [np.full(shape, np.inf) for _ in range(4)]
    for table, column in zip(tables, (ends, works, cut, moved), strict=True):
        table[begin, end] = column
    if not neighbours:
        _monotone(tables[0])
    row = np.zeros(shape, dtype=np.int64)
    row[begin, end] = np.arange(begin.size)
    return GroupTimes(
        ends_s=tables[0],
        works_s=tables[1],
        cut_s=tables[2],
        moved_s=tables[3],
        row=row,
        at_s=at_s,
        none=groups.none,
    )


def together_s(groups: Sequence[tuple[GroupTimes, int, int, float]], chances: Sequence[float]) -> FloatArray:
    """When all of a plan's groups have ended, with each of rising chances.

    A group is (times of its size, first border, last border, when its actor begins to decode).
    """
    rows = [(times.at_s[times.row[i, j]] + begin_s, times.none[times.row[i, j]]) for times, i, j, begin_s in groups]
    at_s = np.sort(np.concatenate([reached for reached, _ in rows]))
    late = np.sum([np.interp(at_s, reached, none, right=0.0) for reached, none in rows], axis=0)
    ends_s: FloatArray = np.interp(np.log(chances), late, at_s)
    return ends_s


def _risk(crowd: Crowd, chance: float, begin: IntArray, end: IntArray) -> FloatArray:
    """float[groups]: each group's part in the risk of being late; those of a plan add up to 1.

    Half by its share of the responses, half by its share of the risk that some response is longer than the step's
    longest is with this chance: by the first alone, groups of short prompts would have to expect what hardly happens in
    them, by the second alone, all groups would have to expect the same longest response.
    """
    longest = int(np.searchsorted(crowd.none[-1], np.log(chance)))
    at = crowd.none[:, min(longest, crowd.middle.size - 1)]
    share = (crowd.responses[end] - crowd.responses[begin]) / crowd.responses[-1]
    risk: FloatArray = 0.5 * (share + (at[end] - at[begin]) / at[-1])
    return risk


@dataclass(frozen=True, slots=True)
class _Fall:
    """Where columns [groups, cells] that fall along the cells have come down to a level."""

    cells: IntArray
    """int[groups]: cells above it."""
    share: FloatArray
    """float[groups]: part of the way from the middle of the last of them to that of the next."""

    @classmethod
    def of(cls, falling: FloatArray, level: FloatArray) -> "_Fall":
        """`level`: float[groups]."""
        above: BoolArray = falling > level[:, None]
        cells = above.sum(axis=1)
        rows = np.arange(falling.shape[0])
        high, low = falling[rows, np.maximum(cells - 1, 0)], falling[rows, np.minimum(cells, falling.shape[1] - 1)]
        share = np.where(high > low, np.clip((high - level) / np.maximum(high - low, 1e-300), 0.0, 1.0), 1.0)
        return cls(cells, share)

    def seconds(self, each: FloatArray) -> FloatArray:
        """float[groups]: seconds until there, from those of each cell, float[groups, cells]."""
        cells, rows = self.cells, np.arange(each.shape[0])
        done = np.concatenate([np.zeros((each.shape[0], 1)), np.cumsum(each, axis=1)], axis=1)
        half, following = each[rows, np.maximum(cells - 1, 0)] / 2, np.minimum(cells, each.shape[1] - 1)
        until = done[rows, cells] - half + self.share * (half + each[rows, following] / 2)
        reached: FloatArray = np.where(cells > 0, np.minimum(until, done[:, -1]), 0.0)
        return reached


def _queued(model: DecodeModel, crowd: Crowd, groups: _Groups, queue: BoolArray) -> FloatArray:
    """float[groups]: seconds by which groups whose responses queue have ended with the chance asked for.

    The last to be admitted waits until as many have ended as could not begin at once, and is then as long as the
    longest of those that had to wait.
    """
    data, alive, none, level = model.profile.data, groups.alive[queue], groups.none[queue], groups.level[queue]
    tokens = alive @ crowd.width
    squares = 2.0 * ((alive * crowd.middle) @ crowd.width)
    prompts = (groups.kv[queue] - alive * crowd.middle) @ crowd.width
    at_once = np.clip(data.kv_capacity_tokens * tokens / (prompts + KV_SHARE * squares), 1.0, data.max_slots)
    context_tokens = ((groups.context[queue] * alive) @ crowd.width) / tokens
    even = tokens / at_once
    late = np.maximum(1.0 - at_once / groups.responses[queue], 0.0)  # share that cannot begin at once
    width = np.broadcast_to(crowd.width, alive.shape)
    waits = np.maximum(_Fall.of(alive, at_once).seconds(width), even * late)
    last = _Fall.of(-np.expm1(none * late[:, None]), level).seconds(width)
    longest = np.maximum(_Fall.of(-np.expm1(none), level).seconds(width), waits + last)
    most = np.maximum(even, longest)
    return np.asarray(QUEUEING * most * model.profile.decode_iteration_s(tokens / most, context_tokens))


def _monotone(table: FloatArray) -> None:
    """No group ends before a part of it: raise what estimates of queues may have below."""
    size = table.shape[0]
    inside = np.where(np.isfinite(table), table, -np.inf)
    inside = np.maximum.accumulate(inside, axis=1)
    inside = np.maximum.accumulate(inside[::-1], axis=0)[::-1]
    upper = np.triu_indices(size, 1)
    table[upper] = inside[upper]
