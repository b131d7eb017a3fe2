"""`python -m experiments.scaling`: actors chosen each step, against fixed numbers (RLHFless §6.4, Fig. 13a)."""

from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import PolicyRun, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, PPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.types.arrays import floats

OURS = "rlhfless"
FIXED = "dp+pa"
"""The same policy with a fixed number of actors."""
EPOCHS = 15
"""As many as the paper follows lengths over (chosen: numbers of actors follow lengths, which drift slowly)."""
LEAST = (1, 2, 3)
"""Least number of actors that may be chosen: the paper gives no range, and its norms depend on both ends."""


def counts(asked: Asked) -> range:
    """Fixed numbers of actors: all that fit."""
    room = asked.nodes // asked.setting(asked.seed).profile.data.tp
    return range(1, min(room, asked.batch) + 1)


def chosen(asked: Asked, lengths: Lengths, seed: int, least: int = 1) -> PolicyRun:
    """RLHFless with at least so many actors."""
    return simulate(OURS, asked.steps(lengths, seed), asked.setting(seed), min_actors=least)


def label(least: int) -> str:
    """What results call a range of N."""
    return f"{OURS}, N >= {least}"


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Fixed numbers and chosen ones on the same lengths, all against 3 fixed actors; `score`: the objective of RLHFless
    §4.4 with the times and costs that came out, normalised over the fixed numbers."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    runs = {f"{count} actors": simulate(FIXED, steps, setting, actors=count) for count in counts(asked)}
    fixed = list(runs.values())
    base = fixed[min(STATIC, len(fixed)) - 1]
    runs |= {label(least): chosen(asked, lengths, seed, least) for least in LEAST if least <= len(fixed)}
    runs[f"oracle:{OURS}"] = simulate(f"oracle:{OURS}", steps, setting)
    time = [each.summary.generation_s.mean for each in fixed]
    cost = [each.summary.decode_executed_gpu_s.mean for each in fixed]
    found = {}
    for name, each in runs.items():
        own = each.summary
        score = setting.weight * _norm(own.generation_s.mean, time)
        score += (1 - setting.weight) * _norm(own.decode_executed_gpu_s.mean, cost)
        found[name] = study.measures(each, bound, base) | {
            "score": score,
            "actors_least": float(own.actors.values.min()),
            "actors_most": float(own.actors.values.max()),
        }
    return found


def _norm(value: float, over: list[float]) -> float:
    return (value - min(over)) / (max(over) - min(over)) if max(over) > min(over) else 0.0


def scaling(asked: Asked) -> Result:
    """RLHFless Fig. 13a."""
    workloads = asked.workloads([GRPO, PPO])
    found = study.over_seeds(job, workloads, asked, "scaling")
    ranges = [label(least) for least in LEAST if least <= len(counts(asked))]
    claims = []
    for lengths, policies in zip(workloads, found, strict=True):
        for name in ranges:
            for what, field, paper, unit in (
                ("generation speedup", "generation_speedup", "faster", "x"),
                ("decode GPU-seconds saved", "decode_saving", "about 0 or above", "%"),
            ):
                claims.append(Claim(
                    what=what, given=f"{lengths.label}, {name}, against {STATIC} fixed actors", paper=paper,
                    here=policies[name][field], unit="x" if unit == "x" else "%",
                ))  # fmt: skip
        claims.append(Claim(
            what="objective above the best fixed number's", given=f"{lengths.label}, {ranges[0]}", paper="0 or below",
            here=_regret(policies, len(counts(asked)), ranges[0]),
        ))  # fmt: skip

    def draw(path: Path) -> None:
        with plots.picture(path, 9.0, 3.4) as picture:
            steps_at, *trades = picture.subplots(1, 1 + len(workloads))
            for number, lengths in enumerate(workloads):
                actors = np.mean(
                    [chosen(asked, lengths, seed).summary.actors.values for seed in asked.seed_list], axis=0
                )
                steps_at.step(
                    np.arange(actors.size), actors, where="mid", color=plots.POLICY_COLOURS[number],
                    marker=plots.MARKERS[number], markersize=3, label=lengths.label,
                )  # fmt: skip
            steps_at.set_xlabel("step")
            steps_at.set_ylabel("actors chosen (mean over seeds)")
            steps_at.set_ylim(0, len(counts(asked)) + 0.5)
            steps_at.legend(fontsize=7, loc="lower right")
            charts.title(steps_at, "(a) actors by step")
            for letter, axes, lengths, policies in zip("bc", trades, workloads, found, strict=False):
                fixed = [policies[f"{count} actors"] for count in counts(asked)]
                x = [one["generation_s"].mean for one in fixed]
                y = [one["decode_gpu_s"].mean for one in fixed]
                axes.plot(x, y, "-o", color=plots.BLACK, markersize=4, linewidth=1, label="fixed, N beside")
                for count, at in zip(counts(asked), zip(x, y, strict=True), strict=True):
                    axes.annotate(str(count), at, textcoords="offset points", xytext=(4, 3), fontsize=7)
                for number, name in enumerate([*ranges, f"oracle:{OURS}"]):
                    one = policies[name]
                    axes.plot(
                        one["generation_s"].mean, one["decode_gpu_s"].mean, plots.MARKERS[number + 1], markersize=7,
                        color=plots.POLICY_COLOURS[number], markeredgecolor=plots.BLACK, label=name,
                    )  # fmt: skip
                bound = policies[ranges[0]]
                axes.plot(bound["bound_s"].mean, bound["bound_gpu_s"].mean, "x", color=plots.BLACK, label="bound")
                axes.set_xlim(0, 1.12 * max(x))
                axes.set_ylim(0, 1.12 * max(y))
                axes.set_xlabel("generation time (s)")
                axes.set_ylabel("decode GPU-seconds of a step")
                charts.title(axes, f"({letter}) {lengths.label}")
            charts.legend(picture, trades[0], 6)

    return Result(
        claims=tuple(claims),
        columns=COLUMNS,
        rows=tuple(
            figure.row({"workload": lengths.label, "policy": name}, each)
            for lengths, policies in zip(workloads, found, strict=True)
            for name, each in policies.items()
        ),
        remarks=tuple(remark for each in zip(workloads, found, strict=True) for remark in _remarks(asked, *each)),
        draw=draw,
    )


COLUMNS: tuple[figure.Column, ...] = (
    *figure.COLUMNS, ("fewest", "actors_least", 1), ("most", "actors_most", 1), ("objective", "score", 1),
)  # fmt: skip


def _regret(policies: dict[str, Means], most: int, name: str) -> Series:
    best = np.min([policies[f"{count} actors"]["score"].values for count in range(1, most + 1)], axis=0)
    return Series(values=floats(policies[name]["score"].values - best))


def _remarks(asked: Asked, lengths: Lengths, policies: dict[str, Means]) -> list[str]:
    most = len(counts(asked))
    ours, single = policies[label(LEAST[0])], policies["1 actors"]
    best = min(range(1, most + 1), key=lambda count: policies[f"{count} actors"]["score"].mean)
    moved = (ours["actors_most"].values - ours["actors_least"].values).max()
    fastest = min(policies[f"{count} actors"]["generation_s"].mean for count in range(1, most + 1))
    return [
        f"{lengths.label}: {ours['actors'].mean:.1f} actors are chosen, {best} would have been best of the fixed "
        f"ones; from 1 actor to the fastest number, time falls from {single['generation_s'].mean:.1f} to "
        f"{fastest:.1f} s, and no number goes below the bound of {ours['bound_s'].mean:.1f} s; within a run the "
        f"number moves by {moved:.1f} at most (steps of {asked.batch} prompts from one data set are much alike)",
        figure.bound_remark(lengths.label, policies),
    ]


FIGURE = Figure(
    name="scaling",
    paper="13a",
    title="actors chosen each step against fixed numbers",
    work=scaling,
    asked=Asked(epochs=EPOCHS),
)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
