"""`python -m experiments.frontier`: the time-cost frontier of a step as it is planned, with every policy on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments import options, plots
from experiments.bench import OWN_BEST, PolicyRun, Setting, Steps, beside, best_static, simulate, static_ladder
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from rlhfless.accounting.billing import bill
from rlhfless.accounting.metrics import generation_bounds
from rlhfless.commands import run
from rlhfless.errors import InfeasibleError, InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.frontier import Goal
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.policies import FRONTIER, policy
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import ClusterState
from rlhfless.types.plan import FrontierTable
from rlhfless.types.report import StepReport
from rlhfless.units import HOUR_S
from sim.profiles import load
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of
from traces.synthesize import synthesize

DEFAULT_PROFILES = "llama-2-70b_h100_sxm_tp2,llama-2-70b_h100_sxm_tp4,llama-2-70b_h100_sxm_tp8"
"""Llama2-70B of the paper's scale study, with actors of its 2 GPUs and of more."""
DEFAULT_POLICIES = "dp+pa,rlhfless,elastic,frontier,oracle:frontier"
BASELINE = "verl"
"""Runs at its best static number of actors, at every size of actor."""
LEAST_STEP = 0.01
"""Points of the frontier are more than this share of time apart (chosen: finer than the estimates are right)."""
FILES = ("frontier.csv", "frontier.json", "frontier.png")
"""Result files."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one policy's generation took and held in the last step and over all steps."""

    label: str
    run: PolicyRun

    @property
    def last(self) -> tuple[float, float]:
        """(seconds, GPU-seconds) of the last step."""
        return taken(self.run.reports[-1])

    def cells(self, bound: tuple[float, float]) -> dict[str, Cell]:
        """The row of the result files."""
        each = np.array([taken(report) for report in self.run.reports])
        time_s, held = self.last
        plan = self.run.records[-1].plan
        return {
            "policy": self.label,
            "actors": len(plan.actors),
            "sizes": "+".join(map(str, plan.sizes)),
            "generation_s": time_s,
            "held_gpu_s": held,
            "over_least_time": time_s / bound[0],
            "over_least_cost": held / bound[1],
            "planned_s": plan.estimate.generation_s,
            "mean_generation_s": float(each[:, 0].mean()),
            "mean_held_gpu_s": float(each[:, 1].mean()),
            "mean_step_s": self.run.summary.step_s.mean,
            "mean_usd": self.run.summary.usd.mean,
        }


def taken(report: StepReport) -> tuple[float, float]:
    """(seconds of generation, GPU-seconds that the prefill actor and the decode actors hold)."""
    account = bill(report, 1.0)
    return report.phase_s("generation"), sum(account.function(name).held_gpu_s for name in ("prefill", "decode"))


def believed(steps: Steps, setting: Setting, reports: Sequence[StepReport]) -> FrontierTable:
    """The frontier of the last step, as the planner believes it after the reports of those before."""
    planner = Planner(
        FRONTIER, setting.planner_profile or setting.profile, setting.cluster, profiles=setting.profiles,
        learner_gpus=setting.learner_gpus, window=setting.window, weight=setting.weight, seed=setting.seed,
        start=setting.start,
    )  # fmt: skip
    state = ClusterState(time_s=0.0, free_gpus=ints(np.arange(setting.cluster.gpus)))
    for (workload, _), report in zip(steps[:-1], reports, strict=False):
        planner.plan(workload, state)
        planner.observe(report)
    return planner.frontier(steps[-1][0], state, LEAST_STEP)


def goal_of(weight: float | None, deadline_s: float | None, budget: float | None, price: float) -> Goal:
    """The goal that options ask for; the knee where none does. `budget` in USD, `price` USD a GPU-hour.

    Raises InputError for two at once, and for a budget where GPUs cost nothing.
    """
    if budget is not None and not price > 0:
        raise InputError(f"--budget {budget:g}: nothing is spent at {price:g} USD a GPU-hour; it needs a price above 0")
    asked = [
        Goal(kind="weight", value=weight) if weight is not None else None,
        Goal(kind="deadline_s", value=deadline_s) if deadline_s is not None else None,
        Goal(kind="budget_gpu_s", value=budget / price * HOUR_S) if budget is not None else None,
    ]
    given = [goal for goal in asked if goal is not None]
    if len(given) > 1:
        raise InputError("--weight, --deadline and --budget exclude each other; give one, or none for the knee")
    return given[0] if given else Goal()


def bound_of(steps: Steps, setting: Setting) -> tuple[float, float]:
    """(least seconds, least GPU-seconds) of the last step over all sizes of actor; of two plans, perhaps."""
    workload, outcome = steps[-1]
    bounds = [
        generation_bounds(profile, workload.prompt_tokens, outcome.response_tokens)
        for profile in (setting.profile, *setting.profiles)
    ]
    return min(each.time_s for each in bounds), min(each.decode_gpu_s for each in bounds)


def measure(steps: Steps, setting: Setting, names: Sequence[str]) -> list[Point]:
    """The baseline at its best number of actors, at every size of actor; then every policy."""
    profiles = (setting.profile, *setting.profiles)
    alone = [replace(setting, profile=profile, profiles=()) for profile in profiles]
    own = [name for name in names if name in OWN_BEST and name != BASELINE]
    total = sum(len(static_ladder(steps, each)) for each in alone)
    total += len(own) * len(static_ladder(steps, alone[0])) + len([name for name in names if name not in OWN_BEST])
    points = []
    with progress(total * len(steps), f"{len(steps)} steps, {len(profiles)} sizes, {len(names)} policies") as tick:
        actors, baseline = best_static(BASELINE, steps, alone[0], tick)
        points.append(Point(label=f"{BASELINE} tp{profiles[0].data.tp}", run=baseline))
        for each in alone[1:]:
            _, done = best_static(BASELINE, steps, each, tick)
            points.append(Point(label=f"{BASELINE} tp{each.profile.data.tp}", run=done))
        fair = beside(setting, FRONTIER, baseline)
        for name in names:
            if name == BASELINE:
                continue
            if name in OWN_BEST:
                points.append(
                    Point(label=name, run=best_static(name, steps, beside(alone[0], name, baseline), tick)[1])
                )
            else:
                points.append(Point(label=name, run=simulate(name, steps, fair, actors=actors, tick=tick)))
    return points


def draw(table: FrontierTable, points: Sequence[Point], bound: tuple[float, float], path: Path) -> None:
    """Time against cost of the last step: the believed frontier, every policy as it went, the bounds."""
    with plots.picture(path, 6.4, 4.4) as figure:
        axes = figure.add_subplot()
        axes.plot(
            table.time_s, table.cost_gpu_s, "-", color=plots.BLACK, linewidth=1.2, marker=".", markersize=4,
            label="frontier, as planned",
        )  # fmt: skip
        for number, point in enumerate(points):
            colour = plots.POLICY_COLOURS[number % len(plots.POLICY_COLOURS)]
            marker = plots.MARKERS[number % len(plots.MARKERS)]
            fill = "white" if point.label.startswith(BASELINE) else colour
            axes.plot(
                *point.last, marker=marker, color=colour, markerfacecolor=fill, markersize=7, linestyle="none",
                label=point.label,
            )  # fmt: skip
        axes.axvline(bound[0], color="#8C8C8C", linestyle="--", linewidth=0.9)
        axes.axhline(bound[1], color="#8C8C8C", linestyle="--", linewidth=0.9)
        axes.annotate(
            "bounds: least time, least cost", (bound[0], bound[1]), xytext=(4, 4), textcoords="offset points",
            color="#5A5A5A", fontsize=8,
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "235" else "")
        axes.set_xlabel("generation of the step, s")
        axes.set_ylabel("held by prefill and decode, GPU-s")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


HEADINGS = (
    ("policy", "policy"), ("actors", "actors"), ("GPUs each", "sizes"), ("gen s", "generation_s"),
    ("held GPU-s", "held_gpu_s"), ("x least s", "over_least_time"), ("x least GPU-s", "over_least_cost"),
    ("planned s", "planned_s"), ("mean gen s", "mean_generation_s"), ("mean held GPU-s", "mean_held_gpu_s"),
    ("mean step s", "mean_step_s"), ("mean USD", "mean_usd"),
)  # fmt: skip
"""Printed table: (heading, field)."""


@app.command(name="frontier")
def main(
    trace: options.TraceIn = None,
    preset: Annotated[str, typer.Option("--preset", help="Length preset, where no trace is given.")] = "gsm8k",
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=10**6, help="Prompts of a synthetic epoch.")] = 512,
    samples: Annotated[
        int, typer.Option("--responses-per-prompt", min=1, max=1000, help="n of a synthetic trace.")
    ] = 1,
    cap: Annotated[int, typer.Option("--cap", min=1, max=options.MOST_TOKENS, help="Cap of a synthetic trace.")] = 2048,
    epochs: options.Epochs = 3,
    prompts_per_step: Annotated[
        int | None, typer.Option("--prompts-per-step", min=1, help="Regroup the trace into steps of this size.")
    ] = None,
    profiles: options.Profiles = DEFAULT_PROFILES,
    nodes: options.Nodes = 160,
    gpus_per_host: options.GpusPerHost = options.GPUS_PER_HOST,
    policies: Annotated[str, typer.Option("--policies", help="Policies to run, with commas.")] = DEFAULT_POLICIES,
    weight: Annotated[
        float | None, typer.Option("--weight", min=0, max=1, help="Least time^weight x cost^(1 - weight).")
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Seconds of generation; cheapest.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="USD of generation in a step; fastest.")
    ] = None,
    usd_per_gpu_hour: options.Price = None,
    tau: options.Tau = migration.DEFAULT_TAU,
    window: options.Window = 1,
    learner_gpus: options.LearnerGpus = None,
    start: options.StartMode = "warm",
    speed_noise: options.Noise = 0.0,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for frontier.csv, frontier.json, frontier.png.")] = Path(
        "out/frontier"
    ),
    as_json: options.Json = False,
) -> None:
    """Plan steps on the time-cost frontier and compare every policy with it, in the last step of a trace.

    Policies of one size of actor use the first of --profile; elastic and frontier choose among all. What is asked of
    frontier: --weight, --deadline or --budget; without any, the knee, at which one percent of time costs one percent of
    money, no slower and no dearer than the paper's equal groups.
    """
    names = options.policy_names(policies, "--policies")
    options.check_outputs(out, FILES, None)
    first, *others = [part.strip() for part in profiles.split(",")]
    setting = options.setting(
        profile=first, nodes=nodes, gpus_per_host=gpus_per_host, usd_per_gpu_hour=usd_per_gpu_hour, seed=seed, tau=tau,
        weight=scaling.WEIGHT, window=window, learner_gpus=learner_gpus, start=start, speed_noise=speed_noise,
    )  # fmt: skip
    goal = goal_of(weight, deadline_s, budget, setting.usd_per_gpu_hour)
    setting = replace(setting, profiles=tuple(load(name) for name in others), goal=goal)
    recorded = (
        Trace.read(trace)
        if trace is not None
        else synthesize(
            preset, prompts=prompts, epochs=epochs, responses_per_prompt=samples, max_response_tokens=cap,
            prompts_per_step=prompts, seed=seed, algorithm="grpo", stretch=True,
        )
    )  # fmt: skip
    if prompts_per_step is not None:
        recorded = batch(recorded, prompts_per_step, seed).trace
    steps = list(steps_of(recorded))
    longest = max(int(workload.prompt_tokens.max()) for workload, _ in steps)
    setting.profile.require_fit(longest, recorded.info.max_response_tokens)
    try:
        points = measure(steps, setting, names)
    except InfeasibleError as error:
        if budget is None:
            raise
        usd = setting.usd_per_gpu_hour / HOUR_S
        raise InfeasibleError(f"--budget {budget:g}: {error}; a GPU-second costs {usd:.3g} USD") from None
    planned = next((point for point in points if policy_of(point.label) == FRONTIER), None)
    fair = beside(setting, FRONTIER, points[0].run)
    table = believed(steps, fair, planned.run.reports if planned is not None else points[0].run.reports)
    bound = bound_of(steps, setting)
    rows = [point.cells(bound) for point in points]
    names_of = ("generation_s", "held_gpu_s", "gpus", "actors")
    columns_of = (table.time_s, table.cost_gpu_s, table.gpus, table.actors)
    curve = [dict(zip(names_of, row, strict=True)) for row in zip(*(c.tolist() for c in columns_of), strict=True)]
    config = {
        "trace": trace.name if trace is not None else None, "source": recorded.info.source, "profiles": profiles,
        "nodes": nodes, "gpus_per_host": gpus_per_host, "policies": names, "goal": str(goal),
        "usd_per_gpu_hour": setting.usd_per_gpu_hour, "tau": tau, "window": window, "learner_gpus": learner_gpus,
        "start": start, "speed_noise": speed_noise, "seed": seed, "prompts_per_step": prompts_per_step,
    }  # fmt: skip
    folder = out_folder(out)
    columns = list(rows[0])
    least = {"generation_s": bound[0], "decode_gpu_s": bound[1]}
    write_atomic(folder / FILES[0], csv_text(columns, [[row[name] for name in columns] for row in rows]))
    write_atomic(folder / FILES[1], json_text({"config": config, "bound": least, "frontier": curve, "rows": rows}))
    draw(table, points, bound, folder / FILES[2])
    if as_json:
        print((folder / FILES[1]).read_text(), end="")
        return
    data, last = setting.profile.data, steps[-1][0]
    sizes = " or ".join(str(profile.data.tp) for profile in (setting.profile, *setting.profiles))
    print_table(
        f"{data.model} on {nodes} {data.gpu}, actors of {sizes} GPUs; step {last.step} of {recorded.info.dataset}, "
        f"{last.size} prompts x {recorded.n}, cap {recorded.info.max_response_tokens}; frontier is asked for {goal}; "
        "held by prefill and decode; simulated",
        [heading for heading, _ in HEADINGS],
        [[row[name] for _, name in HEADINGS] for row in rows],
    )
    print(f"bounds over all sizes: {bound[0]:.4g} s, {bound[1]:.4g} decode GPU-s")
    fast, cheap = (f"{table.time_s[row]:.4g} s for {table.cost_gpu_s[row]:.4g} GPU-s" for row in (0, -1))
    print(f"believed frontier: {len(curve)} points, {fast} to {cheap}")
    print(f"written: {', '.join(str(folder / name) for name in FILES)}")


def policy_of(label: str) -> str | None:
    """The policy that a label names; None for a baseline at a size of its own."""
    try:
        return policy(label).name
    except InputError:
        return None


if __name__ == "__main__":
    run(app)
