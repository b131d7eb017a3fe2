"""The closed forms of the planner's beliefs against slow engines that step token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.scheduler.assignment import least_in_flight, sorted_even
from rlhfless.scheduler.estimate import (
    CHUNK_INTERVALS,
    DecodeModel,
    Work,
    even_bounds,
    group_times,
    running_sum,
    split_work,
)
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.profile import Profile
from tests.profiles import tiny_profile

BENT = 0.01
"""Bound on the error of stretches taken at their mean context where the grid bends (stated: 1 %)."""
QUEUED = 0.15
"""Bound on the error of the closed form of queueing where slots are short (stated: 15 %)."""
SHORT_OF_KV = 0.35
"""The same where KV is short, and responses are preempted (stated: a third, for single groups)."""


def linear_profile(**fields: object) -> Profile:
    """Latency linear in batch and in total context, over the whole grid."""
    batch, context = np.array([1, 64]), np.array([1, 8192])
    latency = 0.01 + 1e-4 * batch[:, None] + 2e-8 * batch[:, None] * context[None, :]
    grid: dict[str, object] = {
        "decode_batch": ints(batch),
        "decode_context": ints(context),
        "decode_s": floats(latency),
        "kv_capacity_tokens": 10**9,
        "max_slots": 64,
    }
    return tiny_profile(**(grid | fields))  # type: ignore[arg-type]


def together_s(profile: Profile, lengths: IntArray, contexts: IntArray) -> float:
    """All responses begin at once; one iteration after the other."""
    total = 0.0
    for t in range(int(lengths.max())):
        running = lengths > t
        total += float(profile.decode_iteration_s(int(running.sum()), float((contexts[running] + t).mean())))
    return total


def engine_s(profile: Profile, prompts: IntArray, lengths: IntArray, order: IntArray, n: int) -> float:
    """Greedy admission in order with shared prompt KV, last admitted preempted and decoded further after a prefill."""
    data = profile.data
    queue: list[int] = order.tolist()
    running: list[int] = []
    done = np.zeros(order.size, dtype=int)

    def held(responses: list[int]) -> int:
        own = sum(int(done[r]) for r in responses)
        return own + int(prompts[list({r // n for r in responses})].sum())

    total = 0.0
    while queue or running:
        again = 0
        while queue and len(running) < data.max_slots:
            if held([*running, queue[0]]) + len(running) + 1 > data.kv_capacity_tokens:
                break
            again += int(done[queue[0]] and done[queue[0]] + prompts[queue[0] // n])
            running.append(queue.pop(0))
        total += float(profile.prefill_s(again))
        while held(running) + len(running) > data.kv_capacity_tokens:
            queue.insert(0, running.pop())
        context = float(np.mean([prompts[r // n] + done[r] for r in running]))
        total += float(profile.decode_iteration_s(len(running), context))
        done[running] += 1
        running = [r for r in running if done[r] < lengths[r // n]]
    return total


def times(profile: Profile, lengths: FloatArray, prompts: IntArray, n: int, actors: int) -> FloatArray:
    """Decode times of the groups of `sorted_even`, no prefill."""
    order = np.argsort(-lengths, kind="stable")[::-1]
    work = Work.of(order, lengths[order], prompts[order], n)
    starts, ends = even_bounds(lengths.size, np.array([actors]))
    return group_times(DecodeModel.of(profile), work, starts, ends, np.zeros(actors))


cases = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4))
"""Seed, prompts, responses each."""


@given(cases, st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_exact_on_a_linear_grid_where_everything_fits(case: tuple[int, int, int], actors: int) -> None:
    seed, count, n = case
    rng, actors = np.random.default_rng(seed), min(actors, count)
    lengths, prompts = rng.integers(1, 60, count), rng.integers(1, 90, count)
    profile = linear_profile()
    expected = [
        together_s(profile, lengths[share // n], prompts[share // n]) for share in sorted_even(lengths, n, actors)
    ]
    np.testing.assert_allclose(times(profile, lengths.astype(float), prompts, n, actors), expected, rtol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_close_where_the_grid_bends(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.integers(1, 400, 8), rng.integers(1, 300, 8)
    profile = tiny_profile(kv_capacity_tokens=10**6)
    estimate = times(profile, lengths.astype(float), prompts, 2, 2)
    for share, seconds in zip(sorted_even(lengths, 2, 2), estimate, strict=True):
        assert seconds == pytest.approx(together_s(profile, lengths[share // 2], prompts[share // 2]), rel=BENT)


@pytest.mark.parametrize("draw", ["gamma", "uniform", "constant"])
@pytest.mark.parametrize("count", [17, 24, 40, 90])
def test_queueing_for_slots(draw: str, count: int) -> None:
    rng = np.random.default_rng(count)
    lengths = {
        "gamma": 1 + rng.gamma(2.0, 40.0, count).astype(int),
        "uniform": rng.integers(1, 150, count),
        "constant": np.full(count, 70),
    }[draw]
    prompts = rng.integers(20, 80, count)
    profile = tiny_profile(kv_capacity_tokens=10**6, max_slots=16)
    estimate = times(profile, lengths.astype(float), prompts, 1, 1)[0]
    (share,) = sorted_even(lengths, 1, 1)
    assert estimate == pytest.approx(engine_s(profile, prompts, lengths, share, 1), rel=QUEUED)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("capacity", [700, 1500, 3000])
def test_queueing_for_kv(n: int, capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    lengths, prompts = 1 + rng.gamma(2.0, 40.0, 20).astype(int), rng.integers(20, 80, 20)
    profile = tiny_profile(kv_capacity_tokens=capacity, max_slots=32)
    estimate = times(profile, lengths.astype(float), prompts, n, 1)[0]
    (share,) = sorted_even(lengths, n, 1)
    assert estimate == pytest.approx(engine_s(profile, prompts, lengths, share, n), rel=SHORT_OF_KV)


@pytest.mark.parametrize("capacity", [1000, 2000])
def test_queueing_for_kv_with_long_prompts_shared_by_short_responses(capacity: int) -> None:
    lengths, prompts = np.full(12, 30), np.full(12, 200)
    profile = tiny_profile(kv_capacity_tokens=capacity, max_slots=32)
    estimate = times(profile, lengths.astype(float), prompts, 4, 1)[0]
    (share,) = sorted_even(lengths, 4, 1)
    assert estimate == pytest.approx(engine_s(profile, prompts, lengths, share, 4), rel=SHORT_OF_KV)


def test_kv_counts_a_prompt_once_for_its_responses() -> None:
    """Four responses of 10 tokens fit together beside one prompt of 100, but not beside four."""
    lengths, prompts = np.full(1, 10.0), np.array([100])
    tight, wide = (linear_profile(kv_capacity_tokens=capacity) for capacity in (140, 10**6))
    together = times(wide, lengths, prompts, 4, 1)
    np.testing.assert_array_equal(times(tight, lengths, prompts, 4, 1), together)
    unshared = Work.of(np.arange(4), np.full(4, 10.0), np.full(4, 100), 1)
    alone = group_times(DecodeModel.of(tight), unshared, np.array([0]), np.array([4]), [0])
    assert alone[0] > 1.5 * together[0]


def test_peak_kv_may_lie_before_the_last_end() -> None:
    """Eight responses of 12 tokens and one of 60: KV peaks when the eight end (9 x 12 tokens), not at the end."""
    lengths, prompts = np.array([12.0] * 8 + [60.0]), np.ones(9, dtype=int)
    peak = 9 * 12 + 9
    fits, over = (times(linear_profile(kv_capacity_tokens=c), lengths, prompts, 1, 1)[0] for c in (peak, peak - 1))
    assert fits == pytest.approx(together_s(linear_profile(), lengths.astype(int), prompts), rel=1e-9)
    assert over != fits


def test_iteration_equals_the_profile() -> None:
    profile = tiny_profile()
    rng = np.random.default_rng(0)
    batch, context = rng.integers(1, 17, 500), rng.uniform(1, 5000, 500)
    model = DecodeModel.of(profile)
    np.testing.assert_allclose(
        model.iteration_s(batch, context), profile.decode_iteration_s(batch, context), rtol=1e-12
    )


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_bounds_are_those_of_sorted_even(lengths: list[int]) -> None:
    order = np.argsort(-np.array(lengths), kind="stable")[::-1]
    candidates = np.arange(1, len(lengths) + 1)
    starts, ends = even_bounds(len(lengths), candidates)
    shares = [share for actors in candidates for share in sorted_even(lengths, 1, int(actors))]
    for share, start, end in zip(shares, starts, ends, strict=True):
        np.testing.assert_array_equal(order[start:end][::-1], share)


@given(cases, st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_any_assignment_gives_the_same_as_slices_of_one_column(case: tuple[int, int, int], actors: int) -> None:
    seed, count, n = case
    rng, actors = np.random.default_rng(seed), min(actors, count)
    lengths, prompts = floats(rng.integers(1, 300, count)), ints(rng.integers(1, 90, count))
    profile = tiny_profile(kv_capacity_tokens=900)
    work, starts, ends = split_work(sorted_even(lengths, n, actors), lengths, prompts, n)
    apart = group_times(DecodeModel.of(profile), work, starts, ends, np.zeros(actors))
    np.testing.assert_allclose(apart, times(profile, lengths, prompts, n, actors), rtol=1e-9)


def test_split_work_joins_a_prompts_responses_on_one_actor() -> None:
    lengths, prompts = floats([30, 10, 20]), ints([5, 6, 7])
    work, starts, ends = split_work(least_in_flight(3, 4, 2), lengths, prompts, 4)
    assert [work.prompt[a:b].tolist() for a, b in zip(starts, ends, strict=True)] == [[1, 2, 0], [1, 2, 0]]
    assert np.diff(work.copies_sum).tolist() == [2] * 6


def test_large_inputs_are_evaluated_in_pieces() -> None:
    """More intervals than a chunk holds give what each group gives alone."""
    rng = np.random.default_rng(3)
    count, profile = 3000, tiny_profile(kv_capacity_tokens=10**6, max_slots=32)
    lengths, prompts = np.sort(rng.uniform(1, 300, count)), rng.integers(1, 50, count)
    work, model = Work.of(np.arange(count), lengths, prompts, 1), DecodeModel.of(profile)
    starts, ends = even_bounds(count, np.arange(100, 200))
    assert int((ends - starts)[ends - starts <= 32].sum()) > 2 * CHUNK_INTERVALS
    whole = group_times(model, work, starts, ends, np.zeros(starts.size))
    for g in range(0, starts.size, 997):
        alone = group_times(model, work, starts[g : g + 1], ends[g : g + 1], [0])
        assert whole[g] == pytest.approx(alone[0], rel=1e-9)


def test_prefill_comes_on_top() -> None:
    profile = tiny_profile()
    work, model = Work.of([0], [20.0], [30], 1), DecodeModel.of(profile)
    one = np.array([0]), np.array([1])
    with_prefill, without = (group_times(model, work, *one, [tokens])[0] for tokens in (30, 0))
    assert with_prefill - without == pytest.approx(float(profile.prefill_s(30)))


def test_running_sum() -> None:
    assert running_sum(np.array([3, 4, 5])).tolist() == [0, 3, 7, 12]
