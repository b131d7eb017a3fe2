"""Speed of the simulator and how it grows: python -m benchmarks.simulation.

Prints simulated responses per wall-clock second for one step under several policies, planning excluded, and the peak
memory of the process. Ratios to the first row say how time grows with responses.
"""

import resource
import time
from typing import Annotated

import typer

from rlhfless.commands import run
from rlhfless.scheduler.planner import Planner
from rlhfless.types.cluster import Cluster
from sim.executor import SimExecutor
from sim.profiles import load
from sim.world import World
from traces.load import steps
from traces.synthesize import synthesize

PROFILES = ("llama-2-70b_h100_sxm_tp2", "llama-3-8b_h100_sxm_tp1")
"""One that is short of KV, and one that has plenty."""
SIZES = ((1_000, 160), (10_000, 160), (100_000, 1_280), (1_000_000, 10_240))
"""(responses, GPUs) of one step."""
POLICIES = ("verl", "rlhfuse", "dp+pa", "rlhfless")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def benchmark(
    largest: Annotated[int, typer.Option("--largest", min=1_000, help="Leave out larger steps.")] = 1_000_000,
) -> None:
    """Time the simulation of single steps."""
    print("| profile | policy | responses | GPUs | actors | s | responses/s | x first | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in PROFILES:
        profile = load(name)
        for policy in POLICIES:
            first_s = 0.0
            for responses, gpus in SIZES:
                if responses > largest:
                    continue
                trace = synthesize(
                    "gsm8k", prompts=responses, epochs=1, responses_per_prompt=1, max_response_tokens=2048,
                    prompts_per_step=responses, seed=0, algorithm="ppo",
                )  # fmt: skip
                workload, outcome = next(iter(steps(trace)))
                cluster = Cluster.uniform(profile.data.gpu, gpus)
                executor = SimExecutor(cluster=cluster, world=World(profile=profile, outcome_of=lambda _, o=outcome: o))
                plan = Planner(policy, profile, cluster).plan(workload, executor.snapshot())
                begin = time.perf_counter()
                executor.execute(plan, workload)
                seconds = time.perf_counter() - begin
                first_s = first_s or seconds
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(
                    f"| {name} | {policy} | {responses} | {gpus} | {len(plan.actors)} | {seconds:.3f} "
                    f"| {responses / seconds:.0f} | {seconds / first_s:.1f} | {peak:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    run(app)
