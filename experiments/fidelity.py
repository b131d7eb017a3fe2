"""`python -m experiments.fidelity`: how far the simulator is from what is not it, and what errors leave of a saving.

Four comparisons: event to event against token by token, against Vidur's simulator, against the log of a real verl run,
against real vLLM on this machine. Each that cannot be made here is a row that says why. Then `experiments.perturb`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments import fidelity_twin, fidelity_verl, fidelity_vidur, options, perturb, plots
from experiments.compare import number
from experiments.evidence import Evidence, compared
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from rlhfless.commands import run
from rlhfless.errors import InputError, RlhflessError, SchemaError
from rlhfless.types.arrays import floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("fidelity.csv", "perturb.csv", "fidelity.json", "fidelity.png")
REAL_CONFIG = Path("examples/cpu-tiny.toml")
"""What `--real` runs."""
SEEDS = 10
"""Seeds of the perturbations (chosen: the saving of a seed is off the mean by a fifth)."""
INVISIBLE = 1e-6
"""Errors too small for the figure."""
RUN_HEIGHT_IN = 3.0
"""Height of the figure of the verl run."""
VERL_FILE = Path("verl") / fidelity_verl.LOG
VIDUR_FOLDER, REQUESTS_FILE = Path("vidur"), Path("requests") / "splitwise_conv.csv"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# ---- against Vidur, verl, vLLM


def vidur_rows(data: Path | None) -> list[Evidence]:
    """What `experiments.fidelity_vidur` finds."""
    against = "Vidur 0.0.26"
    if find_spec("vidur") is None:
        return [Evidence(against=against, skipped="vidur is not installed: pip install 'rlhfless[vidur]'")]
    if data is None:
        return [Evidence(against=against, skipped=f"no --data: a folder with {VIDUR_FOLDER} and {REQUESTS_FILE}")]
    try:
        found = fidelity_vidur.rows(data / VIDUR_FOLDER, data / REQUESTS_FILE)
    except RlhflessError as error:
        return [Evidence(against=against, skipped=str(error))]
    return [
        Evidence(
            against=against,
            quantity=row.name,
            n=row.n,
            median=row.median_error,
            p90=row.p90_error,
            scope=f"same measurements and requests on both sides; {row.note}",
        )
        for row in found
    ]


def verl_study(data: Path | None, seed: int) -> fidelity_verl.Study | Evidence:
    """What `experiments.fidelity_verl` finds, or why there is nothing."""
    if data is None:
        return Evidence(against=fidelity_verl.AGAINST, skipped=f"no --data: a folder with {VERL_FILE}")
    if not (data / VERL_FILE).is_file():
        return Evidence(against=fidelity_verl.AGAINST, skipped=f"{data / VERL_FILE}: no such file")
    with progress(fidelity_verl.PROFILES, f"verl log, {fidelity_verl.PROFILES} runs of all its steps") as tick:
        return fidelity_verl.study(data / VERL_FILE, seed, tick)


def real_rows(results: Path, run_now: bool, folder: Path) -> list[Evidence]:
    """The simulator against real engines: of a run that is made now, or of an earlier one's file."""
    against = "real vLLM and Ray"
    if run_now:
        if find_spec("vllm") is None or find_spec("ray") is None:
            raise InputError("--real needs vLLM and Ray: pip install 'rlhfless[cpu]'")
        made = folder / "validate"
        command = [sys.executable, "-m", "experiments.validate", "--config", str(REAL_CONFIG), "--out", str(made)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise InputError(f"--real: experiments.validate --config {REAL_CONFIG} did not end well; see above")
        results = made / "validate.json"
    if not results.is_file():
        reason = f"no {results}: give --real, or run experiments.validate first; needs pip install 'rlhfless[cpu]'"
        return [Evidence(against=against, skipped=reason)]
    try:
        facts = json.loads(results.read_bytes())
        steps, order = facts["steps"], facts["rank_agreement"]
        scope = (
            f"{facts['config']['name']} on {facts['config']['engine']['device']}, profile {facts['profile']}; the same "
            "plans and lengths; start and weights told"
        )
        found = [
            compared(
                floats([row["predicted_generation_s"] for row in steps]),
                floats([row["measured_generation_s"] for row in steps]),
                against=against,
                quantity="generation time",
                agree=int(order["agree"]),
                pairs=int(order["of"]),
                scope=f"{scope}; other work on the machine counts as error",
            )
        ]
        if alone := [row for row in steps if row.get("measured_cpu_s")]:
            found.append(
                compared(
                    floats([row["predicted_core_s"] for row in alone]),
                    floats([row["measured_cpu_s"] for row in alone]),
                    against=against,
                    quantity="core-seconds, of the engines' processor time",
                    scope=f"{scope}; other work on the machine does not count",
                )
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{results}: no result of experiments.validate ({type(error).__name__}: {error})") from None
    return found


# ---- the command

HEADINGS = (
    "against", "what", "predicted by", "n", "median %", "mean %", "90th pct %", "r", "order of policies", "scope",
)  # fmt: skip


def table_row(row: Evidence) -> list[Cell]:
    """One printed row."""
    if row.skipped is not None:
        return [row.against, "not compared", *[None] * 7, row.skipped]
    sizes: list[Cell] = [None if size is None else 100 * size for size in (row.median, row.mean, row.p90)]
    shown = [f"{size:.0e}" if isinstance(size, float) and 0 < size < 1e-6 else size for size in sizes]
    order = None if row.pairs is None else f"{row.agree} of {row.pairs}"
    return [row.against, row.quantity, row.predictor, row.n, *shown, row.r, order, row.scope]


@app.command()
def fidelity(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            envvar="RLHFLESS_TEST_DATA",
            help=f"Folder with {VERL_FILE}, {VIDUR_FOLDER} and {REQUESTS_FILE}; rows without their file are left out.",
        ),
    ] = None,
    real: Annotated[bool, typer.Option("--real", help=f"Run experiments.validate ({REAL_CONFIG}) now.")] = False,
    validated: Annotated[
        Path, typer.Option("--validated", help="Result file of an earlier experiments.validate.")
    ] = Path("out/validate/validate.json"),
    seeds: Annotated[int, typer.Option("--seeds", min=2, max=1000, help="Seeds of the perturbations.")] = SEEDS,
    prompts: Annotated[int, typer.Option("--prompts", min=10, help="Prompts of a perturbed step.")] = 512,
    nodes: options.Nodes = 160,
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option("--out", help=f"Folder for {', '.join(FILES)}.")] = Path("out/fidelity"),
    as_json: options.Json = False,
) -> None:
    """Say how far the simulator can be trusted, and what errors of the planner leave of its saving."""
    options.check_outputs(out, FILES, None)
    if data is not None and not data.is_dir():
        raise InputError(f"--data {data}: no such folder")
    folder = out_folder(out)
    real_evidence = real_rows(validated, real, folder)
    with progress(2, "token-by-token twin, Vidur") as tick:
        evidence = [fidelity_twin.row()]
        tick(1)
        evidence += vidur_rows(data)
        tick(1)
    logged = verl_study(data, seed)
    study = logged if isinstance(logged, fidelity_verl.Study) else None
    evidence += [logged] if isinstance(logged, Evidence) else logged.evidence
    evidence += real_evidence
    case = perturb.Case(prompts=prompts, gpus=nodes)
    with progress(seeds, "seeds of a perturbed planner") as tick:
        perturbed = perturb.study(case, range(seed, seed + seeds), tick)

    write_atomic(folder / FILES[0], _csv([row.cells() for row in evidence]))
    write_atomic(folder / FILES[1], _csv(perturbed))
    facts: dict[str, object] = {
        "config": {"seed": seed, "seeds": seeds, "case": case, "verl": None if study is None else study.candidates},
        "evidence": evidence,
        "perturbed": perturbed,
    }
    write_atomic(folder / FILES[2], json_text(facts))
    draw(evidence, study, perturbed, folder / FILES[3])
    if as_json:
        print((folder / FILES[2]).read_text(), end="")
        return
    title = "the simulator against what is not it; sizes of relative errors, predicted over measured less 1"
    print_table(title, HEADINGS, [table_row(row) for row in evidence])
    if study is not None:
        _print_candidates(study)
    print_table(
        f"{perturb.OURS} against {perturb.BASELINE} with its best static number of actors, when the planner is wrong: "
        f"{case.profile} on {case.gpus} GPUs, {case.prompts} prompts, cap {case.cap_tokens}, {case.preset}; "
        f"mean and standard deviation over {seeds} seeds; simulated",
        ("wrong", "held saved %", "std", "of it left %", "executed saved %", "std", "gen x", "std"),
        [_perturbed_row(row) for row in perturbed],
    )
    print(f"written to {folder}: {', '.join(FILES)}")


def _print_candidates(study: fidelity_verl.Study) -> None:
    print_table(
        "profiles tried for the verl log (errors of steps held out, mean)",
        ("profile", "factor", "overhead ms", "before %", "one calibration %", "r", "rescaled %", "r"),
        [
            [
                row["profile"], row["speed"], row["overhead_ms"],
                *(_percent(row[f"{when}_mean"]) if what == "mean" else row[f"{when}_r"]
                  for when, what in (("before", "mean"), ("once", "mean"), ("once", "r"), ("renewed", "mean"),
                                     ("renewed", "r"))),
            ]
            for row in study.candidates
        ],
    )  # fmt: skip
    print(
        f"the MFU of the verl log is of a GPU of at least {study.implied_flops / 1e12:.0f} TFLOP/s; verl's own figures "
        "are 312 for A100 and A800, 989 for H100 and H800, 148 for H20"
    )


def _perturbed_row(row: dict[str, Cell]) -> list[Cell]:
    held, executed = ([_percent(row[f"{name}_{part}"]) for part in ("mean", "std")] for name in perturb.MEASURES[:2])
    left = _percent(row["held_saving_left"])
    return [row["condition"], *held, left, *executed, *(row[f"generation_speedup_{part}"] for part in ("mean", "std"))]


def _percent(cell: Cell) -> Cell:
    return 100 * cell if isinstance(cell, float) else cell


def _csv(rows: Sequence[dict[str, Cell]]) -> str:
    columns = list(rows[0])
    return csv_text(columns, [[row[name] for name in columns] for row in rows])


# ---- the figure


def draw(
    evidence: Sequence[Evidence],
    study: fidelity_verl.Study | None,
    perturbed: Sequence[dict[str, Cell]],
    path: Path,
) -> None:
    """The verl run step by step, errors where more than one is known, savings of a planner that is wrong."""
    lines = _lines([row for row in evidence if row.n > 1 and row.median is not None and row.median > INVISIBLE])
    below = 1.2 + 0.19 * max(len(lines), len(perturbed))
    above = RUN_HEIGHT_IN if study else 0.0
    with plots.picture(path, 11.0, above + below) as figure:
        grid = figure.add_gridspec(2 if study else 1, 2, height_ratios=(above, below) if study else None)
        if study is not None:
            _run(figure.add_subplot(grid[0, :]), study)
        if lines:
            _errors(figure.add_subplot(grid[-1, 0]), lines, "(b)" if study else "(a)")
        _savings(figure.add_subplot(grid[-1, 1]), perturbed, "(c)" if study else "(b)")


def _run(axes: "Axes", study: fidelity_verl.Study) -> None:
    given = study.calibration
    axes.plot(study.step, study.measured_s, color=plots.BLACK, linewidth=1.2, label="measured")
    axes.plot(study.step, study.once_s, color=plots.SKY, linewidth=1.2, label="simulator, one calibration")
    axes.plot(
        study.step, study.renewed_s, color=plots.RED, linewidth=1.0, linestyle="--",
        label=f"simulator, rescaled at each {fidelity_verl.EVERY}th step",
    )  # fmt: skip
    axes.plot(
        study.step[given], study.measured_s[given], "o", color=plots.BLACK, markersize=3.5, label="calibration steps"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlim(int(study.step[0]), int(study.step[-1]))
    axes.set_xlabel("step of the verl run")
    axes.set_ylabel("generation time, mean of ranks (s)")
    axes.set_title(
        "(a) a real run: 8 GPUs, Qwen2-7B, 1024 prompts x 5; lengths made up from its statistics",
        loc="left",
        fontsize=10,
    )
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def _lines(rows: Sequence[Evidence]) -> list[tuple[str, Evidence | None]]:
    """(label, row) of the figure of errors; a heading has no row. Where several predict the same, who predicts."""
    lines: list[tuple[str, Evidence | None]] = []
    heading = ""
    for row in rows:
        rivals = sum((each.against, each.quantity) == (row.against, row.quantity) for each in rows) > 1
        above = f"{row.against}: {row.quantity}" if rivals else row.against
        if above != heading:
            lines.append((above, None))
            heading = above
        lines.append((row.predictor if rivals else row.quantity, row))
    return lines


def _errors(axes: "Axes", lines: Sequence[tuple[str, Evidence | None]], panel: str) -> None:
    for place, (_, row) in enumerate(lines):
        if row is None:
            continue
        colour = plots.RED if row.predictor.startswith("simulator") else "#777777"
        assert row.median is not None
        assert row.p90 is not None
        axes.plot([100 * row.median, 100 * row.p90], [place, place], color=colour, linewidth=1.0)
        axes.plot(100 * row.median, place, "o", color=colour, markersize=5)
        axes.plot(100 * row.p90, place, "|", color=colour, markersize=8)
    labels = axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=7)
    for label, (_, row) in zip(labels, lines, strict=True):
        label.label1.set_fontweight("bold" if row is None else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("relative error, %: median (dot), 90th percentile (bar)")
    axes.set_title(f"{panel} simulator (red) and baselines (grey)", loc="left", fontsize=10)


def _savings(axes: "Axes", rows: Sequence[dict[str, Cell]], panel: str) -> None:
    for which, (name, label) in enumerate((("held_saving", "held"), ("executed_saving", "executed"))):
        axes.errorbar(
            [100 * number(row, f"{name}_mean") for row in rows],
            [place + 0.3 * (which - 0.5) for place in range(len(rows))],
            xerr=[100 * number(row, f"{name}_std") for row in rows],
            color=plots.POLICY_COLOURS[which], marker=plots.MARKERS[which], linestyle="none", markersize=5,
            elinewidth=1.0, capsize=2, label=label,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [str(row["condition"]).replace(", ", ",\n") for row in rows], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.axvline(0, color=plots.BLACK, linewidth=0.6, linestyle=":")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("GPU-seconds saved, %: mean, std")
    axes.set_title(f"{panel} a wrong planner", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)


if __name__ == "__main__":
    run(app)
