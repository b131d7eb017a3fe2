"""`python -m experiments.all`: every figure of the paper, and one report of them all.

Figures whose files stand in the output folder, made with the same configuration, are not run again.
"""

import base64
import csv
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from html import escape
from inspect import signature
from io import StringIO
from json import loads
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import (
    ablation,
    breakdown,
    figure,
    lengths,
    options,
    overall,
    predictor,
    prefill,
    rlhfuse,
    scale,
    scaling,
    sensitivity,
    waste,
)
from experiments.figure import Figure
from experiments.output import json_text, out_folder, print_table, write_atomic
from experiments.study import SEEDS, Asked
from rlhfless.commands import run
from rlhfless.errors import InputError

FIGURES = tuple(
    module.FIGURE
    for module in (
        waste, lengths, overall, ablation, rlhfuse, scaling, prefill, predictor, sensitivity, breakdown,
    )
)  # fmt: skip
"""In the paper's order, but for the scale study, which has options of its own and comes before the last."""
SCALE = "scale"
REPORT = "report.html"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.8rem 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: 0.2rem 0.6rem; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } code { background: #f4f4f4; padding: 0 0.2rem; } .wide { overflow-x: auto; }
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One figure of the report."""

    name: str
    paper: str
    title: str
    files: tuple[str, ...]
    config: dict[str, Any]
    """What its files must have been made with."""
    make: Callable[[Path], None]
    """Makes the files in a folder."""

    def done(self, folder: Path) -> bool:
        """Whether its files stand there, made with this configuration."""
        if not all((folder / name).is_file() for name in self.files):
            return False
        return (folder / "config.json").read_text(encoding="utf-8") == json_text(self.config)


def pieces(asked: Asked, epochs: int | None, batch: int | None, chosen: Sequence[str]) -> list[Piece]:
    """The figures chosen, in order; `epochs` and `batch` where they are to differ from a figure's own."""
    found = [_figure(each, asked, epochs, batch) for each in FIGURES]
    found.insert(-1, _scale(asked, epochs, batch))
    names = [each.name for each in found]
    for name in chosen:
        if name not in names:
            raise InputError(f"--only {name!r}: known are {', '.join(names)}")
    return [each for each in found if not chosen or each.name in chosen]


def _figure(each: Figure, asked: Asked, epochs: int | None, batch: int | None) -> Piece:
    own = replace(
        each.asked, seed=asked.seed, seeds=asked.seeds, trace=asked.trace, processes=asked.processes,
        epochs=epochs or each.asked.epochs, batch=batch or each.asked.batch,
    )  # fmt: skip

    def make(folder: Path) -> None:
        figure.show(each, own, figure.produce(each, own, folder), folder)

    return Piece(
        name=each.name, paper=each.paper, title=each.title, files=each.files, config=figure.config(each, own), make=make
    )


def _scale(asked: Asked, epochs: int | None, batch: int | None) -> Piece:
    changed: dict[str, Any] = {"seed": asked.seed, "seeds": asked.seeds, "trace": asked.trace}
    changed |= {} if epochs is None else {"epochs": epochs}
    changed |= {} if batch is None else {"prompts": batch}
    usual = {name: each.default for name, each in signature(scale.scale).parameters.items()}

    def make(folder: Path) -> None:
        scale.scale(**changed, processes=asked.processes, out=folder)

    return Piece(
        name=SCALE, paper="16", title="time and cost by cluster size", files=scale.FILES,
        config=scale.configuration(usual | changed), make=make,
    )  # fmt: skip


@app.command()
def run_all(
    seed: options.Seed = 0,
    seeds: options.Seeds = SEEDS,
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, max=1000, help="Default: each figure's own.")] = None,
    batch: Annotated[
        int | None, typer.Option("--prompts-per-step", min=1, max=10**6, help="Default: each figure's own.")
    ] = None,
    trace: options.TraceIn = None,
    only: Annotated[str, typer.Option("--only", help="Figures to make, with commas; default: all.")] = "",
    processes: options.Processes = options.PROCESSES,
    out: Annotated[Path, typer.Option("--out", help="Folder for a folder a figure, and the report.")] = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Make every figure of the paper and report.html, which holds pictures and tables in itself."""
    options.check_outputs(out, [REPORT], None)
    asked = Asked(seed=seed, seeds=seeds, trace=trace, processes=processes)
    wanted = pieces(asked, epochs, batch, [name for name in only.split(",") if name])
    out_folder(out)
    for number, piece in enumerate(wanted, 1):
        where = f"[{number}/{len(wanted)}] {piece.name}"
        if piece.done(out / piece.name):
            print(f"{where}: is there", file=sys.stderr)
            continue
        print(where, file=sys.stderr)
        printed = StringIO()
        with redirect_stdout(printed):
            piece.make(out / piece.name)
        write_atomic(out / piece.name / "table.txt", printed.getvalue())
    write_atomic(out / REPORT, report(wanted, out))
    found = {piece.name: claims(piece, out / piece.name) for piece in wanted}
    if as_json:
        print(json_text(found), end="")
        return
    for piece in wanted:
        print_table(
            f"Figure {piece.paper}: {piece.title} (python -m experiments.{piece.name})",
            HEADINGS,
            [[each["what"], each["given"], *_shown(each)] for each in found[piece.name]],
        )
    print(f"written: {out / REPORT}")


def claims(piece: Piece, folder: Path) -> list[dict[str, Any]]:
    """The paper beside ours, wall-clock measurements last."""
    found: list[dict[str, Any]] = loads((folder / f"{piece.name}.json").read_text(encoding="utf-8"))["paper"]
    timed = folder / "timings-paper.csv"
    if timed.is_file():
        with timed.open(encoding="utf-8") as file:
            for each in csv.DictReader(file):
                found.append(each | {name: float(each[name]) if each[name] else None for name in ("here", "here_ci95")})
    return found


# ---- the report

HEADINGS = ("", "given", "paper", "here")


def report(wanted: Sequence[Piece], out: Path) -> str:
    """One HTML file, self-contained."""
    parts = [_section(piece, out / piece.name) for piece in wanted]
    index = "".join(
        f'<li><a href="#{piece.name}">Figure {escape(piece.paper)}: {escape(piece.title)}</a></li>' for piece in wanted
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>RLHFless: figures of the paper</title>\n'
        f"<style>{STYLE}</style></head><body>\n<h1>Figures of the paper, measured again</h1>\n<p>Simulated unless a "
        "row says real. ± and intervals: 95 %, over seeds, each another synthetic trace. The paper's value stands "
        "beside ours; where it gives no condition, the condition is ours and is "
        f"named.</p>\n<ul>{index}</ul>\n{''.join(parts)}</body></html>\n"
    )


def _section(piece: Piece, folder: Path) -> str:
    found = loads((folder / f"{piece.name}.json").read_text(encoding="utf-8"))
    picture = base64.b64encode((folder / f"{piece.name}.png").read_bytes()).decode()
    table = (folder / "table.txt").read_text(encoding="utf-8") if (folder / "table.txt").is_file() else ""
    paper = _table(HEADINGS, [[each["what"], each["given"], *_shown(each)] for each in claims(piece, folder)])
    remarks = "".join(f"<li>{escape(each)}</li>" for each in found.get("remarks", ()))
    config = escape((folder / "config.json").read_text(encoding="utf-8"))
    return (
        f'<h2 id="{piece.name}">Figure {escape(piece.paper)}: {escape(piece.title)}</h2>\n'
        f"<p><code>python -m experiments.{piece.name}</code></p>\n"
        f'<img alt="{escape(piece.title)}" src="data:image/png;base64,{picture}">\n{paper}<ul>{remarks}</ul>\n'
        f'<details><summary>all rows</summary><div class="wide"><pre>{escape(table)}</pre></div></details>\n'
        f"<details><summary>configuration</summary><pre>{config}</pre></details>\n"
    )


def _shown(each: dict[str, Any]) -> tuple[str, str]:
    return figure.beside(each["paper"], each["here"], each["here_ci95"], each["unit"])


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' if at > 1 else ''}>{escape(each)}</td>" for at, each in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>\n" if rows else ""


if __name__ == "__main__":
    run(app)
