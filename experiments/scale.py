"""`python -m experiments.scale`: every policy on clusters of growing size (RLHFless §6.6, Fig. 16)."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import figure, options, perfetto, plots
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, write_atomic
from experiments.scale_study import BASELINE, OURS, Scope, Study, sweep, sweep_sizes
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.peers import PEERS
from rlhfless.scheduler.policies import POLICIES
from rlhfless.types.cluster import Cluster
from rlhfless.types.report import IDLE
from traces.format import Trace

DEFAULT_PROFILE = "llama-2-70b_h100_sxm_tp2"
"""Llama2-70B with 2 GPUs per actor, the paper's scale study."""
DEFAULT_BATCH = 512
"""Prompts of a step in the paper's scale study."""
DEFAULT_CAPS = "2048,4096,8192"
"""Response caps: the paper's 2k to 8k."""
SEEDS = 1
"""Seeds by default (chosen: with one, the main command takes about half a minute; `experiments.all` asks for more)."""
FILES = ("scale.csv", "paper.csv", "scale.json", "scale.png", "config.json")
"""Result files."""
PAPER: tuple[tuple[str, str, float, figure.Unit], ...] = (
    ("generation speedup, mean over sizes and caps", "generation_speedup", 1.23, "x"),
    ("held GPU-seconds saved, mean over sizes and caps", "held_saving", 0.387, "%"),
)
"""(quantity, field, RLHFless §6.6, unit)."""
DEFAULT_POLICIES = ",".join([*(name for name in POLICIES if name not in PEERS), "oracle:rlhfless"])
"""All but peers', which `experiments.bakeoff` compares."""

COLUMNS: tuple[figure.Column, ...] = (
    ("GPUs", "gpus", 1), ("cap", "cap_tokens", 1), ("policy", "policy", 1), ("actors", "actors", 1),
    ("gen s", "generation_s", 1), ("±", "generation_s_ci95", 1), ("step s", "step_s", 1),
    ("decode GPU-s", "decode_gpu_s", 1), ("exec GPU-s", "executed_gpu_s", 1), ("held GPU-s", "held_gpu_s", 1),
    ("±", "held_gpu_s_ci95", 1), ("USD", "usd", 1), ("gen x", "generation_speedup", 1),
    ("±", "generation_speedup_ci95", 1), ("step x", "step_speedup", 1), ("exec saved %", "executed_saving", 100),
    ("held saved %", "held_saving", 100), ("±", "held_saving_ci95", 100),
    *((f"{cause} %", f"idle_{cause.replace('-', '_')}_share", 100) for cause in IDLE),
)  # fmt: skip
"""Printed table: (heading, field, factor); intervals only where there is more than one seed."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def table_row(row: Mapping[str, Cell], columns: Sequence[figure.Column]) -> list[Cell]:
    """One printed row."""
    return [figure.scaled(row.get(name), factor) for _, name, factor in columns]


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
    seeds: options.Seeds = SEEDS,
    trace: options.TraceIn = None,
    out: options.Out = Path("out/scale"),
    trace_out: options.TraceOut = None,
    processes: options.Processes = options.PROCESSES,
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
    options.check_outputs(out, FILES, trace_out)
    cap_list = options.whole_numbers(caps, "--caps")
    if trace is not None:
        cap_list = [Trace.read(trace).info.max_response_tokens]
    scope = Scope(
        gpus_per_host=gpus_per_host, profile=profile, preset=preset, prompts=prompts, samples=samples,
        algorithm="ppo" if algorithm == "ppo" else "grpo", epochs=epochs, policies=tuple(names),
        usd_per_gpu_hour=usd_per_gpu_hour, weight=weight, tau=tau, window=window, learner_gpus=learner_gpus,
        start=start, speed_noise=speed_noise, trace=trace,
    )  # fmt: skip
    largest = scope.setting(nodes, seed)
    largest.cluster.require(learner_gpus or 1, "--learner-gpus: the learner")
    seed_list = range(seed, seed + seeds)
    for cap, each in product(cap_list, seed_list):
        most = max(int(workload.prompt_tokens.max()) for workload, _ in scope.steps(cap, each))
        largest.profile.require_fit(most, cap)
    sizes = sweep_sizes(nodes, largest.profile.data.tp)
    found = sweep(scope, list(product(sizes, cap_list)), seed_list, processes, keep=trace_out is not None)

    folder = out_folder(out)
    rows = found.rows()
    _write(folder, found, [row for row, _ in rows], {
        "nodes": nodes, "gpus_per_host": gpus_per_host, "profile": profile, "preset": preset, "caps": cap_list,
        "prompts": prompts, "responses_per_prompt": samples, "algorithm": algorithm, "epochs": epochs,
        "policies": names, "usd_per_gpu_hour": largest.usd_per_gpu_hour, "weight": weight, "tau": tau,
        "window": window, "learner_gpus": learner_gpus, "start": start, "speed_noise": speed_noise, "seed": seed,
        "seeds": seeds, **({} if trace is None else {"trace": trace.name}),
    }, known)  # fmt: skip
    told = None if trace_out is None else _trace(found, trace_out, largest.cluster)
    if as_json:
        print((folder / "scale.json").read_text(), end="")
        return
    columns = [column for column in COLUMNS if seeds > 1 or column[0] != "±"]
    print_table(
        f"{largest.profile.data.model} on up to {nodes} GPUs ({largest.cluster.gpu.name}, {gpus_per_host} a host), "
        f"{largest.profile.data.tp} GPUs an actor; {algorithm}, {prompts} prompts x {samples}, {preset} lengths, "
        f"mean of {epochs} steps{f' and {seeds} seeds, ± 95 % interval' if seeds > 1 else ''}, "
        f"${largest.usd_per_gpu_hour:g} a GPU-hour; simulated, functions start {start}, "
        f"baseline {BASELINE} at its best static number of actors",
        [*(heading for heading, _, _ in columns), "plan ms"],
        [[*table_row(row, columns), None if ms is None else round(ms, 2)] for row, ms in rows],
    )
    for note in dict.fromkeys(note for each in found.found.values() for one in each for note in one.notes):
        print(note)
    if claims := paper_claims(found):
        print_table("Figure 16 of the paper", ["", "given", "paper", "here"], [claim.printed() for claim in claims])
    print(f"mean over sizes and caps, as ratios to {BASELINE}: {', '.join(name for name, _ in RATIOS)}")
    for label in dict.fromkeys(label for means in found.means.values() for label in means):
        ratios = [found.over_places(label, name, BASELINE) for _, name in RATIOS]
        print(f"  {label:<16}{'  '.join(_ratio(each) for each in ratios)}")
    print(f"written: {', '.join(str(folder / name) for name in FILES)}")
    if told is not None:
        print(told)


RATIOS = (
    ("generation s", "generation_s"),
    ("step s", "step_s"),
    ("decode GPU-s", "decode_gpu_s"),
    ("held GPU-s", "held_gpu_s"),
)
"""What is compared on average (RLHFless Fig. 16b)."""


def _ratio(series: Series) -> str:
    return f"{series.mean:.3f}" + ("" if series.half_width is None else f" ± {series.half_width:.3f}")


def _trace(found: Study, path: Path, cluster: Cluster) -> str:
    """Write the trace of the largest place at which ours could run; what it shows."""
    shown = [(place, each[0].traced) for place, each in found.found.items()]
    kept = [(place, *one) for place, one in shown if one is not None]
    (gpus, cap), label, reports = next((each for each in reversed(kept) if each[1] == OURS), kept[-1])
    perfetto.write(path, reports, cluster)
    return f"trace of {label}, {gpus} GPUs, cap {cap}: {path}"


def _write(
    folder: Path, found: Study, rows: Sequence[dict[str, Cell]], config: dict[str, Any], known: dict[str, Any]
) -> None:
    """Result files, the configuration last: the same seed gives the same bytes."""
    columns = list(dict.fromkeys(name for row in reversed(rows) for name in row))
    write_atomic(folder / "scale.csv", csv_text(columns, [[row.get(name) for name in columns] for row in rows]))
    claims = [claim.cells() for claim in paper_claims(found)]
    write_atomic(
        folder / "paper.csv",
        csv_text(list(claims[0]) if claims else ["what"], [list(each.values()) for each in claims]),
    )
    write_atomic(folder / "scale.json", json_text({"config": config, "paper": claims, "rows": rows}))
    points = [
        plots.ScaleRow(
            gpus=gpus,
            cap_tokens=cap,
            policy=label,
            **{name: means[name] for _, name in plots.MEASURES},
        )
        for (gpus, cap), policies in found.means.items()
        for label, means in policies.items()
    ]
    labels = [point.policy for point in points]
    ours = OURS if OURS in labels else labels[-1]
    plots.scale_figure(points, folder / "scale.png", ours, BASELINE)
    write_atomic(folder / "config.json", json_text(known))


def configuration(given: dict[str, Any]) -> dict[str, Any]:
    """What config.json says: every option but those that say where results go, and in how many processes."""
    left_out = ("out", "trace_out", "processes", "as_json")
    return figure.settled("scale", "16", {name: value for name, value in given.items() if name not in left_out})


def paper_claims(found: Study) -> list[figure.Claim]:
    """What the paper says of its scale study beside ours."""
    if not any(OURS in means for means in found.means.values()):
        return []
    return [
        figure.Claim(
            what=what, given=f"against {BASELINE} with its best static N", paper=paper,
            here=found.over_places(OURS, field), unit=unit,
        )
        for what, field, paper, unit in PAPER
    ]  # fmt: skip


if __name__ == "__main__":
    run(app)
