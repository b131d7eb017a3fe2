"""`python -m experiments.replay`: a recorded trace under a policy and a baseline, epoch by epoch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import traces
from experiments import options, perfetto, plots
from experiments.bench import PolicyRun, Setting, Steps, beside, best_static, bounds, simulate, static_ladder
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from rlhfless.accounting.metrics import Summary, compare, summarize
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.policies import policy
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of

DEFAULT_TRACE = Path(traces.__file__).parent / "recorded" / "cpu-grpo.parquet"
"""GRPO of a small model on sums, by `python -m experiments.train --config examples/cpu-grpo.toml`: epochs over the same
prompts while their responses get longer."""
DEFAULT_PROFILE = "qwen2.5-3b_l40s_tp2"
"""The smaller model of the paper's testbed, with its 2 GPUs per actor."""
DEFAULT_NODES = 16
"""GPUs of the paper's testbed, 2 x 8 L40S."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def epoch_rows(
    label: str, done: PolicyRun, baseline: PolicyRun, epochs: Sequence[int], price: float
) -> list[dict[str, Cell]]:
    """One row an epoch, then one over all; numbers are means over steps."""
    rows = []
    for epoch in [*sorted(set(epochs)), None]:
        chosen = [number for number, each in enumerate(epochs) if epoch is None or each == epoch]
        rows.append(_row(label, epoch, _part(done, chosen, price), _part(baseline, chosen, price)))
    return rows


def _part(done: PolicyRun, chosen: Sequence[int], price: float) -> Summary:
    return summarize([done.reports[number] for number in chosen], price)


def _row(label: str, epoch: int | None, own: Summary, baseline: Summary) -> dict[str, Cell]:
    against = compare(own, baseline)
    return {
        "epoch": "all" if epoch is None else epoch,
        "policy": label,
        "steps": int(own.steps.size),
        "actors": own.actors.mean,
        "generation_s": own.generation_s.mean,
        "generation_ci95_s": own.generation_s.half_width,
        "step_s": own.step_s.mean,
        "decode_gpu_s": own.decode_executed_gpu_s.mean,
        "executed_gpu_s": own.executed_gpu_s.mean,
        "held_gpu_s": own.held_gpu_s.mean,
        "usd": own.usd.mean,
        "generation_speedup": against.generation_speedup,
        "step_speedup": against.step_speedup,
        "executed_saving": against.executed_saving,
        "held_saving": against.held_saving,
        "cuts": own.cuts.mean,
        "moves": own.moves.mean,
        "preemptions": own.preemptions.mean,
        "prefill_tokens": own.prefill_tokens.mean,
    }


def play(
    steps: Steps, setting: Setting, names: Sequence[str], baseline: str, actors: int | None
) -> tuple[dict[str, PolicyRun], int | None]:
    """Carry out the trace under the baseline and each of `names`; and the static number of actors that was used.

    Without `actors`, the number that is best in hindsight for the baseline (`bench.best_static`); None where the
    baseline scales, and static policies take all actors that fit.
    """
    static = not policy(baseline).scale
    others = [name for name in names if name != baseline]
    trials = len(static_ladder(steps, setting)) if actors is None and static else 1
    with progress((trials + len(others)) * len(steps), f"{len(steps)} steps, {1 + len(others)} policies") as tick:
        if static and actors is None:
            actors, first = best_static(baseline, steps, setting, tick)
        else:
            first = simulate(baseline, steps, setting, actors=actors, tick=tick)
        runs = {baseline: first}
        for name in others:
            runs[name] = simulate(name, steps, beside(setting, name, first), actors=actors, tick=tick)
    return runs, actors


def gantt_name(name: str) -> str:
    """File of a policy's last step."""
    return f"gantt-{name.replace(':', '-')}.png"


HEADINGS = (
    ("epoch", "epoch", 1), ("policy", "policy", 1), ("steps", "steps", 1), ("actors", "actors", 1),
    ("gen s", "generation_s", 1), ("step s", "step_s", 1), ("decode GPU-s", "decode_gpu_s", 1),
    ("exec GPU-s", "executed_gpu_s", 1), ("held GPU-s", "held_gpu_s", 1), ("USD", "usd", 1),
    ("gen x", "generation_speedup", 1), ("step x", "step_speedup", 1),
    ("exec saved %", "executed_saving", 100), ("held saved %", "held_saving", 100),
    ("cuts", "cuts", 1), ("moves", "moves", 1), ("prefill tokens", "prefill_tokens", 1),
)  # fmt: skip


@app.command()
def replay(
    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            help="Trace file, .parquet or .jsonl (see python -m traces); default: a recorded GRPO run.",
            show_default=False,
        ),
    ] = DEFAULT_TRACE,
    policies: Annotated[str, typer.Option("--policy", help="Policy to judge; several with commas.")] = "rlhfless",
    baseline: Annotated[str, typer.Option("--baseline", help="Policy to judge it against.")] = "verl",
    actors: Annotated[
        int | None,
        typer.Option("--actors", min=1, help="Static number of actors; default: the baseline's best in hindsight."),
    ] = None,
    prompts_per_step: Annotated[
        int | None, typer.Option("--prompts-per-step", min=1, help="Regroup the trace into steps of this size.")
    ] = None,
    nodes: options.Nodes = DEFAULT_NODES,
    gpus_per_host: options.GpusPerHost = options.GPUS_PER_HOST,
    profile: options.ProfileName = DEFAULT_PROFILE,
    usd_per_gpu_hour: options.Price = None,
    weight: options.Weight = scaling.WEIGHT,
    tau: options.Tau = migration.DEFAULT_TAU,
    window: options.Window = 1,
    learner_gpus: options.LearnerGpus = None,
    start: options.StartMode = "warm",
    speed_noise: options.Noise = 0.0,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for replay.csv, replay.json and pictures.")] = Path(
        "out/replay"
    ),
    trace_out: options.TraceOut = None,
    as_json: options.Json = False,
) -> None:
    """Replay recorded response lengths under a policy and a baseline; length history is carried from epoch to epoch."""
    names = options.policy_names(policies, "--policy")
    if len(options.policy_names(baseline, "--baseline")) > 1:
        raise InputError(f"--baseline {baseline!r}: one policy is needed")
    if actors is not None and all(policy(name).scale for name in (baseline, *names)):
        raise InputError(f"--actors {actors}: none of {baseline}, {policies} has a static number of actors")
    drawn = dict.fromkeys([names[0], baseline])
    files = ["replay.csv", "replay.json", "replay.png", *(gantt_name(name) for name in drawn)]
    options.check_outputs(out, files, trace_out)
    recorded = Trace.read(trace)
    remarks = []
    if prompts_per_step is not None:
        grouped = batch(recorded, prompts_per_step, seed)
        recorded = grouped.trace
        if grouped.dropped_prompts:
            remarks.append(f"{grouped.dropped_prompts} prompts an epoch do not fill a step and are left out")
    steps = list(steps_of(recorded))
    setting = options.setting(
        profile=profile, nodes=nodes, gpus_per_host=gpus_per_host, usd_per_gpu_hour=usd_per_gpu_hour, seed=seed,
        weight=weight, tau=tau, window=window, learner_gpus=learner_gpus, start=start, speed_noise=speed_noise,
    )  # fmt: skip
    longest = max(int(workload.prompt_tokens.max()) for workload, _ in steps)
    setting.profile.require_fit(longest, recorded.info.max_response_tokens)
    runs, static = play(steps, setting, names, baseline, actors)
    folder = out_folder(out)

    epochs = [workload.epoch for workload, _ in steps]
    rows = [
        row
        for name in dict.fromkeys([baseline, *names])
        for row in epoch_rows(name, runs[name], runs[baseline], epochs, setting.usd_per_gpu_hour)
    ]
    bound_s, bound_gpu_s = bounds(steps, setting.profile)
    config = {
        "trace": trace.name, "source": recorded.info.source, "policies": names, "baseline": baseline,
        "static_actors": static, "prompts_per_step": prompts_per_step, "nodes": nodes, "gpus_per_host": gpus_per_host,
        "profile": profile, "usd_per_gpu_hour": setting.usd_per_gpu_hour, "weight": weight, "tau": tau,
        "window": window, "learner_gpus": learner_gpus, "start": start, "speed_noise": speed_noise, "seed": seed,
    }  # fmt: skip
    bound = {"generation_s": bound_s, "decode_gpu_s": bound_gpu_s}
    columns = list(rows[0])
    write_atomic(folder / "replay.csv", csv_text(columns, [[row[name] for name in columns] for row in rows]))
    write_atomic(folder / "replay.json", json_text({"config": config, "bound": bound, "rows": rows}))
    plots.steps_figure({name: runs[name].summary for name in runs}, folder / "replay.png")
    for name in drawn:
        plots.gantt(runs[name].reports[-1], folder / gantt_name(name), setting.cluster)
    if trace_out is not None:
        perfetto.write(trace_out, runs[names[0]].reports, setting.cluster)
    if as_json:
        print((folder / "replay.json").read_text(), end="")
        return
    data = setting.profile.data
    print_table(
        f"{trace.name} ({recorded.info.dataset}, {recorded.info.algorithm}, n = {recorded.n}) replayed as {data.model} "
        f"on {nodes} {data.gpu}, {data.tp} GPUs an actor; mean per step, ${setting.usd_per_gpu_hour:g} a GPU-hour; "
        f"simulated; functions start {start}; "
        f"static policies with {static or 'all'} actors{'' if static else ' that fit'}",
        [heading for heading, _, _ in HEADINGS],
        [_cells(row) for row in rows],
    )
    print(f"bound: no policy generates in less than {bound_s:.4g} s or {bound_gpu_s:.4g} decode GPU-s a step")
    for remark in [*remarks, *dict.fromkeys(note for each in runs.values() for note in each.notes)]:
        print(remark)
    planned = ", ".join(f"{name} {np.round(each.planning_s * 1e3, 2)} ms" for name, each in runs.items())
    print(f"planning a step (median, measured): {planned}")
    print(f"written to {folder}: {', '.join(files)}")


def _cells(row: dict[str, Cell]) -> list[Cell]:
    cells: list[Cell] = []
    for _, name, factor in HEADINGS:
        value = row[name]
        cells.append(round(value * factor, 3) if isinstance(value, float) else value)
    return cells


if __name__ == "__main__":
    run(app)
