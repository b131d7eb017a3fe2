"""What the planner believes: the time of decode actors on a profile, in closed form, for many groups at once.

All groups of responses that a planner compares are slices of one sorted column, `Work`, so that every sum over a group
is the difference of two running sums. Nothing here steps token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.profile import Profile

CHUNK_INTERVALS = 1 << 13
"""Intervals evaluated in one go (measured: temporary columns of 64 KiB stay below the size from which the allocator
maps fresh pages, and in cache; twice as many make a step of 512 prompts and 80 candidates half again slower)."""
KV_SHARE = 0.6
"""Share of its own tokens whose KV a running response holds on average while KV is short. Steady growth makes 1/2; the
rest stands for responses that are preempted and begin again (measured against an engine with vLLM's admission and
preemption, four length distributions, two models: 1/2 reads 8 to 14 % low in T(N), 0.6 is 3 to 10 % off)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeModel:
    """A profile's decode grid laid out for whole batches: latency = base + slope * context, one row per batch."""

    profile: Profile
    """Where it comes from."""
    base_s: FloatArray
    """float[(max_slots + 1) * segments]: intercept of each batch on each stretch between two grid contexts."""
    slope_s: FloatArray
    """float[(max_slots + 1) * segments]: seconds for one more token of mean context."""
    segment_of: IntArray
    """int[max_context + 1]: stretch in which each whole context lies."""
    segments: int
    """Stretches, one fewer than grid contexts."""

    @classmethod
    def of(cls, profile: Profile) -> "DecodeModel":
        """Lay out `profile`. Worth keeping: every call costs about a hundred microseconds."""
        knots = profile.data.decode_context
        slope = np.diff(profile.row_s, axis=1) / np.diff(knots)
        base = profile.row_s[:, :-1] - slope * knots[:-1]
        segment_of = np.searchsorted(knots, np.arange(knots[-1] + 1), side="right") - 1
        return cls(
            profile=profile,
            base_s=base.ravel(),
            slope_s=slope.ravel(),
            segment_of=np.clip(segment_of, 0, knots.size - 2),
            segments=knots.size - 1,
        )

    def iteration_s(self, batch: IntArray, context: FloatArray) -> FloatArray:
        """Seconds of one iteration, elementwise: `Profile.decode_iteration_s` for whole batches in 1..max_slots."""
        knots = self.profile.data.decode_context
        clipped = np.clip(context, knots[0], knots[-1])
        at = batch * self.segments
        at += self.segment_of.take(clipped.astype(np.int64))
        clipped *= self.slope_s.take(at)
        clipped += self.base_s.take(at)
        return clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts (or an actor's shares of prompts) in a column that groups are slices of, each ascending in length.

    An item stands for `copies` responses of one prompt, all expected to be `lengths` tokens long. Columns that end in
    `_sum` are running sums with a leading 0: the total over items [a, b) is sum[b] - sum[a].
    """

    prompt: IntArray
    """int[items]: number of the prompt."""
    lengths: FloatArray
    """float[items]: expected tokens of a response."""
    step: FloatArray
    """float[items]: lengths minus the length of the item before."""
    middle: FloatArray
    """float[items]: mean position of the iterations between the item before and this one."""
    rises: IntArray
    """int[rises]: items whose length differs from the one before, the first item among them."""
    rises_until: IntArray
    """int[items]: rises up to and including each item."""
    copies_sum: IntArray
    """int[items + 1]: responses."""
    prompt_sum: FloatArray
    """float[items + 1]: prompt tokens, each item's prompt once."""
    context_sum: FloatArray
    """float[items + 1]: prompt tokens, once for every response."""
    tokens_sum: FloatArray
    """float[items + 1]: tokens to be generated."""
    context_token_sum: FloatArray
    """float[items + 1]: sum of the context over all iterations of all responses."""
    kv_token_sum: FloatArray
    """float[items + 1]: KV tokens held x iterations, prompts counted once for all of an item's responses."""

    @classmethod
    def of(
        cls, prompt: npt.ArrayLike, lengths: npt.ArrayLike, prompt_tokens: npt.ArrayLike, copies: npt.ArrayLike
    ) -> "Work":
        """The column of [items] inputs; `copies` may be one number for all."""
        length = np.asarray(lengths, dtype=np.float64)
        tokens = np.asarray(prompt_tokens, dtype=np.float64)
        count = np.broadcast_to(np.asarray(copies, dtype=np.int64), length.shape)
        previous = np.concatenate([[0.0], length[:-1]])
        step = length - previous
        rising = step != 0.0
        rising[0] = True
        generated = count * length
        context = count * tokens
        return cls(
            prompt=np.asarray(prompt, dtype=np.int64),
            lengths=length,
            step=step,
            middle=(length + previous - 1.0) / 2,
            rises=np.flatnonzero(rising),
            rises_until=np.cumsum(rising),
            copies_sum=running_sum(count),
            prompt_sum=running_sum(tokens),
            context_sum=running_sum(context),
            tokens_sum=running_sum(generated),
            context_token_sum=running_sum(length * context + generated * (length - 1.0) / 2),
            kv_token_sum=running_sum(length * tokens + generated * length * KV_SHARE),
        )


def running_sum(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[items + 1]: sums of the first 0, 1, ... values."""
    total = np.zeros(values.size + 1, dtype=values.dtype)
    np.cumsum(values, out=total[1:])
    return total


def even_bounds(items: int, groups: IntArray) -> tuple[IntArray, IntArray]:
    """Bounds (starts, ends) of the groups of `assignment.sorted_even`, for every number of groups in `groups`.

    In a column of `items` prompts that ascends, the first group is at the end, where the longest are; groups are
    contiguous and of equal size, the last items % number of them one larger. Those of all candidates follow each other:
    int[sum(groups)].
    """
    first = np.cumsum(groups) - groups
    each, more = items // groups, items % groups
    rank = np.arange(int(groups.sum())) - np.repeat(first, groups)
    size = np.repeat(each, groups)
    larger = rank - np.repeat(groups - more, groups)  # of the groups up to this one, how many are larger, minus 1
    ends = items - rank * size - np.maximum(larger, 0)
    return ends - size - (larger >= 0), ends


def split_work(
    assignment: Sequence[IntArray], lengths: FloatArray, prompt_tokens: IntArray, n: int
) -> tuple[Work, IntArray, IntArray]:
    """(Work, starts, ends) of an arbitrary assignment: per actor, response numbers (prompt * n + sample).

    A prompt's responses on one actor become one item, since they share its KV. Costs two sorts of the responses.
    """
    sizes = [responses.size for responses in assignment]
    actor = np.repeat(np.arange(len(sizes)), sizes)
    pair, copies = np.unique(actor * lengths.size + np.concatenate(assignment) // n, return_counts=True)
    actor, prompt = np.divmod(pair, lengths.size)
    order = np.lexsort((lengths[prompt], actor))
    prompt = prompt[order]
    ends = np.cumsum(np.bincount(actor, minlength=len(sizes)))
    starts = np.concatenate([[0], ends[:-1]])
    return Work.of(prompt, lengths[prompt], prompt_tokens[prompt], copies[order]), starts, ends


def group_times(
    model: DecodeModel, work: Work, starts: IntArray, ends: IntArray, prefill_tokens: npt.ArrayLike
) -> FloatArray:
    """float[groups]: seconds of one actor for each group [starts, ends), its own prefill of `prefill_tokens` included.

    Where a group's responses fit into the slots and their KV into memory at every moment, they all begin together,
    the batch falls as they end, and the sum over the stretches between two ends is exact on linear parts of the
    grid (each stretch is taken at its mean context). KV counts a prompt once for all of its responses.

    Otherwise responses queue, and the order of events no longer matters much: an iteration's latency is close to
    linear in batch and total context, so the sum over iterations depends only on how many there are, on the tokens
    and on the sum of contexts, and the last two are fixed by the work. Iterations are at least the longest response,
    at least the tokens over the m responses that run at once (slots, or KV capacity over the mean footprint
    of a running response), and, since ceil(k / m) of the longest k' = (ceil(k / m) - 1) * m + 1 responses must share
    a slot, at least ceil(k / m) times the shortest of those k'. The largest of the three bounds is taken: admission
    from the longest down comes close to it (Graham 1969). Where slots are short, this is within 15 % of such an
    engine; where KV is short, preemption makes single groups differ by up to a third.

    A response is given an iteration for each of its tokens, as where KV was delivered. Where the actor prefills for
    itself, the first token comes with that: the estimate is an iteration too long.
    """
    data = model.profile.data
    responses = work.copies_sum[ends] - work.copies_sum[starts]
    prompt_kv = work.prompt_sum[ends] - work.prompt_sum[starts]
    decode_s = np.empty(starts.size)
    # The bound on a group's peak KV that is cheapest to have: all responses at the length of the longest.
    ample = prompt_kv + responses * work.lengths[ends - 1] <= data.kv_capacity_tokens
    together = responses <= data.max_slots
    fitting = np.flatnonzero(together)
    intervals = 1 + work.rises_until[ends[fitting] - 1] - work.rises_until[starts[fitting]]
    for some in _chunks(intervals):
        rows = fitting[some]
        decode_s[rows], fits = _together_s(model, work, starts[rows], ends[rows], intervals[some], ample[rows])
        together[rows] = fits
    queued = np.flatnonzero(~together)
    if queued.size:
        decode_s[queued] = _queued_s(model, work, starts[queued], ends[queued])
    return np.asarray(decode_s + model.profile.prefill_s(prefill_tokens))


def _chunks(sizes: IntArray) -> list[slice]:
    """Slices of consecutive groups of about CHUNK_INTERVALS in all."""
    total = np.cumsum(sizes)
    if sizes.size == 0 or total[-1] <= CHUNK_INTERVALS:
        return [slice(0, sizes.size)] if sizes.size else []
    cuts = np.searchsorted(total, np.arange(CHUNK_INTERVALS, int(total[-1]), CHUNK_INTERVALS), side="right")
    edges = np.unique(np.concatenate([[0], cuts, [sizes.size]])).tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


def _together_s(
    model: DecodeModel, work: Work, starts: IntArray, ends: IntArray, counts: IntArray, ample: npt.NDArray[np.bool_]
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """(seconds of decoding, whether KV fits) of groups that fit into the slots; `counts` intervals each.

    A group's intervals end at its distinct lengths: its first item, then every rise inside it.
    """
    first = np.cumsum(counts) - counts
    at = np.arange(int(counts.sum()))
    at -= np.repeat(first - work.rises_until[starts] + 1, counts)
    at = work.rises.take(at)
    at[first] = starts
    step, middle = work.step.take(at), work.middle.take(at)
    lengths = work.lengths[starts]
    step[first], middle[first] = lengths, (lengths - 1.0) / 2
    running = np.repeat(work.copies_sum[ends], counts)
    running -= work.copies_sum.take(at)
    context = np.repeat(work.context_sum[ends], counts)
    context -= work.context_sum.take(at)
    context /= running
    context += middle
    step *= model.iteration_s(running, context)
    seconds = np.add.reduceat(step, first)
    if ample.all():
        return seconds, ample
    held = np.repeat(work.prompt_sum[ends], counts) - work.prompt_sum.take(at) + running * work.lengths.take(at)
    return seconds, np.maximum.reduceat(held, first) <= model.profile.data.kv_capacity_tokens


def _queued_s(model: DecodeModel, work: Work, starts: IntArray, ends: IntArray) -> FloatArray:
    """Seconds of decoding of groups whose responses queue (see `group_times`)."""
    data = model.profile.data
    responses = work.copies_sum[ends] - work.copies_sum[starts]
    tokens = work.tokens_sum[ends] - work.tokens_sum[starts]
    context_tokens = work.context_token_sum[ends] - work.context_token_sum[starts]
    footprint = (work.kv_token_sum[ends] - work.kv_token_sum[starts]) / tokens
    at_once = np.clip(data.kv_capacity_tokens / footprint, 1.0, data.max_slots)
    whole = np.minimum(at_once.astype(np.int64), responses)
    rounds = -(-responses // whole)
    shortest = np.searchsorted(work.copies_sum, work.copies_sum[starts] + (responses - 1) % whole, side="right") - 1
    iterations = np.maximum(work.lengths[ends - 1], tokens / at_once)
    iterations = np.maximum(iterations, rounds * work.lengths[shortest])
    return np.asarray(iterations * model.profile.decode_iteration_s(tokens / iterations, context_tokens / tokens))
