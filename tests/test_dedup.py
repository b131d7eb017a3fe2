"""Shared prefixes against direct counting: sets for D(L), a naive trie for what is computed and cached."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler.dedup import PrefixOrder, common_header, distinct_prefixes, new_tokens, shared_prefix
from rlhfless.types.arrays import ints
from rlhfless.types.workload import Workload

# few different tokens (two that differ only in one byte's place) and short prompts: collisions, nesting, repeats
TOKENS = st.sampled_from([0, 1, 256, 2**24])
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=7).map(tuple), min_size=1, max_size=12)


def count(prompts, length):
    return len({tuple(prompt[:length]) for prompt in prompts})


def tree(prompts, length=None):
    """Tokens of the prefix tree of all prompts, each cut at `length`."""
    return len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt[:length]))})


def uncached(prompts, order):
    """What a cache that holds every prefix seen so far still has to compute, prompt by prompt."""
    held, new = set(), []
    for number in order:
        prefixes = {tuple(prompts[number][:end]) for end in range(1, len(prompts[number]) + 1)}
        new.append(len(prefixes - held))
        held |= prefixes
    return new


def headed(lengths, header):
    """Prompts whose ids fit what `common_header` is told: the same beginning, then a token of their own."""
    return [tuple([0] * min(length, header) + [n + 1] * (length - header)) for n, length in enumerate(lengths)]


@given(PROMPTS)
def test_step_function_is_the_count_at_every_length(prompts):
    lengths, counts = distinct_prefixes(prompts)
    low, high = min(map(len, prompts)), max(map(len, prompts))
    assert lengths[0] == low
    assert np.all(np.diff(lengths) > 0)
    assert np.all(np.diff(counts) > 0)  # only lengths at which D changes are named
    for length in range(low, high + 1):
        at = np.searchsorted(lengths, length, side="right") - 1
        assert counts[at] == count(prompts, length)
    assert lengths[-1] <= high


@given(PROMPTS, st.data())
def test_longest_prefix_that_fits(prompts, data):
    capacity = data.draw(st.integers(1, len(prompts) + 1))
    plan = shared_prefix(prompts, capacity)
    low, high = min(map(len, prompts)), max(map(len, prompts))
    fitting = [length for length in range(low, high + 1) if count(prompts, length) <= capacity]
    assert plan.prefix_tokens == (fitting[-1] if fitting else low)
    assert plan.distinct == count(prompts, plan.prefix_tokens)
    assert plan.waves == -(-plan.distinct // capacity)
    assert plan.computed_tokens == tree(prompts, plan.prefix_tokens)
    numbers = {}
    for prompt, number in zip(prompts, plan.prefix_of.tolist(), strict=True):
        assert numbers.setdefault(tuple(prompt[: plan.prefix_tokens]), number) == number
    assert sorted(numbers.values()) == list(range(plan.distinct))


@given(PROMPTS)
def test_neighbours_common_prefixes(prompts):
    found = PrefixOrder(prompts)
    assert [prompts[number] for number in found.order] == sorted(prompts)
    for place, lcp in enumerate(found.lcp.tolist()):
        one, other = prompts[found.order[place]], prompts[found.order[place + 1]]
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] == other[shared]:
            shared += 1
        assert lcp == shared


@given(PROMPTS, st.data(), st.integers(0, 4))
def test_new_tokens_are_what_a_naive_cache_misses(prompts, data, known):
    order = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=20))
    missed = uncached(prompts, order)
    assert new_tokens(prompts, order).tolist() == missed
    rest = [max(len(prompts[number]) - known, 0) for number in order]
    assert new_tokens(prompts, order, known).tolist() == [min(pair) for pair in zip(missed, rest, strict=True)]


def left_by_blocks(prompts, order, size, known=0):
    """What an engine computes that keeps whole blocks, in a chain, and draws from its output for the last token."""
    blocks, left = set(), []
    for number in order:
        prompt = tuple(prompts[number])
        ends = range(size, len(prompt) + 1, size)
        held = 0
        for end in ends:
            if end >= len(prompt) or not (prompt[:end] in blocks or end <= known):
                break
            held = end
        left.append(len(prompt) - held)
        blocks |= {prompt[:end] for end in ends}
    return left


@given(PROMPTS, st.data(), st.integers(2, 5), st.integers(0, 9), st.integers(1, 14))
def test_prefixes_are_shared_in_whole_blocks(prompts, data, size, known, capacity):
    order = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=20))
    by_blocks = PrefixOrder(prompts, size)
    assert by_blocks.new_tokens(order, known).tolist() == left_by_blocks(prompts, order, size, known)
    plan, single = by_blocks.prefill(capacity), PrefixOrder(prompts).prefill(capacity)
    for field in ("prefix_tokens", "distinct", "waves"):
        assert getattr(plan, field) == getattr(single, field)
    prefixes = sorted({tuple(prompt[: plan.prefix_tokens]) for prompt in prompts})
    assert plan.computed_tokens == sum(left_by_blocks(prefixes, range(len(prefixes)), size))
    assert plan.computed_tokens >= single.computed_tokens


@given(PROMPTS)
def test_all_new_tokens_together_are_the_prefix_tree(prompts):
    assert new_tokens(prompts, np.arange(len(prompts))[::-1]).sum() == tree(prompts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 10), st.integers(1, 14), st.data())
def test_unknown_ids_count_as_prompts_that_differ_after_the_header(lengths, header, capacity, data):
    prompts = headed(lengths, header)
    found, expected = common_header(ints(lengths), header, capacity), shared_prefix(prompts, capacity)
    for field in ("prefix_tokens", "distinct", "waves", "computed_tokens"):
        assert getattr(found, field) == getattr(expected, field), field
    pairs = set(zip(found.prefix_of.tolist(), expected.prefix_of.tolist(), strict=True))
    assert len(pairs) == found.distinct  # the same grouping under other numbers
    order = data.draw(st.lists(st.integers(0, len(prompts) - 1), max_size=20))
    assert PrefixOrder.of_lengths(ints(lengths), header).new_tokens(order).tolist() == uncached(prompts, order)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_prompt_is_computed_once_whatever_its_responses(n):
    """RLHFless §4.2: with n = 3, two thirds of the prefill work is repetition."""
    draw = stream(1, "prompts")
    prompts = [(number, *draw.integers(0, 1000, 20).tolist()) for number in range(50)]
    copies = [prompt for prompt in prompts for _ in range(n)]
    plan = shared_prefix(copies, capacity=50)
    assert plan.prefix_tokens == 21
    assert plan.computed_tokens * n == sum(map(len, copies))
    assert new_tokens(prompts, np.repeat(np.arange(50), n)).sum() * n == sum(map(len, copies))


def test_a_short_prompt_is_not_the_beginning_of_a_longer_one():
    lengths, counts = distinct_prefixes([[1, 2], [1, 2, 3], [1, 2, 3]])
    assert (lengths.tolist(), counts.tolist()) == ([2, 3], [1, 2])


def test_a_capacity_of_one_less_than_all():
    assert shared_prefix([[1], [1, 2]], capacity=1).prefix_tokens == 1
    assert shared_prefix([[1], [1, 2]], capacity=2).prefix_tokens == 2


def test_waves_where_even_the_shortest_prefix_does_not_fit():
    plan = shared_prefix([[n, 7, n] for n in range(10)], capacity=4)
    assert (plan.prefix_tokens, plan.distinct, plan.waves, plan.computed_tokens) == (3, 10, 3, 30)


def test_headers_that_different_prefixes_share_are_computed_once():
    header = list(range(100))
    plan = shared_prefix([[*header, n, n] for n in range(8)], capacity=8)
    assert plan.computed_tokens == 100 + 8 * 2


def test_every_form_of_token_ids_gives_the_same():
    rows = np.array([[5, 1, 2], [5, 1, 70000], [5, 1, 2]])
    forms = [
        rows,
        rows.tolist(),
        [tuple(row) for row in rows.tolist()],
        list(rows.astype(np.uint32)),
        [rows[0].astype(np.int32), rows[1].tolist(), tuple(rows[2])],
        [rows[0].astype(np.uint64), rows[1], list(rows[2])],
    ]
    plans = [shared_prefix(form, 2) for form in forms]
    assert {(plan.prefix_tokens, plan.computed_tokens, tuple(plan.prefix_of)) for plan in plans} == {(3, 4, (0, 1, 0))}


def test_the_workload_says_which_form_is_known():
    common = {"step": 0, "epoch": 0, "algorithm": "grpo", "responses_per_prompt": 2, "max_response_tokens": 8}
    ids = {"prompt_ids": np.arange(3), "prompt_tokens": ints([3, 3, 4])}
    lengths_only = Workload(**common, **ids, common_prefix_tokens=2)
    assert PrefixOrder.of(lengths_only).new_tokens([2, 2, 0, 1]).tolist() == [4, 0, 1, 1]
    known = Workload(**common, **ids, prompts=(ints([1, 2, 3]), ints([1, 2, 3]), ints([1, 2, 3, 4])))
    assert PrefixOrder.of(known).new_tokens([2, 2, 0, 1]).tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ([], "no prompts"),
        (np.empty((0, 3), dtype=np.int64), "no prompts"),
        ([[1], []], "prompt 1 has no tokens"),
        ([np.array([1, 2]), np.array([3, -1])], "prompt 1: expected a flat sequence of token ids"),
        ([np.array([1]), np.array([2**32])], "prompt 1: expected"),
        ([[1], [2, -4]], "prompt 1: expected"),
        ([[1.5]], "prompt 0: expected"),
        ([np.array([1.5])], "prompt 0: expected"),
        ([[[1, 2]]], "prompt 0: expected"),
        ([np.ones((2, 2), dtype=int)], "prompt 0: expected"),
        (["text"], "prompt 0: expected"),
        ([5], "prompt 0: expected"),
    ],
)
def test_bad_prompts_are_named_in_one_line(prompts, told):
    for call in (
        lambda: distinct_prefixes(prompts),
        lambda: shared_prefix(prompts, 1),
        lambda: new_tokens(prompts, [0]),
    ):
        with pytest.raises(InputError, match=told) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_bad_numbers_are_named():
    with pytest.raises(InputError, match="capacity 0 must be at least 1"):
        shared_prefix([[1]], 0)
    with pytest.raises(InputError, match="capacity -1 must be at least 1"):
        common_header(ints([1]), 0, -1)
    with pytest.raises(InputError, match="header_tokens -1"):
        common_header(ints([1]), -1, 1)
    with pytest.raises(InputError, match="prompt 1 has 0 tokens"):
        common_header(ints([3, 0]), 0, 1)
    for lengths in ([], [[1, 2]], [1.5]):
        with pytest.raises(InputError, match="one whole number a prompt"):
            common_header(np.array(lengths), 0, 1)
    for order in ([1], [-1]):
        with pytest.raises(InputError, match=r"outside 0\.\.0"):
            new_tokens([[1]], order)


def test_blocks_and_windows_join_without_a_seam():
    """More prompts and longer ones than are handled at a time, with common prefixes across every window's edge."""
    base = stream(2, "base").integers(0, 50_000, 1200)
    depths = [1, 15, 16, 17, 47, 48, 49, 111, 112, 113, 1007, 1008, 1009, 1199, 1200]
    prompts = [np.append(base[:depth], 60_000 + depth) for depth in depths] * 300  # 4,500 prompts
    plan = shared_prefix(prompts, capacity=len(depths))
    assert plan.distinct == len(depths)
    assert plan.computed_tokens == 1200 + len(depths)
    assert plan.prefix_of.reshape(300, -1).std(axis=0).max() == 0


def test_many_prompts():
    """100,000 prompts of 500 tokens in 1,000 families; what is shared is known from how they were made."""
    draw = stream(3, "many")
    family = np.repeat(np.arange(1000), 100)
    prompts = np.empty((100_000, 500), dtype=np.int32)
    prompts[:, :50] = draw.integers(0, 150_000, 50)  # a header of all
    prompts[:, 50:300] = draw.integers(0, 100_000, (1000, 250))[family]  # of a family
    prompts[:, 50] = family
    prompts[:, 300:] = draw.integers(0, 150_000, (100_000, 200))
    prompts[:, 300] = np.arange(100_000)
    shuffled = draw.permutation(100_000)
    lengths, counts = distinct_prefixes(prompts[shuffled])
    assert (lengths.tolist(), counts.tolist()) == ([500], [100_000])
    plan = shared_prefix([*prompts[shuffled], prompts[0, :40]], capacity=1001)  # a short one makes lengths a choice
    assert (plan.prefix_tokens, plan.distinct) == (300, 1001)
    assert plan.computed_tokens == 50 + 1000 * 250
    of_family = plan.prefix_of[:-1][np.argsort(family[shuffled], kind="stable")].reshape(1000, 100)
    assert np.all(of_family == of_family[:, :1])
    assert np.unique(of_family).size == 1000
