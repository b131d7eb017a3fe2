"""What the figures of the paper share: the paper's value beside ours, result files, the command line.

A figure is a `Figure`: a name, defaults, and a function from what was `Asked` to a `Result`. `command` makes its
command line, `produce` its files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Literal

import typer

import experiments
import rlhfless
import sim
import traces
from experiments import options
from experiments.output import Cell, csv_text, format_cell, json_text, out_folder, print_table, write_atomic
from experiments.study import STEPS_PER_EPOCH, Asked, Means
from rlhfless.accounting.metrics import Series
from rlhfless.errors import InputError

SOURCES = (".py", ".toml", ".json")
"""Files whose content a result may depend on."""
LIBRARIES = ("rlhfless", "numpy", "simpy", "pandas", "matplotlib")
"""Whose versions a configuration names."""
Unit = Literal["x", "%", ""]
"""x: a ratio. %: a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the paper and what it comes to here."""

    what: str
    """Quantity."""
    given: str
    """Workload and condition, where the paper leaves one open."""
    paper: float | str | None
    """The paper's number (shares, not percent), its statement, or None where it says nothing."""
    here: Series
    """Ours over the seeds."""
    unit: Unit = ""
    """What it is counted in."""

    def cells(self) -> dict[str, Cell]:
        """A row of the result files."""
        return {
            "what": self.what, "given": self.given, "paper": self.paper, "here": self.here.mean,
            "here_ci95": self.here.half_width, "unit": self.unit,
        }  # fmt: skip

    def printed(self) -> list[Cell]:
        """A row of the printed table."""
        return [self.what, self.given, *beside(self.paper, self.here.mean, self.here.half_width, self.unit)]


def beside(paper: float | str | None, here: float, half_width: float | None, unit: str) -> tuple[str, str]:
    """The paper's value and ours with its interval, as tables show them."""
    mark = {"x": "x", "%": " %"}.get(unit, "")

    def number(value: float) -> str:
        return {"x": f"{value:.2f}", "%": f"{100 * value:.1f}"}.get(unit) or format_cell(float(value))

    said = "-" if paper is None else paper if isinstance(paper, str) else f"{number(paper)}{mark}"
    return said, f"{number(here)}{'' if half_width is None else f' ± {number(half_width)}'}{mark}"


Column = tuple[str, str, float]
"""Heading, field of the rows, factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a figure has found."""

    claims: tuple[Claim, ...]
    """The paper beside ours."""
    columns: tuple[Column, ...]
    """What is printed of the rows."""
    rows: tuple[dict[str, Cell], ...]
    """Everything measured, the bounds among it."""
    remarks: tuple[str, ...]
    """Sentences that follow from the rows."""
    draw: Callable[[Path], None]
    """Draws the picture."""
    timings: tuple[dict[str, Cell], ...] = ()
    """Wall-clock measurements: in files of their own, for they differ from run to run."""
    measured: tuple[Claim, ...] = ()
    """Claims that follow from them."""


COLUMNS: tuple[Column, ...] = (
    ("workload", "workload", 1), ("policy", "policy", 1), ("actors", "actors", 1), ("gen s", "generation_s", 1),
    ("step s", "step_s", 1), ("decode GPU-s", "decode_gpu_s", 1), ("exec GPU-s", "executed_gpu_s", 1),
    ("held GPU-s", "held_gpu_s", 1), ("prefill tokens", "prefill_tokens", 1), ("gen x", "generation_speedup", 1),
    ("step x", "step_speedup", 1), ("decode saved %", "decode_saving", 100), ("exec saved %", "executed_saving", 100),
    ("held saved %", "held_saving", 100), ("time / bound", "time_over_bound", 1),
    ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip
"""What figures that compare policies print."""


def bound_remark(label: str, policies: Mapping[str, Means]) -> str:
    """How far each policy is from what none can beat."""
    any_one = next(iter(policies.values()))
    time_s, cost = any_one["bound_s"].mean, any_one["bound_gpu_s"].mean
    apart = ", ".join(
        f"{name} {each['time_over_bound'].mean:.2f} and {each['cost_over_bound'].mean:.2f}"
        for name, each in policies.items()
    )
    return (
        f"bound, {label}: no policy generates faster than the longest response alone, {time_s:.4g} s, or decodes "
        f"with less than all responses packed into the fewest GPUs, {cost:.4g} GPU-s; times as much: {apart}"
    )


def row(facts: dict[str, Cell], found: Means) -> dict[str, Cell]:
    """A row of the result files: means over seeds, each with the half width of its confidence interval."""
    cells = dict(facts)
    for name, series in found.items():
        cells[name] = series.mean
        cells[f"{name}_ci95"] = series.half_width
    return cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of the paper."""

    name: str
    """Module, folder and files are called so."""
    paper: str
    """Its number in the paper."""
    title: str
    """One line."""
    work: Callable[[Asked], Result]
    """Runs it."""
    asked: Asked = field(default_factory=Asked)
    """Its defaults."""
    inputs: tuple[Path, ...] = ()
    """Folders that it reads where they are."""

    @property
    def files(self) -> tuple[str, ...]:
        """Result files."""
        return (f"{self.name}.csv", "paper.csv", f"{self.name}.json", f"{self.name}.png", "config.json")


def config(figure: Figure, asked: Asked) -> dict[str, Any]:
    """Everything that a result depends on; the same configuration gives the same bytes (wall-clock times apart)."""
    given = asdict(asked) | {"gpus_per_host": options.GPUS_PER_HOST, "steps_per_epoch": STEPS_PER_EPOCH}
    del given["processes"]
    found = [path for folder in figure.inputs for path in sorted(folder.rglob("*")) if path.is_file()]
    return settled(figure.name, figure.paper, given, found)


def settled(name: str, paper: str, given: dict[str, Any], inputs: Sequence[Path] = ()) -> dict[str, Any]:
    """A configuration: the command and its options (files by their content), versions, and what the source was."""

    def digest(path: Path) -> str:
        try:
            return sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"{path}: cannot read ({error.strerror})") from None

    files = {key: value for key, value in given.items() if isinstance(value, Path)}
    return {
        "command": f"python -m experiments.{name}",
        "figure": paper,
        "options": given | {key: {"name": path.name, "sha256": digest(path)} for key, path in files.items()},
        "inputs": {str(path): digest(path) for path in inputs},
        "versions": {"python": python_version(), **{name: version(name) for name in LIBRARIES}},
        "source_sha256": source_digest(),
    }


@cache
def source_digest() -> str:
    """Of all files that a simulated result can depend on: code, presets, profiles."""
    digest = sha256()
    for package in (rlhfless, sim, traces, experiments):
        root = Path(package.__path__[0])
        for path in sorted(each for each in root.rglob("*") if each.suffix in SOURCES and each.is_file()):
            digest.update(f"{package.__name__}/{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def produce(figure: Figure, asked: Asked, folder: Path) -> Result:
    """Run a figure and write its files, the configuration last: where it stands, the others are whole."""
    options.check_outputs(folder, figure.files, None)
    known = config(figure, asked)
    result = figure.work(asked)
    out_folder(folder)
    claims = [claim.cells() for claim in result.claims]
    _write_rows(folder / f"{figure.name}.csv", result.rows)
    _write_rows(folder / "paper.csv", claims)
    if result.timings:
        _write_rows(folder / "timings.csv", result.timings)
        _write_rows(folder / "timings-paper.csv", [claim.cells() for claim in result.measured])
    result.draw(folder / f"{figure.name}.png")
    found = {"config": known, "paper": claims, "rows": result.rows, "remarks": result.remarks}
    write_atomic(folder / f"{figure.name}.json", json_text(found))
    write_atomic(folder / "config.json", json_text(known))
    return result


def _write_rows(path: Path, rows: Sequence[dict[str, Cell]]) -> None:
    columns = list(dict.fromkeys(name for each in rows for name in each)) or ["what"]
    write_atomic(path, csv_text(columns, [[each.get(name) for name in columns] for each in rows]))


def show(figure: Figure, asked: Asked, result: Result, folder: Path) -> None:
    """Print a result: the paper beside ours, the rows, the remarks."""
    print_table(
        f"Figure {figure.paper} of the paper: {figure.title}; {described(asked)}",
        ["", "given", "paper", "here"],
        [claim.printed() for claim in (*result.claims, *result.measured)],
    )
    print_table(
        f"mean over {asked.seeds} seeds; files hold 95 % intervals",
        [heading for heading, _, _ in result.columns],
        [[scaled(each.get(name), factor) for _, name, factor in result.columns] for each in result.rows],
    )
    for remark in result.remarks:
        print(remark)
    print(f"written to {folder}: {', '.join(figure.files)}")


def described(asked: Asked) -> str:
    """What was asked for, in one line."""
    lengths = "synthetic lengths" if asked.trace is None else f"lengths of {asked.trace.name}"
    return (
        f"simulated, {' and '.join(asked.profiles)}, {asked.nodes} GPUs, {asked.batch} prompts a step, "
        f"{asked.epochs} epochs, {lengths}, seeds {asked.seed}..{asked.seed + asked.seeds - 1}, ± 95 % interval"
    )


def scaled(value: Cell, factor: float) -> Cell:
    """A cell as printed tables of rows show it."""
    return round(value * factor, 3) if isinstance(value, float) else value


def command(figure: Figure) -> typer.Typer:
    """The command line of a figure, with the options that all share."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    usual = figure.asked
    usual_profiles = ",".join(usual.profiles)

    def main(
        seed: options.Seed = usual.seed,
        seeds: options.Seeds = usual.seeds,
        epochs: options.Epochs = usual.epochs,
        batch: options.Batch = usual.batch,
        profile: options.Profiles = usual_profiles,
        nodes: options.Nodes = usual.nodes,
        trace: options.TraceIn = None,
        out: options.Out = Path("out") / figure.name,
        processes: options.Processes = options.PROCESSES,
        as_json: options.Json = False,
    ) -> None:
        profiles = tuple(dict.fromkeys(profile.split(",")))
        if len(profiles) > max(len(usual.profiles), 1):
            raise InputError(f"--profile {profile}: this figure takes at most {len(usual.profiles)}")
        asked = Asked(
            seed=seed, seeds=seeds, epochs=epochs, batch=batch, profiles=profiles, nodes=nodes, trace=trace,
            processes=processes,
        )  # fmt: skip
        result = produce(figure, asked, out)
        if as_json:
            print((out / f"{figure.name}.json").read_text(), end="")
        else:
            show(figure, asked, result, out)

    main.__doc__ = f"Figure {figure.paper} of the paper: {figure.title}."
    app.command()(main)
    return app
