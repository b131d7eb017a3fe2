"""The scale study of `experiments.dominance`: speedup and saving over the baseline on the paper's largest cluster."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import typer

from experiments import figure, options
from experiments.bench import beside, best_static, bounds, simulate
from experiments.frontier import taken
from experiments.output import Cell, print_table
from experiments.scale_study import BASELINE, OURS
from experiments.study import Measures, fan_out, means
from rlhfless.accounting.metrics import compare
from traces.load import steps as steps_of
from traces.synthesize import synthesize

PROFILES = ("llama-2-70b_h100_sxm_tp2", "llama-2-70b_h100_sxm_tp4", "llama-2-70b_h100_sxm_tp8")
GPUS, PROMPTS, CAPS = 160, 512, "2048,4096,8192"
"""The paper's largest cluster, its prompts and response caps (RLHFless §6.6)."""
EPOCHS = 3
"""Epochs, of one step each (chosen: for time)."""
AIM_SPEEDUP, AIM_SAVING = 1.35, 0.448
"""What is aimed at, both at once: the paper's largest speedup and saving, each from another run (RLHFless §6)."""

Nodes = Annotated[
    int, typer.Option("--scale-nodes", min=0, max=options.MOST_GPUS, help="H100 of the scale study; 0: without it.")
]
Prompts = Annotated[int, typer.Option("--scale-prompts", min=1, max=10**6, help="Prompts of its steps.")]
Caps = Annotated[str, typer.Option("--scale-caps", help="Its response caps.")]


def play(prompts: int, nodes: int, policies: Sequence[str], each: tuple[int, int]) -> dict[str, Measures]:
    """Every policy at one response cap with one seed, against the best static number of the baseline's actors."""
    cap, seed = each
    trace = synthesize(
        "gsm8k", prompts=prompts, epochs=EPOCHS, responses_per_prompt=1, max_response_tokens=cap,
        prompts_per_step=prompts, seed=seed, algorithm="ppo", stretch=True,
    )  # fmt: skip
    steps = list(steps_of(trace))
    sizes = [
        options.setting(
            profile=name, nodes=nodes, gpus_per_host=options.GPUS_PER_HOST, usd_per_gpu_hour=None, seed=seed
        )
        for name in PROFILES
    ]
    actors, base = best_static(BASELINE, steps, sizes[0])
    base_held = float(np.mean([report.reserved_gpus * report.phase_s("generation") for report in base.reports]))
    least = np.min([bounds(steps, one.profile) for one in sizes], axis=0).tolist()
    found: dict[str, Measures] = {}
    for one in sizes:
        setting = replace(one, profiles=tuple(other.profile for other in sizes if other is not one))
        for name in (OURS, *policies):
            own = simulate(name, steps, beside(setting, name, base))
            against = compare(own.summary, base.summary)
            held = float(np.mean([taken(report)[1] for report in own.reports]))
            rest = own.summary.held_gpu_s.mean - held
            found[f"{cap} {one.profile.data.tp} {name}"] = {
                "static_actors": actors,
                "generation_speedup": against.generation_speedup,
                "generation_saving": 1 - held / base_held,
                "held_saving": against.held_saving,
                "most_speedup": base.summary.generation_s.mean / least[0],
                "most_generation_saving": 1 - least[1] / base_held,
                "most_held_saving": 1 - (rest + least[1]) / base.summary.held_gpu_s.mean,
            }
    return found


def rows_of(caps: Sequence[int], seeds: int, found: Sequence[dict[str, Measures]]) -> list[dict[str, Cell]]:
    """A row a cap, size and policy: means over the seeds, and whether the aim is met."""
    rows = []
    for number, cap in enumerate(caps):
        for label, series in means(found[number * seeds : (number + 1) * seeds]).items():
            _, tp, name = label.split()
            row: dict[str, Cell] = {"cap_tokens": cap, "tp": int(tp), "policy": name}
            for quantity, values in series.items():
                row[quantity], row[f"{quantity}_ci95"] = values.mean, values.half_width
            for cost in ("generation_saving", "held_saving"):
                fast, cheap = series["generation_speedup"].mean >= AIM_SPEEDUP, series[cost].mean >= AIM_SAVING
                row[f"aim_{cost}"] = int(fast and cheap)
            row["aim"] = " ".join(what for what in ("generation", "held") if row[f"aim_{what}_saving"]) or "missed"
            rows.append(row)
    return rows


def rows(
    prompts: int, nodes: int, policies: Sequence[str], caps: Sequence[int], seeds: Sequence[int], processes: int
) -> list[dict[str, Cell]]:
    """All of the study, shared out to `processes`. Raises InfeasibleError where profiles do not reach a cap."""
    items = [(cap, seed) for cap in caps for seed in seeds]
    return rows_of(caps, len(seeds), fan_out(partial(play, prompts, nodes, policies), items, processes, "scale"))


COLUMNS = (
    ("cap", "cap_tokens", 1), ("policy", "policy", 1), ("GPUs each", "tp", 1), ("gen x", "generation_speedup", 1),
    ("±", "generation_speedup_ci95", 1), ("most", "most_speedup", 1),
    ("gen saved %", "generation_saving", 100), ("±", "generation_saving_ci95", 100),
    ("most", "most_generation_saving", 100), ("step saved %", "held_saving", 100), ("±", "held_saving_ci95", 100),
    ("most", "most_held_saving", 100), ("aim", "aim", 1),
)  # fmt: skip
"""Printed table: (heading, field, factor)."""


def show(found: Sequence[dict[str, Cell]], prompts: int, nodes: int) -> None:
    """The table on stdout."""
    table(
        f"{nodes} H100, {prompts} prompts, simulated, against {BASELINE} at its best static number of "
        f"actors; aim: {AIM_SPEEDUP:g}x faster and {AIM_SAVING:.1%} cheaper at once, in generation or in all that "
        "a step holds; most: what the bounds leave",
        COLUMNS, found,
    )  # fmt: skip


def table(title: str, columns: Sequence[figure.Column], found: Sequence[dict[str, Cell]]) -> None:
    """Rows as a table on stdout."""
    cells = [[figure.scaled(row.get(name), factor) for _, name, factor in columns] for row in found]
    print_table(title, [heading for heading, _, _ in columns], cells)
