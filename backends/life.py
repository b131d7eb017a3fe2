"""One function invocation while it lasts, as a report will show it."""

from dataclasses import dataclass, field

from rlhfless.types.report import Activity, Invocation, Span


@dataclass(slots=True, kw_only=True)
class Life:
    """Spans follow each other without gaps; times are seconds from the step's start."""

    function: str
    """prefill, decode, reward or learner."""
    index: int
    """Number among the function's invocations of the step."""
    gpus: tuple[int, ...]
    """GPUs that it holds."""
    at_s: float
    """End of what has been written; at first the moment at which its GPUs are held."""
    spans: list[Span] = field(default_factory=list)
    """Its past."""

    def until(self, time_s: float | None, activity: Activity) -> None:
        """It has been doing `activity` up to `time_s`; nothing happens where that is unknown or not after what is
        written, as clocks of different processes would have it now and then."""
        if time_s is None or time_s <= self.at_s:
            return
        start_s = self.at_s
        if self.spans and self.spans[-1].activity == activity:
            start_s = self.spans.pop().start_s
        self.spans.append(Span(activity=activity, start_s=start_s, end_s=time_s))
        self.at_s = time_s

    def invocation(self) -> Invocation | None:
        """The finished record; None for a life of no length."""
        if not self.spans:
            return None
        return Invocation(function=self.function, index=self.index, gpus=self.gpus, spans=tuple(self.spans))
