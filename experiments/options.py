"""Options that commands share, with one meaning, one default and one help text each."""

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from experiments.bench import Setting
from rlhfless.errors import InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.policies import policy
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import Start
from sim.profiles import load

MOST_TOKENS = 10_000_000
"""Longest response cap that a command takes (chosen: beyond any model's context)."""
GPUS_PER_HOST = 8
"""GPUs of one host, as in the paper's clusters."""

MOST_GPUS = 1_000_000
"""GPUs of the largest cluster that a command takes (chosen: ten times the largest that was tried)."""

Nodes = Annotated[
    int,
    typer.Option(
        "--nodes", min=1, max=MOST_GPUS, help="GPUs of the cluster: 160 is 20 hosts of 8. Counts GPUs, not hosts."
    ),
]
GpusPerHost = Annotated[int, typer.Option("--gpus-per-host", min=1, max=1024, help="GPUs of one host.")]
ProfileName = Annotated[str, typer.Option("--profile", help="Name of a shipped profile, or a profile file.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed; the same gives byte-identical result files.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON instead of a table.")]
Price = Annotated[
    float | None, typer.Option("--usd-per-gpu-hour", min=0, help="Price of a GPU; default: the GPU's list price.")
]
Weight = Annotated[float, typer.Option("--weight", min=0, max=1, help="lambda: weight of time against cost.")]
Tau = Annotated[float, typer.Option("--tau", help="Share of an actor's responses done before it may be cut, (0, 1].")]
Window = Annotated[int, typer.Option("--window", min=1, max=1000, help="Epochs that length estimates look back on.")]
LearnerGpus = Annotated[
    int | None,
    typer.Option(
        "--learner-gpus",
        min=1,
        help="GPUs of the learner; default: as many as a reserved baseline has, else the fewest that hold its state.",
    ),
]
StartMode = Annotated[str, typer.Option("--start", help="How serverless functions start: warm, prewarmed or cold.")]
Noise = Annotated[float, typer.Option("--speed-noise", help="Spread (std of the log) of actors' true speeds, [0, 1).")]
TraceOut = Annotated[
    Path | None, typer.Option("--trace-out", help="Write a Chrome/Perfetto trace (a row per GPU) to this file.")
]

Seeds = Annotated[
    int,
    typer.Option("--seeds", min=1, max=1000, help="Seeds in a row, each another trace; results are means over them."),
]
Epochs = Annotated[int, typer.Option("--epochs", min=1, max=1000, help="Passes over the prompts.")]
Batch = Annotated[int, typer.Option("--prompts-per-step", min=1, max=10**6, help="Prompts of a step.")]
Profiles = Annotated[
    str, typer.Option("--profile", help="Names of shipped profiles, or profile files; several with commas.")
]
TraceIn = Annotated[
    Path | None, typer.Option("--trace", help="Recorded trace, whose lengths take the place of synthetic ones.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder for CSV, JSON, PNG and config.json.")]
Processes = Annotated[
    int, typer.Option("--processes", min=1, max=256, help="Processes side by side; results do not depend on it.")
]
PROCESSES = 2
"""Processes of a figure by default (chosen: the cores of a small machine)."""

STARTS: dict[str, Start] = {"warm": "warm", "prewarmed": "prewarmed", "cold": "cold"}


def setting(
    *,
    profile: str,
    nodes: int,
    gpus_per_host: int,
    usd_per_gpu_hour: float | None,
    seed: int,
    weight: float = scaling.WEIGHT,
    tau: float = migration.DEFAULT_TAU,
    window: int = 1,
    learner_gpus: int | None = None,
    start: str = "warm",
    speed_noise: float = 0.0,
) -> Setting:
    """The setting that options describe. Raises InputError for an unknown name or a value out of range."""
    if start not in STARTS:
        raise InputError(f"--start {start!r}: known are {', '.join(STARTS)}")
    if not 0 < tau <= 1:
        raise InputError(f"--tau {tau}: it must be above 0 and at most 1")
    if not 0 <= weight <= 1:
        raise InputError(f"--weight {weight}: lambda must lie in 0..1")
    if not 0 <= speed_noise < 1:
        raise InputError(f"--speed-noise {speed_noise}: it must be at least 0 and below 1")
    if usd_per_gpu_hour is not None and not isfinite(usd_per_gpu_hour):
        raise InputError(f"--usd-per-gpu-hour {usd_per_gpu_hour}: it must be a finite number")
    loaded = load(profile)
    cluster = Cluster.uniform(loaded.data.gpu, nodes, gpus_per_host)
    cluster.require(learner_gpus or 1, "--learner-gpus: the learner")
    return Setting(
        profile=loaded,
        cluster=cluster,
        usd_per_gpu_hour=cluster.gpu.usd_per_hour if usd_per_gpu_hour is None else usd_per_gpu_hour,
        seed=seed,
        weight=weight,
        tau=tau,
        window=window,
        learner_gpus=learner_gpus,
        start=STARTS[start],
        speed_noise=speed_noise,
    )


def whole_numbers(text: str, option: str) -> list[int]:
    """Comma-separated whole numbers, each at least 1, ascending without repeats. Raises InputError otherwise."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"{option} {text!r}: expected whole numbers with commas between, such as 2048,4096") from None
    if not 1 <= numbers[0] <= numbers[-1] <= MOST_TOKENS:
        raise InputError(f"{option} {text!r}: every number must lie in 1..{MOST_TOKENS}")
    return numbers


def check_outputs(out: Path, names: Sequence[str], trace_out: Path | None) -> None:
    """Raise InputError now, rather than after the work, for a place where results cannot be written. Makes nothing."""
    targets = [out / name for name in names] + ([] if trace_out is None else [trace_out])
    for target in targets:
        if target.is_dir():
            raise InputError(f"{target}: a folder is in the way of a result file")
    for folder in [out] if trace_out is None else [out, trace_out.parent]:
        present = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not present.is_dir():
            raise InputError(f"{present}: a file is in the way; an output folder is needed")
        made = folder == out  # the folder of a trace file is not made
        if not os.access(present, os.W_OK | os.X_OK) or not (made or present == folder):
            raise InputError(f"{folder}: no such folder that can be written to; choose another one for results")


def policy_names(text: str, option: str) -> list[str]:
    """Comma-separated policies, in the order given. Raises InputError for an unknown one."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        try:
            policy(name)
        except InputError as error:
            raise InputError(f"{option}: {error}") from None
    return names
