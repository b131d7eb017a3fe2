"""`python -m experiments.scale`: every policy on clusters of growing size (RLHFless §6.6, Fig. 16)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from experiments import figure, options, perfetto, plots
from experiments.bench import (
    OWN_BEST,
    PolicyRun,
    Setting,
    Steps,
    beside,
    best_static,
    bounds,
    simulate,
    static_ladder,
)
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from rlhfless.accounting.metrics import Comparison, Series, compare
from rlhfless.commands import run
from rlhfless.errors import InfeasibleError, InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.peers import PEERS
from rlhfless.scheduler.policies import POLICIES
from rlhfless.types.arrays import floats
from rlhfless.types.report import IDLE
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of
from traces.synthesize import synthesize

DEFAULT_PROFILE = "llama-2-70b_h100_sxm_tp2"
"""Llama2-70B with 2 GPUs per actor, the paper's scale study."""
DEFAULT_BATCH = 512
"""Prompts of a step in the paper's scale study."""
DEFAULT_CAPS = "2048,4096,8192"
"""Response caps: the paper's 2k to 8k."""
SIZES = 4
"""Cluster sizes of a sweep: the largest, its half, its quarter, its eighth."""
BASELINE = "verl"
"""What speedup and saving are measured against: verl with its best static number of actors."""
EVERYWHERE = "verl-all"
"""verl on every GPU of the cluster, for those who would simply use what they have."""
OURS = "rlhfless"
FILES = ("scale.csv", "paper.csv", "scale.json", "scale.png", "config.json")
"""Result files."""
PAPER = (
    ("generation speedup, mean over sizes and caps", "generation_speedup", 1.23, "x"),
    ("held GPU-seconds saved, mean over sizes and caps", "held_saving", 0.387, "%"),
)
"""(quantity, field, RLHFless §6.6, unit)."""
DEFAULT_POLICIES = ",".join([*(name for name in POLICIES if name not in PEERS), "oracle:rlhfless"])
"""All but peers', which `experiments.bakeoff` compares."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy at one cluster size and response cap."""

    gpus: int
    cap_tokens: int
    label: str
    run: PolicyRun
    against: Comparison

    def cells(self) -> dict[str, Cell]:
        """The row of the result files; all numbers are means over the steps."""
        summary, against = self.run.summary, self.against
        row: dict[str, Cell] = {
            "gpus": self.gpus,
            "cap_tokens": self.cap_tokens,
            "policy": self.label,
            "actors": summary.actors.mean,
            "generation_s": summary.generation_s.mean,
            "generation_ci95_s": summary.generation_s.half_width,
            "step_s": summary.step_s.mean,
            "decode_gpu_s": summary.decode_executed_gpu_s.mean,
            "executed_gpu_s": summary.executed_gpu_s.mean,
            "held_gpu_s": summary.held_gpu_s.mean,
            "usd": summary.usd.mean,
            "generation_speedup": against.generation_speedup,
            "step_speedup": against.step_speedup,
            "executed_saving": against.executed_saving,
            "held_saving": against.held_saving,
        }
        row |= {f"idle_{cause.replace('-', '_')}_share": summary.idle(cause).mean for cause in IDLE}
        counts = {"cuts": summary.cuts, "moves": summary.moves, "preemptions": summary.preemptions}
        return row | {name: series.mean for name, series in counts.items()}


def sweep_sizes(nodes: int, tp: int) -> list[int]:
    """The cluster sizes up to `nodes`, halving, down to what one actor of `tp` GPUs needs."""
    return sorted({max(nodes >> shift, min(tp, nodes)) for shift in range(SIZES)})


def measure(
    steps: Steps, setting: Setting, policies: Sequence[str], cap: int, tick: Callable[[int], None]
) -> tuple[list[Result], list[str]]:
    """Every policy on one cluster, and what was left out and why.

    Static policies have the number of actors that is best for verl, those of `OWN_BEST` that which is best for them.
    """
    actors, baseline = best_static(BASELINE, steps, setting, tick)
    everywhere = simulate(BASELINE, steps, setting, tick=tick)
    runs = {EVERYWHERE: everywhere, BASELINE: baseline}
    left_out = []
    for name in policies:
        if name == BASELINE:
            continue
        try:
            fair = beside(setting, name, baseline)
            if name in OWN_BEST:
                runs[name] = best_static(name, steps, fair, tick)[1]
            else:
                runs[name] = simulate(name, steps, fair, actors=actors, tick=tick)
        except InfeasibleError as error:
            left_out.append(f"{setting.cluster.gpus} GPUs, {name} left out: {error}")
    results = [
        Result(
            gpus=setting.cluster.gpus,
            cap_tokens=cap,
            label=label,
            run=each,
            against=compare(each.summary, baseline.summary),
        )
        for label, each in runs.items()
    ]
    return results, left_out


def bounds_row(steps: Steps, setting: Setting, cap: int) -> dict[str, Cell]:
    """What no policy beats."""
    time_s, decode_gpu_s = bounds(steps, setting.profile)
    return {
        "gpus": setting.cluster.gpus,
        "cap_tokens": cap,
        "policy": "(bound)",
        "generation_s": time_s,
        "decode_gpu_s": decode_gpu_s,
    }


COLUMNS = (
    ("GPUs", "gpus", 1), ("cap", "cap_tokens", 1), ("policy", "policy", 1), ("actors", "actors", 1),
    ("gen s", "generation_s", 1), ("step s", "step_s", 1), ("decode GPU-s", "decode_gpu_s", 1),
    ("exec GPU-s", "executed_gpu_s", 1), ("held GPU-s", "held_gpu_s", 1), ("USD", "usd", 1),
    ("gen x", "generation_speedup", 1), ("step x", "step_speedup", 1),
    ("exec saved %", "executed_saving", 100), ("held saved %", "held_saving", 100),
    *((f"{cause} %", f"idle_{cause.replace('-', '_')}_share", 100) for cause in IDLE),
)  # fmt: skip
"""Printed table: (heading, field, factor)."""


def table_row(row: dict[str, Cell], planning_s: float | None) -> list[Cell]:
    """One printed row; planning time is measured and therefore in no result file."""
    cells: list[Cell] = []
    for _, name, factor in COLUMNS:
        value = row.get(name)
        cells.append(round(value * factor, 3) if isinstance(value, float) else value)
    return [*cells, None if planning_s is None else round(planning_s * 1e3, 2)]


@app.command()
def scale(
    nodes: options.Nodes = 160,
    gpus_per_host: options.GpusPerHost = options.GPUS_PER_HOST,
    profile: options.ProfileName = DEFAULT_PROFILE,
    preset: Annotated[str, typer.Option("--preset", help="Length preset of `python -m traces synthesize`.")] = "gsm8k",
    caps: Annotated[
        str, typer.Option("--caps", help="Caps on a response's tokens; lengths are stretched with the cap.")
    ] = DEFAULT_CAPS,
    prompts: Annotated[int, typer.Option("--prompts", min=1, max=10**7, help="Prompts of a step.")] = DEFAULT_BATCH,
    samples: Annotated[int, typer.Option("--responses-per-prompt", min=1, max=1000, help="n.")] = 1,
    algorithm: Annotated[str, typer.Option("--algorithm", help="ppo or grpo.")] = "ppo",
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, max=1000, help="Steps; each prompt comes once in each.")
    ] = 3,
    policies: Annotated[str, typer.Option("--policies", help="Policies to run, with commas.")] = DEFAULT_POLICIES,
    usd_per_gpu_hour: options.Price = None,
    weight: options.Weight = scaling.WEIGHT,
    tau: options.Tau = migration.DEFAULT_TAU,
    window: options.Window = 1,
    learner_gpus: options.LearnerGpus = None,
    start: options.StartMode = "warm",
    speed_noise: options.Noise = 0.0,
    seed: options.Seed = 0,
    trace: options.TraceIn = None,
    out: options.Out = Path("out/scale"),
    trace_out: options.TraceOut = None,
    as_json: options.Json = False,
) -> None:
    """Simulate RLHF steps under every policy on clusters of up to --nodes GPUs.

    --nodes counts GPUs, as in the paper's 20 x 8 = 160. Policies plan with length history alone; those named oracle:
    know the true lengths. Baseline of speedup and saving: verl with the number of static actors that is best in
    hindsight (generation time and held GPU-seconds, weighted by lambda).
    """
    known = configuration(dict(locals()))
    names = options.policy_names(policies, "--policies")
    if algorithm not in ("ppo", "grpo"):
        raise InputError(f"--algorithm {algorithm!r}: known are ppo, grpo")
    cap_list = options.whole_numbers(caps, "--caps")
    options.check_outputs(out, FILES, trace_out)

    def setting_of(gpus: int) -> Setting:
        learner = learner_gpus if learner_gpus is None or gpus == nodes else min(learner_gpus, gpus)
        return options.setting(
            profile=profile, nodes=gpus, gpus_per_host=gpus_per_host, usd_per_gpu_hour=usd_per_gpu_hour, seed=seed,
            weight=weight, tau=tau, window=window, learner_gpus=learner, start=start, speed_noise=speed_noise,
        )  # fmt: skip

    settings = [setting_of(gpus) for gpus in sweep_sizes(nodes, setting_of(nodes).profile.data.tp)]

    def made(cap: int) -> Steps:
        drawn = synthesize(
            preset, prompts=prompts, epochs=epochs, responses_per_prompt=samples, max_response_tokens=cap,
            prompts_per_step=prompts, seed=seed, algorithm="ppo" if algorithm == "ppo" else "grpo", stretch=True,
        )  # fmt: skip
        return list(steps_of(drawn))

    inputs = {cap: made(cap) for cap in cap_list} if trace is None else _recorded(trace, prompts, seed)
    cap_list = list(inputs)
    for cap, steps in inputs.items():
        settings[-1].profile.require_fit(int(max(w.prompt_tokens.max() for w, _ in steps)), cap)

    results: list[Result] = []
    rows: list[dict[str, Cell]] = []
    planning: list[float | None] = []
    left_out: list[str] = []
    own = len({BASELINE, *names} & {*OWN_BEST})
    runs = sum(
        own * len(static_ladder(inputs[cap], each)) + 1 + len({*names, BASELINE}) - own
        for each in settings
        for cap in cap_list
    )
    with progress(
        runs * len(next(iter(inputs.values()))),
        f"{len(settings)} cluster sizes up to {nodes} GPUs, {len(names)} policies",
    ) as tick:
        for each in settings:
            for cap in cap_list:
                found, missing = measure(inputs[cap], each, names, cap, tick)
                left_out += missing
                results += found
                rows += [bounds_row(inputs[cap], each, cap), *(result.cells() for result in found)]
                planning += [None, *(result.run.planning_s for result in found)]
    folder = out_folder(out)
    _write(folder, rows, results, {
        "nodes": nodes, "gpus_per_host": gpus_per_host, "profile": profile, "preset": preset, "caps": cap_list,
        "prompts": prompts, "responses_per_prompt": samples, "algorithm": algorithm, "epochs": epochs,
        "policies": names, "usd_per_gpu_hour": settings[-1].usd_per_gpu_hour, "weight": weight, "tau": tau,
        "window": window, "learner_gpus": learner_gpus, "start": start, "speed_noise": speed_noise, "seed": seed,
        **({} if trace is None else {"trace": trace.name}),
    }, known)  # fmt: skip
    traced = next((each for each in reversed(results) if each.label == OURS), results[-1])
    if trace_out is not None:
        perfetto.write(trace_out, traced.run.reports, settings[-1].cluster)
    if as_json:
        print((folder / "scale.json").read_text(), end="")
        return
    largest = settings[-1]
    print_table(
        f"{largest.profile.data.model} on up to {nodes} GPUs ({largest.cluster.gpu.name}, {gpus_per_host} a host), "
        f"{largest.profile.data.tp} GPUs an actor; {algorithm}, {prompts} prompts x {samples}, {preset} lengths, "
        f"mean of {epochs} steps, ${largest.usd_per_gpu_hour:g} a GPU-hour; simulated, functions start {start}, "
        f"baseline {BASELINE} at its best static number of actors",
        [*(heading for heading, _, _ in COLUMNS), "plan ms"],
        [table_row(row, planned) for row, planned in zip(rows, planning, strict=True)],
    )
    for note in dict.fromkeys([*left_out, *(f"{r.gpus} GPUs: {note}" for r in results for note in r.run.notes)]):
        print(note)
    if claims := paper_claims(results):
        print_table("Figure 16 of the paper", ["", "given", "paper", "here"], [claim.printed() for claim in claims])
    print(f"mean over sizes and caps, as ratios to {BASELINE}: {', '.join(name for name, _ in RATIOS)}")
    for label in dict.fromkeys(result.label for result in results):
        print(f"  {label:<16}{'  '.join(f'{ratio:.3f}' for ratio in _ratios(results, label))}")
    print(f"written: {', '.join(str(folder / name) for name in FILES)}")
    if trace_out is not None:
        print(f"trace of {traced.label}, {traced.gpus} GPUs, cap {traced.cap_tokens}: {trace_out}")


def _recorded(path: Path, prompts: int, seed: int) -> dict[int, Steps]:
    """A recorded trace's steps, regrouped, by its own cap."""
    recorded = Trace.read(path)
    return {recorded.info.max_response_tokens: list(steps_of(batch(recorded, prompts, seed).trace))}


RATIOS = (
    ("generation s", "generation_s"),
    ("step s", "step_s"),
    ("decode GPU-s", "decode_executed_gpu_s"),
    ("held GPU-s", "held_gpu_s"),
)
"""What is compared on average (RLHFless Fig. 16b)."""


def _ratios(results: Sequence[Result], label: str) -> list[float]:
    """Mean over cluster sizes and caps of a policy's means, each over the baseline's."""
    base = {(each.gpus, each.cap_tokens): each.run.summary for each in results if each.label == BASELINE}
    own = [(each.run.summary, base[each.gpus, each.cap_tokens]) for each in results if each.label == label]
    return [
        fmean(getattr(summary, name).mean / getattr(against, name).mean for summary, against in own)
        for _, name in RATIOS
    ]


def _write(
    folder: Path, rows: list[dict[str, Cell]], results: list[Result], config: dict[str, Any], known: dict[str, Any]
) -> None:
    """Result files, the configuration last: the same seed gives the same bytes."""
    columns = list(results[0].cells())
    write_atomic(folder / "scale.csv", csv_text(columns, [[row.get(name) for name in columns] for row in rows]))
    claims = [claim.cells() for claim in paper_claims(results)]
    write_atomic(
        folder / "paper.csv",
        csv_text(list(claims[0]) if claims else ["what"], [list(each.values()) for each in claims]),
    )
    write_atomic(folder / "scale.json", json_text({"config": config, "paper": claims, "rows": rows}))
    points = [
        plots.ScaleRow(
            gpus=result.gpus,
            cap_tokens=result.cap_tokens,
            policy=result.label,
            generation_s=result.run.summary.generation_s.mean,
            step_s=result.run.summary.step_s.mean,
            executed_gpu_s=result.run.summary.executed_gpu_s.mean,
            held_gpu_s=result.run.summary.held_gpu_s.mean,
            usd=result.run.summary.usd.mean,
        )
        for result in results
    ]
    labels = [result.label for result in results]
    ours = OURS if OURS in labels else labels[-1]
    plots.scale_figure(points, folder / "scale.png", ours, BASELINE)
    write_atomic(folder / "config.json", json_text(known))


def configuration(given: dict[str, Any]) -> dict[str, Any]:
    """What config.json says: every option but those that say where results go."""
    kept = {name: value for name, value in given.items() if name not in ("out", "trace_out", "as_json")}
    return figure.settled("scale", "16", kept)


def paper_claims(results: Sequence[Result]) -> list[figure.Claim]:
    """What the paper says of its scale study beside ours, over sizes and caps (the interval too)."""
    own = [each.against for each in results if each.label == OURS]
    return [
        figure.Claim(
            what=what, given=f"against {BASELINE} with its best static N, ± over sizes and caps", paper=paper,
            here=Series(values=floats([getattr(each, field) for each in own])), unit="x" if unit == "x" else "%",
        )
        for what, field, paper, unit in PAPER if own
    ]  # fmt: skip


if __name__ == "__main__":
    run(app)
