"""python -m sim.profiles: list, show, rebuild and estimate profiles."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlhfless.commands import run
from rlhfless.types.profile import Profile
from rlhfless.units import GIB, MS
from sim.profiles import roofline as roofline_provider
from sim.profiles import tables
from sim.profiles.model import read_shape
from sim.profiles.registry import load, names, require_folder, write_profile

app = typer.Typer(add_completion=False, help="Profiles: what a model on a GPU type costs.")

SAMPLES = ((1, 1024), (64, 1024))
"""(batch, mean context) whose iteration latency `list` shows."""
PIPE_WIDTH = 10_000
"""Columns of a table that does not go to a terminal (chosen: figures are never cut)."""
PIPE_TEXT_WIDTH = 120
"""Columns at which running text wraps there (chosen)."""


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
    """Rebuild the shipped profiles from aiconfigurator's tables (needs rlhfless[profiles])."""
    targets = tables.chosen(only or ())
    require_folder(out)
    # The package warns about tables of other models and GPUs whenever it opens its data.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    for target in targets:
        print(f"building {target.name}", file=sys.stderr)
        path = out / f"{target.name}.json"
        write_profile(tables.build(target), path)
        print(path)


@app.command()
def roofline(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json.")],
    gpu: Annotated[str, typer.Option(help="A GPU of the catalogue, for instance l40s.")],
    out: Annotated[Path, typer.Option(help="The profile file to write.")],
    tp: Annotated[int, typer.Option(help="GPUs of one actor.")] = 1,
) -> None:
    """Estimate a profile from a data sheet, for models and GPUs that nobody measured."""
    write_profile(roofline_provider.build(read_shape(config), gpu, tp), out)
    print(out)


if __name__ == "__main__":
    run(app)
