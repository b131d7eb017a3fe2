"""The seam between deciding and doing: what the simulator and the real backend have in common."""

from typing import Protocol

from rlhfless.types.cluster import ClusterState
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload


class Executor(Protocol):
    """Carries plans out, one step after the other."""

    def snapshot(self) -> ClusterState:
        """What is free now."""
        ...

    def execute(self, plan: Plan, workload: Workload) -> StepReport:
        """Run one step to its end and say how it went."""
        ...

    def close(self) -> None:
        """Release everything that is held. Further calls are a bug."""
        ...
