"""What experiments share: a setting, one policy carried out over the steps of a trace, the best static baseline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.accounting.metrics import Summary, generation_bounds, summarize
from rlhfless.driver import StepRecord, run
from rlhfless.errors import InfeasibleError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.frontier import Goal
from rlhfless.scheduler.lengths import DEFAULT_WINDOW, LengthEstimator
from rlhfless.scheduler.placement import positions
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.policies import Policy, policy
from rlhfless.types.arrays import FloatArray, floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Start
from rlhfless.types.profile import Profile
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World

Steps = Sequence[tuple[Workload, Outcome]]
"""The steps of a trace: what a planner may know, and what happens."""

STATIC_RUNGS = 8
"""Static numbers of actors that are tried for the best (chosen: a ladder in even ratios with both ends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything about an experiment but the policy and the steps."""

    profile: Profile
    """True latencies, and what the planner believes unless `planner_profile` says otherwise."""
    cluster: Cluster
    """Hosts and GPUs."""
    usd_per_gpu_hour: float
    """Price."""
    seed: int = 0
    """Seed of everything that is drawn."""
    weight: float = scaling.WEIGHT
    """lambda."""
    tau: float = migration.DEFAULT_TAU
    """Share of finished responses at which cut-and-migrate may cut."""
    window: int = DEFAULT_WINDOW
    """Epochs that length estimates look back on."""
    learner_gpus: int | None = None
    """GPUs of the learner; None for the fewest that hold its training state, or as many as `beside` says."""
    start: Start | None = None
    """How functions start; None for the policy's own way."""
    speed_noise: float = 0.0
    """Spread of actors' true speeds."""
    profiles: tuple[Profile, ...] = ()
    """The same model at other tensor-parallel sizes, for policies that mix them."""
    goal: Goal | None = None
    """What policies that choose on the time-cost frontier are asked for; None for its knee."""
    planner_profile: Profile | None = None
    """Latencies that the planner believes, where they are not the true ones."""
    planner_profiles: tuple[Profile, ...] = ()
    """Likewise at the sizes of `profiles`, in its order."""
    estimator: Callable[[Mapping[int, Outcome]], LengthEstimator] | None = None
    """Makes the length estimator of policies that have no oracle, from the true outcomes by step, which an imperfect
    predictor distorts; None for the length history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy over all steps."""

    records: tuple[StepRecord, ...]
    """Plan and report of each step."""
    summary: Summary
    """What they amount to."""

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """The reports alone."""
        return tuple(record.report for record in self.records)

    @property
    def planning_s(self) -> float:
        """Median wall-clock seconds of planning a step. Measured, and so not repeatable."""
        return float(np.median([record.planning_s for record in self.records]))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of all plans, each once."""
        return tuple(dict.fromkeys(note for record in self.records for note in record.plan.notes))


OWN_BEST = ("verl", "verl-lif", "verl-split", "rlhfuse")
"""Baselines that get the static number of actors that is best for themselves; the steps of the ablation (raw, dp,
dp+pa) run with verl's, so that each differs from the one before by one feature."""


@dataclass(frozen=True, slots=True)
class OracleEstimator:
    """True mean lengths, for policies that are labelled as oracles. Only experiments can make one."""

    outcomes: Mapping[int, Outcome]

    def estimate(self, workload: Workload) -> FloatArray:
        """float[prompts]: mean length that each prompt's responses will have."""
        return floats(self.outcomes[workload.step].response_tokens.mean(axis=1))

    def observe(self, report: StepReport) -> None:
        """It knows already."""


def simulate(
    name: str | Policy,
    steps: Steps,
    setting: Setting,
    *,
    actors: int | None = None,
    min_actors: int = 1,
    made_by: type[Planner] = Planner,
    tick: Callable[[int], None] = lambda _: None,
) -> PolicyRun:
    """Carry out all steps under a policy, by name or made for the purpose.

    `actors` is the static N of policies that do not scale, `min_actors` the least that others may choose, `made_by` the
    kind of planner. `tick` is told of each step that is done. Raises what the planner and the executor raise.
    """
    outcomes = {workload.step: outcome for workload, outcome in steps}
    chosen = policy(name) if isinstance(name, str) else name
    known = OracleEstimator if chosen.oracle else setting.estimator
    planner = made_by(
        chosen,
        setting.planner_profile or setting.profile,
        setting.cluster,
        actors=None if chosen.scale else actors,
        weight=setting.weight,
        tau=setting.tau,
        window=setting.window,
        min_actors=min_actors,
        learner_gpus=setting.learner_gpus,
        estimator=known(outcomes) if known is not None else None,
        seed=setting.seed,
        start=setting.start,
        profiles=setting.planner_profiles or setting.profiles,
        goal=setting.goal,
    )
    world = World(
        profile=setting.profile,
        profiles={each.data.tp: each for each in setting.profiles},
        outcome_of=lambda workload: outcomes[workload.step],
        speed_noise=setting.speed_noise,
        seed=setting.seed,
    )
    executor = SimExecutor(cluster=setting.cluster, world=world)
    records = []
    for record in run(planner, executor, [workload for workload, _ in steps]):
        records.append(record)
        tick(1)
    executor.close()
    reports = [record.report for record in records]
    return PolicyRun(records=tuple(records), summary=summarize(reports, setting.usd_per_gpu_hour))


def beside(setting: Setting, name: str, baseline: PolicyRun) -> Setting:
    """The setting in which policy `name` is compared with a baseline that reserves its GPUs.

    Learning scales with GPUs here, so a serverless learner gets as many as the baseline's has, unless the user said
    otherwise: the comparison is about generation, and learning then takes and costs the same on both sides.
    """
    reserved = baseline.reports[0].reserved_gpus
    if setting.learner_gpus is not None or reserved == 0 or policy(name).hosting != "serverless":
        return setting
    return replace(setting, learner_gpus=reserved)


def static_ladder(steps: Steps, setting: Setting) -> list[int]:
    """Static numbers of actors worth trying: from 1 to all that fit, in even ratios."""
    profile, cluster = setting.profile, setting.cluster
    everywhere = ints(np.arange(cluster.gpus))
    room = positions(cluster, everywhere, profile.data.tp, everywhere[:1], exclusive=False).host.size
    most = min(room, *(workload.size for workload, _ in steps))
    return [int(rung) for rung in scaling.ladder(1, most, STATIC_RUNGS)]


def best_static(
    name: str,
    steps: Steps,
    setting: Setting,
    tick: Callable[[int], None] = lambda _: None,
    carry_out: Callable[..., PolicyRun] = simulate,
) -> tuple[int, PolicyRun]:
    """(N, its run): the static number of actors that is best for policy `name` in hindsight over these very steps.

    Each feasible rung of `static_ladder` is carried out. The best has the least weighted sum of normalised generation
    time and billed GPU-seconds, with the lambda that the scaling policies plan by: the same question, answered with
    hindsight. `carry_out` takes what `simulate` takes. Raises InfeasibleError where no rung is feasible.
    """
    rungs, runs = [], []
    problem: InfeasibleError | None = None
    for actors in static_ladder(steps, setting):
        try:
            runs.append(carry_out(name, steps, setting, actors=actors, tick=tick))
            rungs.append(actors)
        except InfeasibleError as error:
            problem = error
    if problem is not None and not runs:
        raise problem
    time_s = np.array([each.summary.generation_s.mean for each in runs])
    held = np.array([each.summary.held_gpu_s.mean for each in runs])
    score = setting.weight * scaling.min_max(time_s) + (1 - setting.weight) * scaling.min_max(held)
    best = int(np.argmin(score))
    return rungs[best], runs[best]


def bounds(steps: Steps, profile: Profile) -> tuple[float, float]:
    """Mean over the steps of the bounds that no policy beats: generation seconds, decode GPU-seconds."""
    each = [generation_bounds(profile, workload.prompt_tokens, outcome.response_tokens) for workload, outcome in steps]
    return float(np.mean([b.time_s for b in each])), float(np.mean([b.decode_gpu_s for b in each]))
