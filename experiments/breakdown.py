"""`python -m experiments.breakdown`: phases of a step, and parts of the scheduler (RLHFless §6.7, Fig. 17).

Phases are simulated, and the same for a seed; where `python -m experiments.testbed` has recorded a real run, its phases
stand beside them. The scheduler is not simulated: its parts are timed on this machine, and differ from run to run.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import PolicyRun, Setting, Steps, beside, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.rng import stream
from rlhfless.scheduler.dedup import PrefixOrder
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import ints
from rlhfless.types.report import Invocation, StepReport
from rlhfless.types.workload import Workload

OURS = "rlhfless"
PARTS_OF_GENERATION = ("start-up", "wait-weights", "wait-kv", "prefill", "decode")
"""What the last actor to end does, one after the other, and the prefill actor before it on the same GPUs. Waiting for
weights and KV is the paper's I/O latency; elsewhere than on the learner's GPUs, waiting for KV includes prefill."""
PHASES = (*PARTS_OF_GENERATION, "preparation", "learning")
REAL = Path("out/testbed")
"""Where a real run is looked for."""
PAPER_MS = 30.0
"""Scheduling overhead on the large cluster, at most (RLHFless §6.6)."""
TIMED = {
    "_prefill": "deduplication", "_own_prefill": "deduplication", "_lengths": "length prediction",
    "_scale": "time and cost of every N", "_site_of": "routes",
}  # fmt: skip
"""Steps of the planner, and the part that each belongs to."""
SORTING, OTHER = "deduplication", "assignment, placement, plan"
VOCABULARY = 150_000
"""Token ids of made-up prompts (chosen: the size of Qwen2.5's)."""
LARGE_CLUSTER = ("llama-2-70b_h100_sxm_tp2", 160, Lengths(preset="gsm8k", algorithm="ppo", n=1), 512)
"""Profile, GPUs, workload and prompts of a step of the paper's scale study."""


class TimedPlanner(Planner):
    """A planner with a stopwatch on its steps."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seconds: dict[str, float] = defaultdict(float)
        self.planned = 0
        for name, part in TIMED.items():
            setattr(self, name, self._watch(part, getattr(self, name)))

    def _watch(self, part: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin_s = perf_counter()
            try:
                return step(*given, **named)
            finally:
                self.seconds[part] += perf_counter() - begin_s

        return timed

    def plan(self, workload: Workload, state: Any) -> Any:
        """See `Planner`. The prefix sort, which no step of its own does, is timed once more by itself."""
        begin_s = perf_counter()
        PrefixOrder.of(workload)
        sort_s = perf_counter() - begin_s
        before_s, begin_s = sum(self.seconds.values()), perf_counter()
        plan = super().plan(workload, state)
        whole_s = perf_counter() - begin_s
        rest_s = whole_s - (sum(self.seconds.values()) - before_s)
        self.seconds[SORTING] += min(sort_s, rest_s)
        self.seconds[OTHER] += max(rest_s - sort_s, 0.0)
        self.planned += 1
        return plan

    def observe(self, report: StepReport) -> None:
        """See `Planner`."""
        begin_s = perf_counter()
        super().observe(report)
        self.seconds["learning lengths"] += perf_counter() - begin_s


def phases(each: PolicyRun) -> Measures:
    """Mean seconds of each of `PHASES` over the steps."""
    found = [report_phases(report) for report in each.reports]
    return {name: float(np.mean([one[name] for one in found])) for name in PHASES}


def report_phases(report: StepReport) -> Measures:
    """Seconds of each of `PHASES` in one step, those of generation as the actor that ends last sees it."""

    def end_s(one: Invocation) -> float:
        return max((span.end_s for span in one.spans if span.activity == "decode"), default=0.0)

    last = max((one for one in report.invocations if one.function == "decode"), key=end_s)
    found = dict.fromkeys(PHASES, 0.0)
    for one in report.invocations:  # an actor on the learner's GPUs waits, without holding them, for the prefill actor
        until_s = {"prefill": last.start_s, "decode": end_s(last)}.get(one.function, 0.0)
        for span in one.spans if one is last or one.function == "prefill" else ():
            if span.activity in found:
                found[span.activity] += max(min(span.end_s, until_s) - max(span.start_s, 0.0), 0.0)
    return found | {name: report.phase_s(name) for name in ("preparation", "learning")}


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Phases under verl with 3 actors, raw and RLHFless."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    base = simulate("verl", steps, setting, actors=STATIC)
    runs = {"verl": base} | {
        name: simulate(name, steps, beside(setting, name, base), actors=STATIC) for name in ("raw", OURS)
    }
    return {name: study.measures(each, bound, base) | phases(each) for name, each in runs.items()}


def timings(steps: Steps, setting: Setting) -> Measures:
    """Mean milliseconds of each part of planning a step, after the first step, in which caches fill."""
    made: list[TimedPlanner] = []

    class Kept(TimedPlanner):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    simulate(OURS, steps, setting, made_by=Kept)
    (planner,) = made
    return {part: 1e3 * seconds / planner.planned for part, seconds in planner.seconds.items()}


def with_ids(steps: Steps, seed: int) -> Steps:
    """The same prompts with token ids, made up where not known, so that deduplication has something to sort."""
    if steps[0][0].prompts is not None:
        return steps
    return [
        (replace(workload, prompts=_made_up(workload, stream(seed, "breakdown", workload.step))), outcome)
        for workload, outcome in steps
    ]


def _made_up(workload: Workload, rng: np.random.Generator) -> tuple[Any, ...]:
    return tuple(ints(rng.integers(0, VOCABULARY, size)) for size in workload.prompt_tokens.tolist())


def timed_settings(asked: Asked, lengths: Lengths) -> list[tuple[str, Asked, Lengths]]:
    """The testbed and the paper's scale study."""
    profile, nodes, large, prompts = LARGE_CLUSTER
    found = [(f"{asked.nodes} GPUs, {asked.batch} prompts x {lengths.n}", asked, lengths)]
    if asked.trace is None:
        bigger = replace(asked, profiles=(profile,), nodes=nodes, batch=prompts)
        found.append((f"{nodes} GPUs, {prompts} prompts x {large.n}", bigger, large))
    return found


def breakdown(asked: Asked) -> Result:
    """RLHFless Fig. 17."""
    lengths = asked.workloads([GRPO])[0]
    found = study.over_seeds(job, [lengths], asked, "breakdown")[0]
    measured: dict[str, Means] = {}
    for label, there, workload in timed_settings(asked, lengths):
        each = [
            {"plan": timings(with_ids(there.steps(workload, seed), seed), there.setting(seed))}
            for seed in asked.seed_list
        ]
        measured[label] = study.means(each)["plan"]
    real = real_phases(REAL)
    rows = [
        figure.row({"workload": lengths.label, "policy": name, "kind": "simulated"}, each)
        for name, each in found.items()
    ]
    if real is not None:
        rows.append({"workload": str(REAL), "policy": real[0], "kind": "real", **real[1]})
    step_s = found[OURS]["step_s"]
    totals = {label: _total(each) for label, each in measured.items()}
    planning = [
        Claim(what="scheduling overhead, ms a step (measured)", given=label, paper=f"<= {PAPER_MS:g}", here=total)
        for label, total in totals.items()
    ]  # fmt: skip
    first = next(iter(totals.values()))
    share = study.derived(lambda ms, step: ms / 1e3 / step, first, step_s)
    planning.append(
        Claim(what="its share of the step (measured)", given=lengths.label, paper="negligible", here=share, unit="%")
    )

    def draw(path: Path) -> None:
        with plots.picture(path, 8.8, 3.6) as picture:
            phase, parts = picture.subplots(1, 2, width_ratios=(1.25, 1))
            names = [*found, *([f"{real[0]} (real)"] if real else [])]
            values = {
                name: [each[name].mean for each in found.values()] + ([real[1][name]] if real else [])
                for name in PHASES
            }
            charts.stacks(phase, names, values, "seconds of a step")
            phase.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
            charts.title(phase, f"(a) {lengths.label}")
            labels = list(dict.fromkeys(part for each in measured.values() for part in each))
            share_of = {part: [each[part].mean for each in measured.values()] for part in labels}
            charts.stacks(
                parts, [name.replace(", ", "\n") for name in measured], share_of, "milliseconds of planning a step"
            )
            parts.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=2)
            charts.title(parts, "(b) the scheduler, timed")

    return Result(
        claims=(), measured=tuple(planning),
        columns=COLUMNS, rows=tuple(rows), remarks=tuple(_remarks(lengths, found, real)), draw=draw,
        timings=tuple(
            {"setting": label, "part": part, "ms": series.mean, "ms_ci95": series.half_width}
            for label, each in measured.items()
            for part, series in each.items()
        ),
    )  # fmt: skip


COLUMNS: tuple[figure.Column, ...] = (
    ("workload", "workload", 1), ("policy", "policy", 1), ("kind", "kind", 1), ("actors", "actors", 1),
    ("gen s", "generation_s", 1), *((f"{name} s", name, 1.0) for name in PHASES), ("step s", "step_s", 1),
    ("time / bound", "time_over_bound", 1), ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def real_phases(folder: Path) -> tuple[str, Measures] | None:
    """(policy, mean seconds of each phase) of a recorded real run, its first step, in which all starts, left out."""
    files = sorted(folder.glob("reports/step-*.json"))[1:]
    if not files:
        return None
    reports = [StepReport.from_json(path.read_bytes(), str(path)) for path in files]
    each = [report_phases(report) for report in reports]
    found = {name: float(np.mean([one[name] for one in each])) for name in PHASES}
    found["generation_s"] = float(np.mean([report.phase_s("generation") for report in reports]))
    found["step_s"] = float(np.mean([report.step_s for report in reports]))
    return reports[0].policy, found


def _total(each: Means) -> Series:
    return study.derived(lambda *parts: np.sum(parts, axis=0), *each.values())


def _remarks(lengths: Lengths, found: dict[str, Means], real: tuple[str, Measures] | None) -> list[str]:
    ours = found[OURS]
    io_s = ours["wait-weights"].mean + ours["wait-kv"].mean
    return [
        f"{lengths.label}: before its last actor decodes, {OURS} spends {io_s:.2f} s on weights and KV, "
        f"{ours['prefill'].mean:.2f} s on prefill and {ours['start-up'].mean:.2f} s on starting; preparation and "
        f"learning are {100 * (ours['preparation'].mean + ours['learning'].mean) / ours['step_s'].mean:.0f} % of "
        "the step",
        figure.bound_remark(lengths.label, found),
        *([] if real else [f"no recorded real run in {REAL}: `python -m experiments.testbed` makes one"]),
    ]


FIGURE = Figure(
    name="breakdown", paper="17", title="phases of a step, parts of the scheduler", work=breakdown, inputs=(REAL,)
)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
