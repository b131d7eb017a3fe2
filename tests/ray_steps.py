"""A small Ray cluster with tiny engines, for tests: workloads, plans, and what a step must have left behind."""

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless.rng import stream
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload
from tests.profiles import tiny_profile

_PACKAGES = [name for name in ("ray", "vllm", "redis", "transformers") if importlib.util.find_spec(name) is None]
MISSING = _PACKAGES + ([] if shutil.which("redis-server") else ["redis-server"])
real = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'rlhfless[cpu]'")

GPUS, SLOTS, BLOCK, HEADER = 3, 16, 32, 32
CLUSTER = Cluster.uniform("cpu", GPUS, 8)
GONE_S = 30.0
"""Seconds in which processes that are ended must be gone: an ended one is not waited for in mid-step."""
TRIES = 6
"""Steps after which a test gives up waiting for a cut: whether one falls depends on how fast engines happen to be."""


def profile() -> Profile:
    return tiny_profile(gpu="cpu", kv_capacity_tokens=8000, max_slots=SLOTS)


def workload(step: int, *, prompts: int = 12, n: int = 2, cap: int = 80) -> Workload:
    """Prompts of whole blocks and one token, all with the same first block, every third twice."""
    rng = stream(5, "ray", step)
    header, made = rng.integers(5, 90, HEADER), []
    for prompt in range(prompts):
        if prompt % 3 == 2:
            made.append(made[-1])
        else:
            made.append(np.concatenate([header, rng.integers(5, 90, BLOCK * int(rng.integers(1, 4)) + 1)]))
    return Workload(
        step=step,
        epoch=step,
        algorithm="grpo",
        prompt_ids=np.arange(prompts),
        prompt_tokens=ints([prompt.size for prompt in made]),
        responses_per_prompt=n,
        max_response_tokens=cap,
        prompts=tuple(ints(prompt) for prompt in made),
    )


def lengths(work: Workload) -> Outcome:
    """Skewed lengths up to the cap."""
    rng = stream(5, "lengths", work.step)
    drawn = np.minimum(rng.lognormal(3.0, 0.8, (work.size, work.responses_per_prompt)).astype(int) + 1, 10**6)
    return Outcome(response_tokens=ints(np.minimum(drawn, work.max_response_tokens)))


def long_tails(made: Plan, work: Workload) -> Callable[[Workload], Outcome]:
    """Every actor's last two responses are at the cap and all others short, so that a rule finds something to move."""
    tokens = np.minimum(lengths(work).response_tokens.ravel() // 4 + 1, work.max_response_tokens // 4)
    for actor in made.actors:
        tokens[actor.responses[-2:]] = work.max_response_tokens
    outcome = Outcome(response_tokens=ints(tokens.reshape(work.size, -1)))
    return lambda _: outcome


def plan(policy: str, work: Workload, *, actors: int = 2, tau: float = 0.3, **options: Any) -> Plan:
    """A plan whose prefill actor shares a GPU with decode actor 0."""
    if policy == "rlhfless":
        options |= {"min_actors": actors, "max_actors": actors}
    else:
        options["actors"] = actors
    planner = Planner(policy, profile(), CLUSTER, learner_gpus=1, tau=tau, **options)
    return planner.plan(work, state())


def state() -> Any:
    from rlhfless.types.cluster import ClusterState

    return ClusterState(time_s=0.0, free_gpus=ints(np.arange(GPUS)))


def config(model: Path, run_folder: Path, **changes: Any) -> Any:
    from backends.ray_config import RayConfig

    values: dict[str, Any] = {
        "model": str(model),
        "run_folder": run_folder,
        "max_model_len": 512,
        "max_slots": SLOTS,
        "kv_cache_bytes": 32 << 20,
        "block_size": BLOCK,
        "temperature": 1.0,
        "seed": 11,
    }
    return RayConfig(**(values | changes))


@contextmanager
def executor(model: Path, run_folder: Path, **changes: Any) -> Iterator[Any]:
    """A `RayExecutor` on a private Ray, of which nothing is left at the end."""
    from backends.ray_executor import RayExecutor

    made = RayExecutor(CLUSTER, config(model, run_folder, **changes))
    pids: list[int] = []
    try:
        yield made
        pids = made.pids()
    finally:
        made.close()
        made.close()
    assert_gone(pids)


def execute_until_cut(executor: Any, made: Plan, work: Workload) -> Any:
    """The report of the first of a few executions in which responses have moved."""
    for _ in range(TRIES):
        report = executor.execute(made, work)
        if report.counters.moves:
            return report
    pytest.fail(f"no response has moved in {TRIES} steps")


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int]) -> None:
    until_s = time.monotonic() + GONE_S
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not left, f"processes {left} still run"


def family() -> list[int]:
    """Processes that descend from this one."""
    everyone = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [pid for pid in everyone if _descends(pid)]


def _descends(pid: int) -> bool:
    try:
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if pid == os.getpid():
                return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


def by_length(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> Any:
    """A reward from 0 to 1 that differs among responses of a model that has learned nothing."""
    return np.array([len(text) % 7 / 6 for text in responses])
