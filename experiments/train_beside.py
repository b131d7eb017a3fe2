"""What a real step's plan would take, and the static plan beside it: both simulated, with the lengths that came out."""

from collections.abc import Sequence
from dataclasses import replace

from experiments.output import Cell
from experiments.real import Bench
from rlhfless.driver import StepRecord
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile
from rlhfless.types.report import FUNCTIONS_OF, Activity, StepReport
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.world import World

STATIC = "verl"
"""The policy with a static plan: shuffled prompts on a fixed number of actors, each held until the last has ended."""
START: tuple[Activity, ...] = ("start-up", "early")
"""Not counted, and without length here: both sides keep their processes from step to step."""


class Beside:
    """Carries each step's own plan and the static one out in two simulated clusters, step after step."""

    def __init__(self, bench: Bench) -> None:
        """The clusters of a run; their speeds are those of its profile, and processes are always there."""
        self._planner = bench.planner(STATIC)
        self._outcomes: dict[int, Outcome] = {}
        profile = Profile(data=replace(bench.profile.data, cold_start_s=0.0, warm_start_s=0.0))
        world = World(profile=profile, outcome_of=lambda workload: self._outcomes[workload.step])
        self._own, self._static = (SimExecutor(cluster=bench.cluster, world=world) for _ in range(2))

    def of(self, record: StepRecord, workload: Workload) -> dict[str, Cell]:
        """Seconds of generation and GPU-seconds of its actors, of both, and the share of the latter that is saved."""
        n = workload.responses_per_prompt
        self._outcomes = {workload.step: Outcome(response_tokens=record.report.tokens.reshape(-1, n))}
        static = self._planner.plan(workload, self._static.snapshot())
        own = self._own.execute(record.plan, workload)
        other = self._static.execute(static, workload)
        self._planner.observe(other)
        own_gpu_s, other_gpu_s = generation_gpu_s(own), generation_gpu_s(other)
        return {
            "simulated_generation_s": own.phase_s("generation"),
            "static_generation_s": other.phase_s("generation"),
            "simulated_generation_gpu_s": own_gpu_s,
            "static_generation_gpu_s": other_gpu_s,
            "saving": 1 - own_gpu_s / other_gpu_s,
        }


def generation_gpu_s(report: StepReport) -> float:
    """GPU-seconds that prefill and decode actors hold after their start: work, transfers and waiting."""
    return sum(
        (span.end_s - max(span.start_s, 0.0)) * len(invocation.gpus)
        for invocation in report.invocations
        if invocation.function in FUNCTIONS_OF["generation"]
        for span in invocation.spans
        if span.activity not in START and span.end_s > 0
    )


def savings(rows: Sequence[dict[str, Cell]]) -> tuple[float, float]:
    """Shares of generation time and of its GPU-seconds that are saved over all steps."""

    def saved(name: str) -> float:
        own, static = (sum(float(str(row[f"{side}_{name}"])) for row in rows) for side in ("simulated", "static"))
        return 1 - own / static

    return saved("generation_s"), saved("generation_gpu_s")
