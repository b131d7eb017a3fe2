"""`python -m experiments.testbed`: plan, execute and bill real steps on Ray and vLLM, as a configuration file says."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments import options, perfetto, plots
from experiments.config import load
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from experiments.real import Bench, RealStep, carry_out, open_bench, recorded
from rlhfless.accounting.billing import Bill, bill, total
from rlhfless.accounting.metrics import prefill_tokens
from rlhfless.commands import run
from rlhfless.driver import StepRecord
from rlhfless.errors import InputError
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import ClusterState

FILES = ("testbed.csv", "testbed.json", "gantt.png")
"""Result files, besides plans, reports and the recorded trace."""
TRACE = "trace.parquet"
"""Recorded trace, unless --record names another file."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def step_row(record: StepRecord, usd_per_gpu_hour: float) -> dict[str, Cell]:
    """What the table and the result files say of a step."""
    plan, report = record.plan, record.report
    cost, generation_s = bill(report, usd_per_gpu_hour), report.phase_s("generation")
    return {
        "step": report.step,
        "epoch": report.epoch,
        "policy": report.policy,
        "actors": len(plan.actors),
        "responses": int(report.tokens.size),
        "generation_s": generation_s,
        "step_s": report.step_s,
        "executed_gpu_s": cost.executed_gpu_s,
        "held_gpu_s": cost.held_gpu_s,
        "usd": cost.usd,
        "tokens": report.counters.decoded_tokens,
        "tokens_per_s": report.counters.decoded_tokens / generation_s,
        "cuts": report.counters.cuts,
        "moves": report.counters.moves,
        "failures": report.counters.failures,
        "preemptions": report.counters.preemptions,
        "prefill_tokens": prefill_tokens(report),
        "planned_generation_s": plan.estimate.generation_s,
        "planning_s": record.planning_s,
    }


def bill_rows(cost: Bill) -> list[list[Cell]]:
    """Functions that ran, then causes of idling, then the total."""
    rows: list[list[Cell]] = [
        [each.function, each.invocations, each.executed_gpu_s, each.held_gpu_s]
        for each in cost.functions
        if each.invocations
    ]
    rows += [[f"idle: {cause}", None, None, seconds] for cause, seconds in cost.idle_gpu_s if seconds > 0]
    return [*rows, [f"all, ${cost.usd:.6f}", None, cost.executed_gpu_s, cost.held_gpu_s]]


HEADINGS = (
    ("step", "step"), ("policy", "policy"), ("actors", "actors"), ("gen s", "generation_s"), ("step s", "step_s"),
    ("exec {unit}", "executed_gpu_s"), ("held {unit}", "held_gpu_s"), ("tokens/s", "tokens_per_s"), ("cuts", "cuts"),
    ("moves", "moves"), ("prefill tokens", "prefill_tokens"),
)  # fmt: skip


def unit(bench: Bench) -> str:
    """What a catalogue's GPU is here."""
    return "core-s" if bench.config.cluster.gpu == "cpu" else "GPU-s"


@app.command()
def run_testbed(
    config: Annotated[Path, typer.Option("--config", help="Configuration file, such as examples/cpu-tiny.toml.")],
    policy_name: Annotated[str | None, typer.Option("--policy", help="Policy; default: the file's.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps; default: the file's.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="GSM8K-like jsonl file; default: the file's, or arithmetic.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("out/testbed"),
    record: Annotated[
        Path | None, typer.Option("--record", help="Recorded trace, .parquet or .jsonl; default: trace.parquet there.")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Plan the first step and stop: needs no model, Ray or GPU.")
    ] = False,
    trace_out: options.TraceOut = None,
    as_json: options.Json = False,
) -> None:
    """Plan real steps, run them on vLLM actors under Ray, and bill them."""
    loaded = load(config)
    name = policy_name or loaded.planner.policy
    if policy(name).oracle:
        raise InputError(f"--policy {name!r}: nobody knows the true lengths before a real step")
    if record is not None and record.suffix not in (".parquet", ".jsonl"):
        raise InputError(f"--record {record}: the name must end in .parquet or .jsonl")
    options.check_outputs(out, FILES, trace_out)
    folder = out_folder(out)
    bench = open_bench(loaded, folder, prompts, engines=not plan_only)
    if plan_only:
        show_plan(bench, name)
        return
    for each in ("plans", "reports"):
        out_folder(folder / each)
    count = steps or loaded.workload.steps
    with progress(count, f"{loaded.name}: steps under {name}") as tick:

        def done(step: RealStep) -> None:
            file = f"step-{step.workload.step:04d}.json"
            write_atomic(folder / "plans" / file, step.record.plan.to_json() + "\n")
            write_atomic(folder / "reports" / file, step.record.report.to_json() + "\n")
            tick(1)

        found = carry_out(bench, name, count, done)
    recorded(bench, found).write(record or folder / TRACE)
    reports = [step.record.report for step in found]
    rows = [step_row(step.record, bench.usd_per_gpu_hour) for step in found]
    columns = list(rows[0])
    cost = total(bill(report, bench.usd_per_gpu_hour) for report in reports)
    write_atomic(folder / "testbed.csv", csv_text(columns, [[row[each] for each in columns] for row in rows]))
    write_atomic(
        folder / "testbed.json",
        json_text({"config": loaded, "profile": bench.profile.data.name, "steps": rows, "bill": cost}),
    )
    plots.gantt(reports[-1], folder / "gantt.png", bench.cluster)
    if trace_out is not None:
        perfetto.write(trace_out, reports, bench.cluster)
    if as_json:
        print((folder / "testbed.json").read_text(), end="")
        return
    print_table(
        f"{loaded.name}: {Path(bench.model).name} on {bench.cluster.gpus} {bench.cluster.gpu.name}, run on vLLM and "
        f"Ray; {loaded.workload.algorithm}, {loaded.workload.prompts_per_step} prompts x "
        f"{loaded.workload.responses_per_prompt}, temperature {loaded.workload.temperature:g}, "
        f"planned with profile {bench.profile.data.name}",
        [heading.format(unit=unit(bench)) for heading, _ in HEADINGS],
        [[row[each] for _, each in HEADINGS] for row in rows],
    )
    print_table(
        f"bill of {len(rows)} steps at ${bench.usd_per_gpu_hour:g} a {unit(bench)[:-2]} and hour",
        ["function", "invocations", f"exec {unit(bench)}", f"held {unit(bench)}"],
        bill_rows(cost),
    )
    for note in dict.fromkeys(note for step in found for note in step.record.plan.notes):
        print(note)
    print(f"written to {folder}: {', '.join(FILES)}, plans, reports; recorded: {record or folder / TRACE}")


def show_plan(bench: Bench, name: str) -> None:
    """The first step's plan, as it would be carried out."""
    executor_free = ClusterState(time_s=0.0, free_gpus=ints(np.arange(bench.cluster.gpus)))
    (workload,) = bench.workloads(1)
    plan = bench.planner(name).plan(workload, executor_free)
    plan.check()
    out_folder(bench.folder / "plans")
    path = bench.folder / "plans" / "step-0000.json"
    write_atomic(path, plan.to_json() + "\n")
    print_table(
        f"{bench.config.name}: first step under {name}, planned with profile {bench.profile.data.name}; prompts "
        f"counted by {bench.tokenizer.name}",
        ["actor", "GPUs", "responses", "slots", "expected decode s"],
        [
            [index, ",".join(map(str, gpus)), int(actor.responses.size), actor.slots, float(decode_s)]
            for index, (actor, gpus, decode_s) in enumerate(
                zip(plan.actors, plan.placement.decode, plan.estimate.decode_s, strict=True)
            )
        ],
    )
    print(f"learner and prefill on GPUs {','.join(map(str, plan.placement.learner))}")
    print(f"expected generation: {plan.estimate.generation_s:.4g} s")
    for note in plan.notes:
        print(note)
    print(f"written: {path}")


if __name__ == "__main__":
    run(app)
