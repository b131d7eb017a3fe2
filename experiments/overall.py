"""`python -m experiments.overall`: RLHFless against verl on every workload of the testbed (RLHFless §6.2, Fig. 10)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import PolicyRun, Setting, Steps, beside, best_static, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.output import Cell
from experiments.study import LARGE, SMALL, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.types.arrays import FloatArray
from rlhfless.types.workload import Algorithm

DATA_SETS = ("gsm8k", "gpqa", "livecodebench")
SAMPLES: dict[Algorithm, int] = {"ppo": 1, "grpo": 4}
"""n, which the paper gives for GRPO alone, as 3 or 4."""
FACTORS = (0.25, 1, 4)
"""Batches of the dependence on the batch, as multiples of the one asked for."""
OWN, ALL, SPLIT = "its actors' GPUs", "all GPUs", "all GPUs, split"
"""What the baseline reserves, which the paper does not give: the GPUs of its 3 actors, on which learning takes its
turn; all, learning on all; all, learning on those that are not the actors'."""
HOLDS = (OWN, ALL, SPLIT)
OURS, BEST, AGAINST_BEST = "rlhfless", "verl, best static", "rlhfless against verl, best static"
PAPER_SPEEDUP, PAPER_SAVING = 1.35, 0.448
"""RLHFless §6.2: "up to"."""

Item = tuple[str, Lengths]
"""Profile and workload."""
Found = list[dict[str, Means]]
"""For each item: label -> quantity -> values over seeds."""


def job(asked: Asked, item: Item, seed: int) -> dict[str, Measures]:
    """All policies on one workload: "HOLDS: POLICY" -> its measures against verl with 3 actors that holds as much."""
    profile, lengths = item
    steps, setting = asked.steps(lengths, seed), asked.setting(seed, profile)
    bound = bounds(steps, setting.profile)
    found = _pair(asked, steps, setting, bound, HOLDS)
    base = simulate("verl", steps, setting, actors=STATIC)
    best = best_static("verl", steps, setting)[1]
    served = beside(setting, "rlhfless", base)
    runs = {
        BEST: best,
        "dp+pa": simulate("dp+pa", steps, served, actors=STATIC),
        "rlhfless, lambda 1": simulate("rlhfless", steps, replace(served, weight=1.0)),
        "oracle:rlhfless": simulate("oracle:rlhfless", steps, served),
    }
    found |= {f"{OWN}: {label}": study.measures(each, bound, base) for label, each in runs.items()}
    ours = simulate("rlhfless", steps, beside(setting, "rlhfless", best))
    found[AGAINST_BEST] = study.measures(ours, bound, best)
    return found


def batch_job(asked: Asked, item: tuple[int, Item], seed: int) -> dict[str, Measures]:
    """verl and rlhfless alone, with another batch."""
    prompts, (profile, lengths) = item
    asked = replace(asked, batch=prompts)
    steps, setting = asked.steps(lengths, seed), asked.setting(seed, profile)
    return _pair(asked, steps, setting, bounds(steps, setting.profile), (OWN, ALL))


def _pair(
    asked: Asked, steps: Steps, setting: Setting, bound: tuple[float, float], holds: tuple[str, ...]
) -> dict[str, Measures]:
    found = {}
    for held in holds:
        learner = {OWN: None, ALL: asked.nodes, SPLIT: asked.nodes - STATIC * setting.profile.data.tp}[held]
        here = replace(setting, learner_gpus=learner)
        base = simulate("verl-split" if held == SPLIT else "verl", steps, here, actors=STATIC)
        ours = simulate("rlhfless", steps, beside(here, "rlhfless", base))
        for label, each in (("verl", base), ("rlhfless", ours)):
            found[f"{held}: {label}"] = study.measures(each, bound, base) | _parts(each)
    return found


def _parts(each: PolicyRun) -> Measures:
    """Why a run takes as long and costs as much as it does."""
    cost, leads = each.summary.bill, []
    for report in each.reports:
        last = report.actor[int(report.end_s.argmax())]
        leads.append(float(report.first_s[report.actor == last].min()))
    inside = sum(cost.function(name).held_gpu_s for name in ("prefill", "decode"))
    return {
        "lead_s": sum(leads) / len(leads),
        "generation_held_share": inside / cost.held_gpu_s,
        "executed_share": cost.executed_gpu_s / cost.held_gpu_s,
    }


def overall(asked: Asked) -> Result:
    """RLHFless Fig. 10."""
    workloads = asked.workloads(
        [Lengths(preset=name, algorithm=algorithm, n=n) for algorithm, n in SAMPLES.items() for name in DATA_SETS]
    )
    items = [(profile, lengths) for profile in asked.profiles for lengths in workloads]
    found = study.over_seeds(job, items, asked, "overall")
    sizes = [max(round(asked.batch * factor), 1) for factor in FACTORS if asked.trace is None or factor <= 1]
    varied = study.over_seeds(batch_job, [(size, item) for size in sizes for item in items], asked, "by batch")
    by_batch = {size: varied[at * len(items) : (at + 1) * len(items)] for at, size in enumerate(sizes)}
    return Result(
        claims=(*_best_claims(items, found), *_mean_claims(items, found), *_batch_claims(by_batch)),
        columns=COLUMNS,
        rows=(
            *_rows(asked.batch, items, found),
            *(each for size, group in by_batch.items() if size != asked.batch for each in _rows(size, items, group)),
        ),
        remarks=tuple(_remarks(asked, items, found)),
        draw=lambda path: _draw(path, items, found, by_batch),
    )


def _rows(size: int, items: Sequence[Item], found: Found) -> Iterator[dict[str, Cell]]:
    for (profile, lengths), policies in zip(items, found, strict=True):
        for label, each in policies.items():
            facts: dict[str, Cell] = {
                "batch": size,
                "model": _model(profile),
                "workload": lengths.label,
                "policy": label,
            }
            yield figure.row(facts, each)


def _draw(path: Path, items: Sequence[Item], found: Found, by_batch: Mapping[int, Found]) -> None:
    names = [f"{_model(profile)[len('qwen2.5-') :] if profile.startswith('qwen2.5-') else _model(profile)}, "
             f"{lengths.algorithm.upper()} {lengths.preset}" for profile, lengths in items]  # fmt: skip
    with plots.picture(path, 10.0, 1.6 + 0.3 * len(items)) as picture:
        time, cost, batches = picture.subplots(1, 3, width_ratios=(1, 1, 0.85))
        own = [
            {name: policies[f"{OWN}: {name}"] for name in (BEST, "dp+pa", OURS, f"oracle:{OURS}")} for policies in found
        ]
        times = {
            name: [study.derived(np.reciprocal, each[name]["generation_speedup"]) for each in own] for name in own[0]
        }
        times["bound"] = [study.derived(np.reciprocal, each[f"{OWN}: verl"]["time_over_bound"]) for each in found]
        costs = {name: [study.derived(_rest, each[name]["held_saving"]) for each in own] for name in own[0]}
        charts.dots(time, names, times, f"generation time / verl's with {STATIC} actors")
        charts.dots(cost, [""] * len(names), costs, "held GPU-seconds / verl's")
        for axes, text in ((time, "(a) time (left is better)"), (cost, f"(b) cost, verl holds {OWN}")):
            axes.axvline(1, color=plots.BLACK, linewidth=0.6, linestyle=":", zorder=0)
            charts.title(axes, text)
        charts.legend(picture, time, len(times))
        shares = {
            "cost saved, verl holds all": (ALL, "held_saving", lambda saving: 100 * saving),
            "cost saved, verl holds its own": (OWN, "held_saving", lambda saving: 100 * saving),
            "generation faster by": (OWN, "generation_speedup", lambda speedup: 100 * (speedup - 1)),
        }
        lines = {
            label: [study.derived(formula, _mean(group, f"{held}: {OURS}", name)) for group in by_batch.values()]
            for label, (held, name, formula) in shares.items()
        }
        charts.lines(batches, list(by_batch), lines, "prompts a step", f"{OURS}: %, mean over workloads")
        batches.set_xscale("log", base=2)
        batches.set_xticks(list(by_batch), [str(size) for size in by_batch])
        batches.axhline(0, color=plots.BLACK, linewidth=0.6, linestyle=":")
        batches.legend(fontsize=7, loc="center")
        charts.title(batches, "(c) by batch")


COLUMNS: tuple[figure.Column, ...] = (
    ("batch", "batch", 1), ("model", "model", 1), ("workload", "workload", 1), ("verl holds: policy", "policy", 1),
    ("actors", "actors", 1), ("gen s", "generation_s", 1), ("step s", "step_s", 1),
    ("decode GPU-s", "decode_gpu_s", 1), ("exec GPU-s", "executed_gpu_s", 1), ("held GPU-s", "held_gpu_s", 1),
    ("gen x", "generation_speedup", 1), ("step x", "step_speedup", 1), ("decode saved %", "decode_saving", 100),
    ("exec saved %", "executed_saving", 100), ("held saved %", "held_saving", 100),
    ("time / bound", "time_over_bound", 1), ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def _model(profile: str) -> str:
    return Path(profile).name.removesuffix(".json").split("_")[0]


def _name(item: Item) -> str:
    return f"{_model(item[0])} {item[1].label}"


def _rest(share: FloatArray) -> FloatArray:
    return 1 - share


def _mean(found: Found, label: str, name: str) -> Series:
    """Seed by seed, the mean over workloads."""
    return study.derived(lambda *each: np.mean(each, axis=0), *(policies[label][name] for policies in found))


def _best_claims(items: Sequence[Item], found: Found) -> Iterator[Claim]:
    """The paper's "up to"."""
    kinds: tuple[tuple[str, str, float, figure.Unit], ...] = (
        ("generation speedup, best workload", "generation_speedup", PAPER_SPEEDUP, "x"),
        ("step speedup, best workload", "step_speedup", PAPER_SPEEDUP, "x"),
        ("GPU-seconds held saved, best workload", "held_saving", PAPER_SAVING, "%"),
        ("GPU-seconds executed saved, best workload", "executed_saving", PAPER_SAVING, "%"),
    )
    for what, name, paper, unit in kinds:
        for held in HOLDS:
            series = [policies[f"{held}: {OURS}"][name] for policies in found]
            best = int(np.argmax([each.mean for each in series]))
            given = f"verl holds {held}; {_name(items[best])}"
            yield Claim(what=what, given=given, paper=paper, here=series[best], unit=unit)


def _mean_claims(items: Sequence[Item], found: Found) -> Iterator[Claim]:
    kinds: tuple[tuple[str, str, figure.Unit], ...] = (
        ("generation speedup, mean over workloads", "generation_speedup", "x"),
        ("GPU-seconds held saved, mean over workloads", "held_saving", "%"),
    )
    for what, name, unit in kinds:
        for held in HOLDS:
            here = _mean(found, f"{held}: {OURS}", name)
            yield Claim(what=what, given=f"verl holds {held}", paper=None, here=here, unit=unit)
        here = _mean(found, AGAINST_BEST, name)
        yield Claim(what=what, given="verl with its best static N, its actors' GPUs", paper=None, here=here, unit=unit)
    kind = {
        algorithm: [each for (_, lengths), each in zip(items, found, strict=True) if lengths.algorithm == algorithm]
        for algorithm in SAMPLES
    }
    if all(kind.values()):
        parts = [_mean(kind[algorithm], f"{OWN}: {OURS}", "held_saving") for algorithm in ("grpo", "ppo")]
        gap = study.derived(np.subtract, *parts)
        yield Claim(what="held saved, GRPO less PPO", given=f"verl holds {OWN}", paper="above 0", here=gap, unit="%")


def _batch_claims(by_batch: Mapping[int, Found]) -> Iterator[Claim]:
    """The dependence on the batch, which the paper does not give."""
    for size, group in by_batch.items():
        series = [policies[f"{OWN}: {OURS}"]["generation_speedup"] for policies in group]
        best = max(series, key=lambda each: each.mean)
        what, given = "generation speedup, best workload", f"{size} prompts a step"
        yield Claim(what=what, given=given, paper=PAPER_SPEEDUP, here=best, unit="x")


def _remarks(asked: Asked, items: Sequence[Item], found: Found) -> Iterator[str]:
    """What is missing to the paper's gains, from the numbers."""
    verl, ours, fast = (
        [policies[f"{OWN}: {label}"] for policies in found] for label in ("verl", OURS, f"{OURS}, lambda 1")
    )
    room = [each["time_over_bound"].mean for each in verl]
    able = sum(each >= PAPER_SPEEDUP for each in room)
    best = int(np.argmax([each["generation_speedup"].mean for each in ours]))
    top = ours[best]
    if top["generation_speedup"].mean < PAPER_SPEEDUP:
        lost_s = top["generation_s"].mean - top["bound_s"].mean
        yield (
            f"Time: verl with {STATIC} actors takes {min(room):.2f} to {max(room):.2f} times the longest response "
            f"alone, so {PAPER_SPEEDUP}x is possible on {able} of {len(items)} workloads; on the best, "
            f"{_name(items[best])}, {OURS} with {top['actors'].mean:.1f} actors loses {lost_s:.1f} s to the bound of "
            f"{top['bound_s'].mean:.1f} s, {top['lead_s'].mean:.1f} s of it before its last actor begins (weights, "
            "start, prefill, KV), the rest to company in the batch and queueing; with lambda = 1 it reaches "
            f"{fast[best]['generation_speedup'].mean:.2f}x."
        )
    most = int(np.argmax([each["held_saving"].mean for each in ours]))
    if ours[most]["held_saving"].mean < PAPER_SAVING:
        base, saved = verl[most], ours[most]
        yield (
            f"Cost, verl holding {OWN}: on the best workload, {_name(items[most])}, generation is "
            f"{100 * base['generation_held_share'].mean:.0f} % of the GPU-seconds that verl holds and the rest, "
            "preparation and learning, is the same on both sides; decoding with "
            f"{100 * saved['decode_saving'].mean:.0f} % fewer GPU-seconds (at most "
            f"{100 * (1 - 1 / base['cost_over_bound'].mean):.0f} % by the bound) therefore saves "
            f"{100 * saved['held_saving'].mean:.1f} % in all."
        )
    for held in (ALL, SPLIT):
        series = [100 * policies[f"{held}: {OURS}"]["held_saving"].mean for policies in found]
        yield (
            f"Cost, verl holding {held}: {OURS} saves {min(series):.1f} to {max(series):.1f} % of held GPU-seconds, "
            f"for {asked.nodes} GPUs are held while {STATIC} actors decode."
        )
    for item, policies in zip(items, found, strict=True):
        shown = {name: policies[f"{OWN}: {name}"] for name in ("verl", BEST, OURS)}
        yield figure.bound_remark(_name(item), shown)


FIGURE = Figure(
    name="overall",
    paper="10",
    title="time and cost of RLHFless against verl with 3 actors",
    work=overall,
    asked=Asked(profiles=(SMALL, LARGE)),
)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
