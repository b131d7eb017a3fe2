"""`python -m experiments.sensitivity`: EWMA window, cut threshold tau, weight lambda (RLHFless §6.5, Fig. 15)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import Setting, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.scheduler.lengths import DEFAULT_WINDOW
from rlhfless.scheduler.migration import DEFAULT_TAU
from rlhfless.scheduler.scaling import WEIGHT
from rlhfless.types.arrays import floats

OURS = "rlhfless"
EPOCHS = 15
"""The paper's, for the window."""
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
VALUES: dict[str, tuple[float, ...]] = {"window": (1, 2, 3, 4), "tau": SHARES, "weight": SHARES}
"""Fields of a setting with their values; all others stay at their defaults."""
CHANGE: dict[str, Callable[[Setting, float], Setting]] = {
    "window": lambda setting, value: replace(setting, window=int(value)),
    "tau": lambda setting, value: replace(setting, tau=value),
    "weight": lambda setting, value: replace(setting, weight=value),
}
DEFAULTS: dict[str, float] = {"window": DEFAULT_WINDOW, "tau": DEFAULT_TAU, "weight": WEIGHT}
"""The paper's choices."""
SYMBOLS = {"window": "window (epochs)", "tau": "tau", "weight": "lambda"}
QUANTITIES = {"generation_s": "generation time", "decode_gpu_s": "decode GPU-seconds", "held_gpu_s": "held GPU-seconds"}


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """ "FIELD VALUE" -> measures, and their ratios to the default's; all on the same lengths."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    base = study.measures(simulate(OURS, steps, setting), bound)
    found = {}
    for name, values in VALUES.items():
        for value in values:
            changed = CHANGE[name](setting, value)
            own = study.measures(simulate(OURS, steps, changed), bound)
            score = WEIGHT * own["generation_s"] / base["generation_s"]
            score += (1 - WEIGHT) * own["decode_gpu_s"] / base["decode_gpu_s"]
            ratios = {f"{what}_ratio": own[what] / base[what] for what in QUANTITIES}
            found[f"{name} {value:g}"] = own | ratios | {"score": score}
    return found


def sensitivity(asked: Asked) -> Result:
    """RLHFless Fig. 15."""
    workload = asked.workloads([GRPO])[0]
    found = study.over_seeds(job, [workload], asked, "sensitivity")[0]
    claims = []
    for name, values in VALUES.items():
        means = [found[f"{name} {value:g}"]["score"].mean for value in values]
        best = values[int(np.argmin(means))]
        wins = [_best(found, name, seed) for seed in range(asked.seeds)]
        claims.append(Claim(
            what=f"best {SYMBOLS[name]}", given=f"{WEIGHT:g} time + {1 - WEIGHT:g} cost, relative to the default; "
            f"best by the mean: {best:g}", paper=f"{DEFAULTS[name]:g}", here=Series(values=floats(wins)),
        ))  # fmt: skip
        spread = np.ptp([found[f"{name} {value:g}"]["score"].values for value in values], axis=0)
        claims.append(Claim(
            what=f"what {SYMBOLS[name]} can change in all", given="the same",
            paper="little" if name == "window" else None, here=Series(values=floats(spread)), unit="%",
        ))  # fmt: skip

    def draw(path: Path) -> None:
        with plots.picture(path, 9.0, 3.2) as picture:
            panels = picture.subplots(1, 3)
            for letter, axes, (name, values) in zip("abc", panels, VALUES.items(), strict=True):
                ratios = {
                    label: [found[f"{name} {value:g}"][f"{what}_ratio"] for value in values]
                    for what, label in QUANTITIES.items()
                }
                charts.lines(axes, values, ratios, SYMBOLS[name], "relative to the default")
                axes.axvline(
                    DEFAULTS[name], color=plots.BLACK, linewidth=0.6, linestyle=":", label="the paper's choice"
                )
                axes.set_xticks(values)
                charts.title(axes, f"({letter}) {name if name != 'weight' else 'lambda'}")
            charts.legend(picture, panels[0], 4)

    return Result(
        claims=tuple(claims),
        columns=COLUMNS,
        rows=tuple(figure.row({"workload": workload.label, "policy": name}, each) for name, each in found.items()),
        remarks=tuple(_remarks(workload, found)),
        draw=draw,
    )


COLUMNS: tuple[figure.Column, ...] = (
    ("workload", "workload", 1), ("value", "policy", 1), ("actors", "actors", 1), ("gen s", "generation_s", 1),
    ("decode GPU-s", "decode_gpu_s", 1), ("held GPU-s", "held_gpu_s", 1), ("cuts", "cuts", 1), ("moves", "moves", 1),
    ("time ratio", "generation_s_ratio", 1), ("decode ratio", "decode_gpu_s_ratio", 1),
    ("held ratio", "held_gpu_s_ratio", 1), ("time / bound", "time_over_bound", 1),
    ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def _best(found: dict[str, Means], name: str, seed: int) -> float:
    """The value with the least weighted sum in one seed."""
    return min(VALUES[name], key=lambda value: found[f"{name} {value:g}"]["score"].values[seed])


def _remarks(workload: Lengths, found: dict[str, Means]) -> list[str]:
    default = found[f"tau {DEFAULT_TAU:g}"]
    low, high = found[f"weight {SHARES[0]:g}"], found[f"weight {SHARES[-1]:g}"]
    return [
        f"lambda from {SHARES[0]:g} to {SHARES[-1]:g} goes from {low['actors'].mean:.1f} to "
        f"{high['actors'].mean:.1f} actors, {low['generation_s'].mean:.1f} to {high['generation_s'].mean:.1f} s and "
        f"{low['decode_gpu_s'].mean:.0f} to {high['decode_gpu_s'].mean:.0f} decode GPU-s: it trades, and which "
        "value is best is what one wants",
        f"tau: at {DEFAULT_TAU:g}, {default['cuts'].mean:.1f} actors of {default['actors'].mean:.1f} are cut a step",
        figure.bound_remark(workload.label, found),
    ]


FIGURE = Figure(
    name="sensitivity", paper="15", title="EWMA window, tau and lambda", work=sensitivity, asked=Asked(epochs=EPOCHS)
)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
