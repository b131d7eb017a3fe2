"""Prefixes that prompts share: what the prefill actor computes once (RLHFless §4.2), what a decode actor's cache saves.

Everything follows from one sort. In lexicographic order the prompts with a common prefix of L tokens stand side by
side, so the common prefixes of neighbours tell all: D(L), its largest L that fits, the prefix tree's size, and the
common prefix of any two prompts (the least between them).

Engines that keep KV in blocks share prefixes in whole blocks. They also compute a prompt's last token whatever they
hold, since they draw from its output.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError
from rlhfless.types.arrays import IntArray, ints
from rlhfless.types.plan import PrefillPlan
from rlhfless.types.workload import Workload

Prompts = Sequence[Sequence[int]] | Sequence[npt.NDArray[np.integer[Any]]] | npt.NDArray[np.integer[Any]]
"""Token ids of each prompt: lists, tuples or int arrays, of any lengths."""

MAX_TOKEN = 2**32 - 1
"""Largest token id: sort keys hold 4 bytes a token; vocabularies have some 10^5."""
_FIRST_WINDOW, _LAST_WINDOW = 16, 512
"""Tokens compared at a time: few at first, as most neighbours soon differ, then doubling. Chosen."""
_ROWS = 4096
"""Prompts handled at a time, which bounds temporaries to some 10 MB however many prompts there are. Chosen."""


class PrefixOrder:
    """The prompts of one step in lexicographic order, with the common prefixes of neighbours.

    Made once a step, O(total tokens) and a sort; every question is then answered from O(prompts) integers.
    """

    lengths: IntArray
    """int[prompts]: tokens of each prompt."""
    order: IntArray
    """int[prompts]: prompt numbers in lexicographic order, equal ones by number."""
    lcp: IntArray
    """int[prompts - 1]: tokens that neighbours in that order have in common."""
    block_tokens: int
    """Tokens of a KV block (`ProfileData.kv_block_tokens`)."""

    def __init__(self, prompts: Prompts, block_tokens: int = 1) -> None:
        """Sort prompts whose token ids are known. Raises InputError: no prompts, an empty one, or bad token ids."""
        flat, lengths = _flatten(prompts)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        keys = [flat[start:end].tobytes() for start, end in bounds]  # big-endian: bytes sort as token ids do
        order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
        first, second = order[:-1], order[1:]
        shorter = np.minimum(lengths[first], lengths[second])
        self._keep(lengths, order, _common_prefixes(flat, starts[first], starts[second], shorter), block_tokens)

    @classmethod
    def of_lengths(cls, prompt_tokens: npt.ArrayLike, header_tokens: int, block_tokens: int = 1) -> "PrefixOrder":
        """Prompts of unknown ids that begin with the same header and differ in the first token after it.

        `prompt_tokens`: int[prompts]. A prompt as long as the header is the header, a shorter one its beginning; such
        prompts of equal length are therefore identical. Raises InputError: no prompts, an empty one, header below 0.
        """
        lengths = np.asarray(prompt_tokens)
        if lengths.ndim != 1 or lengths.size == 0 or lengths.dtype.kind not in "iu":
            raise InputError("prompt_tokens: expected one whole number a prompt, for at least one prompt")
        if lengths.min() < 1:
            raise InputError(f"prompt {int(lengths.argmin())} has {lengths.min()} tokens; each needs at least 1")
        if header_tokens < 0:
            raise InputError(f"header_tokens {header_tokens} must be at least 0")
        lengths = lengths.astype(np.int64)
        made = cls.__new__(cls)
        order = np.argsort(np.minimum(lengths, header_tokens + 1), kind="stable")
        ascending = np.minimum(lengths[order], header_tokens)
        made._keep(lengths, order, ascending[:-1], block_tokens)
        return made

    @classmethod
    def of(cls, workload: Workload, block_tokens: int = 1) -> "PrefixOrder":
        """The prompts of a step, by their token ids or, where those are unknown, by their lengths and common header."""
        if workload.prompts is not None:
            return cls(workload.prompts, block_tokens)
        return cls.of_lengths(workload.prompt_tokens, workload.common_prefix_tokens, block_tokens)

    def _keep(self, lengths: npt.ArrayLike, order: npt.ArrayLike, lcp: npt.ArrayLike, block_tokens: int) -> None:
        self.lengths, self.order, self.lcp = ints(lengths), ints(order), ints(lcp)
        self.block_tokens = block_tokens

    @cached_property
    def _breaks(self) -> IntArray:
        """int[prompts - 1]: longest L at which neighbours still count as one prefix; beyond L_max if identical.

        Different prompts part right after their common prefix, even if one of them ends there: the whole of a short
        prompt is another prefix than the beginning of a longer one.
        """
        longer = np.maximum(self.lengths[self.order[:-1]], self.lengths[self.order[1:]])
        breaks: IntArray = np.where(self.lcp < longer, self.lcp, int(self.lengths.max()) + 1)
        return breaks

    def distinct(self) -> tuple[IntArray, IntArray]:
        """See `distinct_prefixes`."""
        low, high = int(self.lengths.min()), int(self.lengths.max())
        at, new = np.unique(np.maximum(self._breaks, low - 1), return_counts=True)
        at, new = at[at < high] + 1, new[at < high]  # breaks after L tokens show from L + 1
        if at.size == 0 or at[0] != low:
            at, new = np.append(low, at), np.append(0, new)
        return ints(at), ints(1 + np.cumsum(new))

    def prefill(self, capacity: int) -> PrefillPlan:
        """See `shared_prefix`."""
        if capacity < 1:
            raise InputError(f"prefill capacity {capacity} must be at least 1 sequence")
        low, high = int(self.lengths.min()), int(self.lengths.max())
        breaks = self._breaks
        length = high
        if breaks.size >= capacity:  # D(L) = 1 + breaks below L, so the capacity-th smallest break is the last L to fit
            length = min(max(int(np.partition(breaks, capacity - 1)[capacity - 1]), low), high)
        prefix_of = np.empty(self.lengths.size, dtype=np.int64)
        prefix_of[self.order] = np.append(0, np.cumsum(breaks < length))
        distinct = int(prefix_of[self.order[-1]]) + 1
        first = np.append(True, breaks < length)  # of each prefix, in the order in which they are computed
        tokens = np.minimum(self.lengths[self.order], length)[first]
        shared = np.append(0, np.minimum(self.lcp, length))[first]
        return PrefillPlan(
            prefix_tokens=length,
            distinct=distinct,
            prefix_of=ints(prefix_of),
            waves=-(-distinct // capacity),
            computed_tokens=int(uncached(tokens, shared, self.block_tokens).sum()),
        )

    def new_tokens(self, order: npt.ArrayLike, known_tokens: int = 0) -> IntArray:
        """int[admitted]: tokens of each prompt that an in-actor prefix cache does not hold when it is admitted.

        `order`: int[admitted], prompts in order of admission; a prompt may come again (its n responses) and then
        needs nothing, or its last block. `known_tokens`: tokens at the start of every prompt whose KV the actor has
        been sent. A token is held if the actor has seen its whole prefix in an earlier prompt. O(admitted) and a sort.
        Raises InputError for a prompt number out of range.
        """
        admitted = np.asarray(order, dtype=np.int64)
        if admitted.size == 0:
            return ints(admitted)
        if admitted.min() < 0 or admitted.max() >= self.lengths.size:
            raise InputError(f"order: a prompt number outside 0..{self.lengths.size - 1}")
        held = self.lengths[admitted]
        places, first = np.unique(self._place[admitted], return_index=True)
        held[first] = self._covered(places, first)
        return uncached(self.lengths[admitted], np.maximum(held, known_tokens), self.block_tokens)

    def _covered(self, places: IntArray, time: IntArray) -> IntArray:
        """int[different]: longest common prefix of each prompt with any that was admitted before it.

        Taken out in reverse order of admission, a prompt leaves a list of exactly the earlier ones, and the longest
        common prefix is with a neighbour.
        """
        covered = np.zeros(places.size, dtype=np.int64)
        if places.size == 1:
            return covered
        if self._uniform:  # any two prompts have as much in common: no need to look
            covered[time > 0] = self.lcp[0]
            return covered
        gap = [0, *self._least(places[:-1], places[1:]).tolist(), 0]  # common prefix with the one before
        before, after = list(range(-1, places.size)), list(range(1, places.size + 2))
        found = [0] * places.size
        for here in np.argsort(time)[::-1].tolist():
            left, right, following, previous = gap[here], gap[after[here]], after[here], before[here]
            found[here], gap[following] = (left, right) if left > right else (right, left)
            after[previous], before[following] = following, previous
        covered[:] = found
        return covered

    @cached_property
    def _place(self) -> IntArray:
        """int[prompts]: place of each prompt in the lexicographic order."""
        place = np.empty(self.order.size, dtype=np.int64)
        place[self.order] = np.arange(self.order.size)
        return place

    @cached_property
    def _uniform(self) -> bool:
        return self.lcp.size == 0 or bool(self.lcp.min() == self.lcp.max())

    @cached_property
    def _table(self) -> npt.NDArray[np.int32]:
        """int32[levels, prompts - 1]: least lcp of the 2^level from each place on (a sparse table)."""
        size = self.lcp.size
        table = np.empty((size.bit_length(), size), dtype=np.int32)
        table[0] = self.lcp
        for level in range(1, len(table)):
            half = 1 << level - 1
            table[level] = table[level - 1]
            np.minimum(table[level - 1, :-half], table[level - 1, half:], out=table[level, :-half])
        return table

    def _least(self, begin: IntArray, end: IntArray) -> IntArray:
        """Least lcp between places begin < end: the common prefix of the prompts there."""
        level = np.frexp((end - begin).astype(np.float64))[1] - 1
        least: IntArray = np.minimum(self._table[level, begin], self._table[level, end - (1 << level)])
        return least


def distinct_prefixes(prompts: Prompts) -> tuple[IntArray, IntArray]:
    """D(L), the number of distinct prefixes of L tokens, for L from the shortest to the longest prompt (RLHFless §4.2).

    (lengths, counts): D is counts[i] from lengths[i] up to the next; lengths[0] is the shortest prompt's length. A
    prompt shorter than L counts whole, and differs from a longer one that begins with it. Raises InputError: no
    prompts, an empty one, or bad token ids.
    """
    return PrefixOrder(prompts).distinct()


def shared_prefix(prompts: Prompts, capacity: int) -> PrefillPlan:
    """The longest prefix length L whose D(L) distinct prefixes fit the prefill actor at once (RLHFless §4.2).

    L lies between the shortest and the longest prompt; if even the least D is above `capacity` (sequences), L is the
    shortest prompt's length and prefill takes several waves. Raises InputError as `distinct_prefixes`, and for a
    capacity below 1.
    """
    return PrefixOrder(prompts).prefill(capacity)


def common_header(prompt_tokens: npt.ArrayLike, header_tokens: int, capacity: int) -> PrefillPlan:
    """`shared_prefix` of prompts whose ids are unknown: lengths int[prompts], the same header, different after it.

    O(prompts). What counts as identical and which errors are raised: `PrefixOrder.of_lengths`.
    """
    return PrefixOrder.of_lengths(prompt_tokens, header_tokens).prefill(capacity)


def new_tokens(prompts: Prompts, order: npt.ArrayLike, known_tokens: int = 0) -> IntArray:
    """Tokens that one actor computes, prompt by prompt in its order of admission: `PrefixOrder.new_tokens`.

    For several actors of a step, make one `PrefixOrder` and ask it for each.
    """
    return PrefixOrder(prompts).new_tokens(order, known_tokens)


def uncached(tokens: npt.ArrayLike, held_tokens: npt.ArrayLike, block_tokens: int) -> IntArray:
    """Tokens that are computed of prompts, elementwise: those whose first `held_tokens` are there, in KV blocks."""
    count = np.asarray(tokens, dtype=np.int64)
    most = count if block_tokens == 1 else (count - 1) // block_tokens * block_tokens
    return ints(count - np.minimum(np.asarray(held_tokens) // block_tokens * block_tokens, most))


def _flatten(prompts: Prompts) -> tuple[npt.NDArray[np.uint32], IntArray]:
    """All tokens end to end, big-endian, with room for one window after them; and int[prompts] lengths."""
    rows = [_tokens(number, prompt) for number, prompt in enumerate(prompts)]
    if not rows:
        raise InputError("no prompts; at least one is needed")
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if lengths.min() < 1:
        raise InputError(f"prompt {int(lengths.argmin())} has no tokens; each needs at least 1")
    flat = np.empty(int(lengths.sum()) + _LAST_WINDOW, dtype=">u4")
    flat[-_LAST_WINDOW:] = 0
    end = 0
    for begin in range(0, len(rows), _ROWS):
        block = np.concatenate(rows[begin : begin + _ROWS])
        if block.min() < 0 or block.max() > MAX_TOKEN:
            numbers = enumerate(rows[begin : begin + _ROWS], begin)
            raise _bad_tokens(next(number for number, row in numbers if row.min() < 0 or row.max() > MAX_TOKEN))
        flat[end : end + block.size] = block
        end += block.size
    return flat, lengths


def _tokens(number: int, prompt: Any) -> npt.NDArray[np.integer[Any]]:
    if isinstance(prompt, np.ndarray) and prompt.dtype.kind in "iu" and prompt.ndim == 1:
        return prompt
    try:  # several times as fast as np.array on lists, and refuses fractions
        return np.frombuffer(array("I", prompt if isinstance(prompt, list | tuple) else list(prompt)), dtype=np.uintc)
    except (TypeError, OverflowError):
        raise _bad_tokens(number) from None


def _bad_tokens(number: int) -> InputError:
    return InputError(f"prompt {number}: expected a flat sequence of token ids, whole numbers in 0..{MAX_TOKEN}")


def _common_prefixes(flat: npt.NDArray[np.uint32], first: IntArray, second: IntArray, shorter: IntArray) -> IntArray:
    """int[pairs]: tokens that the prompts starting at `first` and `second` share, `shorter` at most."""
    flat = flat.view(np.uint32)  # byte order does not matter to equality, and the machine's own is faster
    same = np.zeros(first.size, dtype=np.int64)
    for begin in range(0, first.size, _ROWS):
        pairs = np.arange(begin, min(begin + _ROWS, first.size))
        depth, width = 0, _FIRST_WINDOW
        while pairs.size:
            windows = np.lib.stride_tricks.sliding_window_view(flat, width)
            differ = windows[first[pairs] + depth] != windows[second[pairs] + depth]
            at = differ.argmax(axis=1)
            at[~differ.any(axis=1)] = width
            same[pairs] = depth + at
            depth += width
            pairs = pairs[(at == width) & (shorter[pairs] > depth)]
            width = min(2 * width, _LAST_WINDOW)
    common: IntArray = np.minimum(same, shorter)
    return common
