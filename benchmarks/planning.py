"""Time to plan one step, shared prefixes and placement included: python benchmarks/planning.py [--profile NAME].

Prompts and lengths are drawn at random; the paper reports at most 30 ms for a step (RLHFless Fig. 16a). Policies that
learn from steps are also timed on the steps of simulated runs, where what earlier steps showed makes plans harder.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from experiments import options
from experiments.bench import simulate
from rlhfless.commands import run
from rlhfless.rng import stream
from rlhfless.scheduler.lengths import LengthEstimator
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import FloatArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.profile import Profile
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from sim.profiles import load
from traces.load import steps
from traces.synthesize import synthesize

PROFILE = "llama-2-70b_h100_sxm_tp2"
"""Default: the model and GPUs of the paper's simulation (RLHFless §6)."""
HEADER_TOKENS = 30
"""Tokens that all prompts share (chosen: a chat template and an instruction)."""
GROWTH = (
    (1_000, 1, 160, False),
    (10_000, 1, 160, False),
    (100_000, 1, 160, False),
    (1_000_000, 1, 160, False),
    (10_000, 1, 10_240, False),
    (100_000, 1, 10_240, False),
    (1_000_000, 1, 10_240, False),
    (125_000, 8, 10_240, False),
    (1_000_000, 1, 10_240, True),
    (1_000_000, 1, 100_000, False),
)
"""(prompts, responses each, GPUs, whether no two length estimates are equal, the slowest case)."""
RUN_PROFILES = (
    "llama-2-70b_h100_sxm_tp2,llama-2-70b_h100_sxm_tp4,llama-2-70b_h100_sxm_tp8",
    "llama-3-8b_h100_sxm_tp1",
    "qwen2.5-3b_l40s_tp2,qwen2.5-3b_l40s_tp1",
    "qwen2.5-7b_l40s_tp2,qwen2.5-7b_l40s_tp1,qwen2.5-7b_l40s_tp4",
)
"""Sizes of actor of each model whose runs are timed; the first is that of policies that do not mix them."""
RUN_POLICIES = ("rlhfless", "elastic", "frontier")
RUN_LENGTHS = (("gsm8k", 2048, 1), ("gsm8k", 8192, 1), ("gpqa", 2048, 4), ("long-reasoning", 8192, 4))
"""(preset, cap to which lengths are stretched, responses each) of the runs."""
RUN_EPOCHS = 6
"""Steps of a run."""
FRONTIER_GROWTH = (512, 5_000, 20_000, 100_000)
"""Prompts of the frontier's steps by size."""


@dataclass(frozen=True)
class Distinct:
    """Length estimates of which no two are equal."""

    lengths: FloatArray

    def estimate(self, workload: Workload) -> FloatArray:
        """The lengths."""
        return self.lengths

    def observe(self, report: StepReport) -> None:
        """Learns nothing."""


def workload(prompts: int, n: int, with_ids: bool) -> Workload:
    """A step of random prompts of some 130 tokens with reference answers of some 200, at most 2048."""
    rng = stream(0, "planning", prompts, n)
    tokens = ints(HEADER_TOKENS + np.clip(rng.gamma(4.0, 25.0, prompts), 1, 900))
    ids = None
    if with_ids:
        header = rng.integers(0, 32_000, HEADER_TOKENS)
        ids = tuple(
            ints(np.concatenate([header, rng.integers(0, 32_000, size - HEADER_TOKENS)])) for size in tokens.tolist()
        )
    return Workload(
        step=0,
        epoch=0,
        algorithm="ppo",
        prompt_ids=np.arange(prompts),
        prompt_tokens=tokens,
        responses_per_prompt=n,
        max_response_tokens=2048,
        reference_tokens=ints(np.clip(rng.gamma(2.0, 100.0, prompts), 1, 2048)),
        prompts=ids,
        common_prefix_tokens=0 if with_ids else HEADER_TOKENS,
    )


def measure(
    profile: Profile, policy: str, work: Workload, gpus: int, repeats: int, estimator: LengthEstimator | None = None
) -> tuple[float, int, int]:
    """(median seconds, actors planned, candidates evaluated) after one plan that fills the caches."""
    planner = Planner(policy, profile, Cluster.uniform(profile.data.gpu, gpus), estimator=estimator)
    state = ClusterState(time_s=0.0, free_gpus=ints(np.arange(gpus)))
    plan = planner.plan(work, state)
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        planner.plan(work, state)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken), len(plan.actors), plan.candidates.actors.size if plan.candidates else 1


def runs(names: Sequence[str]) -> None:
    """Print planning times over the steps of a run: median and worst, by lengths and policy."""
    first, *others = [load(name) for name in names]
    setting = options.setting(
        profile=names[0], nodes=160, gpus_per_host=options.GPUS_PER_HOST, usd_per_gpu_hour=None, seed=0
    )
    for preset, cap, n in RUN_LENGTHS:
        trace = synthesize(
            preset, prompts=512, epochs=RUN_EPOCHS, responses_per_prompt=n, max_response_tokens=cap,
            prompts_per_step=512, seed=0, algorithm="grpo", stretch=True,
        )  # fmt: skip
        for policy in RUN_POLICIES:
            found = simulate(policy, list(steps(trace)), replace(setting, profiles=tuple(others)))
            taken = [record.planning_s * 1e3 for record in found.records]
            lengths = f"{preset} x{n}, cap {cap}"
            row = f"{first.data.model:<28} {lengths:<26} {policy:<10}"
            print(f"{row} {statistics.median(taken):>8.1f} {max(taken):>8.1f}", flush=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(profile: Annotated[str, typer.Option(help="Name of a shipped profile, or a file.")] = PROFILE) -> None:
    """Print the median planning times of one step: by policy, and by size."""
    model = load(profile)
    print(f"profile {model.data.name}; median of repeated plans, shared prefixes and placement included\n")
    print("512 prompts, 1 response each, 160 GPUs")
    print(f"{'policy':<10} {'token ids':<10} {'ms':>8} {'actors':>7} {'candidates':>10}")
    for policy in ("rlhfless", "dp+pa", "raw", "verl-lif"):
        for ids in (True, False):
            seconds, actors, candidates = measure(model, policy, workload(512, 1, ids), 160, 51)
            print(f"{policy:<10} {'yes' if ids else 'no':<10} {seconds * 1e3:>8.2f} {actors:>7} {candidates:>10}")
    print(f"\n512 prompts, 160 GPUs, actors of all sizes of a model, the {RUN_EPOCHS} steps of a simulated run")
    print(f"{'model':<28} {'lengths':<26} {'policy':<10} {'ms':>8} {'worst':>8}")
    for names in RUN_PROFILES:
        runs(names.split(","))
    print("\nfrontier by size, 160 GPUs, token ids not known")
    for prompts in FRONTIER_GROWTH:
        seconds, actors, _ = measure(model, "frontier", workload(prompts, 1, False), 160, 5)
        print(f"{prompts:>9} prompts {seconds:>9.4f} s {actors:>7} actors")
    print("\nrlhfless by size, token ids not known; ratios to the first row")
    columns = f"{'prompts':>9} {'each':>5} {'GPUs':>8} {'lengths':>9} {'seconds':>9} {'time x':>7} {'responses x':>11}"
    print(f"{columns} {'actors':>7} {'candidates':>10}")
    base = 0.0
    for prompts, n, gpus, distinct in GROWTH:
        work = workload(prompts, n, False)
        lengths = stream(0, "lengths").uniform(1, 2048, prompts)
        told = Distinct(floats(lengths)) if distinct else None
        seconds, actors, candidates = measure(model, "rlhfless", work, gpus, 5 if prompts * n < 1_000_000 else 3, told)
        base = base or seconds
        row = f"{prompts:>9} {n:>5} {gpus:>8} {'distinct' if distinct else 'whole':>9} {seconds:>9.4f}"
        print(f"{row} {seconds / base:>7.1f} {prompts * n / GROWTH[0][0]:>11.0f} {actors:>7} {candidates:>10}")


if __name__ == "__main__":
    run(app)
