"""Summaries: exact numbers on hand-made reports. Bounds: against every schedule of tiny cases, and random ones."""

from functools import cache
from itertools import combinations, pairwise, product
from math import gamma, inf, pi, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.accounting.metrics import (
    T_975,
    TAILS,
    Series,
    Summary,
    compare,
    generation_bounds,
    summarize,
    t_975,
)
from rlhfless.errors import InputError
from rlhfless.types.arrays import floats, ints
from rlhfless.types.profile import SCHEMA as PROFILE_SCHEMA
from rlhfless.types.profile import Profile, ProfileData
from rlhfless.types.report import SCHEMA, Counters, Invocation, Phase, Span, StepReport


def report(*, step: int, decode_s: float, policy: str = "ours", actors: int = 2) -> StepReport:
    """Decode actors of two GPUs that start up for a second and decode for `decode_s`, then a learner of 5 s."""
    decode = (
        Span(activity="start-up", start_s=-1.0, end_s=0.0),
        Span(activity="decode", start_s=0.0, end_s=decode_s),
    )
    train = (Span(activity="train", start_s=decode_s, end_s=decode_s + 5.0),)
    return StepReport(
        schema=SCHEMA,
        policy=policy,
        step=step,
        epoch=0,
        start_s=0.0,
        prompt_ids=ints([7, 8]),
        responses_per_prompt=2,
        tokens=ints([10, 20, 30, 40]),
        first_s=floats([0.0] * 4),
        end_s=floats([1.0, 2.0, 3.0, decode_s]),
        actor=ints([0, 0, 1, 1]),
        moves=ints([0, 0, 0, 1]),
        invocations=(
            *(Invocation(function="decode", index=n, gpus=(2 * n, 2 * n + 1), spans=decode) for n in range(actors)),
            Invocation(function="learner", index=0, gpus=(0, 1), spans=train),
        ),
        phases=(
            Phase(name="generation", start_s=0.0, end_s=decode_s),
            Phase(name="preparation", start_s=decode_s, end_s=decode_s),
            Phase(name="learning", start_s=decode_s, end_s=decode_s + 5.0),
        ),
        reserved_gpus=0,
        counters=Counters(
            prefill_tokens=100,
            decode_prefill_tokens=50,
            recomputed_tokens=7,
            decoded_tokens=10,
            preemptions=2,
            cuts=1,
            moves=3,
            failures=0,
            moved_kv_bytes=0.0,
        ),
    )


def test_a_summary_is_exact() -> None:
    made = summarize([report(step=4, decode_s=4.0), report(step=5, decode_s=8.0)], 3600.0, [120, 150])
    assert made.policy == "ours"
    assert made.steps.tolist() == [4, 5]
    per_step = {
        "generation_s": [4.0, 8.0],
        "step_s": [9.0, 13.0],
        "executed_gpu_s": [26.0, 42.0],
        "held_gpu_s": [30.0, 46.0],
        "decode_executed_gpu_s": [16.0, 32.0],
        "usd": [30.0, 46.0],
        "tokens": [100.0, 100.0],
        "tokens_per_s": [25.0, 12.5],
        "actors": [2.0, 2.0],
        "moves": [3.0, 3.0],
        "cuts": [1.0, 1.0],
        "preemptions": [2.0, 2.0],
        "failures": [0.0, 0.0],
        "prefill_tokens": [157.0, 157.0],
        "redundant_prefill_tokens": [37.0, 7.0],
    }
    assert {name: getattr(made, name).values.tolist() for name in per_step} == per_step
    assert made.idle("start-up").values == pytest.approx([4 / 30, 4 / 46])
    assert made.idle("wait-longest").values.tolist() == [0.0, 0.0]
    assert dict(zip(TAILS, (series.values.tolist() for series in made.response_end_s), strict=True)) == {
        0.5: pytest.approx([2.5, 2.5]),
        0.9: pytest.approx([3.7, 6.5]),
        0.99: pytest.approx([3.97, 7.85]),
        1.0: [4.0, 8.0],
    }
    assert made.bill.held_gpu_s == 76.0
    assert made.generation_s.mean == 6.0
    assert made.generation_s.half_width == pytest.approx(12.706 * sqrt(8) / sqrt(2))
    assert summarize([report(step=0, decode_s=1.0)], 1.0).redundant_prefill_tokens is None


def test_one_step_has_no_confidence_interval() -> None:
    assert Series(values=floats([3.0])).half_width is None
    assert Series(values=floats([3.0, 3.0])).half_width == 0.0


@pytest.mark.parametrize("freedom", [1, 2, 5, 12, 30, 31, 60, 400])
def test_t_quantiles_leave_a_fortieth_above(freedom: int) -> None:
    """The density integrated from 0 to the quantile is 0.475, by Simpson's rule."""
    x, step = np.linspace(0.0, t_975(freedom), 20_001, retstep=True)
    half = freedom / 2
    at_0 = gamma(half + 0.5) / gamma(half) if freedom < 300 else sqrt(half) * (1 - 1 / (8 * half))
    density = at_0 / sqrt(freedom * pi) * (1 + x * x / freedom) ** -(half + 0.5)
    below = step / 3 * (density[0] + 4 * density[1::2].sum() + 2 * density[2:-1:2].sum() + density[-1])
    assert below == pytest.approx(0.475, abs=4e-5)


def test_t_quantiles_fall_towards_the_normal_one() -> None:
    quantiles = [t_975(freedom) for freedom in range(1, 200)]
    assert quantiles[: len(T_975)] == list(T_975)
    assert all(after < before for before, after in pairwise(quantiles))
    assert t_975(10**9) == pytest.approx(1.96, abs=1e-4)


@pytest.mark.parametrize(
    ("reports", "needed", "message"),
    [
        ([], None, "no step reports"),
        ([report(step=0, decode_s=1.0), report(step=1, decode_s=1.0, policy="verl")], None, "several policies"),
        ([report(step=0, decode_s=1.0)], [1, 2], "needed tokens of 2 steps, reports of 1"),
        ([report(step=9, decode_s=0.0)], None, "step 9 .*generation takes no time"),
    ],
)
def test_what_cannot_be_summarised_is_named(reports: list[StepReport], needed: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        summarize(reports, 1.0, needed)


def run(decode_s: float, actors: int, usd: float = 2.0, steps: int = 2) -> Summary:
    return summarize([report(step=step, decode_s=decode_s, actors=actors) for step in range(steps)], usd)


def test_a_comparison_is_exact() -> None:
    found = compare(run(4.0, 2), run(6.0, 3))
    assert found.steps == 2
    assert found.generation_speedup == 1.5
    assert found.step_speedup == 11 / 9
    assert found.executed_saving == pytest.approx(1 - 26 / 46)
    assert found.held_saving == pytest.approx(1 - 30 / 52)
    assert found.usd_saving == pytest.approx(1 - 30 / 52)
    assert compare(run(6.0, 3), run(4.0, 2)).executed_saving < 0


def test_prices_of_0_save_nothing() -> None:
    assert compare(run(4.0, 2, usd=0.0), run(6.0, 3, usd=0.0)).usd_saving == 0.0
    assert compare(run(4.0, 2), run(6.0, 3, usd=0.0)).usd_saving == -inf


def test_runs_of_different_steps_are_not_compared() -> None:
    with pytest.raises(InputError, match="same steps"):
        compare(run(4.0, 2, steps=2), run(4.0, 2, steps=3))


def profile(
    decode_s: list[list[float]], contexts: list[int], slots: int, tp: int = 2, kv: int = 10_000, prefill_s: float = 1.0
) -> Profile:
    batches = list(range(1, len(decode_s) + 1))
    return Profile(
        data=ProfileData(
            schema=PROFILE_SCHEMA,
            name="tiny",
            model="none",
            gpu="l40s",
            tp=tp,
            kind="roofline",
            origin="made for tests",
            licence="Apache-2.0",
            notes=(),
            parameters=1.0,
            weight_bytes=1.0,
            kv_bytes_per_token=1.0,
            kv_capacity_tokens=kv,
            max_slots=slots,
            max_batched_tokens=100,
            decode_batch=ints(batches),
            decode_context=ints(contexts),
            decode_s=floats(decode_s),
            prefill_tokens=ints([1, 100]),
            prefill_s=floats([prefill_s, prefill_s]),
            iteration_overhead_s=0.0,
            cold_start_s=0.0,
            warm_start_s=0.0,
        )
    )


def physical(slots: int, kv: int = 1_000_000) -> Profile:
    """Weights are read once an iteration, KV once for each token of context: affine in batch x context."""
    contexts = [1, 20_000]
    return profile(
        [[10.0 + 0.05 * b + 0.001 * b * c for c in contexts] for b in range(1, slots + 1)], contexts, slots, kv=kv
    )


def test_on_physical_profiles_the_time_bound_is_the_longest_response_alone() -> None:
    made = physical(8)
    prompts, lengths = [100, 40], [[300, 10], [350, 20]]
    bounds = generation_bounds(made, prompts, lengths)
    alone = max(made.decode_run_s(1, 101, 299), made.decode_run_s(1, 41, 349))
    assert bounds.time_s == pytest.approx(made.prefill_s(1) + alone, rel=1e-12)


def test_the_cost_bound_is_reached_by_a_full_actor_of_equal_responses() -> None:
    made = physical(8)
    bounds = generation_bounds(made, [100], [[400] * 8])
    packed = (made.prefill_s(1) + made.decode_run_s(8, 101, 399)) * made.data.tp
    assert bounds.decode_gpu_s <= packed
    assert bounds.decode_gpu_s == pytest.approx(packed, rel=2e-3)


def test_the_cost_bound_knows_that_kv_is_finite() -> None:
    """With room for the own tokens of two responses only, eight cannot share an iteration for long."""
    roomy, tight = physical(8), physical(8, kv=4_000)
    prompts, lengths = [10], [[2_000] * 8]
    loose = generation_bounds(roomy, prompts, lengths).decode_gpu_s
    bound = generation_bounds(tight, prompts, lengths).decode_gpu_s
    assert bound > 1.3 * loose
    pairs = 4 * tight.decode_run_s(2, 10, 2_000) * tight.data.tp
    assert bound <= pairs


def test_the_cost_bound_lets_responses_share_the_kv_of_their_prompt() -> None:
    """Eight responses of 100 tokens and their prompt of 900, once, fill the cache; eight contexts would not fit."""
    made = physical(8, kv=1_700)
    bound = generation_bounds(made, [900], [[100] * 8]).decode_gpu_s
    assert bound <= (made.prefill_s(1) + made.decode_run_s(8, 901, 99)) * made.data.tp


@pytest.mark.parametrize(
    ("prompts", "lengths", "message"),
    [
        ([1, 2], [[1, 2]], "are not"),
        ([1], [1], "are not"),
        ([], np.zeros((0, 2)), "are not"),
        ([0], [[1]], "the least is 1"),
        ([1], [[1, 0]], "the least is 1"),
    ],
)
def test_lengths_without_bounds(prompts: list[int], lengths: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generation_bounds(physical(2), prompts, lengths)


@st.composite
def monotone_profiles(draw: st.DrawFn) -> Profile:
    """Any profile that the format allows: latency falls neither with the batch nor with the context."""
    slots = draw(st.integers(2, 3))
    rises = st.sampled_from([0.0, 0.1, 1.0, 5.0])
    steps = np.array([[draw(rises) for _ in range(3)] for _ in range(slots)])
    decode_s = 1.0 + steps.cumsum(axis=0).cumsum(axis=1)
    knots = draw(st.sampled_from([[1, 4, 9], [2, 3, 12], [4, 6, 8]]))
    return profile(
        decode_s.tolist(),
        knots,
        draw(st.integers(1, slots)),
        tp=draw(st.integers(1, 2)),
        prefill_s=draw(st.sampled_from([0.2, 1.0, 4.0])),
    )


cases = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3)
"""(prompt, response) tokens of each prompt's only response."""


def least_cost_s(made: Profile, case: list[tuple[int, int]]) -> float:
    """Actor-seconds of the cheapest schedule: any responses may share any iteration, on any actor, with free moves.

    A first token comes with a prefill, shared by any that begin and any others, or an iteration (KV was delivered)."""

    @cache
    def left(done: tuple[int, ...]) -> float:
        open_now = [n for n, (_, length) in enumerate(case) if done[n] < length]
        if not open_now:
            return 0.0
        costs = []
        for size in range(1, min(len(open_now), made.data.max_slots) + 1):
            for batch in combinations(open_now, size):
                mean = sum(case[n][0] + done[n] for n in batch) / size
                after = left(tuple(count + (n in batch) for n, count in enumerate(done)))
                costs.append(float(made.decode_iteration_s(size, mean)) + after)
                others = [case[n][0] + done[n] for n in batch if done[n]]
                if len(others) < size:
                    decode_s = float(made.decode_iteration_s(len(others), sum(others) / len(others))) if others else 0.0
                    costs.append(max(float(made.prefill_s(1)), decode_s) + after)
        return min(costs)

    return left((0,) * len(case))


def least_time_s(made: Profile, case: list[tuple[int, int]]) -> float:
    """Seconds until the slowest response ends when each picks, every iteration, the company that serves it best.

    Company may have any context that it ever has, whatever else happens to it: no schedule is faster.
    """

    def fastest(n: int, context: int) -> float:
        others = [range(prompt, prompt + length) for m, (prompt, length) in enumerate(case) if m != n]
        batches = [
            (context, *company)
            for size in range(min(len(others), made.data.max_slots - 1) + 1)
            for chosen in combinations(others, size)
            for company in product(*chosen)
        ]
        means = [sum(batch) / len(batch) for batch in batches]
        return float(made.decode_iteration_s([len(batch) for batch in batches], means).min())

    return max(
        float(made.prefill_s(1)) + sum(fastest(n, prompt + token) for token in range(1, length))
        for n, (prompt, length) in enumerate(case)
    )


@given(monotone_profiles(), cases)
@settings(deadline=None, max_examples=150)
def test_no_schedule_of_a_tiny_case_beats_the_bounds(made: Profile, case: list[tuple[int, int]]) -> None:
    prompts, lengths = [prompt for prompt, _ in case], [[length] for _, length in case]
    bounds = generation_bounds(made, prompts, lengths)
    assert 0 < bounds.time_s <= least_time_s(made, case) * (1 + 1e-9)
    assert 0 < bounds.decode_gpu_s <= least_cost_s(made, case) * made.data.tp * (1 + 1e-9)


def test_bounds_of_a_single_response_are_what_it_costs() -> None:
    made = profile([[1.0, 3.0]], [1, 9], slots=1)
    bounds = generation_bounds(made, [1], [[8]])
    later_s = sum(1.0 + 0.25 * j for j in range(1, 8))
    assert bounds.time_s == pytest.approx(1.0 + later_s)  # the prefill takes 1 s
    assert bounds.decode_gpu_s == pytest.approx(later_s * 2, rel=2e-3)
    assert bounds.decode_gpu_s < later_s * 2, "what lies between two points of the envelope is given away"


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_random_continuous_batching_stays_above_the_bounds(seed: int) -> None:
    """Two actors that admit at random, token by token, with the KV of the own tokens kept below capacity."""
    rng = np.random.default_rng(seed)
    made = physical(int(rng.integers(1, 6)), kv=int(rng.integers(60, 200)))
    prompts, lengths = rng.integers(1, 30, 4), rng.integers(1, 50, (4, 2))
    clocks, busy_s = [], 0.0
    for queue in np.array_split(rng.permutation(8), 2):
        waiting, running, clock_s = list(queue), {}, 0.0
        while waiting or running:
            reserved = sum(int(lengths.flat[n]) for n in running)
            while (
                waiting
                and len(running) < made.data.max_slots
                and (not running or reserved + lengths.flat[waiting[0]] <= made.data.kv_capacity_tokens)
            ):
                reserved += int(lengths.flat[waiting[0]])
                running[waiting.pop(0)] = 0
            mean = sum(int(prompts[n // 2]) + own for n, own in running.items()) / len(running)
            clock_s += float(made.decode_iteration_s(len(running), mean))
            running = {n: own + 1 for n, own in running.items() if own + 1 < lengths.flat[n]}
        clocks.append(clock_s)
        busy_s += clock_s
    bounds = generation_bounds(made, prompts, lengths)
    assert bounds.time_s <= max(clocks) * (1 + 1e-9)
    assert bounds.decode_gpu_s <= busy_s * made.data.tp * (1 + 1e-9)
