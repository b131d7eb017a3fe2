"""Figures: what every GPU did in a step, and time, cost and planning by cluster size (RLHFless Fig. 16).

Matplotlib is imported where it is used, drawn without pyplot (no window, no global state) and from its own defaults, so
that the same rows give the same bytes whatever a user's matplotlibrc says.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.output import write_atomic
from rlhfless.accounting.billing import timelines
from rlhfless.accounting.metrics import Series, Summary
from rlhfless.errors import InputError
from rlhfless.types.cluster import Cluster
from rlhfless.types.report import IDLE, WORK, Activity, StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Colours that colour-blind readers tell apart (Okabe and Ito, Color Universal Design, 2008)."""
POLICY_COLOURS = (BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK)
"""In the order in which policies and caps appear."""
MARKERS = "osD^vPX"
"""Likewise, for print without colour."""
ACTIVITY_COLOURS: dict[Activity, str] = {
    "prefill": ORANGE,
    "decode": BLUE,
    "score": GREEN,
    "train": RED,
    "send-kv": PINK,
    "start-up": "#8C8C8C",
    "early": "#B3B3B3",
    "wait-weights": YELLOW,
    "wait-kv": "#F7F0A1",
    "wait-longest": SKY,
    "wait-phase": "#DDDDDD",
}
"""Work in strong colours, idling in pale ones."""
PHASE_ACTIVITY: dict[str, Activity] = {"generation": "decode", "preparation": "score", "learning": "train"}
"""Phases have the colour of their work."""
HATCHES: dict[Activity, str] = {"start-up": "////", "early": "....", "wait-kv": "\\\\\\\\"}
"""Tells pale neighbours apart in print."""
MOST_GPU_ROWS = 64
"""GPUs that a figure shows one by one (chosen: the rows of a page); beyond, a row is an invocation."""
FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
"""Formats by file ending, with the metadata that would make two equal figures differ taken out."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "rlhfless",
    "hatch.linewidth": 0.4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """One policy at one cluster size and response cap; series over seeds, of means over steps."""

    gpus: int
    """GPUs of the cluster."""
    cap_tokens: int
    """Cap on a response's length."""
    policy: str
    """Name of the policy."""
    generation_s: Series
    """Duration of generation."""
    step_s: Series
    """Duration of the step."""
    executed_gpu_s: Series
    """GPU-seconds of work."""
    held_gpu_s: Series
    """GPU-seconds held."""


MEASURES = (
    ("generation\ntime", "generation_s"),
    ("step\ntime", "step_s"),
    ("executed\nGPU-s", "executed_gpu_s"),
    ("cost\n(held GPU-s)", "held_gpu_s"),
)
"""What `scale_figure` compares."""


def gantt(report: StepReport, path: Path, cluster: Cluster) -> None:
    """What every GPU did in one step, coloured by activity; above `MOST_GPU_ROWS` GPUs, what every invocation did.

    Raises InputError for a report without invocations, a GPU that the cluster does not have, an unknown file ending.
    """
    used = sorted({gpu for invocation in report.invocations for gpu in invocation.gpus})
    if not used:
        raise InputError(f"report of step {report.step} ({report.policy}): no invocations to draw")
    if used[-1] >= cluster.gpus:
        raise InputError(f"figure: a function runs on GPU {used[-1]}, the cluster has {cluster.gpus}")
    rows = len(used) if len(used) <= MOST_GPU_ROWS else len(report.invocations)
    with picture(path, 8.0, 1.4 + min(8.0, max(1.2, 0.17 * rows))) as figure:
        axes = figure.add_subplot()
        seen = timeline(axes, report, cluster)
        axes.set_title(f"{report.policy}, step {report.step}: {len(used)} GPUs in use", loc="left", pad=16, fontsize=10)
        _activity_legend(axes, seen)


def timeline(axes: "Axes", report: StepReport, cluster: Cluster, most_names: int = 40) -> list[Activity]:
    """The rows of `gantt` on given axes, at most `most_names` of them named; the activities that are seen."""
    used = sorted({gpu for invocation in report.invocations for gpu in invocation.gpus})
    by_gpu = len(used) <= MOST_GPU_ROWS
    rows = _gpu_rows(report) if by_gpu else _invocation_rows(report)
    seen = {activity for _, bars in rows for activity, _, _ in bars}
    start_s = min([0.0, *(begin for _, bars in rows for _, begin, _ in bars)])
    end_s = max([report.step_s, *(end for _, bars in rows for _, _, end in bars)])
    host_of = cluster.host_of.tolist()
    for activity in (*WORK, *IDLE):
        for line, (_, bars) in enumerate(rows):
            stretches = [(begin, end - begin) for done, begin, end in bars if done == activity]
            if stretches:
                axes.broken_barh(stretches, (line - 0.42, 0.84), **paint(activity))
    for phase in report.phases:
        if phase.start_s > 0:
            axes.axvline(phase.start_s, color=BLACK, linewidth=0.6, linestyle=":")
        middle_s = (phase.start_s + phase.end_s) / 2
        if phase.duration_s > 0.08 * (end_s - start_s):  # in less room, names run into each other
            axes.text(middle_s, -0.8, phase.name, ha="center", va="bottom", fontsize=8)
    if by_gpu:
        for line in range(1, len(used)):
            if host_of[used[line]] != host_of[used[line - 1]]:
                axes.axhline(line - 0.5, color=BLACK, linewidth=0.6)
    every = -(-len(rows) // most_names)  # more names would run into each other
    axes.set_yticks(range(0, len(rows), every), [name for name, _ in rows[::every]], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(start_s, end_s)
    axes.set_xlabel("time from the step's start (s)")
    axes.set_ylabel(f"GPU ({cluster.gpu.name}; a line between hosts)" if by_gpu else "invocation (GPUs)")
    return [activity for activity in (*WORK, *IDLE) if activity in seen]


Bars = list[tuple[Activity, float, float]]
"""(activity, start_s, end_s) of one row."""


def _gpu_rows(report: StepReport) -> list[tuple[str, Bars]]:
    rows = {}
    for gpus, stretches in timelines(report.invocations):
        for gpu in gpus:
            rows[gpu] = [(stretch.activity, stretch.start_s, stretch.end_s) for stretch in stretches]
    return [(str(gpu), rows[gpu]) for gpu in sorted(rows)]


def _invocation_rows(report: StepReport) -> list[tuple[str, Bars]]:
    ordered = sorted(report.invocations, key=lambda invocation: (invocation.start_s, invocation.gpus))
    return [
        (
            f"{invocation.function} {invocation.index} ({len(invocation.gpus)})",
            [(span.activity, span.start_s, span.end_s) for span in invocation.spans],
        )
        for invocation in ordered
    ]


def paint(activity: Activity) -> dict[str, Any]:
    """How an activity's bars and their patch in the legend are filled."""
    hatch = HATCHES.get(activity)
    edge = "#555555" if hatch else "none"
    return {"facecolor": ACTIVITY_COLOURS[activity], "hatch": hatch, "edgecolor": edge, "linewidth": 0}


def _activity_legend(axes: "Axes", activities: Sequence[Activity]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(label=activity, **paint(activity)) for activity in activities]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, borderaxespad=0.4)


def steps_figure(runs: Mapping[str, Summary], path: Path) -> None:
    """One point a step: generation time against the GPU-seconds of decode actors (as the paper's Fig. 11).

    Raises InputError for an unknown file ending.
    """
    points = {
        f"{policy} (mean)": (summary.generation_s, summary.decode_executed_gpu_s) for policy, summary in runs.items()
    }
    with picture(path, 5.6, 4.0) as figure:
        axes = figure.add_subplot()
        clouds(axes, points, "generation time of a step (s)", "decode GPU-seconds of a step")
        axes.legend(fontsize=8)


def clouds(axes: "Axes", values: Mapping[str, tuple[Series, Series]], x_label: str, y_label: str) -> None:
    """A point a step for each label, and a large one at its mean."""
    for number, (label, (x, y)) in enumerate(values.items()):
        turn = number // len(POLICY_COLOURS)  # past the last colour, the same colours with other markers
        colour = POLICY_COLOURS[number % len(POLICY_COLOURS)]
        marker = MARKERS[(number + turn) % len(MARKERS)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none"}
        axes.plot(x.values, y.values, markersize=4, alpha=0.45, markeredgewidth=0, **style)
        axes.plot(x.mean, y.mean, markersize=9, markeredgecolor=BLACK, label=label, **style)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def scale_figure(rows: Sequence[ScaleRow], path: Path, ours: str, baseline: str) -> None:
    """Time and cost by cluster size, as the paper's Fig. 16.

    (a) Generation time by GPUs, a colour for each response cap: `ours` drawn through, `baseline` dashed.
    (b) Every policy's time and cost relative to the baseline, mean over sizes and caps.

    Bars are 95 % intervals over seeds, where there is more than one. Raises InputError for no rows, a policy that has
    none, two rows for one point, or a size and cap at which a policy ran and the baseline did not.
    """
    points = _points(rows, ours, baseline)
    caps = sorted({row.cap_tokens for row in rows})
    sizes = sorted({row.gpus for row in rows})
    with picture(path, 8.0, 4.2) as figure:
        grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.1))
        time = figure.add_subplot(grid[0, 0])
        for number, cap in enumerate(caps):
            colour, marker = POLICY_COLOURS[number % len(POLICY_COLOURS)], MARKERS[number % len(MARKERS)]
            for policy, style, fill in ((ours, "-", colour), (baseline, "--", "white")):
                line = [points[policy, gpus, cap] for gpus in sizes if (policy, gpus, cap) in points]
                time.errorbar(
                    [row.gpus for row in line], [row.generation_s.mean for row in line],
                    yerr=_bars([row.generation_s for row in line]), linestyle=style, color=colour,
                    marker=marker, markersize=4.5, markerfacecolor=fill, linewidth=1.3, elinewidth=0.8, capsize=2,
                )  # fmt: skip
        _scale_axes(time, sizes)
        _scale_legends(time, caps, ours, baseline)
        _ratios(figure.add_subplot(grid[0, 1]), points, baseline)


Points = dict[tuple[str, int, int], ScaleRow]
"""(policy, GPUs, cap) -> its row."""


def _points(rows: Sequence[ScaleRow], ours: str, baseline: str) -> Points:
    points: Points = {}
    for row in rows:
        key = (row.policy, row.gpus, row.cap_tokens)
        if key in points:
            raise InputError(f"figure: two rows for {row.policy} at {row.gpus} GPUs and {row.cap_tokens} tokens")
        points[key] = row
        if not min(getattr(row, name).values.min() for _, name in MEASURES) > 0:
            raise InputError(
                f"figure: {row.policy} at {row.gpus} GPUs and {row.cap_tokens} tokens: a time or cost of 0"
            )
    policies = {row.policy for row in rows}
    for policy in (ours, baseline):
        if policy not in policies:
            raise InputError(f"figure: no rows for {policy}; there are {', '.join(sorted(policies)) or 'none'}")
    for policy, gpus, cap in points:
        if (baseline, gpus, cap) not in points:
            raise InputError(f"figure: {policy} ran at {gpus} GPUs and {cap} tokens, the baseline {baseline} did not")
    return points


def _bars(series: Sequence[Series]) -> list[float] | None:
    """Half widths of intervals; None where there is a single seed."""
    found = [each.half_width for each in series]
    return None if None in found else [each for each in found if each is not None]


def _scale_axes(time: "Axes", sizes: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    time.set_xscale("log", base=2)
    time.set_xticks(sizes, [str(size) for size in sizes])
    time.xaxis.set_minor_locator(NullLocator())
    log_y(time)
    time.set_ylabel("generation time (s)")
    time.set_xlabel("GPUs")
    time.set_title("(a) by cluster size", loc="left", fontsize=10)
    time.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    time.set_axisbelow(True)


def _scale_legends(time: "Axes", caps: Sequence[int], ours: str, baseline: str) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [], [], color=POLICY_COLOURS[number % len(POLICY_COLOURS)], marker=MARKERS[number % len(MARKERS)],
            markersize=4.5, linewidth=1.3, label=f"cap {cap} tokens",
        )
        for number, cap in enumerate(caps)
    ]  # fmt: skip
    grey: dict[str, Any] = {"color": "#555555", "marker": "o", "markersize": 4.5}
    handles.append(Line2D([], [], linestyle="-", markerfacecolor="#555555", label=ours, **grey))
    handles.append(Line2D([], [], linestyle="--", markerfacecolor="white", label=baseline, **grey))
    time.legend(handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _ratios(axes: "Axes", points: Points, baseline: str) -> None:
    """A row a policy, a marker a measure: its ratio to the baseline, mean over sizes and caps."""
    policies = list(dict.fromkeys(policy for policy, _, _ in points))
    for row in range(len(policies)):
        axes.axhline(row, color="#EEEEEE", linewidth=0.8, zorder=0)
    for number, (label, name) in enumerate(MEASURES):
        ratios = [
            [
                getattr(point, name).values / getattr(points[baseline, gpus, cap], name).values
                for (who, gpus, cap), point in points.items()
                if who == policy
            ]
            for policy in policies
        ]
        over_seeds = [Series(values=np.mean(each, axis=0)) for each in ratios]
        style: dict[str, Any] = {"color": POLICY_COLOURS[number], "marker": MARKERS[number], "linestyle": "none"}
        means, bars = [each.mean for each in over_seeds], _bars(over_seeds)
        told = label.replace("\n", " ")
        axes.errorbar(means, range(len(policies)), xerr=bars, markersize=5.5, elinewidth=0.8, label=told, **style)
    axes.axvline(1, color=BLACK, linewidth=0.6, linestyle=":", zorder=0)
    axes.set_yticks(range(len(policies)), policies, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(policies) - 0.5, -0.5)
    axes.set_xlabel(f"relative to {baseline} (left is better)")
    axes.set_title("(b) mean over sizes and caps", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=2)


def log_y(axes: "Axes") -> None:
    """A logarithmic y axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@contextmanager
def picture(path: Path, width_in: float, height_in: float) -> "Iterator[Figure]":
    """A figure in the house style; written to `path` when the block ends well."""
    import matplotlib
    from matplotlib.figure import Figure

    if path.suffix not in FORMATS:
        raise InputError(f"{path}: unknown kind of figure; known endings are {', '.join(FORMATS)}")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        yield figure
        drawn = BytesIO()
        figure.savefig(drawn, format=path.suffix[1:], dpi=160, metadata=FORMATS[path.suffix])
    write_atomic(path, _small(drawn) if path.suffix == ".png" else drawn.getvalue())


def _small(drawn: BytesIO) -> bytes:
    """A PNG in a palette of 256 colours: a third of the bytes, and no difference that one sees in flat colours."""
    from PIL import Image

    kept = BytesIO()
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(kept, format="png", optimize=True)
    return kept.getvalue()
