"""Policies over the lengths of several seeds: what the figures of the paper run.

A job plays several policies on one workload with the lengths of one seed; every policy in it meets the same lengths, so
that ratios are paired. `over_seeds` runs a job over seeds, in processes side by side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from experiments import options
from experiments.bench import PolicyRun, Setting, Steps
from experiments.output import progress
from rlhfless.accounting.metrics import Series
from rlhfless.types.arrays import FloatArray, floats
from rlhfless.types.report import IDLE
from rlhfless.types.workload import Algorithm
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of
from traces.synthesize import synthesize

SEEDS = 5
"""Synthetic traces that means are over (chosen: few, and intervals yet tell policies apart)."""
BATCH = 256
"""Prompts of a step, which the paper does not give (chosen: the largest power of two below GPQA's 448 questions)."""
STEPS_PER_EPOCH = 2
"""Steps of an epoch (chosen: enough that prompts change company; the paper runs whole data sets)."""
EPOCHS = 3
"""The paper's (RLHFless §6)."""
CAP = 2048
"""Response tokens (RLHFless §6)."""
STATIC = 3
"""Decode actors of the paper's baseline (RLHFless §6)."""
SMALL, LARGE = "qwen2.5-3b_l40s_tp2", "qwen2.5-7b_l40s_tp4"
"""Models of the paper's testbed with their GPUs per actor."""
NODES = 16
"""GPUs of the paper's testbed, 2 x 8 L40S."""

Item = TypeVar("Item")
Found = TypeVar("Found")
Measures = dict[str, float]
"""Quantity -> its mean over the steps of one run."""
Means = dict[str, Series]
"""Quantity -> its values over seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A workload's prompts and response lengths, all but their seed."""

    preset: str
    """Preset of `traces.synthesize`, or the data set of a recorded trace."""
    algorithm: Algorithm = "grpo"
    """ppo or grpo."""
    n: int = 4
    """Responses of a prompt."""
    cap: int = CAP
    """Cap on a response's tokens."""

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.algorithm.upper()} {self.preset}, n = {self.n}"


PPO = Lengths(preset="gsm8k", algorithm="ppo", n=1)
GRPO = Lengths(preset="gsm8k")
"""The workloads of most figures; n = 4 is the paper's Fig. 3c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The shared options of a figure."""

    seed: int = 0
    """First seed."""
    seeds: int = SEEDS
    """Seeds in a row; each draws another synthetic trace, or other steps of a recorded one."""
    epochs: int = EPOCHS
    """Passes over the prompts."""
    batch: int = BATCH
    """Prompts of a step."""
    profiles: tuple[str, ...] = (SMALL,)
    """Models with their GPUs per actor: shipped profiles, or profile files."""
    nodes: int = NODES
    """GPUs of the cluster, in hosts of `options.GPUS_PER_HOST`."""
    trace: Path | None = None
    """Recorded trace, whose lengths take the place of synthetic ones."""
    processes: int = 1
    """Processes side by side; results do not depend on it."""

    @property
    def seed_list(self) -> range:
        """All seeds."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def profile(self) -> str:
        """The first profile."""
        return self.profiles[0]

    def workloads(self, wanted: Sequence[Lengths]) -> list[Lengths]:
        """Those wanted, or the single one of a recorded trace."""
        if self.trace is None:
            return list(wanted)
        trace = _read(self.trace)
        info = trace.info
        return [
            Lengths(preset=info.dataset, algorithm=info.algorithm, n=trace.n, cap=info.max_response_tokens),
        ]

    def steps(self, lengths: Lengths, seed: int) -> Steps:
        """What happens in a run: the prompts of each step, and the true lengths."""
        return _steps(self.trace, lengths, self.batch, self.epochs, seed)

    def setting(self, seed: int, profile: str | None = None, **changes: Any) -> Setting:
        """The paper's testbed and defaults, with these fields changed."""
        made = options.setting(
            profile=profile or self.profile, nodes=self.nodes, gpus_per_host=options.GPUS_PER_HOST,
            usd_per_gpu_hour=None, seed=seed,
        )  # fmt: skip
        return replace(made, **changes)


@cache
def _read(path: Path) -> Trace:
    return Trace.read(path)


@lru_cache(maxsize=8)  # a job asks for the same again and again; jobs follow each other
def _steps(path: Path | None, lengths: Lengths, prompts: int, epochs: int, seed: int) -> Steps:
    if path is not None:
        recorded = _read(path)
        found = list(steps_of(batch(recorded, prompts, seed).trace))
        seen = sorted({workload.epoch for workload, _ in found})[:epochs]
        return [step for step in found if step[0].epoch <= seen[-1]]
    trace = synthesize(
        lengths.preset, prompts=prompts * STEPS_PER_EPOCH, epochs=epochs, responses_per_prompt=lengths.n,
        max_response_tokens=lengths.cap, prompts_per_step=prompts, seed=seed, algorithm=lengths.algorithm,
    )  # fmt: skip
    return list(steps_of(trace))


# ---- runs


def measures(run: PolicyRun, bound: tuple[float, float], baseline: PolicyRun | None = None) -> Measures:
    """What a run comes to: means over its steps, how far from what no policy beats, and how it compares.

    `bound`: least generation seconds and decode GPU-seconds (`bench.bounds`). Savings and speedups are ratios of means.
    """
    own = run.summary
    found = {
        "actors": own.actors.mean,
        "generation_s": own.generation_s.mean,
        "step_s": own.step_s.mean,
        "decode_gpu_s": own.decode_executed_gpu_s.mean,
        "executed_gpu_s": own.executed_gpu_s.mean,
        "held_gpu_s": own.held_gpu_s.mean,
        "prefill_tokens": own.prefill_tokens.mean,
        "cuts": own.cuts.mean,
        "moves": own.moves.mean,
        "preemptions": own.preemptions.mean,
        "bound_s": bound[0],
        "bound_gpu_s": bound[1],
        "time_over_bound": own.generation_s.mean / bound[0],
        "cost_over_bound": own.decode_executed_gpu_s.mean / bound[1],
        **{f"idle_{cause.replace('-', '_')}_share": own.idle(cause).mean for cause in IDLE},
    }
    if baseline is not None:
        base = baseline.summary
        found |= {
            "generation_speedup": base.generation_s.mean / own.generation_s.mean,
            "step_speedup": base.step_s.mean / own.step_s.mean,
            "decode_saving": 1 - own.decode_executed_gpu_s.mean / base.decode_executed_gpu_s.mean,
            "executed_saving": 1 - own.executed_gpu_s.mean / base.executed_gpu_s.mean,
            "held_saving": 1 - own.held_gpu_s.mean / base.held_gpu_s.mean,
        }
    return found


def fan_out(work: Callable[[Item], Found], items: Sequence[Item], processes: int, label: str) -> list[Found]:
    """`work` of every item, in order, in processes side by side. `work` and the items must survive pickling."""
    with progress(len(items), label) as tick, _mapped(work, items, processes) as results:
        found = []
        for result in results:
            found.append(result)
            tick(1)
    return found


@contextmanager
def _mapped(work: Callable[[Item], Found], items: Sequence[Item], processes: int) -> Iterator[Iterator[Found]]:
    if processes == 1:
        yield map(work, items)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            yield pool.map(work, items)
        finally:
            pool.shutdown(cancel_futures=True)


Job = Callable[[Asked, Item, int], dict[str, Measures]]
"""What is asked, a workload, a seed -> what each policy (or variant) comes to there."""


def over_seeds(job: Job[Item], items: Sequence[Item], asked: Asked, label: str) -> list[dict[str, Means]]:
    """For each item: label -> quantity -> its values over the seeds. A job must give the same labels for every seed."""
    work = [(item, seed) for item in items for seed in asked.seed_list]
    found = iter(fan_out(partial(_call, job, asked), work, asked.processes, label))
    return [means(list(islice(found, asked.seeds))) for _ in items]


def _call(job: Job[Item], asked: Asked, each: tuple[Item, int]) -> dict[str, Measures]:
    return job(asked, *each)


def means(found: Sequence[Mapping[str, Measures]]) -> dict[str, Means]:
    """What each seed found, by label and quantity."""
    return {
        label: {name: Series(values=floats([each[label][name] for each in found])) for name in first}
        for label, first in found[0].items()
    }


def derived(formula: Callable[..., FloatArray], *series: Series) -> Series:
    """A quantity that follows from others, seed by seed."""
    return Series(values=floats(formula(*(each.values for each in series))))
