"""Panels that figures are made of: dots, lines, stacked bars, each with intervals, in colours and in print."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.plots import MARKERS, PHASE_ACTIVITY, POLICY_COLOURS, paint
from rlhfless.accounting.metrics import Series
from rlhfless.types.report import IDLE, WORK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def dots(axes: "Axes", names: Sequence[str], values: Mapping[str, Sequence[Series]], x_label: str) -> None:
    """A row a name, a marker a label: means with 95 % intervals, around a line at 1 where ratios are shown."""
    for place in range(len(names)):
        axes.axhline(place, color="#EEEEEE", linewidth=0.8, zorder=0)
    for number, (label, column) in enumerate(values.items()):
        shift = 0.36 * ((number + 0.5) / len(values) - 0.5)  # apart, or equal values hide each other
        places = [place + shift for place in range(len(names))]
        axes.errorbar([each.mean for each in column], places, xerr=_halves(column), label=label, **_marks(number))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(x_label)


def lines(axes: "Axes", x: Sequence[float], values: Mapping[str, Sequence[Series]], x_label: str, y_label: str) -> None:
    """A line a label over x: means with 95 % intervals."""
    for number, (label, column) in enumerate(values.items()):
        style = _marks(number) | {"linestyle": "-", "linewidth": 1.3}
        axes.errorbar(x, [each.mean for each in column], yerr=_halves(column), label=label, **style)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def stacks(axes: "Axes", names: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> None:
    """A bar a name, made of parts; parts that are activities have their colours."""
    left = np.zeros(len(names))
    for number, (part, values) in enumerate(parts.items()):
        plain = {"facecolor": POLICY_COLOURS[number % len(POLICY_COLOURS)], "linewidth": 0}
        name = PHASE_ACTIVITY.get(part, part)
        known = next((activity for activity in (*WORK, *IDLE) if activity == name), None)
        axes.barh(range(len(names)), values, 0.62, left=left, label=part, **(plain if known is None else paint(known)))
        left += np.asarray(values)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(x_label)


def legend(figure: "Figure", axes: "Axes", columns: int) -> None:
    """What the marks mean, below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=columns)


def title(axes: "Axes", text: str, pad: float = 6) -> None:
    """A panel's title."""
    axes.set_title(text, loc="left", fontsize=10, pad=pad)


def _marks(number: int) -> dict[str, Any]:
    colour = POLICY_COLOURS[number % len(POLICY_COLOURS)]
    return {
        "color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 5, "linestyle": "none",
        "elinewidth": 1.0, "capsize": 2,
    }  # fmt: skip


def _halves(column: Sequence[Series]) -> list[float]:
    return [each.half_width or 0.0 for each in column]
