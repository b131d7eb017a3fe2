"""Predicted against measured: what a plan has come to in the simulator and on real engines, and how far they agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import combinations
from pathlib import Path
from statistics import median

from experiments import plots
from experiments.output import Cell, write_atomic
from rlhfless.accounting.billing import bill
from rlhfless.types.arrays import floats
from rlhfless.types.plan import Plan
from rlhfless.types.report import FUNCTIONS_OF, StepReport
from rlhfless.types.workload import Workload
from sim.profiles.calibrate import errors

AIM = 0.1
"""Median error that the project aims at."""

Row = dict[str, Cell]
Tables = dict[str, list[Row]]
"""`steps` and `actors`, as `tables_of` makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One plan, carried out twice."""

    repeat: int
    """Run of the policy that it belongs to."""
    workload: Workload
    """What was asked for."""
    plan: Plan
    """What both executors were given."""
    measured: StepReport
    """What the real one reports."""
    engines_cpu_s: float | None
    """Processor time of the engines in the step: of their core-seconds, what other work on the machine left them. None
    on GPUs, and where an engine started or ended in the step."""
    predicted: StepReport | None = None
    """What the simulator reports; None until it has been asked."""


def core_s(report: StepReport) -> float:
    """Seconds of work of generation's functions, times their cores."""
    cost = bill(report, 0.0)
    return sum(cost.function(name).executed_gpu_s for name in FUNCTIONS_OF["generation"])


def actor_ends(report: StepReport, actors: int) -> dict[int, float]:
    """Actor -> last token that it generated of a response that it finished, from the step's start."""
    return {
        actor: float(report.end_s[report.actor == actor].max())
        for actor in range(actors)
        if (report.actor == actor).any()
    }


def step_row(pair: Pair) -> Row:
    """One plan, both ways."""
    row: Row = {
        "policy": pair.plan.policy,
        "repeat": pair.repeat,
        "step": pair.workload.step,
        "actors": len(pair.plan.actors),
    }
    for side, report in (("measured", pair.measured), ("predicted", pair.predicted)):
        assert report is not None, "compared before it was predicted"
        counters = report.counters
        row |= {
            f"{side}_generation_s": report.phase_s("generation"),
            f"{side}_core_s": core_s(report),
            f"{side}_cuts": counters.cuts,
            f"{side}_moves": counters.moves,
            f"{side}_tokens": counters.decoded_tokens,
            f"{side}_prefill_tokens": counters.prefill_tokens + counters.decode_prefill_tokens,
            f"{side}_recomputed_tokens": counters.recomputed_tokens,
        }
    assert pair.predicted is not None, "compared before it was predicted"
    row["measured_cpu_s"] = pair.engines_cpu_s
    row["same_lengths"] = int((pair.measured.tokens == pair.predicted.tokens).all())
    return row


def actor_rows(pair: Pair) -> Iterator[Row]:
    """Actors that finished responses on both sides."""
    assert pair.predicted is not None, "compared before it was predicted"
    measured, predicted = (actor_ends(each, len(pair.plan.actors)) for each in (pair.measured, pair.predicted))
    for actor in sorted(measured.keys() & predicted.keys()):
        yield {
            "policy": pair.plan.policy,
            "repeat": pair.repeat,
            "step": pair.workload.step,
            "actor": actor,
            "responses": int(pair.plan.actors[actor].responses.size),
            "measured_end_s": measured[actor],
            "predicted_end_s": predicted[actor],
        }


def tables_of(pairs: Sequence[Pair]) -> Tables:
    """Rows of all steps and of all actors."""
    return {
        "steps": [step_row(pair) for pair in pairs],
        "actors": [row for pair in pairs for row in actor_rows(pair)],
    }


def number(row: Row, name: str) -> float:
    """A cell that is one."""
    value = row[name]
    assert isinstance(value, int | float), f"{name} is no number"
    return float(value)


def agreement(rows: Sequence[Row], error: float) -> tuple[int, int]:
    """(pairs of policies in the same order on both sides, pairs that differ by more than the error where measured).

    By the medians of their generation times.
    """
    times = [
        [
            median(number(row, f"{side}_generation_s") for row in rows if row["policy"] == name)
            for side in ("measured", "predicted")
        ]
        for name in policies_of(rows)
    ]
    agree = of = 0
    for one, other in combinations(times, 2):
        if abs(one[0] - other[0]) > error * min(one[0], other[0]):
            of += 1
            agree += (one[0] < other[0]) == (one[1] < other[1])
    return agree, of


def quickest(rows: Sequence[Row]) -> set[tuple[Cell, ...]]:
    """(policy, repeat, step) of each plan's quickest run: other work on a machine only ever adds time."""
    best: dict[tuple[Cell, ...], Row] = {}
    for row in rows:
        key = (row["policy"], row["step"])
        if key not in best or number(row, "measured_generation_s") < number(best[key], "measured_generation_s"):
            best[key] = row
    return {name_of(row) for row in best.values()}


def name_of(row: Row) -> tuple[Cell, ...]:
    """Which run of which plan."""
    return row["policy"], row["repeat"], row["step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Median sizes of relative errors, predicted over measured less 1."""

    steps: int
    """Steps that they are over."""
    actors: int
    """Ends of actors that they are over."""
    generation_s: float
    """Duration of generation."""
    actor_end_s: float
    """Last token of each actor."""
    core_s: float
    """Core-seconds of prefill and decode."""
    cpu_s: float | None
    """The same against processor time of the engines, which other work on the machine does not lengthen."""


def errors_of(rows: Sequence[Row], actors: Sequence[Row]) -> Errors:
    """Over these steps and ends of actors."""
    cpu = [row for row in rows if row["measured_cpu_s"]]
    return Errors(
        steps=len(rows),
        actors=len(actors),
        generation_s=_median_size(rows, "predicted_generation_s", "measured_generation_s"),
        actor_end_s=_median_size(actors, "predicted_end_s", "measured_end_s"),
        core_s=_median_size(rows, "predicted_core_s", "measured_core_s"),
        cpu_s=_median_size(cpu, "predicted_core_s", "measured_cpu_s") if cpu else None,
    )


def _median_size(rows: Sequence[Row], predicted: str, measured: str) -> float:
    return median(abs(number(row, predicted) / number(row, measured) - 1) for row in rows)


QUANTITIES = (
    ("generation time", "steps", "predicted_generation_s", "measured_generation_s"),
    ("last token of each actor", "actors", "predicted_end_s", "measured_end_s"),
    ("core-seconds", "steps", "predicted_core_s", "measured_core_s"),
    ("against processor time", "steps", "predicted_core_s", "measured_cpu_s"),
)
"""(name, table, column, column that it should equal)."""
ERROR_HEADINGS = (
    "error %, of runs not fitted to", "n", "raw median", "raw p90", "raw bias", "calibrated median", "calibrated p90",
    "calibrated bias",
)  # fmt: skip


def side_by_side(raw: Tables, calibrated: Tables) -> list[list[Cell]]:
    """A row a quantity: errors of the profile as it was measured, and of the calibrated one, over the same runs."""
    found: list[list[Cell]] = []
    for name, table, predicted, measured in QUANTITIES:
        sides = [
            errors(
                floats([number(row, predicted) for row in tables[table] if row[measured]]),
                floats([number(row, measured) for row in tables[table] if row[measured]]),
            )
            for tables in (raw, calibrated)
            if any(row[measured] for row in tables[table])
        ]
        if sides:
            figures = [100 * each for side in sides for each in (side.median, side.p90, side.bias)]
            found.append([name, sides[0].n, *figures])
    return found


HEADINGS = (
    "policy", "steps", "gen s measured", "predicted", "actor end error %", "core-s measured", "of it CPU", "predicted",
    "cuts measured", "predicted", "moves measured", "predicted", "prefill tokens measured", "predicted",
)  # fmt: skip


def summary_rows(rows: Sequence[Row], actors: Sequence[Row]) -> list[list[Cell]]:
    """A row a policy, medians over its steps."""
    found: list[list[Cell]] = []
    for name in policies_of(rows):
        own = [row for row in rows if row["policy"] == name]
        ends = [row for row in actors if row["policy"] == name]

        def both(what: str, own: Sequence[Row] = own) -> list[Cell]:
            return [median(number(row, f"{side}_{what}") for row in own) for side in ("measured", "predicted")]

        cpu = [number(row, "measured_cpu_s") for row in own if row["measured_cpu_s"]]
        core = both("core_s")
        found.append(
            [
                name, len(own), *both("generation_s"),
                100 * _median_size(ends, "predicted_end_s", "measured_end_s"),
                core[0], median(cpu) if cpu else None, core[1],
                *both("cuts"), *both("moves"), *both("prefill_tokens"),
            ]
        )  # fmt: skip
    return found


def policies_of(rows: Sequence[Row]) -> list[str]:
    """In the order of their first rows."""
    return list(dict.fromkeys(str(row["policy"]) for row in rows))


def scatter(rows: Sequence[Row], path: Path, error: float) -> None:
    """Every actor's end, predicted over measured, a colour for each policy; the aim as a band."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(plots.STYLE)
        figure = Figure(figsize=(5.0, 4.6), layout="constrained")
        axes = figure.add_subplot()
        most = 1.08 * max(number(row, f"{side}_end_s") for row in rows for side in ("measured", "predicted"))
        axes.fill_between([0, most], [0, (1 - AIM) * most], [0, (1 + AIM) * most], color="#EEEEEE", linewidth=0)
        axes.plot([0, most], [0, most], color=plots.BLACK, linewidth=0.8)
        for at, name in enumerate(policies_of(rows)):
            own = [row for row in rows if row["policy"] == name]
            axes.plot(
                [number(row, "measured_end_s") for row in own],
                [number(row, "predicted_end_s") for row in own],
                plots.MARKERS[at % len(plots.MARKERS)],
                color=plots.POLICY_COLOURS[at % len(plots.POLICY_COLOURS)],
                markersize=5,
                label=name,
            )
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.set_xlabel("last token of an actor, measured (s)")
        axes.set_ylabel("predicted (s)")
        title = f"median error {error:.1%}, n = {len(rows)}; grey: within {AIM:.0%}"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(fontsize=8)
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=160, metadata=plots.FORMATS[".png"])
    write_atomic(path, picture.getvalue())
