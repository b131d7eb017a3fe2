"""python -m sim.profiles: list, show, rebuild and estimate profiles."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.types.profile import Profile
from rlhfless.units import GIB, MS
from sim.profiles import calibrate as calibration
from sim.profiles import roofline as roofline_provider
from sim.profiles import tables as tables_provider
from sim.profiles import vidur as vidur_provider
from sim.profiles.common import gpu_key
from sim.profiles.model import ModelShape, read_shape
from sim.profiles.registry import load, model_shape, models, names, require_folder, write_profile

app = typer.Typer(add_completion=False, help="Profiles: what a model on a GPU type costs.")

SAMPLES = ((1, 1024), (64, 1024))
"""(batch, mean context) whose iteration latency `list` shows."""
PIPE_WIDTH = 10_000
"""Columns of a table that does not go to a terminal (chosen: figures are never cut)."""
PIPE_TEXT_WIDTH = 120
"""Columns at which running text wraps there (chosen)."""
TRACE_SUFFIXES = (".parquet", ".jsonl")
"""Of recorded traces, which this package does not read."""

Gpu = Annotated[str, typer.Option(help="A GPU of the catalogue, for instance l40s or a100.")]
Tp = Annotated[int, typer.Option(help="GPUs of one actor.")]
Out = Annotated[Path, typer.Option(help="The profile file to write.")]


def _console(pipe_width: int = PIPE_WIDTH) -> Console:
    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=pipe_width)


def _tpot_ms(profile: Profile, batch: int, context: int) -> str:
    return f"{float(profile.decode_iteration_s(batch, context)) / MS:.2f}"


@app.command("list")
def list_profiles() -> None:
    """List the shipped profiles."""
    table = Table(*("name", "model", "gpu"), box=None)
    for heading in ("tp", "KV tokens", *(f"ms at {b} x {c}" for b, c in SAMPLES)):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    for name in names():
        profile = load(name)
        data = profile.data
        samples = (_tpot_ms(profile, batch, context) for batch, context in SAMPLES)
        table.add_row(name, data.model, data.gpu, str(data.tp), f"{data.kv_capacity_tokens:,}", *samples, data.kind)
    _console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="A shipped name or the path of a profile file.")]) -> None:
    """Show one profile: origin, notes, sizes and tables."""
    profile = load(name)
    data, console = profile.data, _console()
    facts = Table(box=None, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in (
        ("name", data.name),
        ("model", f"{data.model}, {data.parameters:,.0f} parameters, {data.weight_bytes / GIB:.2f} GiB"),
        ("actor", f"{data.tp} x {data.gpu}"),
        ("kind", data.kind),
        ("origin", data.origin),
        ("licence", data.licence),
        ("KV", f"{data.kv_capacity_tokens:,} tokens of {data.kv_bytes_per_token:,.0f} bytes"),
        ("limits", f"{data.max_slots} responses at once, {data.max_batched_tokens} tokens a prefill iteration"),
        ("start-up", f"{data.cold_start_s:g} s cold, {data.warm_start_s:g} s warm"),
        ("overhead", f"{data.iteration_overhead_s:g} s an iteration"),
        *(("note", note) for note in data.notes),
    ):
        facts.add_row(key, value)
    _console(PIPE_TEXT_WIDTH).print(facts)
    decode = Table(title="decode iteration, ms", box=None)
    for heading in ("batch", *(str(context) for context in data.decode_context)):
        decode.add_column(heading, justify="right", no_wrap=True)
    for batch, row in zip(data.decode_batch, data.decode_s, strict=True):
        decode.add_row(str(batch), *(f"{value / MS:.1f}" for value in row))
    console.print(decode)
    prefill = Table("prefill tokens", "ms an iteration", box=None)
    for tokens, value in zip(data.prefill_tokens, data.prefill_s, strict=True):
        prefill.add_row(str(tokens), f"{value / MS:.1f}")
    console.print(prefill)


@app.command()
def build(
    only: Annotated[list[str] | None, typer.Argument(help="Names to rebuild; all where none is given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path(__file__).parent / "shipped",
) -> None:
    """Rebuild the shipped profiles from aiconfigurator's tables (needs the extra `profiles`)."""
    targets = tables_provider.chosen(only or ())
    require_folder(out)
    _quiet()
    for target in targets:
        print(f"building {target.name}", file=sys.stderr)
        path = out / f"{target.name}.json"
        write_profile(tables_provider.build(target), path)
        print(path)


def _quiet() -> None:
    # The package warns about tables of other models and GPUs whenever it opens its data.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)


@app.command()
def tables(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json.")], gpu: Gpu, out: Out, tp: Tp = 1
) -> None:
    """Sum aiconfigurator's measured operators over a model of yours (needs the extra `profiles`)."""
    _quiet()
    write_profile(tables_provider.build_from(config, gpu_key(gpu), tp), out)
    print(out)


@app.command()
def roofline(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json.")], gpu: Gpu, out: Out, tp: Tp = 1
) -> None:
    """Estimate a profile from a data sheet, for models and GPUs that nobody measured."""
    write_profile(roofline_provider.build(read_shape(config), gpu_key(gpu), tp), out)
    print(out)


@app.command()
def vidur(
    folder: Annotated[Path, typer.Argument(help="Folder of Vidur's CSVs: mlp, attention, all_reduce; or of its tree.")],
    model: Annotated[str, typer.Option(help="A shipped model, for instance llama-2-70b, or a config.json.")],
    gpu: Gpu,
    out: Out,
    tp: Tp = 1,
    max_batch: Annotated[int | None, typer.Option(help="Largest batch; default: the largest measured.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Longest context; default: the longest measured.")] = None,
    max_prefill: Annotated[
        int | None, typer.Option(help="Tokens of a prefill iteration; default: the most measured.")
    ] = None,
) -> None:
    """Make a profile of Vidur's measurements with its own predictor (needs the extra `vidur`)."""
    profile = vidur_provider.build(
        _shape(model), gpu_key(gpu), tp, folder, max_batch=max_batch, max_context=max_context, max_prefill=max_prefill
    )
    write_profile(profile, out)
    print(out)


def _shape(model: str) -> ModelShape:
    if model in models():
        return model_shape(model)
    if not Path(model).suffix:
        raise InputError(f"unknown model {model!r}: known are {', '.join(models())}; or give a config.json")
    return read_shape(Path(model))


@app.command()
def calibrate(
    profile: Annotated[str, typer.Argument(help="A shipped name or the path of a profile file.")],
    observed: Annotated[
        Path, typer.Argument(help="JSON of observed runs; python -m experiments.calibrate reads traces.")
    ],
    out: Annotated[Path | None, typer.Option(help="The profile file to write; default: none.")] = None,
    model: Annotated[str, typer.Option(help=f"What to fit: auto, {', '.join(calibration.MODELS)}.")] = "auto",
) -> None:
    """Fit a profile's overhead (and speed) to the times that whole engines took."""
    if observed.suffix in TRACE_SUFFIXES:
        raise InputError(f"{observed}: a recorded trace; python -m experiments.calibrate PROFILE TRACE reads those")
    found = calibration.calibrate(load(profile), calibration.read(observed), model)
    if out is not None:
        write_profile(found.profile, out)
    for line in calibration.summary(found):
        print(line)
    if out is not None:
        print(out)


if __name__ == "__main__":
    run(app)
