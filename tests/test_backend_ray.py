"""Plans on real engines: the same plans and the same laws as in simulation, and outputs that no cut changes."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.ray_executor import RayExecutor
from rlhfless.accounting.billing import bill
from rlhfless.driver import StepRecord
from rlhfless.errors import InfeasibleError, InputError, PlanError, RlhflessError
from rlhfless.rng import stream
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import ints
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan, Prewarm
from rlhfless.types.profile import Profile
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World
from tests import ray_steps
from tests.ray_steps import (
    BLOCK,
    CLUSTER,
    GPUS,
    HEADER,
    alive,
    assert_gone,
    execute_until_cut,
    lengths,
    long_tails,
    plan,
    real,
    workload,
)
from tests.step_engines import EOS, Child, reference
from tests.test_laws import check_bill, check_causality, check_delivery, check_gpus

pytestmark = [pytest.mark.slow, real]
POLICIES = ("raw", "dp", "dp+pa", "rlhfless", "rlhfuse")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("run")
    with ray_steps.executor(tiny_model, folder) as made:
        yield made
    assert not list(folder.iterdir()), "something is left in the run's folder"


@pytest.fixture
def executor(cluster: Any) -> Iterator[Any]:
    """The module's executor; what a test changes of it is put back."""
    before = cluster.config
    yield cluster
    cluster.config, cluster.lengths, cluster.rewards = before, None, None


def simulated(made: Plan, work: Workload, outcome_of: Callable[[Workload], Outcome] = lengths) -> StepReport:
    world = World(profile=ray_steps.profile(), outcome_of=outcome_of)
    return SimExecutor(cluster=CLUSTER, world=world).execute(made, work)


def check(made: Plan, report: StepReport, outcome: Outcome) -> None:
    """The laws that hold for every step, simulated or real."""
    record = StepRecord(plan=made, report=report, planning_s=0.0)
    check_delivery(record, outcome)
    check_gpus(report, GPUS)
    check_bill(report)
    check_causality(record)
    assert StepReport.from_json(report.to_json()).to_json() == report.to_json()


UNEVEN = [
    (10, 1),
    (10, 31),
    (32, 0),
    (33, 0),
    (40, 40),
    (64, 5),
    (64, 32),
    (65, 0),
    (96, 1),
    (96, 64),
    (150, 9),
    (150, 9),
]
"""(tokens shared with others, own) of prompts."""


@pytest.mark.parametrize("policy", ["raw", "dp"])
def test_the_plan_says_what_engines_compute_of_prompts_of_any_length(executor: Any, policy: str) -> None:
    """Block by block: prompts that end within blocks and part within them, of which some are computed twice."""
    work, rng = workload(29, n=3), stream(5, "uneven", 0)
    ids = rng.integers(5, 90, 200)
    uneven = [np.concatenate([ids[:shared], rng.integers(5, 90, own)]) for shared, own in UNEVEN]
    work = replace(work, prompts=tuple(map(ints, uneven)), prompt_tokens=ints([prompt.size for prompt in uneven]))
    blocks = Profile(data=replace(ray_steps.profile().data, kv_block_tokens=BLOCK))
    planner = Planner(policy, blocks, CLUSTER, learner_gpus=1, actors=2)
    made = planner.plan(work, executor.snapshot())
    executor.lengths = lengths
    if policy == "raw":  # no actor finds what another has computed
        executor.config = replace(executor.config, kv="none")
    counters = executor.execute(made, work).counters
    own = np.zeros(work.responses, dtype=np.int64)
    for actor in made.actors:
        own[actor.responses] = actor.prefill_tokens
    assert counters.decode_prefill_tokens == own.sum()
    assert counters.prefill_tokens == (0 if made.prefill is None else made.prefill.computed_tokens)
    cached = np.array([one.cached_tokens for one in executor.results])
    assert (cached + own == np.repeat(work.prompt_tokens, 3)).all()
    single = ray_steps.plan(policy, work)
    assert counters.decode_prefill_tokens > sum(actor.prefill_tokens.sum() for actor in single.actors)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_keeps_the_laws_in_simulation_and_on_engines(executor: Any, policy: str) -> None:
    work = workload(POLICIES.index(policy))
    made = plan(policy, work)
    executor.lengths, executor.rewards = long_tails(made, work), lambda _, results: [len(one.tokens) for one in results]
    outcome, version = executor.lengths(work), executor.weight_version
    twin, report = simulated(made, work, executor.lengths), executor.execute(made, work)
    for each in (twin, report):
        check(made, each, outcome)
    assert report.tokens.tolist() == twin.tokens.tolist() == executor.scores.tolist()
    functions, same = ({(i.function, i.gpus) for i in each.invocations} for each in (report, twin))
    assert functions == {(function, gpus) for function, gpus in same if function != "reference"}
    for number, one in enumerate(executor.results):
        assert one.weight_version == version
        assert one.logprobs.shape == one.tokens.shape == (report.tokens[number],)
        assert (one.logprobs <= 0).all()
    assert executor.weight_version == str(int(version) + 1)
    assert not report.counters.failures
    assert report.counters.preemptions == 0
    if made.migration is not None:
        report = execute_until_cut(executor, made, work)
        check(made, report, outcome)
        assert report.counters.cuts == 1
        assert report.counters.moves == report.moves.sum() > 0
        if made.prefill is None:  # else a target that has prefilled finds the prompts in its own cache
            assert report.counters.moved_kv_bytes > 0


def test_each_distinct_prefix_is_computed_once_over_all_actors(executor: Any) -> None:
    """By vLLM's own count: whole blocks are shared, so each response is left with the one token beyond them."""
    work = workload(20)
    executor.lengths = lengths
    made = plan("dp", work)
    counters = executor.execute(made, work).counters
    assert made.prefill is not None
    assert work.prompts is not None
    distinct = {tuple(prompt.tolist()) for prompt in work.prompts}
    assert len(distinct) == made.prefill.distinct == 8
    once = HEADER + sum(len(prompt) - HEADER for prompt in distinct)
    assert counters.prefill_tokens == once
    assert counters.decode_prefill_tokens == work.responses
    assert counters.recomputed_tokens == 0
    cached = [one.cached_tokens for one in executor.results]
    assert cached == [int(work.prompt_tokens[response // 2]) - 1 for response in range(work.responses)]
    executor.execute(plan("raw", work), work)
    assert min(one.cached_tokens for one in executor.results) == 0


def test_greedy_responses_equal_transformers_whatever_is_cut(executor: Any, beside: Child, tiny_model: Path) -> None:
    work = workload(21)
    executor.config = replace(executor.config, temperature=0.0)
    execute_until_cut(executor, plan("dp+pa", work, tau=0.05), work)
    assert work.prompts is not None
    prompts = [prompt.tolist() for prompt in work.prompts]
    expected = beside(reference, tiny_model, prompts, work.max_response_tokens)
    for number, one in enumerate(executor.results):
        assert one.tokens.tolist() == expected[number // work.responses_per_prompt][0]
        assert one.finish_reason == ("stop" if one.tokens[-1] == EOS else "length")
    assert {one.finish_reason for one in executor.results} == {"stop", "length"}


def test_sampled_responses_are_the_same_whatever_is_cut_and_wherever_they_run(executor: Any) -> None:
    work = workload(22, n=3, cap=120)
    for policy, tau in (("dp+pa", 0.05), ("dp+pa", 0.5), ("rlhfuse", 0.3)):
        made = plan(policy, work, tau=tau)
        executor.lengths = long_tails(made, work)
        whole = executor.execute(plan("raw", work, actors=1), work)
        expected = executor.results
        assert whole.counters.moves == 0
        report = execute_until_cut(executor, made, work)
        for one, other in zip(executor.results, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.finish_reason == other.finish_reason
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-3
        assert report.tokens.tolist() == whole.tokens.tolist()
        assert report.counters.decoded_tokens == whole.counters.decoded_tokens
    executor.lengths = None
    executor.execute(plan("raw", work, actors=1), work)
    first, second, third = (tuple(one.tokens.tolist()) for one in executor.results[:3])
    assert len({first, second, third}) == 3  # three samples of one prompt
    again = workload(23, n=3, cap=120)
    executor.execute(plan("raw", again, actors=1), again)
    assert tuple(executor.results[0].tokens.tolist()) != first


def test_no_more_than_the_slots_of_the_plan_run_at_once(executor: Any) -> None:
    work = workload(24)
    made = plan("raw", work, actors=1)
    executor.lengths = lambda _: Outcome(response_tokens=ints(np.full((12, 2), 10)))
    narrow = replace(made, actors=(replace(made.actors[0], slots=3),))
    report = executor.execute(narrow, work)
    ends, starts = np.sort(report.end_s), np.sort(report.first_s)
    assert (starts[3:] >= ends[:-3]).all()  # each found a slot that another had left
    assert set(np.argsort(report.first_s)[:3].tolist()) == set(made.actors[0].responses[:3].tolist())


def test_reserved_actors_are_held_to_the_end_of_generation(executor: Any) -> None:
    work = workload(26)
    executor.lengths = lengths
    made = replace(plan("verl", work), prefix_caching=True)  # so that the engines that there are serve
    report = executor.execute(made, work)
    check(made, report, lengths(work))
    assert report.reserved_gpus == simulated(made, work).reserved_gpus > 0
    end_s = report.phases[0].end_s
    assert all(one.end_s >= end_s for one in report.invocations if one.function == "decode")


def test_warm_processes_are_woken_and_cold_ones_end_with_the_step(executor: Any) -> None:
    work = workload(25)
    executor.lengths = lengths
    executor.execute(plan("raw", work), work)
    before = executor.pids()
    assert len(before) == 2
    executor.execute(plan("dp+pa", work), work)
    assert sorted(executor.pids()) == sorted(before)
    cold = plan("raw", work, actors=1, start="cold")
    report = executor.execute(cold, work)
    assert_gone([pid for pid in before if pid not in executor.pids()])
    assert len(executor.pids()) == 1
    check(cold, report, lengths(work))
    assert all(alive(pid) for pid in executor.pids())
    executor.execute(plan("raw", work), work)  # one of its processes starts anew, and loads what was published
    assert {one.weight_version for one in executor.results} == {str(int(executor.weight_version) - 1)}
    assert len(executor.pids()) == 2


@pytest.fixture
def slow_learner(executor: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Learning lasts until what is asked for meanwhile is up, and a little longer; how often it has waited so."""
    waited: list[int] = []
    publish = RayExecutor._publish

    def slowly(of: Any) -> None:
        import ray

        until_s = time.monotonic() + 60
        while waited and not (ahead := [each for each in of._processes._pool.values() if each.ahead_s is not None]):
            assert time.monotonic() < until_s, "nothing is asked for"
            time.sleep(0.01)
        if waited:
            ray.get([each.actor.up_for.remote() for each in ahead])
            time.sleep(0.1)
            waited.append(len(ahead))
        publish(of)

    monkeypatch.setattr(RayExecutor, "_publish", slowly)
    return waited


def test_prewarmed_processes_start_while_the_step_before_learns(executor: Any, slow_learner: list[int]) -> None:
    work = workload(28)
    executor.lengths = lengths
    executor.execute(plan("raw", work, actors=1, start="cold"), work)  # the pool of earlier tests must not help
    made = replace(plan("raw", work, start="prewarmed"), prewarm=(Prewarm(function="decode", ready_after_s=0.0),))
    assert made.placement.decode == ((0,), (1,))
    assert made.placement.learner == (0,)
    slow_learner.append(0)
    executor.execute(made, work)
    assert slow_learner == [0, 1]
    assert executor._processes.startup_s > 0
    report = executor.execute(made, work)
    check(made, report, lengths(work))
    learners, taken = ([one for one in report.invocations if one.gpus == gpus] for gpus in ((0,), (1,)))
    assert all(one.start_s >= 0 for one in learners)
    (one,) = taken
    assert [span.activity for span in one.spans[:2]] == ["start-up", "early"]
    assert one.spans[1].start_s < 0 <= one.spans[1].end_s
    assert bill(report, 1.0).held_gpu_s > report.step_s  # both GPUs' decoding, and what was held before 0
    assert slow_learner == [0, 1, 1]
    slow_learner.clear()
    unused = plan("raw", work, actors=1, start="cold")
    report = executor.execute(unused, work)
    check(unused, report, lengths(work))
    (other,) = [one for one in report.invocations if one.gpus == (1,)]
    assert other.function == "decode"
    assert {span.activity for span in other.spans} == {"start-up", "early"}
    assert other.start_s < 0
    assert not [each for each in executor._processes._pool.values() if each.gpus == (1,)]


class Sleeper:
    """Stands in for an engine's process on a GPU."""

    def __init__(self, config: object) -> None:
        self.said: list[str] = []

    def sleep(self) -> None:
        self.said.append("sleep")

    def wake(self) -> None:
        self.said.append("wake")

    def all(self) -> list[str]:
        return self.said


def test_engines_on_gpus_sleep_in_the_pool_and_are_woken_ahead(
    executor: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from backends import cluster as module

    cloudpickle = pytest.importorskip("ray.cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(module, "VllmActor", Sleeper)
    config = ray_steps.config(tiny_model, tmp_path, actor_cpus=0.01)
    engine = config.engine(prefix_caching=True, kv_connector=None)
    another = config.engine(prefix_caching=False, kv_connector=None)
    object.__setattr__(engine, "sleep_mode", True)  # a config for CPUs refuses it
    processes = module.RayCluster(CLUSTER, config)
    try:
        one = processes.take((0,), engine)
        processes.keep(one)
        processes.rest()
        processes.rest()
        assert one.asleep
        processes.ahead((1,), engine, new=False)  # nothing sleeps there
        processes.ahead((0,), engine, new=True)
        assert not one.asleep
        assert one.ahead_s is not None
        until_s = time.monotonic() + 60
        while ray.get(one.actor.all.remote()) != ["sleep", "wake"]:  # an actor's calls run side by side
            assert time.monotonic() < until_s
        assert processes.untaken({(0,)}, engine) == []
        assert processes.untaken({(0,)}, another) == [one]
        processes.end(one)
        two = processes.take((0,), engine)
        processes.keep(two)
        ray.kill(two.actor)
        processes.rest()  # what has died rests as well
        assert processes._pool == {}
    finally:
        processes.close()
    assert ray.is_initialized()


def test_what_cannot_be_carried_out_is_refused_before_anything_starts(executor: Any) -> None:
    work = workload(27)
    made = plan("dp", work)
    lengths_only = replace(work, prompts=None)
    wrong: list[tuple[Plan, Workload, type[RlhflessError], str]] = [
        (made, lengths_only, InputError, "token ids"),
        (made, workload(27, prompts=6), InputError, "12, 2"),
        (replace(made, cluster_gpus=4), work, InputError, "4 GPUs"),
        (made, replace(work, max_response_tokens=500), InfeasibleError, "engines hold 512"),
        (replace(made, actors=(replace(made.actors[0], slots=17), made.actors[1])), work, InfeasibleError, "17 slots"),
        (replace(made, actors=made.actors[:1]), work, PlanError, "decoded by no actor"),
    ]
    pids, steps = executor.pids(), executor.steps
    for plan_, work_, kind, says in wrong:
        with pytest.raises(kind, match=says):
            executor.execute(plan_, work_)
    executor.config = replace(executor.config, kv="none")
    with pytest.raises(PlanError, match="kv is none"):
        executor.execute(made, work)
    executor.lengths = lambda _: Outcome(response_tokens=ints(np.full((12, 2), 81)))
    with pytest.raises(InputError, match="81 tokens is above the cap"):
        executor.execute(plan("raw", work), work)
    assert (executor.pids(), executor.steps) == (pids, steps)


def test_snapshot(executor: Any) -> None:
    first, second = executor.snapshot(), executor.snapshot()
    assert first.free_gpus.tolist() == list(range(GPUS))
    assert 0 < first.time_s < second.time_s


def test_nothing_listens_beyond_this_machine(cluster: Any) -> None:
    import ray

    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    ours = [line.split() for line in listening.splitlines() if any(f"pid={pid}," in line for pid in ray_steps.family())]
    assert ours
    assert {fields[3].rpartition(":")[0] for fields in ours} <= {"127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"}


def test_config_refuses_what_cannot_be(tiny_model: Path, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": str(tmp_path)}, "config.json"),
        ({"kv": "tcp"}, "known are redis, nixl, none"),
        ({"redis_url": "redis://10.0.0.1:6379"}, "password"),
        ({"temperature": -1.0}, "temperature"),
        ({"hang_timeout_s": 0.0}, "hang_timeout_s"),
        ({"node_timeout_s": -1.0}, "node_timeout_s"),
        ({"kv_cache_bytes": None}, "kv_cache_bytes"),
    ]
    for changes, says in wrong:
        with pytest.raises(InputError, match=says):
            ray_steps.config(Path(changes.pop("model", str(tiny_model))), tmp_path, **changes)
