"""The one loop of a run: snapshot, plan, check, execute, observe."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhfless.executor import Executor
from rlhfless.scheduler.planner import Planner
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a run."""

    plan: Plan
    """What was decided."""
    report: StepReport
    """What happened."""
    planning_s: float
    """Wall-clock seconds that deciding took; all else is time of the executor's clock."""


def run(planner: Planner, executor: Executor, workloads: Iterable[Workload]) -> Iterator[StepRecord]:
    """Carry out the steps in order, each planned with what the ones before have taught; closing is the caller's.

    Raises what `Planner.plan` raises, and PlanError for a plan that cannot be carried out.
    """
    for workload in workloads:
        state = executor.snapshot()
        begin = time.perf_counter()
        plan = planner.plan(workload, state)
        planning_s = time.perf_counter() - begin
        plan.check()
        report = executor.execute(plan, workload)
        planner.observe(report)
        yield StepRecord(plan=plan, report=report, planning_s=planning_s)
