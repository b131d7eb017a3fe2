"""Mid-step rules on real engines: those that move a part of what an actor has, and a reserve that starts cold. The laws
of the simulator hold, and no move changes an output."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine_types import Partial
from backends.generation import Generation
from backends.generation_types import Actor
from backends.ray_step import RayStep
from rlhfless.types.arrays import floats, ints
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import DecodeActor, ElasticTerms, MigrationSpec, Plan, Speed
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World
from tests import ray_steps
from tests.ray_steps import CLUSTER, assert_gone, plan, real, workload
from tests.test_backend_ray import check, simulated

pytestmark = [pytest.mark.slow, real]
SLOTS, N = 4, 3


@pytest.fixture(scope="module")
def executor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ray_steps.executor(tiny_model, tmp_path_factory.mktemp("run")) as made:
        yield made


def seer(work: Workload, actors: int = 2) -> Plan:
    """A plan of which two thirds wait at first."""
    made = plan("seer", work, actors=actors)
    assert made.migration is not None
    free = replace(made.migration, terms=replace(made.migration.terms, move_s_per_token=0.0))
    return replace(made, migration=free, actors=tuple(replace(actor, slots=SLOTS) for actor in made.actors))


def uneven(made: Plan, work: Workload) -> Callable[[Workload], Outcome]:
    """The first actor's responses are short: it runs out of work while others still wait for slots. They last for some
    reports of an actor."""
    tokens = np.full(work.responses, work.max_response_tokens)
    tokens[made.actors[0].responses] = work.max_response_tokens // 3
    tokens[::2] -= np.arange(tokens[::2].size) % 7
    outcome = Outcome(response_tokens=ints(tokens.reshape(work.size, -1)))
    return lambda _: outcome


def test_a_part_of_what_actors_have_moves_and_nothing_changes(executor: Any) -> None:
    """What waits, what runs, sampled and greedy: as if one actor had generated it all."""
    work = workload(60, prompts=8, n=N, cap=160)
    made = seer(work)
    executor.lengths = uneven(made, work)
    outcome, twin = executor.lengths(work), simulated(made, work, executor.lengths)
    for temperature in (1.0, 0.0):
        executor.config = replace(executor.config, temperature=temperature)
        whole = executor.execute(plan("raw", work, actors=1), work)
        expected = executor.results
        report = executor.execute(made, work)
        for each in (report, twin):
            check(made, each, outcome)
            assert each.counters.cuts == each.counters.failures == each.counters.preemptions == 0
            waiting = made.actors[1].responses[SLOTS:]
            assert each.counters.moves == each.moves.sum() > 3
            assert each.moves[waiting].sum() > 0
            assert each.moves[made.actors[1].responses].sum() > 3
        assert report.tokens.tolist() == twin.tokens.tolist() == whole.tokens.tolist()
        assert report.counters.decoded_tokens == whole.counters.decoded_tokens
        for one, other in zip(executor.results, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.finish_reason == other.finish_reason
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-3


def test_an_actor_that_dies_once_a_part_of_it_has_moved_is_survived(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(61, prompts=8, n=N, cap=160)
    made = seer(work)
    executor.lengths = uneven(made, work)
    executor.execute(plan("raw", work, actors=1), work)
    expected = [one.tokens.tolist() for one in executor.results]
    parted: list[int] = []
    depart = Generation._depart

    def watched(generation: Generation, actor: Actor, news: dict[int, Partial]) -> None:
        depart(generation, actor, news)
        if news and not parted:
            parted.extend(news)
            assert isinstance(generation.wire, RayStep)
            os.kill(generation.wire._decode[actor.index].process.pid, signal.SIGKILL)

    monkeypatch.setattr(Generation, "_depart", watched)
    report = executor.execute(made, work)
    check(made, report, executor.lengths(work))
    assert parted
    assert report.counters.failures == 1
    assert [one.tokens.tolist() for one in executor.results] == expected


def keeping(work: Workload) -> Plan:
    """All responses on one actor, and another in reserve that the rule wants early, whatever that costs."""
    made = plan("raw", work, actors=1, start="cold")
    small, large = (
        Speed(gpus=1, batch=ints([1, ray_steps.SLOTS]), iteration_s=floats([base_s, 1.2 * base_s]))
        for base_s in (0.02, 0.01)
    )
    terms = ElasticTerms(
        speeds=(small, large), speed_of=ints([0, 1]), move_s_per_token=0.0, reserve=ints([1]), start_s=0.01
    )
    later = DecodeActor(responses=ints([]), prefill_tokens=ints([]), slots=ray_steps.SLOTS, tp=1)
    none = {name: floats([*getattr(made.estimate, name), 0.0]) for name in ("ready_s", "kv_s", "decode_s")}
    made = replace(
        made,
        actors=(*made.actors, later),
        placement=replace(made.placement, decode=((0,), (2,))),
        migration=MigrationSpec(kind="elastic", value=50.0, terms=terms),
        estimate=replace(made.estimate, **none),
    )
    made.check()
    return made


def test_an_actor_in_reserve_starts_cold_and_takes_over(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other actor stands still meanwhile: an engine takes longer to start than a step lasts here."""
    work = workload(62, prompts=6, n=2, cap=120)
    executor.lengths = None
    executor.execute(plan("raw", work, actors=1), work)  # the other's process is there
    made = keeping(work)
    tokens = 2 + np.arange(work.responses) % 9
    tokens[made.actors[0].responses[-4:]] = work.max_response_tokens
    outcome = Outcome(response_tokens=ints(tokens.reshape(work.size, -1)))
    executor.lengths = lambda _: outcome
    quick = Profile(data=replace(ray_steps.profile().data, cold_start_s=0.01))
    twin = SimExecutor(cluster=CLUSTER, world=World(profile=quick, outcome_of=executor.lengths)).execute(made, work)
    begin, start, started = Generation.begin, RayStep.start, list[int]()

    def stand_still(step: RayStep, actor: int) -> None:
        start(step, actor)
        os.kill(step._decode[0].process.pid, signal.SIGSTOP)

    def go_on(generation: Generation, index: int, *news: Any) -> None:
        begin(generation, index, *news)
        assert isinstance(generation.wire, RayStep)
        if index == 1:
            started.append(generation.wire._decode[1].process.pid)
            os.kill(generation.wire._decode[0].process.pid, signal.SIGCONT)

    monkeypatch.setattr(RayStep, "start", stand_still)
    monkeypatch.setattr(Generation, "begin", go_on)
    report = executor.execute(made, work)
    results, version = executor.results, str(int(executor.weight_version) - 1)
    assert {one.weight_version for one in results} == {version}, "also of the one that had to load them"
    for each in (twin, report):
        check(made, each, outcome)
        asked_s = np.sort(each.end_s)[0]
        reserve = next(one for one in each.invocations if one.gpus == (2,))
        assert reserve.start_s >= asked_s > 0, "held, and billed, from when the rule asked for it"
        assert [span.activity for span in reserve.spans[:2]] == ["start-up", "wait-weights"]
        assert reserve.spans[0].start_s == reserve.start_s
        assert each.counters.cuts == 1
        moved = np.flatnonzero(each.moves)
        assert moved.size == each.counters.moves > 0
        assert (each.actor[moved] == 1).all()
    assert len(started) == 1
    assert_gone(started)
    executor.execute(plan("raw", work, actors=1), work)
    assert [one.tokens.tolist() for one in results] == [one.tokens.tolist() for one in executor.results]
