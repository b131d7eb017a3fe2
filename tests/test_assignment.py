"""Assignments: every response exactly once, and each rule against its definition told response by response."""

import heapq

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.rng import stream
from rlhfless.scheduler.assignment import group_sticky, least_in_flight, shuffled_even, sorted_even

SIZES = st.tuples(st.integers(1, 30), st.integers(1, 5), st.integers(1, 30))


def fewest_in_flight(groups, actors):
    """Each group of responses, in order, to the actor with the fewest in flight, while nothing ends."""
    heap = [(0, actor) for actor in range(actors)]
    given_to = [[] for _ in range(actors)]
    for group in groups:
        in_flight, actor = heapq.heappop(heap)
        given_to[actor] += group
        heapq.heappush(heap, (in_flight + len(group), actor))
    return given_to


def groups_of(prompts, n):
    return [list(range(prompt * n, prompt * n + n)) for prompt in range(prompts)]


def all_rules(prompts, n, actors):
    estimates = stream(4, "estimates").uniform(1, 100, prompts)
    return {
        "sorted": sorted_even(estimates, n, actors),
        "shuffled": shuffled_even(prompts, n, actors, stream(5, "shuffle")),
        "sticky": group_sticky(prompts, n, actors),
        "least": least_in_flight(prompts, n, actors),
    }


@given(SIZES)
def test_every_response_is_dealt_once_to_actors_that_all_have_work(sizes):
    prompts, n, actors = sizes
    assume(actors <= prompts)
    for name, dealt in all_rules(prompts, n, actors).items():
        assert len(dealt) == actors, name
        assert sorted(np.concatenate(dealt).tolist()) == list(range(prompts * n)), name
        counts = [len(responses) for responses in dealt]
        assert max(counts) - min(counts) <= (1 if name == "least" else n), name
        for responses in dealt:
            assert responses.dtype == np.int64
            assert not responses.flags.writeable
            if name != "least":  # a prompt's responses side by side, in order
                assert np.all(responses.reshape(-1, n) % n == np.arange(n)), name
                assert np.all(np.ptp(responses.reshape(-1, n) // n, axis=1) == 0), name


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 30))
def test_sorted_even_is_one_stable_sort_dealt_in_order(estimates, n, actors):
    assume(actors <= len(estimates))
    dealt = sorted_even(estimates, n, actors)
    prompts = np.concatenate(dealt)[::n] // n
    assert prompts.tolist() == sorted(range(len(estimates)), key=lambda prompt: -estimates[prompt])
    counts = [len(responses) for responses in dealt]
    assert counts == sorted(counts)  # the larger groups hold the shorter responses


@given(SIZES)
def test_least_in_flight_is_what_a_heap_does(sizes):
    prompts, n, actors = sizes
    assume(actors <= prompts * n)
    dealt = least_in_flight(prompts, n, actors)
    assert [responses.tolist() for responses in dealt] == fewest_in_flight([[r] for r in range(prompts * n)], actors)


@given(SIZES)
def test_group_sticky_is_what_a_heap_of_prompts_does(sizes):
    prompts, n, actors = sizes
    assume(actors <= prompts)
    dealt = group_sticky(prompts, n, actors)
    assert [responses.tolist() for responses in dealt] == fewest_in_flight(groups_of(prompts, n), actors)


def test_sorted_even_by_hand():
    dealt = sorted_even([10, 40, 20, 40, 30], n=2, actors=2)
    assert [responses.tolist() for responses in dealt] == [[2, 3, 6, 7], [8, 9, 4, 5, 0, 1]]


def test_shuffled_even_depends_on_the_stream_alone():
    one, same, other = (shuffled_even(40, 2, 4, stream(seed, "shuffle")) for seed in (1, 1, 2))
    assert [a.tolist() for a in one] == [a.tolist() for a in same]
    assert [a.tolist() for a in one] != [a.tolist() for a in other]


def test_more_actors_than_work_is_infeasible():
    with pytest.raises(InfeasibleError, match="4 actors for 3 prompts; each actor needs at least one"):
        sorted_even([1, 2, 3], 2, 4)
    with pytest.raises(InfeasibleError, match="4 actors for 3 prompts"):
        shuffled_even(3, 2, 4, stream(1))
    with pytest.raises(InfeasibleError, match="4 actors for 3 prompts"):
        group_sticky(3, 2, 4)
    with pytest.raises(InfeasibleError, match="7 actors for 6 responses"):
        least_in_flight(3, 2, 7)
    assert len(least_in_flight(3, 2, 6)) == 6


@pytest.mark.parametrize("sizes", [(0, 1, 1), (-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes):
    prompts, n, actors = sizes
    rules = (
        lambda: sorted_even([1.0] * prompts, n, actors),
        lambda: shuffled_even(prompts, n, actors, stream(1)),
        lambda: least_in_flight(prompts, n, actors),
        lambda: group_sticky(prompts, n, actors),
    )
    for call in rules:
        with pytest.raises(InputError, match="each must be at least 1"):
            call()


@pytest.mark.parametrize("estimates", [[1, np.nan], [1, np.inf], [[1, 2]]])
def test_estimates_that_cannot_be_sorted_are_refused(estimates):
    with pytest.raises(InputError, match="one finite number for each prompt"):
        sorted_even(estimates, 1, 1)


def test_a_million_responses_on_thousands_of_actors():
    for name, dealt in all_rules(250_000, 4, 5120).items():
        counts = np.array([len(responses) for responses in dealt])
        assert counts.sum() == 1_000_000, name
        assert np.ptp(counts) <= 4, name
        assert np.all(np.bincount(np.concatenate(dealt), minlength=1_000_000) == 1), name
