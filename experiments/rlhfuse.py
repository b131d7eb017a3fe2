"""`python -m experiments.rlhfuse`: each actor cut by itself, against RLHFuse's cut of all (RLHFless §6.4, Fig. 12)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import PolicyRun, beside, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, PPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.commands import run
from rlhfless.scheduler.migration import GLOBAL_CUT
from rlhfless.scheduler.policies import policy
from rlhfless.types.report import WORK

PAPER_SAVING = 0.128
"""RLHFless §6.4: end-to-end cost saved against RLHFuse, PPO, GSM8K, 3 actors."""
OURS = "dp+pa"
"""RLHFless with the number of actors fixed to 3."""
RELEASED, RESERVED = "rlhfuse", "rlhfuse, reserved"
"""RLHFuse with freed actors released as functions; and on GPUs that stay reserved for the step, as it was published.
The paper does not say which it measured."""
HELD = replace(policy(RELEASED), name=RESERVED, hosting="colocated")


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Both on the same lengths; seconds that each actor works, the busiest first."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    reserved = simulate(HELD, steps, setting, actors=STATIC)
    fair = beside(setting, OURS, reserved)
    runs = {RESERVED: reserved} | {
        name: simulate(name, steps, fair, actors=STATIC) for name in (RELEASED, "raw", OURS, f"oracle:{OURS}")
    }
    found = {name: study.measures(each, bound, runs[RELEASED]) | busy(each) for name, each in runs.items()}
    for name, each in found.items():
        each["cut_share"] = cut_share(runs[name])
        each["held_saving_reserved"] = 1 - each["held_gpu_s"] / found[RESERVED]["held_gpu_s"]
    return found


def cut_share(each: PolicyRun) -> float:
    """Mean over the steps of the share of responses left at which a global cut falls; 0 where there is none."""
    rules = [(record.plan.migration, record.plan.responses) for record in each.records]
    return float(np.mean([rule.value / count if rule and rule.kind == GLOBAL_CUT else 0.0 for rule, count in rules]))


def busy(each: PolicyRun) -> Measures:
    """busy_0, busy_1, ...: mean over the steps of the seconds that the busiest actor works, the next, ..."""
    steps = []
    for report in each.reports:
        seconds = [0.0] * STATIC
        for invocation in report.invocations:
            if invocation.function == "decode":
                seconds[invocation.index] += sum(s.end_s - s.start_s for s in invocation.spans if s.activity in WORK)
        steps.append(sorted(seconds, reverse=True))
    return {f"busy_{place}": float(value) for place, value in enumerate(np.mean(steps, axis=0))}


def rlhfuse(asked: Asked) -> Result:
    """RLHFless Fig. 12."""
    workloads = asked.workloads([PPO, GRPO])
    found = study.over_seeds(job, workloads, asked, "rlhfuse")
    claims = []
    for lengths, policies in zip(workloads, found, strict=True):
        paper = PAPER_SAVING if lengths == PPO else None
        for what, given, field in (
            ("GPU-seconds held saved", RESERVED, "held_saving_reserved"),
            ("GPU-seconds held saved", RELEASED, "held_saving"),
            ("GPU-seconds executed saved", RELEASED, "executed_saving"),
            ("decode GPU-seconds saved", RELEASED, "decode_saving"),
        ):
            claims.append(Claim(
                what=what, given=f"{lengths.label}, {STATIC} actors, {OURS} against {given}", paper=paper,
                here=policies[OURS][field], unit="%",
            ))  # fmt: skip
        claims.append(Claim(
            what="generation speedup", given=f"{lengths.label}, {STATIC} actors, {OURS} against {RELEASED}", paper=None,
            here=policies[OURS]["generation_speedup"], unit="x",
        ))  # fmt: skip

    def draw(path: Path) -> None:
        with plots.picture(path, 4.4 * len(workloads), 2.9) as picture:
            for number, (lengths, policies) in enumerate(zip(workloads, found, strict=True)):
                axes = picture.add_subplot(1, len(workloads), number + 1)
                names = ["raw", RELEASED, OURS, f"oracle:{OURS}"]
                values = {
                    f"actor {place + 1}": [policies[name][f"busy_{place}"] for name in names] for place in range(STATIC)
                }
                charts.dots(axes, names, values, "seconds that an actor works in a step")
                axes.set_xlim(left=0)
                charts.title(axes, f"({'ab'[number]}) {lengths.label}")
            charts.legend(picture, axes, STATIC)

    return Result(
        claims=tuple(claims),
        columns=COLUMNS,
        rows=tuple(
            figure.row({"workload": lengths.label, "policy": name}, each)
            for lengths, policies in zip(workloads, found, strict=True)
            for name, each in policies.items()
        ),
        remarks=tuple(remark for each in zip(workloads, found, strict=True) for remark in _remarks(*each)),
        draw=draw,
    )


COLUMNS: tuple[figure.Column, ...] = (
    *figure.COLUMNS, *((f"actor {place + 1} works s", f"busy_{place}", 1.0) for place in range(STATIC)),
    ("cut at % left", "cut_share", 100), ("cuts", "cuts", 1), ("moves", "moves", 1),
)  # fmt: skip


def _remarks(lengths: Lengths, policies: dict[str, Means]) -> list[str]:
    ours, other = policies[OURS], policies[RELEASED]
    decode = other["decode_gpu_s"].mean / other["held_gpu_s"].mean
    return [
        f"{lengths.label}: {OURS} decodes with {100 * ours['decode_saving'].mean:.1f} % fewer GPU-seconds than a "
        f"global cut at {100 * other['cut_share'].mean:.0f} % left and moves {ours['moves'].mean:.1f} responses a step "
        f"instead of {other['moves'].mean:.1f}; decoding is {100 * decode:.0f} % of the GPU-seconds held, which "
        f"leaves {100 * ours['held_saving'].mean:.1f} % in all",
        figure.bound_remark(lengths.label, policies),
    ]


FIGURE = Figure(name="rlhfuse", paper="12", title="actors cut one by one against RLHFuse's global cut", work=rlhfuse)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
