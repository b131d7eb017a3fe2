"""What of the saving survives when the planner is wrong: about speed, about noise, about lengths.

The comparison is the one of `experiments.scale` at its largest cluster: rlhfless against verl with the static number of
actors that is best in hindsight, in the same perturbed world. Every seed draws lengths, noise and errors anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from experiments import options
from experiments.bench import PolicyRun, Setting, Steps, beside, best_static, simulate
from experiments.estimators import PAPER_ACCURACY, of_accuracy
from experiments.output import Cell
from rlhfless.accounting.metrics import Series, compare
from rlhfless.types.arrays import floats
from rlhfless.types.profile import Profile
from sim.profiles import roofline
from sim.profiles.registry import model_shape
from traces.load import steps as steps_of
from traces.synthesize import synthesize

OURS, BASELINE = "rlhfless", "verl"
EXACT = "nothing wrong"
"""The condition that the others are measured by."""
SPEED_ERRORS = (-0.2, -0.1, 0.1, 0.2)
"""What the planner's latencies are off by: -0.2 is a planner that believes the GPUs are 20 % quicker than they are."""
NOISES = (0.05, 0.1, 0.2)
"""Spreads of the log of each actor's true slowness in each step, which the planner knows nothing of."""
MEASURES = ("held_saving", "executed_saving", "generation_speedup")
"""What is compared; savings as shares of the baseline's GPU-seconds, speedup of generation as a ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The comparison that is perturbed."""

    model: str = "llama-2-70b"
    """Key of a shipped model."""
    gpu: str = "h100_sxm"
    """Its GPUs."""
    tp: int = 2
    """GPUs of an actor."""
    gpus: int = 160
    """GPUs of the cluster."""
    prompts: int = 512
    """Prompts of a step."""
    cap_tokens: int = 4096
    """Cap on a response; lengths are stretched to it."""
    epochs: int = 3
    """Steps; every prompt comes once in each."""
    preset: str = "gsm8k"
    """Whose lengths."""

    @property
    def profile(self) -> str:
        """Name of the shipped profile."""
        return f"{self.model}_{self.gpu}_tp{self.tp}"

    def steps(self, seed: int) -> Steps:
        """The steps of one seed."""
        trace = synthesize(
            self.preset, prompts=self.prompts, epochs=self.epochs, responses_per_prompt=1,
            max_response_tokens=self.cap_tokens, prompts_per_step=self.prompts, seed=seed, algorithm="ppo",
            stretch=True,
        )  # fmt: skip
        return list(steps_of(trace))

    def setting(self, seed: int) -> Setting:
        """The setting without a perturbation."""
        return options.setting(
            profile=self.profile, nodes=self.gpus, gpus_per_host=options.GPUS_PER_HOST, usd_per_gpu_hour=None, seed=seed
        )


def conditions(case: Case, setting: Setting) -> dict[str, Setting]:
    """Every condition by its label, the exact one first."""
    profile = setting.profile
    found = {EXACT: setting}
    for error in SPEED_ERRORS:
        believed = Profile(data=profile.data, speed=1 + error)
        found[f"planner's latencies {error:+.0%}"] = replace(setting, planner_profile=believed)
    guessed = roofline.build(model_shape(case.model), case.gpu, case.tp)
    found["planner reads the data sheet alone"] = replace(setting, planner_profile=guessed)
    for noise in NOISES:
        found[f"speed noise {noise:g}"] = replace(setting, speed_noise=noise)
    wrong = f"lengths {PAPER_ACCURACY:.0%} in the right decile"
    found[f"{wrong}, others next to it"] = replace(setting, estimator=of_accuracy(seed=setting.seed, misses="near"))
    found[f"{wrong}, others anywhere"] = replace(setting, estimator=of_accuracy(seed=setting.seed))
    return found


def study(case: Case, seeds: Sequence[int], tick: Callable[[int], None]) -> list[dict[str, Cell]]:
    """A row a condition: mean and standard deviation over the seeds, and what share of the exact saving is left.

    `tick` is told of every seed that is done. Raises InputError for fewer than two seeds.
    """
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in seeds:
        steps, exact = case.steps(seed), case.setting(seed)
        baselines: dict[
            float, PolicyRun
        ] = {}  # the baseline knows no lengths and has its number in hindsight: noise alone moves it
        for label, setting in conditions(case, exact).items():
            noise = setting.speed_noise
            if noise not in baselines:
                baselines[noise] = best_static(BASELINE, steps, replace(exact, speed_noise=noise))[1]
            ours = simulate(OURS, steps, beside(setting, OURS, baselines[noise]))
            against = compare(ours.summary, baselines[noise].summary)
            found.setdefault(label, []).append(tuple(getattr(against, name) for name in MEASURES))
        tick(1)
    exact_saving = Series(values=floats([each[0] for each in found[EXACT]])).mean
    rows = []
    for label, values in found.items():
        row: dict[str, Cell] = {"condition": label, "seeds": len(values)}
        for name, column in zip(MEASURES, zip(*values, strict=True), strict=True):
            series = Series(values=floats(column))
            row[f"{name}_mean"] = series.mean
            row[f"{name}_std"] = float(series.values.std(ddof=1))
        row["held_saving_left"] = float(floats([each[0] for each in values]).mean()) / exact_saving
        rows.append(row)
    return rows
