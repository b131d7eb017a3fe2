"""The seam between deciding and doing: what the simulator and the real backend have in common."""

from dataclasses import dataclass, field
from typing import Protocol

from rlhfless.types.cluster import ClusterState
from rlhfless.types.plan import Plan
from rlhfless.types.report import Activity, Invocation, Span, StepReport
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


@dataclass(slots=True, kw_only=True)
class Life:
    """One invocation while it lasts; spans follow each other without gaps."""

    function: str
    """decode, prefill, reward, reference, critic or learner."""
    index: int
    """Number among the function's invocations of the step."""
    gpus: tuple[int, ...]
    """GPUs that it holds."""
    at_s: float
    """End of what has been written; at first the moment at which the GPUs are held."""
    spans: list[Span] = field(default_factory=list)
    """Its past."""

    @property
    def start_s(self) -> float:
        """When it begins to hold its GPUs."""
        return self.spans[0].start_s if self.spans else self.at_s

    def cut(self, time_s: float) -> None:
        """It has ended at `time_s` after all, whatever was written beyond."""
        kept = [span for span in self.spans if span.start_s < time_s]
        self.at_s = min(self.at_s, max(time_s, self.start_s))
        self.spans = [
            Span(activity=span.activity, start_s=span.start_s, end_s=min(span.end_s, time_s)) for span in kept
        ]

    def until(self, time_s: float | None, activity: Activity) -> None:
        """It has been doing `activity` up to `time_s`; nothing happens where that is unknown or not later than what is
        written, as clocks of different processes would have it now and then."""
        if time_s is None or time_s <= self.at_s:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last.activity == activity:
            self.spans[-1] = Span(activity=activity, start_s=last.start_s, end_s=time_s)
        else:
            self.spans.append(Span(activity=activity, start_s=self.at_s, end_s=time_s))
        self.at_s = time_s

    def invocation(self) -> Invocation | None:
        """The finished record; None for a life of no length."""
        if not self.spans:
            return None
        return Invocation(function=self.function, index=self.index, gpus=self.gpus, spans=tuple(self.spans))
