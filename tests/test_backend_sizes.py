"""Plans with actors of several sizes, on real engines of one and of two tensor parallel ranks side by side."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless.errors import InfeasibleError
from rlhfless.types.arrays import floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import DecodeActor, ElasticTerms, MigrationSpec, Plan, Speed
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World
from tests import ray_steps
from tests.profiles import tiny_profile
from tests.ray_steps import CLUSTER, HEADER, alive, assert_gone, execute_until_cut, plan, real, workload
from tests.test_backend_ray import check

pytestmark = [pytest.mark.slow, real]

NARROW, WIDE = 0, 1
"""Actor of one GPU, and of two."""


@pytest.fixture(scope="module")
def executor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sizes")
    # four processes that import vLLM at once: minutes where the machine is shared
    with ray_steps.executor(tiny_model, folder, temperature=0.0, actor_cpus=0.5, start_timeout_s=900.0) as made:
        yield made


def world(outcome: Outcome) -> World:
    sizes = {2: tiny_profile(gpu="cpu", tp=2, kv_capacity_tokens=16000, max_slots=ray_steps.SLOTS)}
    return World(profile=ray_steps.profile(), profiles=sizes, outcome_of=lambda _: outcome)


def mixed(work: Workload, policy: str = "dp+pa") -> Plan:
    """Actor 0 on one GPU, which it shares with the prefill actor, actor 1 on two; the first to be ripe is cut."""
    made = plan(policy, work)
    actors = (made.actors[NARROW], replace(made.actors[WIDE], tp=2))
    placement = replace(made.placement, decode=((0,), (1, 2)))
    made = replace(made, actors=actors, placement=placement, migration=MigrationSpec(kind="cut-and-migrate", value=0.5))
    made.check()
    return made


def lengths(made: Plan, work: Workload) -> Outcome:
    """Short, but one of the narrow actor's and five of the wide one's: those of the narrow one move, as fewer."""
    tokens = 2 + np.arange(work.size * work.responses_per_prompt) % 9
    for actor, long in ((NARROW, 1), (WIDE, 5)):
        tokens[made.actors[actor].responses[-long:]] = work.max_response_tokens
    return Outcome(response_tokens=ints(tokens.reshape(work.size, -1)))


def test_a_plan_of_two_sizes_keeps_the_laws_in_simulation_and_on_engines(executor: Any) -> None:
    """Greedy tokens are those of engines of one size, though a response has begun on one GPU and ends on two."""
    work = workload(40)
    made = mixed(work)
    assert made.sizes == (1, 2)
    outcome = lengths(made, work)
    executor.lengths = lambda _: outcome
    twin = SimExecutor(cluster=CLUSTER, world=world(outcome)).execute(made, work)
    report = execute_until_cut(executor, made, work)
    results = executor.results
    for each in (twin, report):
        check(made, each, outcome)
    functions, same = ({(i.function, i.gpus) for i in each.invocations} for each in (report, twin))
    assert functions == {(function, gpus) for function, gpus in same if function not in ("reward", "reference")}
    assert report.tokens.tolist() == twin.tokens.tolist()
    assert report.counters.cuts == 1
    moved = np.flatnonzero(report.moves)  # the long one, and what else a busy machine has not ended by then
    assert report.counters.moves == moved.size > 0
    assert np.isin(moved, made.actors[NARROW].responses).all()
    assert (report.actor[moved] == WIDE).all()
    assert report.counters.moved_kv_bytes > 0, "one GPU's KV, loaded on two"
    assert work.prompts is not None
    distinct = {tuple(prompt.tolist()) for prompt in work.prompts}
    assert report.counters.prefill_tokens == HEADER + sum(len(prompt) - HEADER for prompt in distinct)
    assert report.counters.decode_prefill_tokens == work.responses, "the prefill actor's KV, of one GPU, serves both"
    executor.execute(plan("raw", work, actors=1), work)
    for one, other in zip(results, executor.results, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-3


def test_kept_processes_serve_actors_of_their_size_alone(executor: Any) -> None:
    work = workload(41, prompts=4, cap=20)
    executor.lengths = None
    made = mixed(work, "raw")
    executor.execute(made, work)
    before = {process.gpus: process for process in executor._processes._pool.values()}
    assert {gpus: process.engine.tp for gpus, process in before.items()} == {(0,): 1, (1, 2): 2}
    version = executor.weight_version
    executor.execute(made, work)
    assert {one.weight_version for one in executor.results} == {version}, "of both sizes, after an update"
    assert sorted(executor.pids()) == sorted(process.pid for process in before.values())
    executor.execute(plan("raw", work), work)  # GPU 1 alone
    after = {process.gpus: process for process in executor._processes._pool.values()}
    assert {gpus: process.engine.tp for gpus, process in after.items()} == {(0,): 1, (1,): 1}
    assert after[0,].pid == before[0,].pid
    assert alive(after[0,].pid)
    assert_gone([before[1, 2].pid])


def keeping(work: Workload) -> Plan:
    """All responses on one GPU, and an actor of two in reserve that the rule wants early, whatever that costs."""
    made = plan("raw", work, actors=1)
    small, large = (
        Speed(gpus=gpus, batch=ints([1, ray_steps.SLOTS]), iteration_s=floats([base_s, 1.2 * base_s]))
        for gpus, base_s in ((1, 0.02), (2, 0.01))
    )
    terms = ElasticTerms(
        speeds=(small, large), speed_of=ints([0, 1]), move_s_per_token=0.0, reserve=ints([WIDE]), start_s=0.01
    )
    later = DecodeActor(responses=ints([]), prefill_tokens=ints([]), slots=ray_steps.SLOTS, tp=2)
    none = {name: floats([*getattr(made.estimate, name), 0.0]) for name in ("ready_s", "kv_s", "decode_s")}
    made = replace(
        made,
        actors=(*made.actors, later),
        placement=replace(made.placement, decode=((0,), (1, 2))),
        migration=MigrationSpec(kind="elastic", value=50.0, terms=terms),
        estimate=replace(made.estimate, **none),
    )
    made.check()
    return made


def test_an_actor_in_reserve_starts_when_the_rule_asks_and_takes_over(executor: Any) -> None:
    """Its process is kept from the step before, so that it is there in time: a new one takes longer than the step."""
    work = workload(43, cap=300)
    executor.lengths = None
    executor.execute(mixed(work, "raw"), work)
    made = keeping(work)
    tokens = 2 + np.arange(work.size * work.responses_per_prompt) % 9
    tokens[made.actors[NARROW].responses[-4:]] = work.max_response_tokens
    outcome = Outcome(response_tokens=ints(tokens.reshape(work.size, -1)))
    executor.lengths = lambda _: outcome
    twin = SimExecutor(cluster=CLUSTER, world=world(outcome)).execute(made, work)
    kept = executor.pids()
    report = execute_until_cut(executor, made, work)
    assert sorted(executor.pids()) == sorted(kept)
    results = executor.results
    for each in (twin, report):
        check(made, each, outcome)
        decoding = {one.index: one for one in each.invocations if one.function == "decode"}
        assert set(decoding) == {NARROW, WIDE}
        assert decoding[WIDE].gpus == (1, 2)
        assert decoding[WIDE].start_s >= np.sort(each.end_s)[0] > 0, "held from when the first response had ended"
        assert decoding[WIDE].start_s < decoding[NARROW].end_s, "while the other went on"
        assert each.counters.cuts == 1
        moved = np.flatnonzero(each.moves)
        assert moved.size == each.counters.moves > 0
        assert (each.actor[moved] == WIDE).all()
    assert report.counters.moved_kv_bytes > 0
    executor.execute(plan("raw", work, actors=1), work)
    assert [one.tokens.tolist() for one in results] == [one.tokens.tolist() for one in executor.results]


def test_an_actor_across_hosts_is_refused(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload(42)
    executor.lengths = None
    monkeypatch.setattr(executor, "cluster", Cluster.uniform("cpu", 3, 2))
    with pytest.raises(InfeasibleError, match=r"an actor on GPUs \[1, 2\], which are of several hosts"):
        executor.execute(mixed(work), work)
