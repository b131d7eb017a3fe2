"""The elastic rule: when fewer actors do better, what may move, the same in both simulators; how wide a step starts."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.bench import Setting, simulate
from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler import width
from rlhfless.scheduler.assignment import dealt
from rlhfless.scheduler.elastic import MOST_LOOKS, Elastic
from rlhfless.scheduler.iteration import iteration_s, least_running, price_of_iteration
from rlhfless.scheduler.midstep import Migration
from rlhfless.scheduler.migration import rule
from rlhfless.scheduler.spread import Spread
from rlhfless.types.arrays import floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.codec import from_json, to_json
from rlhfless.types.plan import ElasticTerms, MigrationSpec, Speed
from sim.profiles import load
from tests.profiles import tiny_profile
from tests.test_generation import assert_equal, both
from tests.test_migration import ACTORS, obeys_the_laws, triggered, view_of
from traces.load import steps
from traces.synthesize import synthesize


def speed(base_s=0.01, each_s=0.001, most=64, gpus=1):
    """An iteration of b responses takes base + each x b seconds, up to `most` at once."""
    batch = ints([1, most] if most > 1 else [1])
    return Speed(gpus=gpus, batch=batch, iteration_s=floats(base_s + each_s * batch))


def elastic(price=20.0, actors=7, move_s=0.0, **of_speed):
    return Elastic(
        price,
        ElasticTerms(
            speeds=(speed(**of_speed),),
            speed_of=ints(np.zeros(actors, dtype=np.int64)),
            move_s_per_token=move_s,
            reserve=ints([]),
            start_s=0.0,
        ),
    )


SPEEDS = st.builds(
    speed,
    base_s=st.floats(0.001, 0.1),
    each_s=st.floats(0.0, 0.01),
    most=st.integers(1, 300),
    gpus=st.sampled_from([1, 2, 8]),
)


@given(SPEEDS, st.floats(0, 1000))
def test_with_more_running_than_the_least_one_fewer_does_no_better(of, price):
    """Against the price of every number of responses, one by one."""
    actors = 6
    least = least_running(of, price, actors)
    assert least.shape == (actors + 1,)
    assert (np.diff(least) >= 0).all()
    assert least[:2].tolist() == [0, 0]
    for count in range(2, actors + 1):
        running = np.arange(1, (count + 1) * int(of.batch[-1]) + 1)
        now = price_of_iteration(of, price, np.full(running.size, count), running)
        then = price_of_iteration(of, price, np.full(running.size, count - 1), running)
        better = np.flatnonzero(now < then * (1 - 1e-12))
        if better.size:
            assert int(running[better[0]]) <= least[count] + 1 or int(least[count]) == int(least[count - 1])


@pytest.mark.parametrize(("price", "gpus"), [(20.0, 1), (300.0, 2), (64.0, 8)])
def test_on_a_straight_line_the_best_number_falls_with_the_square_root(price, gpus):
    """N beats N - 1 while more than N (N - 1) g t0 / (p k) run, as the module's docstring derives."""
    of = speed(base_s=0.014, each_s=0.0005, most=100_000, gpus=gpus)
    # the line goes through the points of the speed: base and slope as it interpolates them
    least = least_running(of, price, 40)
    count = np.arange(2, 41)
    expected = count * (count - 1) * gpus * 0.014 / (price * 0.0005)
    above = expected > count  # below one response an actor, the line is flat
    np.testing.assert_allclose(least[2:][above], expected[above], atol=1.5, rtol=1e-9)


def test_beyond_what_runs_at_once_responses_take_turns():
    of = speed(base_s=0.01, each_s=0.001, most=10)
    assert iteration_s(of, np.array([10.0, 20.0, 35.0])).tolist() == pytest.approx([0.02, 0.04, 0.07])
    assert iteration_s(of, np.array([0.5])).tolist() == pytest.approx([0.011])


RULES = st.builds(
    elastic,
    price=st.sampled_from([0.0, 1.0, 20.0, 1e4]),
    move_s=st.sampled_from([0.0, 1e-4, 10.0]),
    most=st.integers(1, 40),
)


@given(ACTORS, RULES)
def test_elastic_obeys_the_laws(actors, some_rule):
    some_rule = replace(some_rule, terms=replace(some_rule.terms, speed_of=ints(np.zeros(len(actors), dtype=np.int64))))
    view = view_of(actors)
    before = copy.deepcopy((view.assigned, view.finished, view.running, view.open_slots, view.kv_headroom_tokens))
    moves = some_rule.decide(view)
    obeys_the_laws(view, moves)
    assert moves == some_rule.decide(view)
    after = (view.assigned, view.finished, view.running, view.open_slots, view.kv_headroom_tokens)
    for column, was in zip(after, before, strict=True):
        assert np.array_equal(column, was)
    if moves:
        assert triggered(some_rule, view)


@given(ACTORS, st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_responses_stay_on_actors_of_their_size(actors, sizes):
    terms = replace(TERMS, speeds=(speed(), speed(gpus=4)), speed_of=ints(sizes[: len(actors)]))
    view = view_of(actors)
    moves = Elastic(5.0, terms).decide(view)
    obeys_the_laws(view, moves)
    for move in moves:
        assert sizes[move.source] == sizes[move.target]


@given(ACTORS)
def test_where_slots_and_kv_abound_every_decision_leaves_as_few_as_do_best(actors):
    """Unless what is left would have to move twice: an actor that took responses stays."""
    actors = [(max(actor[0], 1), actor[1] + actor[2], [], 100, 10_000) for actor in actors]
    view, some_rule = view_of(actors), elastic(actors=len(actors))
    moves = some_rule.decide(view)
    left = (view.running > 0).sum() - len({move.source for move in moves})
    took = {move.target for move in moves}
    stays = set(np.flatnonzero(view.running).tolist()) - {move.source for move in moves}
    least = least_running(some_rule.terms.speeds[0], some_rule.price, len(actors))[left]
    few_enough = view.running.sum() >= least - 1  # where both do as well, nothing moves
    assert few_enough or stays <= took


def test_the_fewest_unfinished_go_to_those_with_the_fewest_largest_context_first():
    actors = [
        (5, [7, 9, 8], [], 9, 99),
        (5, [30, 10], [], 9, 99),  # goes
        (5, [5] * 4, [], 9, 99),
        (5, [5] * 5, [], 9, 99),
    ]
    # 14 run; 3 actors are enough: 4 x 3 x 0.01 / (5 x 0.001) = 24; for 2 it would take 12
    assert elastic(price=5.0, actors=4).decide(view_of(actors)) == (Migration(3, 1, 0), Migration(4, 1, 0))


def test_of_equal_actors_the_last_goes_and_none_moves_twice():
    actors = [(5, [5, 5], [], 9, 99), (5, [5, 5], [], 9, 99), (5, [5, 5], [], 9, 99)]
    moves = elastic(price=1.0, actors=3).decide(view_of(actors))
    assert moves == (Migration(4, 2, 0), Migration(5, 2, 1))


def test_what_moving_costs_must_be_saved():
    actors = [(5, [50], [], 9, 99), (5, [50], [], 9, 99)]
    # 2 running, 10 finished, 100 tokens: what remains is 10 tokens; each costs F(2, 2) - F(1, 2) GPU-seconds less
    some_rule = elastic(price=1.0, actors=2)
    one = some_rule.terms.speeds[0]
    saved = np.subtract(*price_of_iteration(one, 1.0, np.array([2, 1]), np.array([2, 2])))
    enough = float(saved) * 10 / (50 * (1.0 + 1.0))
    assert elastic(price=1.0, actors=2, move_s=enough * 0.99).decide(view_of(actors))
    assert not elastic(price=1.0, actors=2, move_s=enough * 1.01).decide(view_of(actors))


def test_time_alone_keeps_all_and_cost_alone_keeps_one():
    actors = [(5, [5, 5], [], 99, 99)] * 5
    assert elastic(price=1e9, actors=5).decide(view_of(actors)) == ()
    moves = elastic(price=0.0, actors=5).decide(view_of(actors))
    assert len({move.source for move in moves}) == 2  # the three that took may go when the next response ends


def test_response_columns_are_asked_for_only_of_what_may_go():
    asked: list[int] = []
    actors = [(5, [50] * k, [], 9, 49) for k in (3, 1, 2, 4)]  # nobody can hold what another has
    assert elastic(price=1.0, actors=4).decide(view_of(actors, asked=asked)) == ()
    assert len(asked) <= MOST_LOOKS
    asked.clear()
    no_slots = [(5, [5] * k, [], 0, 999) for k in (3, 1, 2, 4)]
    assert elastic(price=1.0, actors=4).decide(view_of(no_slots, asked=asked)) == ()
    assert asked == []


def test_the_rule_of_a_plan_says_the_same_after_json():
    spec = elastic(price=7.5, move_s=1e-6).spec
    again = from_json(to_json(Holder(spec=spec)), Holder, 1, "test").spec
    assert to_json(again) == to_json(spec)
    view = view_of([(5, [5, 5], [], 9, 99)] * 7)
    assert rule(again).decide(view) == rule(spec).decide(view) != ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    spec: MigrationSpec
    schema: int = 1


TERMS = elastic().terms


@pytest.mark.parametrize(
    ("price", "terms", "what"),
    [
        (-1.0, TERMS, "price -1.0 must be a finite number"),
        (np.inf, TERMS, "price inf must be a finite number"),
        (1.0, replace(TERMS, move_s_per_token=np.nan), "move_s_per_token nan must be"),
        (1.0, replace(TERMS, speeds=()), "no speeds"),
        (1.0, replace(TERMS, speed_of=ints([0, 1])), "speed_of must name one of 1 speeds"),
        (1.0, replace(TERMS, speeds=(replace(speed(), batch=ints([2, 64])),)), "batch must ascend from 1"),
        (
            1.0,
            replace(TERMS, speeds=(replace(speed(), iteration_s=floats([0.2, 0.1])),)),
            "iteration_s must be above 0 s",
        ),
        (1.0, None, "needs its terms"),
    ],
)
def test_what_it_cannot_decide_with_is_refused(price, terms, what):
    with pytest.raises(InputError, match=f"^elastic: {what}") as caught:
        rule(MigrationSpec(kind="elastic", value=price, terms=terms))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="global-cut: takes no terms"):
        rule(MigrationSpec(kind="global-cut", value=3.0, terms=TERMS))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    actors=st.integers(2, 7),
    per_actor=st.integers(1, 8),
    n=st.integers(1, 4),
    capacity=st.integers(360, 2500),
    slots=st.integers(1, 40),
    price=st.sampled_from([0.0, 0.5, 2.0, 10.0, 50.0]),
    move_s=st.sampled_from([0.0, 1e-4]),
    kv_bytes=st.sampled_from([1e5, 2e6]),
    deaths=st.integers(0, 3),
)
def test_event_jump_equals_token_by_token(seed, actors, per_actor, n, capacity, slots, price, move_s, kv_bytes, deaths):
    """Every response once, tokens conserved, the same times: under reshaping, deaths and want of KV."""
    spec = elastic(price=price, actors=actors, move_s=move_s, most=min(slots, 32)).spec
    run = both(
        seed, actors=actors, prompts=actors * per_actor, n=n, capacity=capacity, slots=slots, caching=True, spec=spec,
        kv_bytes=kv_bytes, deaths=deaths,
    )  # fmt: skip
    assert_equal(*run)


def test_the_cases_merge_time_and_again():
    """The comparison above means something only if its cases do what it is about."""
    cuts = moves = 0
    for seed in range(8):
        spec = elastic(price=10.0, actors=6, most=32).spec
        run = both(seed, actors=6, prompts=36, n=2, capacity=2500, slots=40, caching=True, spec=spec, deaths=1)
        assert_equal(*run)
        cuts += run[0].cuts
        moves += sum(run[0].moves)
    assert cuts > 15
    assert moves > 40


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12), st.integers(0, 99))
def test_dealt_gives_every_actor_the_same_mix(prompts, n, actors, seed):
    actors = min(actors, prompts)
    estimates = np.random.default_rng(seed).integers(1, 50, prompts).astype(float)
    shares = dealt(estimates, n, actors)
    assert sorted(np.concatenate(shares).tolist()) == list(range(prompts * n))
    sizes = [share.size for share in shares]
    assert max(sizes) - min(sizes) in (0, n)
    totals = [estimates[share // n].sum() / n for share in shares]
    full = [total for total, size in zip(totals, sizes, strict=True) if size == max(sizes)]
    assert max(full) - min(full) <= estimates.max() - estimates.min() + 1e-9


def test_lengths_are_drawn_with_the_spread_and_the_cap():
    spread = Spread.of(np.random.default_rng(0).normal(0.0, 0.5, 4096))
    drawn = width.draw(np.full(100, 400.0), spread, 8, 900, stream(0, "test"))
    assert drawn.shape == (100, 8)
    assert drawn.max() == 900.0
    assert np.log(drawn[drawn < 900]).std() < 0.5
    assert np.median(drawn) == pytest.approx(400.0, rel=0.03)
    assert (width.draw(np.full(100, 400.0), Spread.none(), 8, 900, stream(0, "test")).round(6) == 400.0).all()


PRESETS = [("qwen2.5-3b_l40s_tp2", "gpqa", 16), ("llama-3-8b_h100_sxm_tp1", "long-reasoning", 64)]


@pytest.mark.parametrize(("profile", "preset", "gpus"), PRESETS)
def test_elastic_is_no_slower_and_no_dearer_than_the_paper(profile, preset, gpus):
    """With estimates from history; and its own estimate of a step is near what the step comes to."""
    cap = 2048 if preset != "long-reasoning" else 12288
    trace = synthesize(
        preset, prompts=256, epochs=3, responses_per_prompt=4, max_response_tokens=cap, prompts_per_step=128, seed=0,
        algorithm="grpo",
    )  # fmt: skip
    loaded = load(profile)
    setting = Setting(profile=loaded, cluster=Cluster.uniform(loaded.data.gpu, gpus), usd_per_gpu_hour=1.0)
    recorded = list(steps(trace))
    ours, paper = (simulate(name, recorded, setting) for name in ("elastic", "rlhfless"))
    assert ours.summary.generation_s.mean < paper.summary.generation_s.mean
    assert ours.summary.decode_executed_gpu_s.mean < paper.summary.decode_executed_gpu_s.mean
    held = [run.summary.bill.function("decode").held_gpu_s for run in (ours, paper)]
    assert held[0] < held[1]
    later = ours.records[len(ours.records) // 3 :]  # before, nothing says how long responses are
    errors = [abs(r.plan.estimate.generation_s / r.report.phase_s("generation") - 1) for r in later]
    assert np.median(errors) < 0.1


def test_what_a_bound_leaves_out_could_not_win(monkeypatch):
    """The same plans, to the byte, as where every price, number, size and reserve is looked at."""
    sizes = [load(f"llama-2-70b_h100_sxm_tp{tp}") for tp in (2, 4, 8)]
    setting = Setting(
        profile=sizes[0], profiles=tuple(sizes[1:]), cluster=Cluster.uniform("h100_sxm", 64), usd_per_gpu_hour=1.0
    )
    trace = synthesize(
        "gpqa", prompts=64, epochs=3, responses_per_prompt=4, max_response_tokens=2048, prompts_per_step=64, seed=0,
        algorithm="grpo",
    )  # fmt: skip
    looked_at: list[int] = []
    promoted = width._promoted

    def counted(*given):
        looked_at[-1] += given[4].shape[0]
        return promoted(*given)

    monkeypatch.setattr(width, "_promoted", counted)
    plans = []
    for rounding in (width.ROUNDING, 1.0):  # a bound of 0 leaves out nothing
        monkeypatch.setattr(width, "ROUNDING", rounding)
        looked_at.append(0)
        plans.append([to_json(record.plan) for record in simulate("elastic", list(steps(trace)), setting).records])
    assert plans[0] == plans[1]
    assert looked_at[0] < looked_at[1] / 2


def test_what_time_hardly_tells_apart_cost_decides(monkeypatch):
    """Against the largest ratio alone."""
    setting = Setting(
        profile=load("llama-3-8b_h100_sxm_tp1"), cluster=Cluster.uniform("h100_sxm", 64), usd_per_gpu_hour=1.0
    )
    trace = synthesize(
        "gpqa", prompts=192, epochs=2, responses_per_prompt=4, max_response_tokens=2048, prompts_per_step=96, seed=0,
        algorithm="grpo",
    )  # fmt: skip
    found = []
    for rest in (width.REST, 0.0):
        monkeypatch.setattr(width, "REST", rest)
        found.append(simulate("elastic", list(steps(trace)), setting).summary)
    both, largest = (one.bill.function("decode").held_gpu_s for one in found)
    assert both < 0.9 * largest
    assert found[0].generation_s.mean < 1.03 * found[1].generation_s.mean


def test_many_quantiles_are_those_of_numpy():
    rng = np.random.default_rng(0)
    for size in (1, 2, 255, 4096):
        ascending, level = np.sort(rng.normal(size=size)), (np.arange(384) + 0.5) / 384
        assert (width._quantiles(ascending, level) == np.quantile(ascending, level)).all()


def test_a_speed_ends_at_what_runs_at_once():
    profile = tiny_profile()
    made = width.at_context(profile, 100.0, 500.0)
    assert made.batch[0] == 1
    assert made.batch[-1] == profile.data.kv_capacity_tokens // 500 < profile.data.max_slots
    assert (np.diff(made.iteration_s) > 0).all()
    assert made.iteration_s.tolist() == profile.decode_iteration_s(made.batch, np.full(made.batch.size, 100.0)).tolist()
    assert width.at_context(profile, 100.0, 1.0).batch[-1] == profile.data.max_slots
