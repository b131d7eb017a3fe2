"""python -m traces: describe, convert, synthesize and import traces."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rlhfless import commands
from rlhfless.types.workload import Algorithm
from traces.describe import describe as statistics
from traces.format import Trace
from traces.importers import gsm8k as gsm8k_files
from traces.importers import tokenizers
from traces.importers import verl as verl_logs
from traces.synthesize import preset_names
from traces.synthesize import synthesize as draw

app = typer.Typer(help="Recorded and synthetic response lengths.", add_completion=False)

Out = Annotated[Path, typer.Option(help="Trace to write, .parquet or .jsonl.")]
PIPE_WIDTH = 10_000
"""Columns of a table that does not go to a terminal (chosen: never wrapped, never cut)."""


@app.command()
def describe(
    file: Annotated[Path, typer.Argument(help="Trace, .parquet or .jsonl.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what a trace looks like."""
    found = statistics(Trace.read(file))
    if as_json:
        print(json.dumps(found, allow_nan=False))
        return
    epochs: list[dict[str, Any]] = found.pop("per_epoch")
    _print_table(str(file), ("statistic", "value"), found.items())
    _print_table("per epoch", tuple(epochs[0]), (epoch.values() for epoch in epochs))


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on stdout, as wide as the terminal, or as wide as it needs to be where there is none."""
    terminal = sys.stdout.isatty()
    console = Console(markup=False, emoji=False, highlight=False)
    if not terminal:  # whatever COLUMNS or FORCE_COLOR say
        console = Console(
            markup=False, emoji=False, highlight=False, width=PIPE_WIDTH, color_system=None, force_terminal=False
        )
    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for name, *values in rows:
        table.add_row(str(name).replace("_", " "), *map(_shown, values))
    console.print(title, table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Trace to read.")],
    target: Annotated[Path, typer.Argument(help="Trace to write; its suffix says the format.")],
) -> None:
    """Turn Parquet into JSON Lines or the reverse."""
    _write(Trace.read(source), target)


@app.command()
def synthesize(
    preset: Annotated[str, typer.Argument(help=f"One of {', '.join(preset_names())}.")],
    out: Out,
    prompts: Annotated[int, typer.Option(help="Prompts of the data set.")] = 1024,
    epochs: Annotated[int, typer.Option(help="Passes over the data set.")] = 3,
    n: Annotated[int, typer.Option("--responses-per-prompt", "-n", help="Samples of each prompt.")] = 1,
    cap: Annotated[int, typer.Option("--max-response-tokens", help="Cap on a response.")] = 2048,
    prompts_per_step: Annotated[int, typer.Option(help="Prompts of a training step.")] = 256,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    algorithm: Annotated[str, typer.Option(help="ppo or grpo.")] = "ppo",
    stretch: Annotated[bool, typer.Option(help="Scale lengths with the cap instead of cutting them.")] = False,
) -> None:
    """Draw a synthetic trace."""
    trace = draw(
        preset,
        prompts=prompts,
        epochs=epochs,
        responses_per_prompt=n,
        max_response_tokens=cap,
        prompts_per_step=prompts_per_step,
        seed=seed,
        algorithm=cast(Algorithm, algorithm),  # TraceInfo refuses any other
        stretch=stretch,
    )
    _write(trace, out)


@app.command()
def gsm8k(
    source: Annotated[Path, typer.Argument(help=f"{gsm8k_files.SOLUTIONS_FILE}, or the folder that holds it.")],
    out: Out,
    tokenizer: Annotated[str, typer.Option(help="words, qwen, or a folder for transformers.")] = "words",
    prompts_per_step: Annotated[int, typer.Option(help="Prompts of a training step.")] = 256,
) -> None:
    """Import the solutions of four models that come with GSM8K."""
    _write(gsm8k_files.recorded(source, tokenizers.load(tokenizer), prompts_per_step), out)


@app.command()
def verl(
    source: Annotated[Path, typer.Argument(help="Console log of a verl run.")],
    out: Out,
    prompts_per_step: Annotated[
        int | None, typer.Option(help="Prompts of a training step; default: data.train_batch_size in the log.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--responses-per-prompt", "-n", help="Samples of each prompt; default: rollout.n in the log."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Cap on a prompt; default: data.max_prompt_length in the log.")
    ] = None,
    max_response_tokens: Annotated[
        int | None, typer.Option(help="Cap on a response; default: data.max_response_length in the log.")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="ppo or grpo; default: ppo where advantages are gae, grpo otherwise.")
    ] = None,
    prompt_share: Annotated[
        float, typer.Option(help="Assumed share of the spread of lengths between prompts, 0 to 1.")
    ] = verl_logs.PROMPT_SHARE,
    spread: Annotated[
        float | None, typer.Option(help="Spread of log lengths below the cap; default: what the clip ratio implies.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Import a verl log: lengths are made up so that each step has the logged mean, max, min and clip ratio."""
    trace = verl_logs.recorded(
        source,
        prompts_per_step=prompts_per_step,
        responses_per_prompt=n,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        algorithm=cast(Algorithm | None, algorithm),  # TraceInfo refuses any other
        prompt_share=prompt_share,
        spread=spread,
        seed=seed,
    )
    _write(trace, out)


def _write(trace: Trace, target: Path) -> None:
    trace.write(target)
    print(f"{len(trace)} responses to {len(trace.prompt_ids)} prompts", file=sys.stderr)
    print(target)


if __name__ == "__main__":
    commands.run(app)
