"""The choice of N against brute force over every candidate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.scheduler.scaling import LEAST_CANDIDATES, SLACK_TOLERANCE_S, Evaluate, choose, ladder, min_max, search
from rlhfless.types.arrays import FloatArray, IntArray, ints

values = st.integers(0, 5).map(float)
rows = st.lists(st.tuples(values, values, st.sampled_from([-2.0, -1e-12, 0.0, 3.0])), min_size=1, max_size=8)


def brute(times: list[float], costs: list[float], slacks: list[float], weight: float) -> int:
    """Row with the least score among those that hide transfers, by the words of RLHFless §4.4."""

    def norm(all_of: list[float], one: float) -> float:
        return 0.0 if max(all_of) == min(all_of) else (one - min(all_of)) / (max(all_of) - min(all_of))

    some = [i for i, slack in enumerate(slacks) if slack >= -SLACK_TOLERANCE_S] or list(range(len(times)))
    scores = [weight * norm(times, t) + (1 - weight) * norm(costs, c) for t, c in zip(times, costs, strict=True)]
    return min(some, key=lambda i: (scores[i], i))


@given(rows, st.sampled_from([0.0, 0.25, 0.7, 1.0]))
def test_choice_is_the_argmin_over_eligible_rows(table: list[tuple[float, float, float]], weight: float) -> None:
    times, costs, slacks = (list(column) for column in zip(*table, strict=True))
    got = choose(ints(range(1, len(table) + 1)), np.array(times), np.array(costs), np.array(slacks), weight)
    assert got.chosen == brute(times, costs, slacks, weight)
    assert got.eligible.tolist() == [slack > -1 for slack in slacks]


def test_all_tied_goes_to_the_fewest_actors() -> None:
    noise = np.array([1.0, 1.0 - 1e-15, 1.0 + 1e-15])
    got = choose(ints([2, 4, 8]), noise, noise, np.zeros(3))
    assert got.chosen == 0
    assert got.score.tolist() == [0, 0, 0]


def test_none_eligible_takes_the_best_of_all() -> None:
    got = choose(ints([1, 2]), np.array([2.0, 1.0]), np.array([1.0, 1.0]), np.array([-1.0, -3.0]))
    assert got.chosen == 1
    assert not got.eligible.any()


@pytest.mark.parametrize("weight", [-0.1, 1.1, float("nan")])
def test_weight_outside_the_range(weight: float) -> None:
    with pytest.raises(InputError, match=r"lambda .* must lie in 0\.\.1"):
        choose(ints([1]), np.ones(1), np.ones(1), np.zeros(1), weight)


@pytest.mark.parametrize(
    ("actors", "times", "match"),
    [
        ([], [], "no candidate"),
        ([1, 2], [1.0, float("nan")], "time_s of 2 decode actors"),
        ([1, 2], [1.0], "2 candidates need"),
        ([2, 2], [1.0, 1.0], "ascend"),
    ],
)
def test_bad_tables(actors: list[int], times: list[float], match: str) -> None:
    with pytest.raises(InputError, match=match):
        choose(ints(actors), np.array(times), np.ones(len(actors)), np.zeros(len(actors)))


def test_min_max_spans_0_to_1() -> None:
    assert min_max(np.array([3.0, 5.0, 4.0])).tolist() == [0.0, 1.0, 0.5]


@given(st.integers(1, 2000), st.integers(0, 5000), st.integers(2, 40))
def test_ladder_has_both_ends(low: int, span: int, rungs: int) -> None:
    got = ladder(low, low + span, rungs)
    assert (got[0], got[-1]) == (low, low + span)
    assert (np.diff(got) > 0).all()
    assert got.size <= max(rungs, 2)


def bowl(best: int) -> tuple[list[int], Evaluate]:
    """Time that falls and cost that rises, with the least score at `best`; the candidates asked for."""
    asked: list[int] = []

    def evaluate(candidates: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        asked.extend(candidates.tolist())
        distance = np.abs(candidates - best).astype(float)
        return distance, distance, np.zeros(candidates.size)

    return asked, evaluate


@given(st.integers(1, 5000), st.integers(1, 200))
def test_search_stays_in_its_budget_and_asks_for_nothing_twice(best: int, affordable: int) -> None:
    asked, evaluate = bowl(best)
    table = search(1, 5000, evaluate, affordable)
    assert len(asked) == len(set(asked)) == table.actors.size <= max(affordable, LEAST_CANDIDATES)
    assert table.actors.tolist() == sorted(asked)
    assert {1, 5000} <= set(asked)


@given(st.integers(1, 5000))
def test_search_finds_the_best_of_a_bowl(best: int) -> None:
    _, evaluate = bowl(best)
    table = search(1, 5000, evaluate, 200)
    assert table.actors[table.chosen] == best


@given(st.integers(1, 60), st.integers(0, 60), st.integers(61, 500))
def test_small_ranges_are_evaluated_whole(low: int, span: int, affordable: int) -> None:
    _, evaluate = bowl(7)
    table = search(low, low + span, evaluate, affordable)
    assert table.actors.tolist() == list(range(low, low + span + 1))
