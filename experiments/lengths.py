"""`python -m experiments.lengths`: spread and drift of lengths, and what sorting by them can save (Fig. 4, 7b)."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import OracleEstimator, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import CAP, GRPO, PPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import FloatArray, floats

DATA_SETS = ("gsm8k", "gpqa", "livecodebench", "aime2024")
PERCENTILES = (10, 50, 90, 99)
SPREAD_CAP = 1024
"""The paper's cap in Fig. 4a."""
ACTORS = (2, 3, 4, 6, 8)
"""Fixed numbers of actors over which what sorting saves is shown; 3 is the paper's."""
MOVED = ((50, 0.7), (100, 0.9))
"""(tokens, share of prompts that move by at most as much between epochs): RLHFless §4.3, PPO, GSM8K, Qwen2.5-3B."""
SHUFFLED = policy("raw")
SORTED = replace(SHUFFLED, name="oracle:sorted", assignment="sorted-even", oracle=True)
"""raw with prompts sorted by their true lengths, and nothing else: what sorting saves at best."""


def spread_job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Statistics of the lengths themselves; mean length of each epoch as e0, e1, ..."""
    steps = asked.steps(lengths, seed)
    every = np.concatenate([outcome.response_tokens.ravel() for _, outcome in steps])
    found = {f"p{each}": float(np.percentile(every, each)) for each in PERCENTILES}
    found |= {
        "mean": float(every.mean()),
        "longest": float(every.max()),
        "at_cap_share": float((every == lengths.cap).mean()),
    }
    epochs = sorted({workload.epoch for workload, _ in steps})
    means = [
        dict(pair for workload, outcome in steps if workload.epoch == epoch
             for pair in zip(workload.prompt_ids.tolist(), outcome.response_tokens.mean(axis=1).tolist(), strict=True))
        for epoch in epochs
    ]  # fmt: skip
    found |= {f"e{epoch}": float(np.mean(list(each.values()))) for epoch, each in zip(epochs, means, strict=True)}
    moves = np.array([abs(new[name] - old[name]) for old, new in pairwise(means) for name in old if name in new])
    if moves.size:
        found |= {f"moved_at_most_{tokens}": float((moves <= tokens).mean()) for tokens, _ in MOVED}
    return {"lengths": found}


def sort_job(asked: Asked, item: tuple[Lengths, int], seed: int) -> dict[str, Measures]:
    """Shuffled against sorted by true lengths, with so many actors."""
    lengths, actors = item
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    base = simulate(SHUFFLED, steps, setting, actors=actors)
    best = simulate(SORTED, steps, replace(setting, estimator=OracleEstimator), actors=actors)
    return {name: study.measures(each, bound, base) for name, each in (("shuffled", base), (SORTED.name, best))}


def lengths(asked: Asked) -> Result:
    """RLHFless Fig. 4 and 7b."""
    spread = asked.workloads([Lengths(preset=name, n=4, cap=SPREAD_CAP) for name in DATA_SETS])
    drift = asked.workloads([PPO, *(Lengths(preset=name, n=4) for name in DATA_SETS)])
    found = study.over_seeds(spread_job, [*spread, *drift], asked, "lengths")
    spreads, drifts = found[: len(spread)], found[len(spread) :]
    sort_on = asked.workloads([GRPO])[0]
    room = asked.nodes // asked.setting(asked.seed).profile.data.tp
    actors = [each for each in ACTORS if each <= room]
    sorting = dict(
        zip(actors, study.over_seeds(sort_job, [(sort_on, each) for each in actors], asked, "sorting"), strict=True)
    )
    claims = [
        Claim(what=f"prompts that move by at most {tokens} tokens between epochs", given=drift[0].label, paper=share,
              here=drifts[0]["lengths"][f"moved_at_most_{tokens}"], unit="%")
        for tokens, share in MOVED
        if f"moved_at_most_{tokens}" in drifts[0]["lengths"]
    ]  # fmt: skip
    claims += [
        Claim(what="longest response over the median", given=f"{each.label}, cap {each.cap}", paper="long tail",
              here=_over(one["lengths"], "longest", "p50"), unit="x")
        for each, one in zip(spread, spreads, strict=True)
    ]  # fmt: skip
    last = f"e{asked.epochs - 1}"
    claims += [
        Claim(what="mean length of the last epoch over the first", given=each.label, paper="falls or grows",
              here=_over(one["lengths"], last, "e0"), unit="x")
        for each, one in zip(drift, drifts, strict=True)
        if last in one["lengths"]
    ]  # fmt: skip
    claims += [
        Claim(what="decode GPU-seconds saved by sorting, true lengths", given=f"{sort_on.label}, {each} actors",
              paper="shown, no number", here=one[SORTED.name]["decode_saving"], unit="%")
        for each, one in sorting.items()
    ]  # fmt: skip
    rows = [
        figure.row({"workload": each.label, "cap": each.cap}, one["lengths"])
        for each, one in zip([*spread, *drift], found, strict=True)
    ]
    rows += [
        figure.row({"workload": sort_on.label, "cap": sort_on.cap, "actors_given": each, "policy": name}, one)
        for each, policies in sorting.items()
        for name, one in policies.items()
    ]

    def draw(path: Path) -> None:
        with plots.picture(path, 9.5, 3.5) as picture:
            shape, time, saving = picture.subplots(1, 3)
            for number, each in enumerate(spread):
                colour, style = plots.POLICY_COLOURS[number], ("-", "--", "-.", ":")[number % 4]
                tokens = np.sort(np.concatenate([o.response_tokens.ravel() for _, o in asked.steps(each, asked.seed)]))
                shape.plot(tokens, 100 * _above(tokens), style, color=colour, label=each.preset)
            plots.log_y(shape)
            shape.set_xlabel(f"response length (tokens, cap {spread[0].cap})")
            shape.set_ylabel("longer responses (%)")
            shape.set_ylim(0.1, 100)
            shape.legend(fontsize=7)
            epochs = sorted(
                {int(name[1:]) for one in drifts for name in one["lengths"] if name[1:].isdigit() and name[0] == "e"}
            )
            values = {
                each.label: [one["lengths"][f"e{epoch}"] for epoch in epochs]
                for each, one in zip(drift, drifts, strict=True)
                if each.algorithm == "ppo" or each.preset != PPO.preset or len(drift) == 1
            }
            charts.lines(time, epochs, values, "epoch", "mean response length (tokens)")
            time.set_xticks(epochs)
            time.set_ylim(0, 1.5 * max(mean.mean for column in values.values() for mean in column))
            time.legend(fontsize=7, loc="upper left")
            percent = {
                "decode GPU-seconds saved": [_percent(one[SORTED.name]["decode_saving"]) for one in sorting.values()],
                "generation longer by": [_longer(one[SORTED.name]["generation_speedup"]) for one in sorting.values()],
            }
            charts.lines(saving, actors, percent, "actors", "% against shuffled prompts")
            saving.axhline(0, color=plots.BLACK, linewidth=0.6, linestyle=":")
            saving.legend(fontsize=7, loc="center right")
            for axes, text in ((shape, "(a) spread"), (time, "(b) drift"), (saving, f"(c) sorting, {sort_on.label}")):
                charts.title(axes, text)

    return Result(
        claims=tuple(claims),
        columns=COLUMNS,
        rows=tuple(rows),
        remarks=tuple(_remarks(asked, sort_on, sorting)),
        draw=draw,
    )


COLUMNS: tuple[figure.Column, ...] = (
    ("workload", "workload", 1), ("cap", "cap", 1), ("mean", "mean", 1),
    *((f"p{each}", f"p{each}", 1.0) for each in PERCENTILES),
    ("longest", "longest", 1), ("at the cap %", "at_cap_share", 100),
    *((f"moved <= {tokens} %", f"moved_at_most_{tokens}", 100.0) for tokens, _ in MOVED),
    ("actors", "actors_given", 1), ("policy", "policy", 1), ("gen s", "generation_s", 1),
    ("decode GPU-s", "decode_gpu_s", 1), ("decode saved %", "decode_saving", 100), ("gen x", "generation_speedup", 1),
    ("time / bound", "time_over_bound", 1), ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def _above(ordered: FloatArray) -> FloatArray:
    """Share of values above each."""
    return floats(1 - np.arange(1, ordered.size + 1) / ordered.size)


def _over(found: Means, one: str, other: str) -> Series:
    return study.derived(np.divide, found[one], found[other])


def _percent(series: Series) -> Series:
    return study.derived(lambda share: 100 * share, series)


def _longer(speedup: Series) -> Series:
    return study.derived(lambda each: 100 * (1 / each - 1), speedup)


def _remarks(asked: Asked, workload: Lengths, sorting: dict[int, dict[str, Means]]) -> list[str]:
    given = STATIC if STATIC in sorting else next(iter(sorting))
    best = sorting[given][SORTED.name]
    solved = "The synthetic lengths were solved for the two shares of prompts that move little (traces/presets.toml)."
    return [
        *([solved] if asked.trace is None else []),
        f"Sorting by true lengths decodes with {100 * best['decode_saving'].mean:.0f} % fewer GPU-seconds at "
        f"{given} actors, and takes {_longer(best['generation_speedup']).mean:.1f} % longer (the longest "
        "responses share one actor, whose batch thins out late).",
        *(figure.bound_remark(f"{workload.label}, {actors} actors", each) for actors, each in sorting.items()),
    ]


FIGURE = Figure(
    name="lengths", paper="4, 7b", title=f"spread and drift of lengths (cap {CAP}), what sorting saves", work=lengths
)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
