"""A run that is taken up from a checkpoint plans as if it had never stopped."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends import checkpoint
from experiments.train_parts import LEARNED, LENGTHS, memory, remember
from rlhfless.driver import run
from rlhfless.errors import InputError, SchemaError
from rlhfless.scheduler.learned import Learned
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.policies import POLICIES
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import Start
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World
from tests.profiles import tiny_profile
from traces.load import steps
from traces.synthesize import synthesize

PROFILE = tiny_profile(kv_capacity_tokens=20_000)
LARGER = tiny_profile(kv_capacity_tokens=50_000, tp=2)
CLUSTER = Cluster.uniform("l40s", 8)
TRACE = synthesize(
    "gsm8k", prompts=32, epochs=3, responses_per_prompt=2, max_response_tokens=300, prompts_per_step=16, seed=1,
    algorithm="grpo",
)  # fmt: skip
STEPS = list(steps(TRACE))
"""Two steps an epoch, three epochs."""


def planner(name: str, start: Start = "warm", gpus: int = 8) -> Planner:
    known = Cluster.uniform("l40s", gpus)
    return Planner(name, PROFILE, known, start=start, profiles=(LARGER,), seed=3)


def executor() -> SimExecutor:
    outcomes = {workload.step: outcome for workload, outcome in STEPS}
    world = World(profile=PROFILE, profiles={2: LARGER}, outcome_of=lambda workload: outcomes[workload.step])
    return SimExecutor(cluster=CLUSTER, world=world)


def workloads(first: int, last: int) -> list[Workload]:
    return [workload for workload, _ in STEPS[first:last]]


def saved(made: Planner, root: Path, done: int) -> checkpoint.Checkpoint:
    return checkpoint.write(root, done, {}, lambda path: path.write_text("weights"), memory(made), 1)


@pytest.mark.parametrize("start", ["prewarmed", "warm"])
@pytest.mark.parametrize("name", [name for name, each in POLICIES.items() if each.hosting == "serverless"])
def test_the_next_plan_is_the_same(name: str, start: Start, tmp_path: Path) -> None:
    """In the first epoch and in later ones, byte by byte, and everything after it too."""
    for done in (1, 4):
        straight, world = planner(name, start), executor()
        list(run(straight, world, workloads(0, done)))
        resumed = planner(name, start)
        remember(resumed, checkpoint.read(saved(straight, tmp_path, done).folder, {}))
        assert resumed.learned.to_json() == straight.learned.to_json()
        for workload in workloads(done, len(STEPS)):
            state = world.snapshot()
            plan = straight.plan(workload, state)
            assert resumed.plan(workload, state).to_json() == plan.to_json()
            report = world.execute(plan, workload)
            for each in (straight, resumed):
                each.observe(report)


def test_lengths_alone_are_not_enough(tmp_path: Path) -> None:
    """Without the shortest phases functions are asked for at other times: the test above can fail."""
    straight, world = planner("rlhfless"), executor()
    list(run(straight, world, workloads(0, 2)))
    found = saved(straight, tmp_path, 2)
    forgetful = planner("rlhfless")
    remember(forgetful, found)
    forgetful.relearn(planner("rlhfless").learned)
    plans = [each.plan(STEPS[2][0], world.snapshot()) for each in (straight, forgetful)]
    assert plans[0].prewarm != plans[1].prewarm
    assert "decode" in {each.function for each in plans[0].prewarm}


def test_a_smaller_cluster_cannot_take_it_up(tmp_path: Path) -> None:
    straight, world = planner("raw"), executor()
    list(run(straight, world, workloads(0, 1)))
    with pytest.raises(InputError, match="of a cluster with a GPU 7, this one has 4"):
        remember(planner("raw", gpus=4), saved(straight, tmp_path, 1))


Change = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda told: told.pop("shortest_s"), "shortest_s"),
        (lambda told: told.update(schema=9), "schema 9 is not readable here"),
        (lambda told: told.update(shortest_s={"learning": -1.0}), "shortest_s must be at least 0"),
        (lambda told: told.update(first_epoch=[[1.0, 2.0]]), "first_epoch must be two rows of finite numbers"),
        (lambda told: told.update(later_epochs=[1.0, 2.0]), "later_epochs must be two rows"),
        (lambda told: told.update(kept={"1": [-1]}), "kept must give numbers of GPUs"),
        (lambda told: told.update(equal={"-1": [1]}), "equal must give numbers of GPUs"),
        (lambda told: told.update(kept={"1": [0.5]}), "whole numbers"),
    ],
)  # fmt: skip
def test_what_was_not_learned_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    straight = planner("rlhfless")
    list(run(straight, executor(), workloads(0, 1)))
    found = saved(straight, tmp_path, 1)
    told = json.loads(found.text(LEARNED))
    change(told)
    (found.folder / LEARNED).write_text(json.dumps(told))
    with pytest.raises(SchemaError, match=message) as refused:
        remember(planner("rlhfless"), found)
    assert str(found.folder / LEARNED) in str(refused.value)
    (found.folder / LEARNED).unlink()
    with pytest.raises(SchemaError, match=f"cannot read {LEARNED}"):
        remember(planner("rlhfless"), found)


def test_what_was_learned_reads_back_to_the_last_bit() -> None:
    nothing = planner("elastic").learned
    odd = replace(nothing, shortest_s={"learning": 1 / 3, "generation": np.nextafter(2.0, 3.0).item()})
    for each in (nothing, odd):
        assert Learned.from_json(each.to_json()).to_json() == each.to_json()
    assert LENGTHS != LEARNED
