"""The scale study behind `experiments.scale`: every policy at every cluster size and cap, with the lengths of seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from experiments import figure, options, study
from experiments.bench import OWN_BEST, PolicyRun, Setting, Steps, beside, best_static, bounds, simulate
from experiments.output import Cell
from experiments.study import Means, Measures
from rlhfless.accounting.metrics import Series, compare
from rlhfless.errors import InfeasibleError
from rlhfless.types.arrays import floats
from rlhfless.types.report import IDLE, StepReport
from rlhfless.types.workload import Algorithm
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of
from traces.synthesize import synthesize

SIZES = 4
"""Cluster sizes of a sweep: the largest, its half, its quarter, its eighth."""
BASELINE = "verl"
"""What speedup and saving are measured against: verl with its best static number of actors."""
EVERYWHERE = "verl-all"
"""verl on every GPU of the cluster, for those who would simply use what they have."""
OURS = "rlhfless"
BOUND = "(bound)"
"""What no policy beats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Everything that the study was asked for but sizes, caps and seeds."""

    gpus_per_host: int
    profile: str
    preset: str
    prompts: int
    samples: int
    algorithm: Algorithm
    epochs: int
    policies: tuple[str, ...]
    usd_per_gpu_hour: float | None
    weight: float
    tau: float
    window: int
    learner_gpus: int | None
    start: str
    speed_noise: float
    trace: Path | None

    def setting(self, gpus: int, seed: int) -> Setting:
        """On a cluster of `gpus`, whose learner has no more than the cluster."""
        return options.setting(
            profile=self.profile, nodes=gpus, gpus_per_host=self.gpus_per_host, usd_per_gpu_hour=self.usd_per_gpu_hour,
            seed=seed, weight=self.weight, tau=self.tau, window=self.window, start=self.start,
            learner_gpus=None if self.learner_gpus is None else min(self.learner_gpus, gpus),
            speed_noise=self.speed_noise,
        )  # fmt: skip

    def steps(self, cap: int, seed: int) -> Steps:
        """What happens in a run: synthetic lengths up to a cap, or a recorded trace's steps regrouped."""
        return _steps(self, cap, seed)


@lru_cache(maxsize=16)  # every cluster size asks for the same
def _steps(scope: Scope, cap: int, seed: int) -> Steps:
    if scope.trace is not None:
        return list(steps_of(batch(Trace.read(scope.trace), scope.prompts, seed).trace))
    drawn = synthesize(
        scope.preset, prompts=scope.prompts, epochs=scope.epochs, responses_per_prompt=scope.samples,
        max_response_tokens=cap, prompts_per_step=scope.prompts, seed=seed, algorithm=scope.algorithm, stretch=True,
    )  # fmt: skip
    return list(steps_of(drawn))


Place = tuple[int, int]
"""GPUs of the cluster, cap on a response's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Every policy at one place with the lengths of one seed."""

    measures: dict[str, Measures]
    """Policy -> quantity -> its mean over the steps."""
    bound: tuple[float, float]
    """Least generation seconds and decode GPU-seconds."""
    planning_s: dict[str, float]
    """Policy -> median wall-clock seconds of planning a step."""
    notes: tuple[str, ...]
    """What was left out, and what plans say."""
    traced: tuple[str, Sequence[StepReport]] | None
    """The policy that a trace is written of, with its steps, where one was asked for."""


def measures(run: PolicyRun, baseline: PolicyRun) -> Measures:
    """What a run comes to: means over its steps, and how it compares."""
    summary, against = run.summary, compare(run.summary, baseline.summary)
    found = {
        "actors": summary.actors,
        "generation_s": summary.generation_s,
        "step_s": summary.step_s,
        "decode_gpu_s": summary.decode_executed_gpu_s,
        "executed_gpu_s": summary.executed_gpu_s,
        "held_gpu_s": summary.held_gpu_s,
        "usd": summary.usd,
        **{f"idle_{cause.replace('-', '_')}_share": summary.idle(cause) for cause in IDLE},
        "cuts": summary.cuts,
        "moves": summary.moves,
        "preemptions": summary.preemptions,
    }
    ratios = {
        "generation_speedup": against.generation_speedup,
        "step_speedup": against.step_speedup,
        "executed_saving": against.executed_saving,
        "held_saving": against.held_saving,
    }
    return {name: series.mean for name, series in found.items()} | ratios


def sweep_sizes(nodes: int, tp: int) -> list[int]:
    """The cluster sizes up to `nodes`, halving, down to what one actor of `tp` GPUs needs."""
    return sorted({max(nodes >> shift, min(tp, nodes)) for shift in range(SIZES)})


def job(scope: Scope, kept: int | None, each: tuple[Place, int]) -> Found:
    """Every policy on one cluster, with the lengths of one seed; of seed `kept`, the reports that a trace shows too.

    Static policies have the number of actors that is best for verl, those of `OWN_BEST` that which is best for them.
    """
    (gpus, cap), seed = each
    setting, steps = scope.setting(gpus, seed), scope.steps(cap, seed)
    actors, baseline = best_static(BASELINE, steps, setting)
    runs = {EVERYWHERE: simulate(BASELINE, steps, setting), BASELINE: baseline}
    notes = []
    for name in scope.policies:
        if name == BASELINE:
            continue
        try:
            fair = beside(setting, name, baseline)
            if name in OWN_BEST:
                runs[name] = best_static(name, steps, fair)[1]
            else:
                runs[name] = simulate(name, steps, fair, actors=actors)
        except InfeasibleError as error:
            notes.append(f"{gpus} GPUs, {name} left out: {error}")
    notes += [f"{gpus} GPUs: {note}" for run in runs.values() for note in run.notes]
    shown = OURS if OURS in runs else list(runs)[-1]
    return Found(
        measures={label: measures(run, baseline) for label, run in runs.items()},
        bound=bounds(steps, setting.profile),
        planning_s={label: run.planning_s for label, run in runs.items()},
        notes=tuple(dict.fromkeys(notes)),
        traced=(shown, runs[shown].reports) if seed == kept else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What was found, over seeds."""

    found: dict[Place, list[Found]]
    """By size, then cap: what each seed gave."""
    means: dict[Place, dict[str, Means]]
    """By place, policy and quantity: its values over the seeds; policies that could run with the lengths of all."""

    @classmethod
    def of(cls, found: dict[Place, list[Found]]) -> "Study":
        """What seeds gave, put together."""
        means = {}
        for place, each in found.items():
            labels = [label for label in each[0].measures if all(label in one.measures for one in each)]
            means[place] = study.means([{label: one.measures[label] for label in labels} for one in each])
        return cls(found=found, means=means)

    def over_places(self, label: str, name: str, against: str | None = None) -> Series:
        """A quantity's mean over sizes and caps, seed by seed; `against` a policy: of ratios to its."""
        values = [
            found[label][name].values / (1.0 if against is None else found[against][name].values)
            for found in self.means.values()
            if label in found
        ]
        return Series(values=floats(np.mean(values, axis=0)))

    def rows(self) -> list[tuple[dict[str, Cell], float | None]]:
        """The bounds and every policy at each place, and milliseconds of planning, which go into no file."""
        rows: list[tuple[dict[str, Cell], float | None]] = []
        for place, found in self.found.items():
            facts: dict[str, Cell] = dict(zip(("gpus", "cap_tokens"), place, strict=True))
            least = study.means([
                {BOUND: {"generation_s": each.bound[0], "decode_gpu_s": each.bound[1]}} for each in found
            ])  # fmt: skip
            rows.append((figure.row(facts | {"policy": BOUND}, least[BOUND]), None))
            for label, means in self.means[place].items():
                planning_ms = 1e3 * float(np.mean([each.planning_s[label] for each in found]))
                rows.append((figure.row(facts | {"policy": label}, means), planning_ms))
        return rows


def sweep(scope: Scope, places: Sequence[Place], seeds: Sequence[int], processes: int, keep: bool = False) -> Study:
    """Every policy at every place with the lengths of every seed; `keep`: reports of the first seed."""
    jobs = [(place, seed) for place in reversed(places) for seed in seeds]  # the longest first: none is waited for
    label = f"{len({gpus for gpus, _ in places})} cluster sizes up to {places[-1][0]} GPUs"
    found = study.fan_out(partial(job, scope, seeds[0] if keep else None), jobs, processes, label)
    by = dict(zip(jobs, found, strict=True))
    return Study.of({place: [by[place, seed] for seed in seeds] for place in places})
