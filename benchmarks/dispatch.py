"""What it costs to carry a plan out beyond what its engines do: python -m benchmarks.dispatch.

Runs steps of one-token responses on tiny engines on a private Ray, processes warm, and prints for each size: the step's
wall-clock time, the time from the first admission to the last token (the engines' own), what lies before it (calls, and
the weights that every step loads) and after it, and the processor time of the controller, in all and a response. Then a
call's round trip to an actor, and what starting processes took.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from backends.ray_config import RayConfig
from backends.ray_executor import RayExecutor
from backends.tiny import make_tiny
from rlhfless.commands import run
from rlhfless.rng import stream
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload
from sim.profiles import load

ACTORS, SLOTS = 2, 64
PROMPT_TOKENS, VOCABULARY = 8, 90
SIZES = (2, 64, 512, 2048)
"""Responses of a step."""
REPEATS = 3
"""Steps of each size; the fastest is printed."""
PINGS = 300
PLANNED_WITH = "qwen2.5-3b_l40s_tp1"
"""A profile to make plans with: they do not depend on it here, since the number of actors is given."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def one_token(work: Workload) -> Outcome:
    """The shortest responses there are: what is left is dispatch."""
    return Outcome(response_tokens=ints(np.ones((work.size, 1))))


def step_of(responses: int, number: int) -> Workload:
    """Short prompts."""
    tokens = stream(0, "dispatch", number).integers(5, VOCABULARY, (responses, PROMPT_TOKENS))
    return Workload(
        step=number,
        epoch=0,
        algorithm="grpo",
        prompt_ids=np.arange(responses),
        prompt_tokens=ints(np.full(responses, PROMPT_TOKENS)),
        responses_per_prompt=1,
        max_response_tokens=1,
        prompts=tuple(ints(prompt) for prompt in tokens),
    )


def round_trip_s(executor: RayExecutor) -> float:
    """Median time of a call that an actor answers at once: a poll of a turn that is over."""
    import ray

    (process, *_) = executor._processes._pool.values()
    taken_s = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        ray.get(process.actor.poll.remote(-1, 0.0))
        taken_s.append(time.perf_counter() - begin)
    return float(np.median(taken_s))


@app.command()
def benchmark(
    largest: Annotated[int, typer.Option("--largest", min=2, help="Leave out larger steps.")] = SIZES[-1],
) -> None:
    """Time steps that do almost nothing."""
    profile = Profile(data=replace(load(PLANNED_WITH).data, gpu="cpu", max_slots=SLOTS))
    cluster = Cluster.uniform("cpu", ACTORS)
    planner = Planner("raw", profile, cluster, actors=ACTORS, learner_gpus=1)
    with tempfile.TemporaryDirectory() as name:
        config = RayConfig(
            model=str(make_tiny(Path(name) / "model", seed=0)),
            run_folder=Path(name) / "run",
            max_model_len=64,
            max_slots=SLOTS,
            kv_cache_bytes=32 << 20,
            kv="none",
        )
        begin = time.perf_counter()
        with RayExecutor(cluster, config, lengths=one_token) as executor:
            ray_s = time.perf_counter() - begin
            work = step_of(2, 0)
            first = executor.execute(planner.plan(work, executor.snapshot()), work)
            start_s = max(i.spans[0].end_s - i.start_s for i in first.invocations if i.function == "decode")
            print("| responses | step ms | engines ms | before ms | after ms | controller ms | a response us |")
            print("|---|---|---|---|---|---|---|")
            for number, responses in enumerate((size for size in SIZES if size <= largest), 1):
                rows = []
                for repeat in range(REPEATS):
                    work = step_of(responses, number * REPEATS + repeat)
                    plan = planner.plan(work, executor.snapshot())
                    begin, used = time.perf_counter(), time.process_time()
                    report = executor.execute(plan, work)
                    step_s, used_s = time.perf_counter() - begin, time.process_time() - used
                    before_s, end_s = float(report.first_s.min()), float(report.end_s.max())
                    rows.append((step_s, end_s - before_s, before_s, step_s - end_s, used_s))
                columns = " | ".join(f"{1e3 * seconds:.1f}" for seconds in min(rows))
                print(f"| {responses} | {columns} | {1e6 * min(rows)[-1] / responses:.0f} |", flush=True)
            print(f"\nround trip of a call {1e3 * round_trip_s(executor):.2f} ms")
            print(f"Ray started in {ray_s:.1f} s, {ACTORS} engines side by side in {start_s:.1f} s")


if __name__ == "__main__":
    run(app)
