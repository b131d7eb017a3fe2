"""`python -m experiments.predictor`: how much the length predictor matters (RLHFless §6.5, Fig. 14)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import Setting, beside, bounds, simulate
from experiments.estimators import PAPER_ACCURACY, of_accuracy
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, PPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.commands import run
from rlhfless.scheduler.lengths import LengthEstimator, NoEstimator
from rlhfless.types.outcome import Outcome
from rlhfless.units import HOUR_S

PAPER_SPEEDUP, PAPER_SAVING = 1.22, 0.289
"""RLHFless §6.5: with the model that is right for 44 %, against verl."""
TRAINING_GPU_S = 11 * HOUR_S
"""What the paper's model takes to train."""
OURS, FIXED = "rlhfless", "dp+pa"
HISTORY, NEAR, ANYWHERE, NONE, ORACLE = "EWMA", "model, near misses", "model, misses anywhere", "none", "oracle"
PREDICTORS = (HISTORY, NEAR, ANYWHERE, NONE, ORACLE)
"""The paper does not say where its model's errors fall: next to the right bucket of length, or anywhere."""


def _none(_: Mapping[int, Outcome]) -> LengthEstimator:
    return NoEstimator()


def _settings(setting: Setting) -> dict[str, tuple[Setting, str]]:
    """Setting of each predictor, and the prefix of its policy."""
    model = {
        ANYWHERE: of_accuracy(PAPER_ACCURACY, seed=setting.seed, misses="anywhere"),
        NEAR: of_accuracy(PAPER_ACCURACY, seed=setting.seed, misses="near"),
        NONE: _none,
    }
    found = {name: (replace(setting, estimator=made), "") for name, made in model.items()}
    return found | {HISTORY: (setting, ""), ORACLE: (setting, "oracle:")}


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Every predictor on the same lengths, scaling ("rlhfless: ") and with 3 actors ("dp+pa: "); against verl."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    found = {}
    for holds, learner in (("", None), (", verl holds all", asked.nodes)):
        here = replace(setting, learner_gpus=learner)
        base = simulate("verl", steps, here, actors=STATIC)
        found[f"verl{holds}"] = study.measures(base, bound, base)
        settings = _settings(beside(here, OURS, base))
        for name in PREDICTORS:
            known, prefix = settings[name]
            ours = simulate(f"{prefix}{OURS}", steps, known)
            found[f"{OURS}: {name}{holds}"] = study.measures(ours, bound, base)
            if not holds:
                fixed = simulate(f"{prefix}{FIXED}", steps, known, actors=STATIC)
                found[f"{FIXED}: {name}"] = study.measures(fixed, bound, base)
    return found


def predictor(asked: Asked) -> Result:
    """RLHFless Fig. 14."""
    workloads = asked.workloads([GRPO, PPO])
    found = study.over_seeds(job, workloads, asked, "predictor")
    claims = []
    for lengths, policies in zip(workloads, found, strict=True):
        for name in PREDICTORS:
            paper = name in (NEAR, ANYWHERE)
            claims.append(Claim(
                what="generation speedup over verl", given=f"{lengths.label}, {name}", unit="x",
                paper=PAPER_SPEEDUP if paper else None, here=policies[f"{OURS}: {name}"]["generation_speedup"],
            ))  # fmt: skip
        for name in PREDICTORS:
            for holds, says in (("", "its actors' GPUs"), (", verl holds all", "all GPUs")):
                claims.append(Claim(
                    what="held GPU-seconds saved", given=f"{lengths.label}, {name}, verl holds {says}", unit="%",
                    paper=PAPER_SAVING if name in (NEAR, ANYWHERE) else None,
                    here=policies[f"{OURS}: {name}{holds}"]["held_saving"],
                ))  # fmt: skip

    def draw(path: Path) -> None:
        with plots.picture(path, 8.6, 3.2) as picture:
            panels = picture.subplots(1, 2, sharey=True)
            for letter, axes, policy in zip("ab", panels, (OURS, FIXED), strict=True):
                values = {}
                for lengths, policies in zip(workloads, found, strict=True):
                    kind = lengths.algorithm.upper()
                    own = [policies[f"{policy}: {name}"] for name in PREDICTORS]
                    values[f"{kind}, generation time"] = [
                        study.derived(np.reciprocal, each["generation_speedup"]) for each in own
                    ]
                    values[f"{kind}, decode GPU-seconds"] = [
                        study.derived(lambda saving: 1 - saving, each["decode_saving"]) for each in own
                    ]
                charts.dots(axes, PREDICTORS, values, f"relative to verl with {STATIC} actors")
                axes.axvline(1, color=plots.BLACK, linewidth=0.6, linestyle=":")
                charts.title(axes, f"({letter}) {policy}" + (f", {STATIC} actors" if policy == FIXED else ""))
            charts.legend(picture, panels[0], 4)

    return Result(
        claims=tuple(claims),
        columns=figure.COLUMNS,
        rows=tuple(
            figure.row({"workload": lengths.label, "policy": name}, each)
            for lengths, policies in zip(workloads, found, strict=True)
            for name, each in policies.items()
        ),
        remarks=tuple(remark for each in zip(workloads, found, strict=True) for remark in _remarks(*each)),
        draw=draw,
    )


def _remarks(lengths: Lengths, policies: dict[str, Means]) -> list[str]:
    def cost(name: str) -> float:
        return policies[f"{FIXED}: {name}"]["decode_gpu_s"].mean

    gain = cost(HISTORY) - cost(ANYWHERE)
    pays = (
        f"pays for its training of {TRAINING_GPU_S:.0f} GPU-s after {TRAINING_GPU_S / gain:.0f} steps"
        if gain > 0
        else (f"never pays for its training of {TRAINING_GPU_S:.0f} GPU-s")
    )
    none = cost(NONE)
    room = none - cost(ORACLE)
    shares = ", ".join(f"{name} {100 * (none - cost(name)) / room:.0f} %" for name in (HISTORY, NEAR, ANYWHERE))
    return [
        f"{lengths.label}, {STATIC} actors: of the {room:.1f} decode GPU-s that true lengths save over none, "
        f"{shares} come from the predictor; against {HISTORY}, the model with misses anywhere {pays}",
        figure.bound_remark(lengths.label, {name: each for name, each in policies.items() if "holds" not in name}),
    ]


FIGURE = Figure(name="predictor", paper="14", title="EWMA, a model right for 44 %, none, oracle", work=predictor)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
