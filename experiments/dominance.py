"""`python -m experiments.dominance`: is `frontier` or `elastic` at least as good as the paper's policy, everywhere?

On every shipped length preset, recorded trace and profile, each policy plays the same lengths as `rlhfless`: with the
same size of actor, and with the one that is best for `rlhfless` itself. Transfers, starts and wrong estimates are in
all numbers; where a condition makes the planner err, it makes both err alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from experiments import dominance_scale, figure, options, plots, study
from experiments.bench import PolicyRun, Setting, Steps, bounds, simulate
from experiments.estimators import PAPER_ACCURACY, of_accuracy
from experiments.frontier import taken
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, write_atomic
from experiments.study import STEPS_PER_EPOCH, Lengths, Measures, fan_out, means
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.scheduler.policies import policy
from rlhfless.types.profile import Profile
from sim.profiles import load, names
from traces.format import Trace
from traces.synthesize import load_preset, preset_names

OURS = "rlhfless"
"""The paper's policy, which the others are judged by."""
JUDGED = "frontier,elastic"
CONDITIONS = ("plain", "lengths44", "profile20", "cold")
"""Nothing wrong; lengths right for 44 %; planner's latencies 20 % off, both ways; functions that start cold."""
USUAL = "plain,lengths44,cold"
"""Conditions by default (chosen for time: over three seeds profile20 moved almost no verdict of plain)."""
ERROR = 0.2
"""What profile20 puts the planner's latencies off by."""
CLOSE = 0.01
"""Relative difference that counts as none (chosen: below what seeds differ by)."""
VERDICTS = ("dominates", "equal", "trade", "worse")
"""Best first: better in one and no worse in the other; the same in both; better in one only; in none."""
GPUS = {"l40s": 16, "h100_sxm": 64}
"""GPUs of the cluster: the paper's testbed has 16 L40S; its simulation up to 160 H100 (64 chosen: larger ones change
plans of this many prompts little)."""
PROMPTS, SAMPLES, EPOCHS, SEEDS = 96, 4, 3, 3
"""Prompts of a step, their responses, epochs of two steps, seeds (chosen: all defaults take some five minutes on a
core)."""
FILES = ("dominance.csv", "scale.csv", "dominance.json", "dominance.png", "config.json")
"""Result files."""


# ---- one workload on one model


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A workload on all sizes of actor of a model."""

    source: str
    """Preset, or recorded trace."""
    profiles: tuple[Profile, ...]
    """A model on a GPU, by rising size of actor."""
    nodes: int
    """GPUs of the cluster."""

    @property
    def recorded(self) -> bool:
        """Whether the lengths were recorded."""
        return self.source not in preset_names()

    @property
    def label(self) -> str:
        """What tables call the workload."""
        return Path(self.source).name if self.recorded else self.source

    @property
    def model(self) -> str:
        """What tables call the model."""
        return f"{self.profiles[0].data.model}, {self.profiles[0].data.gpu}"

    @property
    def sizes(self) -> list[str]:
        """Names of its profiles."""
        return [profile.data.name for profile in self.profiles]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all grounds are played with."""

    policies: tuple[str, ...]
    conditions: tuple[str, ...]
    prompts: int
    samples: int
    epochs: int


def played(ground: Ground, asked: Asked, seed: int) -> Steps:
    """The steps of one seed. A recorded trace is regrouped into as many prompts as leave it two steps an epoch."""
    if ground.recorded:
        trace = Trace.read(Path(ground.source))
        prompts = max(min(asked.prompts, np.unique(trace.prompt).size // STEPS_PER_EPOCH), 1)
        return study.Asked(trace=Path(ground.source), batch=prompts, epochs=asked.epochs).steps(
            Lengths(preset=""), seed
        )
    preset = load_preset(ground.source)
    room = min(min(each.max_context, each.data.kv_capacity_tokens) for each in ground.profiles)
    lengths = Lengths(
        preset=ground.source, n=asked.samples, cap=min(preset.cap_tokens, room - preset.max_prompt_tokens)
    )
    return study.Asked(batch=asked.prompts, epochs=asked.epochs).steps(lengths, seed)


def conditioned(setting: Setting, condition: str) -> dict[str, Setting]:
    """The settings of a condition by what tables call them."""
    if condition == "lengths44":
        return {condition: replace(setting, estimator=of_accuracy(PAPER_ACCURACY, seed=setting.seed))}
    if condition == "cold":
        return {condition: replace(setting, start="cold")}
    if condition == "profile20":
        return {f"profile{error:+.0%}": _believing(setting, 1 + error) for error in (ERROR, -ERROR)}
    assert condition == "plain", condition
    return {condition: setting}


def _believing(setting: Setting, speed: float) -> Setting:
    """The planner takes all latencies for `speed` times as long as they are."""
    believed = [Profile(data=each.data, speed=each.speed * speed) for each in (setting.profile, *setting.profiles)]
    return replace(setting, planner_profile=believed[0], planner_profiles=tuple(believed[1:]))


def measured(found: PolicyRun) -> Measures:
    """What is compared: means over steps of generation's seconds, and of GPU-seconds."""
    held = [taken(report)[1] for report in found.reports]
    return {
        "generation_s": found.summary.generation_s.mean,
        "held_gpu_s": float(np.mean(held)),
        "decode_gpu_s": found.summary.decode_executed_gpu_s.mean,
        "step_held_gpu_s": found.summary.held_gpu_s.mean,
    }


def play(asked: Asked, each: tuple[Ground, int]) -> dict[str, Measures]:
    """Every condition, size and policy on one ground with one seed, and the bounds of each size.

    Labels are `key`s; bounds have "bound" for policy and condition.
    """
    ground, seed = each
    steps, found = played(ground, asked, seed), {}
    for profile in ground.profiles:
        tp = profile.data.tp
        found[key("bound", tp, "bound")] = dict(
            zip(("generation_s", "decode_gpu_s"), bounds(steps, profile), strict=True)
        )
        others = tuple(other for other in ground.profiles if other is not profile)
        setting = replace(_setting(profile, ground.nodes, seed), profiles=others)
        for condition in asked.conditions:
            for label, own in conditioned(setting, condition).items():
                for name in (OURS, *asked.policies):
                    found[key(label, tp, name)] = measured(simulate(name, steps, own))
    return found


def key(condition: str, tp: int, policy: str) -> str:
    """What a run is filed under."""
    return f"{condition} {tp} {policy}"


def _setting(profile: Profile, nodes: int, seed: int) -> Setting:
    made = options.setting(
        profile=profile.data.name, nodes=nodes, gpus_per_host=options.GPUS_PER_HOST, usd_per_gpu_hour=None, seed=seed
    )
    return replace(made, profile=profile)


# ---- judging


def verdict(time_ratio: float, cost_ratio: float) -> str:
    """One of VERDICTS, of ratios to the paper's policy."""
    low, high = sorted((time_ratio, cost_ratio))
    if high <= 1 + CLOSE:
        return "dominates" if low < 1 - CLOSE else "equal"
    return "trade" if low < 1 - CLOSE else "worse"


RATIOS = ("generation_s", "held_gpu_s", "decode_gpu_s", "step_held_gpu_s")


def rows_of(ground: Ground, asked: Asked, found: Sequence[dict[str, Measures]]) -> Iterator[dict[str, Cell]]:
    """A row a condition, size and policy from what `play` found with each seed; ratios are paired by seed."""
    series = means(found)
    sizes = [profile.data.tp for profile in ground.profiles]
    least = {tp: series[key("bound", tp, "bound")] for tp in sizes}
    labels = list(dict.fromkeys(name.split()[0] for name in series if not name.startswith("bound")))
    for label in labels:
        paper = {tp: series[key(label, tp, OURS)] for tp in sizes}
        # one percent of time for one percent of cost, as the frontier's knee weighs them
        best = min(sizes, key=lambda tp: paper[tp]["generation_s"].mean * paper[tp]["held_gpu_s"].mean)
        for tp in sizes:
            for name in asked.policies:
                own, bound = series[key(label, tp, name)], [least[size] for size in (sizes if mixes(name) else [tp])]
                ratios = {each: Series(values=own[each].values / paper[tp][each].values) for each in RATIOS}
                row: dict[str, Cell] = {
                    "lengths": ground.label, "model": ground.model, "gpus": ground.nodes, "tp": tp, "condition": label,
                    "policy": name, "paper_best": int(tp == best),
                    "verdict": verdict(ratios["generation_s"].mean, ratios["held_gpu_s"].mean),
                }  # fmt: skip
                for each, ratio in ratios.items():
                    row[f"{each}_ratio"], row[f"{each}_ratio_ci95"] = ratio.mean, ratio.half_width
                for each in ("generation_s", "decode_gpu_s"):
                    row[f"{each}_over_bound"] = own[each].mean / min(one[each].mean for one in bound)
                    row[f"paper_{each}_over_bound"] = paper[tp][each].mean / least[tp][each].mean
                for each in RATIOS:
                    row[each], row[f"paper_{each}"] = own[each].mean, paper[tp][each].mean
                yield row


def mixes(name: str) -> bool:
    """Whether a policy may have actors of all sizes, whatever the first is."""
    return policy(name).assignment in ("frontier", "dealt")


def tally(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """How often each verdict falls, by condition and policy, and for the better of all policies at each size."""
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found: list[dict[str, Cell]] = []
    for where, chosen in (("best", [row for row in rows if row["paper_best"]]), ("every", list(rows))):
        for condition in conditions:
            here = [row for row in chosen if row["condition"] == condition]
            better: dict[Any, dict[str, Cell]] = {}
            for row in here:
                cell = (row["lengths"], row["model"], row["tp"])
                better[cell] = min(better.get(cell, row), row, key=lambda each: VERDICTS.index(str(each["verdict"])))
            groups = [(name, [row for row in here if row["policy"] == name]) for name in policies]
            for name, group in [*groups, ("the better", list(better.values()))]:
                counts = {one: sum(row["verdict"] == one for row in group) for one in VERDICTS}
                found.append({"size": where, "condition": condition, "policy": name, "cells": len(group), **counts})
    return found


# ---- the command

COLUMNS = (
    ("lengths", "lengths", 1), ("model", "model", 1), ("GPUs each", "tp", 1), ("condition", "condition", 1),
    ("policy", "policy", 1), ("time", "generation_s_ratio", 1), ("±", "generation_s_ratio_ci95", 1),
    ("held", "held_gpu_s_ratio", 1), ("±", "held_gpu_s_ratio_ci95", 1), ("decode", "decode_gpu_s_ratio", 1),
    ("±", "decode_gpu_s_ratio_ci95", 1), ("verdict", "verdict", 1), ("time / bound", "generation_s_over_bound", 1),
    ("(paper's)", "paper_generation_s_over_bound", 1), ("decode / bound", "decode_gpu_s_over_bound", 1),
    ("(paper's)", "paper_decode_gpu_s_over_bound", 1),
)  # fmt: skip
"""Printed table: (heading, field, factor)."""
TALLY = (("at", "size"), ("condition", "condition"), ("policy", "policy"), ("cells", "cells"),
         *((one, one) for one in VERDICTS))  # fmt: skip


def draw(rows: Sequence[dict[str, Cell]], path: Path) -> None:
    """Time against cost, both over the paper's policy's, a panel a condition; filled where its size is its best."""
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    with plots.picture(path, 3.1 * len(conditions) + 0.4, 3.6) as picture:
        panels = picture.subplots(1, len(conditions), sharex=True, sharey=True, squeeze=False)[0]
        for axes, condition in zip(panels, conditions, strict=True):
            for number, name in enumerate(policies):
                for best in (0, 1):
                    here = [
                        row for row in rows
                        if (row["condition"], row["policy"], row["paper_best"]) == (condition, name, best)
                    ]  # fmt: skip
                    colour = plots.POLICY_COLOURS[number % len(plots.POLICY_COLOURS)]
                    axes.plot(
                        [row["generation_s_ratio"] for row in here], [row["held_gpu_s_ratio"] for row in here],
                        marker=plots.MARKERS[number % len(plots.MARKERS)], linestyle="none", color=colour,
                        markersize=5, markerfacecolor=colour if best else "white", zorder=2 + best,
                        label=f"{name}{'' if best else ', other sizes'}",
                    )  # fmt: skip
            axes.axvline(1, color=plots.BLACK, linewidth=0.7, linestyle=":")
            axes.axhline(1, color=plots.BLACK, linewidth=0.7, linestyle=":")
            axes.set_title(str(condition), loc="left", fontsize=10)
            axes.set_xlabel(f"generation time / {OURS}'s")
            axes.grid(color="#DDDDDD", linewidth=0.6)
            axes.set_axisbelow(True)
        panels[0].set_ylabel(f"GPU-s held by generation / {OURS}'s")
        handles, labels = panels[0].get_legend_handles_labels()
        picture.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=len(labels))


def grounds(sources: Sequence[str], profiles: Sequence[str], nodes: int | None) -> list[Ground]:
    """All workloads on all models. Raises InputError for what is not known, and for a size that is given twice."""
    sizes: dict[tuple[str, str], dict[int, Profile]] = {}
    for name in profiles:
        profile = load(name)
        data = profile.data
        if sizes.setdefault((data.model, data.gpu), {}).setdefault(data.tp, profile) is not profile:
            raise InputError(f"--profile: {name} is a second one of {data.model}, {data.gpu}, {data.tp} GPUs an actor")
        if nodes is None and data.gpu not in GPUS:
            raise InputError(f"--nodes: no default for {data.gpu}, as {name} asks for; known are {', '.join(GPUS)}")
    for source in sources:
        if source not in preset_names():
            if not Path(source).suffix:
                known = ", ".join(preset_names())
                raise InputError(f"--lengths {source!r}: no trace file, nor one of the presets {known}")
            Trace.read(Path(source))
    return [
        Ground(
            source=source,
            profiles=tuple(each for _, each in sorted(by_size.items())),
            nodes=GPUS[gpu] if nodes is None else nodes,
        )
        for source in sources
        for (_, gpu), by_size in sizes.items()
    ]


def shipped_lengths() -> tuple[str, ...]:
    """All presets and recorded traces."""
    recorded = files("traces") / "recorded"
    return (*preset_names(), *sorted(str(entry) for entry in recorded.iterdir() if entry.name.endswith(".parquet")))


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def dominance(
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Presets and trace files; with commas. Default: all shipped.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="Profiles; with commas. Default: all shipped.")
    ] = None,
    policies: Annotated[str, typer.Option("--policies", help="Policies to judge; with commas.")] = JUDGED,
    conditions: Annotated[str, typer.Option("--conditions", help=f"With commas: {', '.join(CONDITIONS)}.")] = USUAL,
    prompts: options.Batch = PROMPTS,
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=4096, help="Responses a prompt, of presets.")
    ] = SAMPLES,
    epochs: options.Epochs = EPOCHS,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, max=options.MOST_GPUS, help=f"GPUs of the cluster; default: {GPUS}."),
    ] = None,
    scale_nodes: dominance_scale.Nodes = dominance_scale.GPUS,
    scale_prompts: dominance_scale.Prompts = dominance_scale.PROMPTS,
    scale_caps: dominance_scale.Caps = dominance_scale.CAPS,
    seed: options.Seed = 0,
    seeds: options.Seeds = SEEDS,
    processes: options.Processes = 1,
    out: options.Out = Path("out/dominance"),
    as_json: options.Json = False,
) -> None:
    """Judge policies by the paper's, everywhere: as fast at no more cost, or as cheap at no more time?

    All play the same lengths at every size of actor that is shipped for a model; frontier and elastic are given the
    other sizes too. Cost is the GPU-seconds that generation holds. The scale study is judged by the baseline.
    """
    judged = tuple(name for name in options.policy_names(policies, "--policies") if name != OURS)
    if not judged:
        raise InputError(f"--policies {policies!r}: {OURS} is what the others are judged by; name another")
    for name in (chosen := _parts(conditions)):
        if name not in CONDITIONS:
            raise InputError(f"--conditions {name!r}: known are {', '.join(CONDITIONS)}")
    caps = options.whole_numbers(scale_caps, "--scale-caps")
    options.check_outputs(out, FILES, None)
    sources = shipped_lengths() if lengths is None else _parts(lengths)
    where = grounds(sources, names() if profile is None else _parts(profile), nodes)
    asked = Asked(policies=judged, conditions=tuple(chosen), prompts=prompts, samples=samples, epochs=epochs)
    given = {
        "lengths": [one.label for one in where], "profile": [one.sizes for one in where],
        "policies": judged, "conditions": chosen, "prompts": prompts, "samples": samples, "epochs": epochs,
        "nodes": nodes, "scale_nodes": scale_nodes, "scale_prompts": scale_prompts, "scale_caps": caps,
        "seed": seed, "seeds": seeds,
    }  # fmt: skip
    config = figure.settled("dominance", "", given)
    every = range(seed, seed + seeds)
    found = fan_out(partial(play, asked), [(one, each) for one in where for each in every], processes, "dominance")
    rows = [
        row
        for number, one in enumerate(where)
        for row in rows_of(one, asked, found[number * seeds : (number + 1) * seeds])
    ]
    scaled: list[dict[str, Cell]] = []
    if scale_nodes:
        scaled = dominance_scale.rows(scale_prompts, scale_nodes, judged, caps, every, processes)
    folder, counts = out_folder(out), tally(rows)
    for name, table in zip(FILES[:2], (rows, scaled), strict=True):
        columns = list(table[0]) if table else ["policy"]
        write_atomic(folder / name, csv_text(columns, [[row[column] for column in columns] for row in table]))
    write_atomic(folder / FILES[2], json_text({"config": config, "rows": rows, "tally": counts, "scale": scaled}))
    draw(rows, folder / FILES[3])
    write_atomic(folder / FILES[4], json_text(config))
    if as_json:
        print((folder / FILES[2]).read_text(), end="")
        return
    last = seed + seeds - 1
    _print(rows, f"{prompts} prompts x {samples}, {epochs} epochs of {STEPS_PER_EPOCH} steps, seeds {seed}..{last}")
    print_table("verdicts", [heading for heading, _ in TALLY], [[row[name] for _, name in TALLY] for row in counts])
    if scaled:
        dominance_scale.show(scaled, scale_prompts, scale_nodes)
    print(f"written to {folder}: {', '.join(FILES)}")


def _print(rows: Sequence[dict[str, Cell]], given: str) -> None:
    best = [row for row in rows if row["paper_best"]]
    missed = [row for row in rows if not row["paper_best"] and row["verdict"] in VERDICTS[2:]]
    says = f"simulated, ratios to {OURS} of the same size, mean over seeds ± 95 %"
    dominance_scale.table(f"at the size that is best for {OURS}; {says}; {given}", COLUMNS, best)
    if missed:
        dominance_scale.table(f"trades and worse at other sizes; {says}", COLUMNS, missed)


if __name__ == "__main__":
    run(app)
