"""Laws of the planner over random steps, clusters and policies."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless import driver
from rlhfless.errors import InfeasibleError, InputError, RlhflessError
from rlhfless.scheduler import gather
from rlhfless.scheduler.dedup import new_tokens, shared_prefix
from rlhfless.scheduler.planner import PREWARM_BUFFER_S, Planner
from rlhfless.scheduler.policies import POLICIES, Policy, policy
from rlhfless.types import report as reports
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.plan import Plan
from rlhfless.types.report import Counters, Invocation, Phase, Span, StepReport
from rlhfless.types.workload import Workload
from tests.profiles import tiny_profile

PHASES = ("generation", "preparation", "learning")


@dataclass(frozen=True)
class Told:
    """An estimator that is told the lengths."""

    lengths: FloatArray

    def estimate(self, workload: Workload) -> FloatArray:
        return self.lengths

    def observe(self, report: StepReport) -> None:
        """Learns nothing."""


def step(
    seed: int = 0, prompts: int = 24, n: int = 2, *, ids: bool = False, number: int = 0, **more: object
) -> Workload:
    """A random step: prompts of up to 60 tokens with a header of 6, responses of up to 200."""
    rng = np.random.default_rng(seed)
    tokens = ints(rng.integers(6, 60, prompts))
    known = tuple(ints(np.concatenate([np.arange(6), rng.integers(0, 3, size - 6)])) for size in tokens.tolist())
    fields: dict[str, object] = {
        "step": number,
        "epoch": 0,
        "algorithm": "ppo",
        "prompt_ids": np.arange(prompts),
        "prompt_tokens": tokens,
        "responses_per_prompt": n,
        "max_response_tokens": 200,
        "reference_tokens": ints(np.clip(rng.gamma(2.0, 40.0, prompts), 1, 200)),
        "prompts": known if ids else None,
        "common_prefix_tokens": 0 if ids else 6,
    }
    return Workload(**(fields | more))  # type: ignore[arg-type]


def idle(gpus: int) -> ClusterState:
    """All GPUs free."""
    return ClusterState(time_s=0.0, free_gpus=ints(range(gpus)))


def cluster(gpus: int = 16) -> Cluster:
    return Cluster.uniform("l40s", gpus)


def report_of(plan: Plan, workload: Workload, tokens: IntArray, durations: tuple[float, float, float]) -> StepReport:
    """A report with the given lengths and phases; what planners do not read is left at its least."""
    ends = np.cumsum(durations)
    responses = workload.responses
    return StepReport(
        schema=reports.SCHEMA,
        policy=plan.policy,
        step=plan.step,
        epoch=plan.epoch,
        start_s=0.0,
        prompt_ids=workload.prompt_ids,
        responses_per_prompt=workload.responses_per_prompt,
        tokens=tokens,
        first_s=floats(np.zeros(responses)),
        end_s=floats(np.zeros(responses)),
        actor=ints(np.zeros(responses)),
        moves=ints(np.zeros(responses)),
        invocations=(),
        phases=tuple(
            Phase(name=name, start_s=float(end - took), end_s=float(end))
            for name, end, took in zip(PHASES, ends, durations, strict=True)
        ),
        reserved_gpus=0,
        counters=Counters(
            prefill_tokens=0,
            decode_prefill_tokens=0,
            recomputed_tokens=0,
            decoded_tokens=0,
            preemptions=0,
            cuts=0,
            moves=0,
            failures=0,
            moved_kv_bytes=0.0,
        ),
    )


requests = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "prompts": st.integers(1, 40),
        "n": st.integers(1, 4),
        "ids": st.booleans(),
        "algorithm": st.sampled_from(["ppo", "grpo"]),
        "number": st.integers(0, 9),
    }
)
fleets = st.tuples(st.integers(1, 24), st.sampled_from([1, 2, 4]), st.sampled_from([300, 1000, 10**6]))
"""GPUs, tp, KV capacity in tokens."""
options = st.fixed_dictionaries(
    {
        "weight": st.floats(0, 1),
        "seed": st.integers(0, 99),
        "hosting": st.sampled_from([None, "serverless", "colocated", "split"]),
        "start": st.sampled_from([None, "cold", "prewarmed"]),
        "learner_gpus": st.sampled_from([None, 1, 4]),
    }
)


@given(st.sampled_from(sorted(POLICIES)), requests, fleets, options)
@settings(deadline=None, max_examples=300)
def test_every_plan_holds_its_laws(
    name: str, request: dict[str, object], fleet: tuple[int, int, int], option: dict[str, object]
) -> None:
    gpus, tp, capacity = fleet
    workload = step(**request)  # type: ignore[arg-type]
    profile = tiny_profile(tp=tp, kv_capacity_tokens=capacity)
    made: list[Plan] = []
    refused: InfeasibleError | None = None
    for _ in range(2):
        try:
            made.append(Planner(name, profile, cluster(gpus), **option).plan(workload, idle(gpus)))  # type: ignore[arg-type]
        except InfeasibleError as error:
            refused = error
    if refused is not None:
        assert not made
        assert "\n" not in str(refused)
        split = (option["hosting"] or POLICIES[name].hosting) == "split"
        assert tp > gpus or int(option["learner_gpus"] or 0) > gpus or split  # type: ignore[call-overload]
        return
    plan = made[0]
    plan.check()
    text = plan.to_json()
    assert Plan.from_json(text).to_json() == text
    assert made[1].to_json() == text, "the same seed gives the same bytes"
    if POLICIES[name].assignment == "sorted-even":
        assert (np.diff(plan.estimate.decode_s) <= 0).all(), "the heaviest actor first"
    assert all(actor.slots <= profile.data.max_slots for actor in plan.actors)
    if POLICIES[name].assignment != "dealt":  # whose estimate knows that responses change actor
        assert plan.estimate.generation_s >= plan.estimate.decode_s[0]
    for actor in plan.actors:
        asked = workload.prompt_tokens[actor.responses // workload.responses_per_prompt]
        assert (actor.prefill_tokens <= asked).all()
    table = plan.candidates
    rule = POLICIES[name]
    assert (table is not None) == rule.scale or rule.assignment != "sorted-even"
    assert (plan.frontier is not None) == (rule.assignment == "frontier")
    if table is not None and rule.assignment == "sorted-even":
        assert table.actors[table.chosen] == len(plan.actors)
        some = table.eligible if table.eligible.any() else np.ones_like(table.eligible)
        assert table.score[table.chosen] == table.score[some].min()
        hides = any("no number of actors hides" in note for note in plan.notes)
        assert hides == (not table.eligible.any())


@pytest.mark.parametrize(("capacity", "ids", "within"), [(300, False, 1e-9), (10**6, True, 1e-9), (300, True, 1e-3)])
def test_rows_equal_the_plans_with_that_number_of_actors(capacity: int, ids: bool, within: float) -> None:
    """Where actors prefill the rest of prompts of known ids, rows do not look for what those have in common."""
    profile, workload = tiny_profile(tp=2, kv_capacity_tokens=capacity), step(ids=ids)
    table = Planner("rlhfless", profile, cluster(), learner_gpus=4).plan(workload, idle(16)).candidates
    assert table is not None
    assert table.actors.tolist() == list(range(1, 9))
    for row, actors in enumerate(table.actors.tolist()):
        got = Planner("dp+pa", profile, cluster(), actors=actors, learner_gpus=4).plan(workload, idle(16)).estimate
        assert got.decode_s[0] == pytest.approx(table.time_s[row], rel=within)
        starts_gpu_s = actors * profile.data.tp * profile.data.warm_start_s
        assert got.decode_gpu_s + starts_gpu_s == pytest.approx(table.cost_gpu_s[row], rel=within)
        late = (got.ready_s + got.kv_s + got.decode_s)[1:]
        slack = got.prefill_s + got.decode_s[0] - late.max(initial=-np.inf) if late.size else 0.0
        assert slack == pytest.approx(table.hiding_slack_s[row], abs=10 * within)


def test_a_process_that_must_start_anew_is_late_and_costs_more() -> None:
    """After a step on two actors, any third one starts anew: its start is in the cost and in the hiding condition."""
    profile, workload = tiny_profile(), step()
    planner = Planner("rlhfless", profile, cluster(), max_actors=2)
    plan = planner.plan(workload, idle(16))
    report = report_of(plan, workload, ints(np.full(workload.responses, 50)), (3.0, 2.0, 1.0))
    ran = (Span(activity="decode", start_s=0.0, end_s=3.0),)
    decode = (Invocation(function="decode", index=i, gpus=g, spans=ran) for i, g in enumerate(plan.placement.decode))
    planner.observe(replace(report, invocations=tuple(decode)))
    wide = Planner("rlhfless", profile, cluster())
    wide._starts = planner._starts
    table, fresh = wide.plan(workload, idle(16)).candidates, Planner("rlhfless", profile, cluster())
    before = fresh.plan(workload, idle(16)).candidates
    assert table is not None
    assert before is not None
    kept = int(planner._starts.kept[profile.data.tp].sum())
    extra = profile.data.cold_start_s - profile.data.warm_start_s
    expected = np.maximum(table.actors - kept, 0) * extra
    np.testing.assert_allclose(table.cost_gpu_s - before.cost_gpu_s, expected, atol=1e-9)
    late_s = profile.data.cold_start_s - 1.0 - PREWARM_BUFFER_S
    new = table.actors > kept
    assert (table.hiding_slack_s[new] < before.hiding_slack_s[new] - late_s / 2).all()
    np.testing.assert_allclose(table.hiding_slack_s[~new], before.hiding_slack_s[~new])


def test_many_candidates_are_searched_and_each_row_is_exact() -> None:
    profile, gpus = tiny_profile(kv_capacity_tokens=10**6), 4096
    workload = step(prompts=30_000, n=1)
    plan = Planner("rlhfless", profile, cluster(gpus), estimator=Told(_distinct(30_000))).plan(workload, idle(gpus))
    table = plan.candidates
    assert table is not None
    assert 20 <= table.actors.size < 1000
    assert (table.actors[0], table.actors[-1]) == (1, gpus)
    for row in (0, table.chosen, table.actors.size // 2):
        fixed = Planner(
            "dp+pa", profile, cluster(gpus), actors=int(table.actors[row]), estimator=Told(_distinct(30_000))
        )
        assert fixed.plan(workload, idle(gpus)).estimate.decode_s[0] == pytest.approx(table.time_s[row], rel=1e-9)


def _distinct(prompts: int) -> FloatArray:
    return floats(np.random.default_rng(1).uniform(1, 200, prompts))


def test_weight_1_is_fastest_and_weight_0_is_cheapest() -> None:
    profile, workload = tiny_profile(), step()
    for weight, column in ((1.0, "time_s"), (0.0, "cost_gpu_s")):
        table = Planner("rlhfless", profile, cluster(), weight=weight).plan(workload, idle(16)).candidates
        assert table is not None
        assert getattr(table, column)[table.chosen] == getattr(table, column)[table.eligible].min()


def test_bounds_on_the_number_of_actors() -> None:
    planner = Planner("rlhfless", tiny_profile(), cluster(), min_actors=3, max_actors=5)
    table = planner.plan(step(), idle(16)).candidates
    assert table is not None
    assert table.actors.tolist() == [3, 4, 5]


@pytest.mark.parametrize("ids", [True, False])
def test_prefill_of_actors(ids: bool) -> None:
    """Nothing where the prefill actor computes all; what the prefix cache lacks; everything without one."""
    profile, workload = tiny_profile(kv_capacity_tokens=10**6), step(ids=ids)
    whole = Planner("dp", profile, cluster(), actors=3).plan(workload, idle(16))
    assert whole.prefill is not None
    assert sum(int(actor.prefill_tokens.sum()) for actor in whole.actors) == 0
    cached = Planner("raw", profile, cluster(), actors=3).plan(workload, idle(16))
    assert cached.prefill is None
    if workload.prompts is not None:
        for actor in cached.actors:
            expected = new_tokens(workload.prompts, actor.responses // 2)
            np.testing.assert_array_equal(actor.prefill_tokens, expected)
    bare = Planner(replace(policy("raw"), prefix_caching=False), profile, cluster(), actors=3)
    every = sum(int(actor.prefill_tokens.sum()) for actor in bare.plan(workload, idle(16)).actors)
    assert every == 2 * int(workload.prompt_tokens.sum())


def test_prefill_actor_of_small_capacity_leaves_the_rest_to_decode() -> None:
    profile, workload = tiny_profile(kv_capacity_tokens=300), step(ids=True, prompts=40)
    plan = Planner("dp", profile, cluster(), actors=3, learner_gpus=1).plan(workload, idle(16))
    assert plan.prefill is not None
    length = plan.prefill.prefix_tokens
    assert length < workload.prompt_tokens.max()
    for actor in plan.actors:
        rest = np.maximum(workload.prompt_tokens[actor.responses // 2] - length, 0)
        assert (actor.prefill_tokens <= rest).all()
        assert actor.prefill_tokens.sum() > 0


def test_prefill_capacity_counts_the_replicas_on_the_learner() -> None:
    profile, workload = tiny_profile(kv_capacity_tokens=300, tp=2), step(ids=True, prompts=40)
    assert workload.prompts is not None
    for gpus, replicas in ((1, 1), (2, 1), (9, 4)):
        got = Planner("dp", profile, cluster(), learner_gpus=gpus).plan(workload, idle(16)).prefill
        expected = shared_prefix(workload.prompts, replicas * 300 // int(workload.prompt_tokens.max()))
        assert got is not None
        assert (got.prefix_tokens, got.distinct, got.waves) == (
            expected.prefix_tokens,
            expected.distinct,
            expected.waves,
        )


def test_history_moves_long_prompts_together() -> None:
    workload, planner = step(prompts=8, n=1), Planner("dp+pa", tiny_profile(), cluster(), actors=2)
    plan = planner.plan(workload, idle(16))
    tokens = ints([10, 150, 10, 150, 10, 150, 10, 150])
    planner.observe(report_of(plan, workload, tokens, (3.0, 2.0, 1.0)))
    later = planner.plan(replace(workload, step=1, epoch=1), idle(16))
    assert sorted(later.actors[0].responses.tolist()) == [1, 3, 5, 7]


def test_prewarm_is_the_shortest_past_plus_a_buffer() -> None:
    workload, planner = step(), Planner("rlhfless", tiny_profile(), cluster())
    plan = planner.plan(workload, idle(16))
    expected = plan.estimate.generation_s + PREWARM_BUFFER_S
    assert {each.function: each.ready_after_s for each in plan.prewarm} == {
        "reward": expected,
        "reference": expected,
        "critic": expected,
        "learner": PREWARM_BUFFER_S,
    }
    tokens = ints(np.full(workload.responses, 50))
    for durations in ((9.0, 2.0, 4.0), (7.0, 3.0, 5.0)):
        planner.observe(report_of(plan, workload, tokens, durations))
    later = planner.plan(workload, idle(16))
    assert [(each.function, each.ready_after_s - PREWARM_BUFFER_S) for each in later.prewarm] == [
        ("prefill", 4.0),
        ("decode", 4.0),
        ("reward", 7.0),
        ("reference", 7.0),
        ("critic", 7.0),
        ("learner", 2.0),
    ]


@pytest.mark.parametrize(("name", "start"), [("rlhfless", "cold"), ("verl", None)])
def test_nothing_is_asked_for_ahead_where_starts_are_cold_or_gpus_reserved(name: str, start: str | None) -> None:
    planner = Planner(name, tiny_profile(), cluster(), start=start)  # type: ignore[arg-type]
    assert planner.plan(step(), idle(16)).prewarm == ()


def test_shuffle_depends_on_seed_and_step_alone() -> None:
    planner = Planner("raw", tiny_profile(), cluster(), seed=5)
    first, second = (planner.plan(step(number=number), idle(16)) for number in (0, 1))
    assert [a.responses.tolist() for a in first.actors] != [a.responses.tolist() for a in second.actors]
    fresh = Planner("raw", tiny_profile(), cluster(), seed=5).plan(step(number=1), idle(16))
    assert fresh.to_json() == second.to_json()
    other = Planner("raw", tiny_profile(), cluster(), seed=6).plan(step(number=1), idle(16))
    assert other.to_json() != fresh.to_json()


def test_fewer_free_gpus_are_planned_around() -> None:
    planner = Planner("dp+pa", tiny_profile(tp=2), cluster(), learner_gpus=2)
    assert len(planner.plan(step(), idle(16)).actors) == 8
    left = ClusterState(time_s=1.0, free_gpus=ints([0, 1, 2, 5, 6, 7, 9, 10, 11]))
    plan = planner.plan(step(), left)
    assert {gpu for gpus in plan.placement.decode for gpu in gpus} == {0, 1, 2, 5, 6, 7, 9, 10}
    assert "8 of 9 GPUs usable by actors of 2" in plan.notes


def test_a_learner_that_does_not_fit_is_noted() -> None:
    plan = Planner("rlhfless", tiny_profile(parameters=70e9), cluster()).plan(step(), idle(16))
    assert any("do not hold the training state" in note for note in plan.notes)


def test_unhidden_transfers_are_noted() -> None:
    plan = Planner("rlhfless", tiny_profile(weight_bytes=1e15), cluster(), min_actors=4).plan(step(), idle(16))
    assert any("no number of actors hides" in note for note in plan.notes)


def test_migration_rules_of_the_policies() -> None:
    kinds = {}
    for name in POLICIES:
        plan = Planner(name, tiny_profile(), cluster(), tau=0.6).plan(step(), idle(16))
        kinds[name] = (plan.migration.kind, plan.migration.value) if plan.migration is not None else None
    assert kinds["rlhfless"] == kinds["dp+pa"] == ("cut-and-migrate", 0.6)
    assert kinds["rlhfuse"] is not None
    assert kinds["rlhfuse"][0] == "global-cut"
    assert kinds["rlhfuse"][1] in np.ceil(gather.SHARES * 48)  # responses
    assert {name for name, kind in kinds.items() if kind is None} >= {"verl", "verl-lif", "verl-split", "raw", "dp"}
    assert kinds["frontier"] is None or kinds["frontier"][0] == "elastic"  # a single actor has none to move to


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("nothing", {}, "unknown policy 'nothing': known are verl, "),
        ("oracle:nothing", {}, "unknown policy 'oracle:nothing'"),
        ("oracle:rlhfless", {}, "oracle:rlhfless needs an estimator that knows the true lengths"),
        ("rlhfless", {"weight": 1.5}, r"lambda 1\.5: .* must lie in 0\.\.1"),
        ("rlhfless", {"tau": 0.0}, r"tau 0\.0 must be above 0"),
        ("rlhfless", {"window": 0}, "window 0 must be at least 1"),
        ("rlhfless", {"actors": 3}, "policy rlhfless chooses the number of actors"),
        ("rlhfless", {"min_actors": 0}, "need 1 <= min_actors"),
        ("rlhfless", {"min_actors": 3, "max_actors": 2}, "actors from 3 to 2"),
        ("raw", {"actors": 0}, "actors 0 must be at least 1"),
        ("raw", {"learner_gpus": 0}, "learner_gpus 0 must be at least 1"),
        ("raw", {"learner_gpus": 17}, "the learner needs 17 GPUs, the cluster has 16"),
        ("raw", {"actors": 9}, r"policy raw: 9 decode actors asked for, 8 fit \(room for 8 of 2 GPUs, 24 prompts\)"),
        ("rlhfless", {"min_actors": 9}, "9 decode actors asked for, 8 fit"),
        ("raw", {"hosting": "split", "learner_gpus": 16}, "beside the learner's 16"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(name: str, given: dict[str, object], match: str) -> None:
    with pytest.raises(RlhflessError, match=match) as caught:
        Planner(name, tiny_profile(tp=2), cluster(), **given).plan(step(), idle(16))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_fewer_prompts_than_positions_limit_the_actors() -> None:
    with pytest.raises(InfeasibleError, match=r"4 decode actors asked for, 3 fit \(room for 16 of 1 GPUs, 3 prompts\)"):
        Planner("raw", tiny_profile(), cluster(), actors=4).plan(step(prompts=3), idle(16))
    assert len(Planner("raw", tiny_profile(), cluster()).plan(step(prompts=3), idle(16)).actors) == 3


def test_profile_of_another_gpu() -> None:
    with pytest.raises(InputError, match="profile tiny is of GPU h100_sxm, the cluster has l40s"):
        Planner("raw", tiny_profile(gpu="h100_sxm"), cluster())


def test_responses_that_exceed_the_kv_cache() -> None:
    with pytest.raises(InfeasibleError, match="exceed the KV cache of 100 tokens"):
        Planner("raw", tiny_profile(kv_capacity_tokens=100), cluster()).plan(step(), idle(16))


def test_no_free_gpu() -> None:
    with pytest.raises(InfeasibleError, match="the learner needs 1 GPUs, 0 of 16 are free"):
        Planner("raw", tiny_profile(), cluster()).plan(step(), ClusterState(time_s=0.0, free_gpus=ints([])))


def test_estimator_of_the_wrong_shape() -> None:
    with pytest.raises(InputError, match="a finite length for each prompt"):
        Planner("raw", tiny_profile(), cluster(), estimator=Told(floats([1.0, 2.0]))).plan(step(), idle(16))


def test_scaling_needs_sorted_prompts() -> None:
    odd: Policy = replace(policy("rlhfless"), name="odd", assignment="shuffled-even")
    with pytest.raises(InputError, match="policy odd: scaling needs sorted-even"):
        Planner(odd, tiny_profile(), cluster())


def test_oracle_policies_are_labelled() -> None:
    planner = Planner("oracle:dp+pa", tiny_profile(), cluster(), estimator=Told(floats(np.arange(1.0, 25.0))))
    plan = planner.plan(step(n=1), idle(16))
    assert plan.policy == "oracle:dp+pa"
    assert plan.actors[0].responses[0] == 23


@dataclass
class Recorder:
    """An executor that answers every plan with the same durations and notes what it was asked."""

    calls: list[str] = field(default_factory=list)

    def snapshot(self) -> ClusterState:
        self.calls.append("snapshot")
        return idle(16)

    def execute(self, plan: Plan, workload: Workload) -> StepReport:
        self.calls.append(f"execute {plan.step}")
        return report_of(plan, workload, ints(np.full(workload.responses, 50)), (5.0, 2.0, 1.0))

    def close(self) -> None:
        self.calls.append("close")


def test_driver_plans_each_step_with_what_the_ones_before_taught() -> None:
    executor = Recorder()
    steps: Iterator[Workload] = (step(number=number, seed=number) for number in range(3))
    records = list(driver.run(Planner("rlhfless", tiny_profile(), cluster()), executor, steps))
    assert executor.calls == [f"{call}" for i in range(3) for call in ("snapshot", f"execute {i}")]
    assert [record.plan.step for record in records] == [record.report.step for record in records] == [0, 1, 2]
    assert "decode" not in {each.function for each in records[0].plan.prewarm}
    assert "decode" in {each.function for each in records[1].plan.prewarm}
    assert all(record.planning_s > 0 for record in records)
