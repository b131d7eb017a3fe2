"""The reserve of the elastic rule: what it is worth, when it is asked for and taken, the same in both simulators."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.bench import Setting, simulate
from rlhfless.errors import InputError, PlanError
from rlhfless.scheduler.elastic import Elastic
from rlhfless.scheduler.iteration import least_running, price_of_iteration
from rlhfless.scheduler.midstep import Migration, Start
from rlhfless.scheduler.promotion import Promotion, gain_of
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import GPUS, Cluster
from rlhfless.types.plan import ElasticTerms, Plan
from sim.profiles import load
from tests.test_elastic import SPEEDS, speed
from tests.test_generation import assert_equal, both
from tests.test_migration import ACTORS, obeys_the_laws, triggered, view_of
from traces.load import steps
from traces.synthesize import synthesize

SMALL, LARGE = speed(base_s=0.02, each_s=0.0001), speed(base_s=0.008, each_s=0.00043, gpus=2)
"""An actor and one of twice its GPUs, 2.4 times as quick for one response and no quicker for 40."""


def terms(actors: int, reserve: int = 1, *, small=SMALL, large=LARGE, move_s=0.0, start_s=0.0) -> ElasticTerms:
    return ElasticTerms(
        speeds=(small, large),
        speed_of=ints(np.repeat([0, 1], [actors, reserve])),
        move_s_per_token=move_s,
        reserve=ints(actors + np.arange(reserve)),
        start_s=start_s,
    )


def reserved(actors, states, slots=99, headroom=9999):
    """A view of actors, and after them of reserve actors in these states."""
    view = view_of([*actors, *((0, [], [], slots if state == "idle" else 0, headroom) for state in states)])
    mask = {
        name: np.array([False] * len(actors) + [state == name for state in states])
        for name in ("unasked", "starting", "idle")
    }
    return replace(view, **mask)


@given(SPEEDS, SPEEDS, st.floats(0, 1000), st.integers(1, 6), st.integers(1, 3))
def test_the_gain_is_what_exponential_lives_save(small, large, price, actors, reserve):
    """Against the sum over the responses that run, one by one, with the best of all numbers of actors."""
    gain = gain_of(small, actors, large, reserve, price)
    assert gain.size == reserve * int(large.batch[-1]) + 1
    assert gain[0] == 0.0

    def least(of, most, running):
        counts = np.arange(1, most + 1)
        best = int(np.searchsorted(least_running(of, price, most), running, side="right")) - 1
        prices = price_of_iteration(of, price, counts, np.full(most, running))
        return float(prices[max(best, 1) - 1])

    saved = [(least(small, actors, k) - least(large, reserve, k)) / k for k in range(1, min(gain.size, 40))]
    np.testing.assert_allclose(gain[1 : min(gain.size, 40)], np.cumsum(saved), rtol=1e-9, atol=1e-12)


def test_exponential_lives_simulated_save_as_much():
    """R C(A) is the mean of what is saved over drawn exponential lives."""
    price, actors, running, mean = 3.0, 1, 20, 400.0
    gain = gain_of(SMALL, actors, LARGE, 1, price)[running]
    lives = np.sort(np.random.default_rng(0).exponential(mean, (4000, running)), axis=1)
    left = np.arange(running, 0, -1)
    one = np.ones(running)
    saved = price_of_iteration(SMALL, price, one, left) - price_of_iteration(LARGE, price, one, left)
    drawn = (np.diff(lives, axis=1, prepend=0.0) * saved).sum(axis=1)
    assert mean * gain == pytest.approx(drawn.mean(), rel=0.02)


def test_all_move_when_that_is_worth_most():
    """At `most` responses the gain is at its highest: one more on the reserve would cost more than it saves."""
    some = Promotion(1.0, terms(2))
    there = price_of_iteration(LARGE, 1.0, np.array(1), np.arange(1, 60))
    best = np.minimum(*(price_of_iteration(SMALL, 1.0, np.array(n), np.arange(1, 60)) for n in (1, 2)))
    assert 1 < some.most < 60
    assert best[some.most - 1] > there[some.most - 1]
    assert best[some.most] < there[some.most]


def test_nothing_is_worth_moving_to_an_actor_that_is_no_quicker():
    some = Promotion(10.0, terms(2, large=speed(base_s=0.02, each_s=0.0001, gpus=2)))
    assert some.most == 0
    rule = Elastic(10.0, terms(2, large=speed(base_s=0.02, each_s=0.0001, gpus=2)))
    view = reserved([(50, [20], [], 9, 99), (50, [20], [], 9, 99)], ["unasked"])
    assert not any(isinstance(each, Start) for each in rule.decide(view))


ACTORS_LEFT = [(50, [20, 30], [], 9, 999), (50, [25], [], 9, 999)]
"""3 run, 100 have ended, 75 tokens of context."""


def test_the_reserve_is_asked_for_waited_for_and_taken():
    rule = Elastic(1e3, terms(2, start_s=0.01))
    assert rule.decide(reserved(ACTORS_LEFT, ["unasked"])) == (Start(2),)
    assert rule.decide(reserved(ACTORS_LEFT, ["starting"])) == ()
    moves = rule.decide(reserved(ACTORS_LEFT, ["idle"]))
    assert moves == (Migration(1, 0, 2), Migration(2, 1, 2), Migration(0, 0, 2))
    assert rule.decide(reserved(ACTORS_LEFT, ["idle"], slots=2)) == ()
    assert rule.decide(reserved(ACTORS_LEFT, ["idle"], headroom=74)) == ()
    assert rule.decide(reserved(ACTORS_LEFT, [None])) == ()  # it has died


def test_it_is_asked_for_only_if_what_is_saved_pays_its_start():
    """100 ended within 7,500 tokens: 75 remain of each in the mean."""
    actors = [(50, [50], [], 9, 9999), (50, [7450], [], 9, 9999)]
    price = 1e3
    gain = gain_of(SMALL, 2, LARGE, 1, price)

    def asked(start_s, move_s=0.0):
        return bool(Elastic(price, terms(2, start_s=start_s, move_s=move_s)).decide(reserved(actors, ["unasked"])))

    later = 1  # of 2 responses, one is expected to have ended by then
    enough_s = 75.0 * gain[later] / LARGE.gpus
    assert 2 * np.exp(-enough_s / (0.0201 * 75)) < 1, "none would run any more"
    soon_s = 0.5 * 0.0201 * 75
    assert int(2 * np.exp(-0.5)) == later
    assert asked(soon_s)
    assert not asked(2 * enough_s)
    moving = (75.0 * gain[later] - LARGE.gpus * soon_s) / ((price + 4) * 7500 / 2)
    assert asked(soon_s, moving * 0.99)
    assert not asked(soon_s, moving * 1.01)


def test_moving_must_pay_as_well():
    actors = [(50, [50], [], 9, 9999), (50, [50], [], 9, 9999)]
    gain = gain_of(SMALL, 2, LARGE, 1, 1e3)[2] * 1.0  # 100 tokens, 100 ended: 1 remains
    enough = gain / ((1e3 + 4) * 100)
    assert Elastic(1e3, terms(2, move_s=enough * 0.99)).decide(reserved(actors, ["idle"]))
    assert not Elastic(1e3, terms(2, move_s=enough * 1.01)).decide(reserved(actors, ["idle"]))


@given(
    ACTORS,
    st.lists(st.sampled_from(["unasked", "starting", "idle", None]), min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0, 20.0, 1e4]),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.sampled_from([0.0, 1e-4, 10.0]),
    st.integers(0, 12),
    st.integers(0, 2000),
)
def test_decisions_with_a_reserve_obey_the_laws(actors, states, price, start_s, move_s, slots, headroom):
    view = reserved(actors, states, slots, headroom)
    rule = Elastic(price, terms(len(actors), len(states), start_s=start_s, move_s=move_s))
    decided = rule.decide(view)
    assert decided == rule.decide(view)
    starts = [each.actor for each in decided if isinstance(each, Start)]
    moves = [each for each in decided if isinstance(each, Migration)]
    assert all(view.unasked[actor] for actor in starts)
    assert len(set(starts)) == len(starts)
    if starts:
        assert not view.starting.any()
        assert not view.idle.any()
    taken = [move for move in moves if view.idle[move.target]]
    if taken:  # all or nothing
        assert len(moves) == (view.running + view.waiting).sum() == len(taken)
    obeys_the_laws(view, moves)
    if decided:
        assert triggered(rule, view)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    actors=st.integers(1, 6),
    reserve=st.integers(1, 2),
    per_actor=st.integers(1, 8),
    n=st.integers(1, 4),
    capacity=st.integers(360, 2500),
    slots=st.integers(1, 40),
    price=st.sampled_from([0.5, 10.0, 1e3]),
    start_s=st.sampled_from([0.0, 0.5]),
    move_s=st.sampled_from([0.0, 1e-4]),
    kv_bytes=st.sampled_from([1e5, 2e6]),
    deaths=st.integers(0, 3),
)
def test_event_jump_equals_token_by_token(
    seed, actors, reserve, per_actor, n, capacity, slots, price, start_s, move_s, kv_bytes, deaths
):
    """Every response once, tokens conserved, the same times: under starts, promotions, merges, deaths, want of KV."""
    spec = Elastic(price, terms(actors, reserve, start_s=start_s, move_s=move_s)).spec
    run = both(
        seed, actors=actors, prompts=actors * per_actor, n=n, capacity=capacity, slots=slots, caching=True, spec=spec,
        kv_bytes=kv_bytes, deaths=deaths, reserve=reserve,
    )  # fmt: skip
    assert_equal(*run)


def test_the_cases_promote():
    """The comparison above means something only if its cases do what it is about."""
    used = died = 0
    for seed in range(24):
        spec = Elastic(100.0, terms(4, 2, start_s=0.3)).spec
        run = both(
            seed, actors=4, prompts=24, n=2, capacity=2500, slots=40, caching=True, spec=spec, deaths=2, reserve=2
        )
        assert_equal(*run)
        used += any(actor.engine.generated_tokens > 0 for actor in run[0].ledger.reserve)
        died += any(actor.dead for actor in run[0].ledger.reserve)
    assert used > 12
    assert died > 2


TERMS = terms(2)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"reserve": ints([3])}, "a reserve must name some, not all, of the actors, each once"),
        ({"reserve": ints([2, 2])}, "a reserve must name some, not all, of the actors, each once"),
        ({"reserve": ints([0, 1, 2])}, "a reserve must name some, not all, of the actors, each once"),
        ({"reserve": ints([1, 2])}, "a reserve must be of one size, and all other actors too"),
        ({"start_s": np.inf}, "start_s inf must be a finite number of seconds, at least 0"),
        ({"start_s": -1.0}, "start_s -1.0 must be a finite number of seconds, at least 0"),
    ],
)
def test_a_reserve_that_it_cannot_weigh_is_refused(changed, what):
    with pytest.raises(InputError, match=f"^elastic: {what}$"):
        Elastic(1.0, replace(TERMS, **changed))


def planned(preset: str, sizes: tuple[str, ...], gpus: int, cap: int = 2048, epochs: int = 2, samples: int = 4):
    """Setting with actors of several sizes, steps, and what `elastic` makes of them."""
    trace = synthesize(
        preset, prompts=128, epochs=epochs, responses_per_prompt=samples, max_response_tokens=cap,
        prompts_per_step=128, seed=0, algorithm="grpo",
    )  # fmt: skip
    first, *others = map(load, sizes)
    cluster = Cluster.uniform(first.data.gpu, gpus)
    setting = Setting(profile=first, cluster=cluster, usd_per_gpu_hour=1.0, profiles=tuple(others))
    recorded = list(steps(trace))
    return setting, recorded, simulate("elastic", recorded, setting)


def test_a_plan_keeps_a_reserve_only_where_the_rule_names_it():
    """On GPUs of its own; used, it is warm in the next step."""
    _, _, run = planned("livecodebench", ("qwen2.5-7b_l40s_tp2", "qwen2.5-7b_l40s_tp4"), 16)
    plan, report = run.records[1].plan, run.records[1].report
    assert plan.migration is not None
    assert plan.migration.terms is not None
    (number,) = plan.migration.terms.reserve.tolist()
    actor = plan.actors[number]
    assert number == len(plan.actors) - 1
    assert (actor.tp, actor.responses.size, plan.sizes) == (4, 0, (2, 4))
    begin = {gpu for gpus in plan.placement.decode[:-1] for gpu in gpus}
    assert begin.isdisjoint(plan.placement.decode[-1])
    assert plan.migration.terms.start_s < 3.0
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    (life,) = [one for one in report.invocations if one.function == "decode" and one.gpus == plan.placement.decode[-1]]
    activities = [span.activity for span in life.spans]
    assert activities[:2] == ["start-up", "wait-weights"]
    assert activities[-1] == "decode"
    woken, loaded = (span.end_s - span.start_s for span in life.spans[:2])
    data = load("qwen2.5-7b_l40s_tp4").data
    assert woken == pytest.approx(data.warm_start_s)
    assert loaded >= data.weight_bytes / GPUS["l40s"].network_bytes_per_s, "weights are sent when it is there"
    assert life.start_s > 1.0, "not before it is asked for"
    assert (report.actor == number).sum() > 1
    assert report.end_s[report.actor == number].max() == report.end_s.max()

    with pytest.raises(PlanError, match="an actor without responses"):
        replace(plan, migration=None).check()
    others = replace(plan.migration.terms, reserve=ints([0]))
    with pytest.raises(PlanError, match="an actor without responses"):
        replace(plan, migration=replace(plan.migration, terms=others)).check()
    both_of_them = replace(plan.migration.terms, reserve=ints([0, number]))
    with pytest.raises(PlanError, match="a reserve actor that does not exist, or has responses"):
        replace(plan, migration=replace(plan.migration, terms=both_of_them)).check()


def test_with_one_size_nothing_is_in_reserve():
    """Nor where all other sizes are smaller: they change nothing."""
    setting, recorded, run = planned("gpqa", ("qwen2.5-7b_l40s_tp2", "qwen2.5-7b_l40s_tp1"), 16)
    alone = simulate("elastic", recorded, replace(setting, profiles=()))
    for ours, single in zip(run.records, alone.records, strict=True):
        assert ours.plan.to_json() == single.plan.to_json()
        assert ours.plan.sizes == (2,)
        assert ours.plan.migration.terms.reserve.size == 0


def test_a_step_begins_on_larger_actors_where_these_do_better():
    """Seven bytes of weights a GPU read twice as quickly: two GPUs an actor cost no more, and take half the time."""
    _, _, run = planned("gpqa", ("qwen2.5-7b_l40s_tp1", "qwen2.5-7b_l40s_tp2"), 16)
    assert run.records[1].plan.actors[0].tp == 2


@pytest.mark.parametrize(
    ("sizes", "preset", "gpus", "cap"),
    [
        (("qwen2.5-3b_l40s_tp1", "qwen2.5-3b_l40s_tp2"), "livecodebench", 16, 2048),
        (("qwen2.5-7b_l40s_tp2", "qwen2.5-7b_l40s_tp4"), "livecodebench", 16, 2048),
        (("llama-2-70b_h100_sxm_tp2", "llama-2-70b_h100_sxm_tp8"), "long-reasoning", 160, 8192),
    ],
)
def test_larger_sizes_make_elastic_faster_and_cheaper(sizes, preset, gpus, cap):
    """Than the paper's policy, and than itself without them, in time and in what decode actors hold and use."""
    setting, recorded, ours = planned(preset, sizes, gpus, cap, epochs=3)
    alone = replace(setting, profiles=())
    for other in (simulate(name, recorded, alone) for name in ("rlhfless", "elastic")):
        for quantity in ("generation_s", "decode_executed_gpu_s"):
            assert getattr(ours.summary, quantity).mean < 0.99 * getattr(other.summary, quantity).mean
        held = [run.summary.bill.function("decode").held_gpu_s for run in (ours, other)]
        assert held[0] < held[1]
    errors = [abs(r.plan.estimate.generation_s / r.report.phase_s("generation") - 1) for r in ours.records[1:]]
    assert np.median(errors) < 0.15
