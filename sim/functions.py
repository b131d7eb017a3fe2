"""How functions start: asked for, starting, ready."""

from collections.abc import Set
from dataclasses import dataclass

from rlhfless.executor import Life
from rlhfless.types.plan import Plan
from rlhfless.types.profile import COLD_START_GPU_SHARE, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """When the functions of a step are asked for and how long each takes to start."""

    plan: Plan
    """Says how functions start and when they are asked for."""
    profile: Profile
    """Start-up seconds, the same for every function of the step."""
    warm: Set[tuple[str, tuple[int, ...]]] | None
    """(function, GPUs) whose process is kept from an earlier step; None before the run's first step, for which
    processes were made ready with the run's set-up, as reserved ones are."""
    before_s: dict[str, float]
    """Function -> start of the phase before its own; a function without one is the run's first."""

    def start(
        self, function: str, gpus: tuple[int, ...], index: int, *, needed_s: float, free_s: float
    ) -> tuple[Life, float]:
        """A life that begins to hold its GPUs, and the time from which it can work.

        `needed_s`: when the phase before has ended; what has not been asked for by then is asked for now. `free_s`:
        when its GPUs are free. Waking a process may overlap what still runs on its GPUs, and so may the first part of
        a new one's start (see `COLD_START_GPU_SHARE`); it holds them, and is billed, once they are free. Reserved
        processes are always there. What the run's very first phase needs was started before the clock.
        """
        if self.plan.hosting != "serverless":
            begin_s = max(needed_s, free_s)
            return Life(function=function, index=index, gpus=gpus, at_s=begin_s), begin_s
        startup_s, kept = self._startup(function, gpus)
        asked_s = needed_s
        if self.plan.start != "cold" and function not in self.before_s:
            asked_s = needed_s - startup_s
        for prewarm in self.plan.prewarm:
            if prewarm.function == function and function in self.before_s:
                before_s = self.before_s[function]
                asked_s = min(max(before_s, before_s + prewarm.ready_after_s - startup_s), needed_s)
        ready_s = max(asked_s + startup_s, free_s + (0.0 if kept else COLD_START_GPU_SHARE * startup_s))
        life = Life(function=function, index=index, gpus=gpus, at_s=max(asked_s, free_s))
        life.until(ready_s, "start-up")
        life.until(needed_s, "early")
        return life, ready_s

    def start_now(
        self, function: str, gpus: tuple[int, ...], index: int, *, now_s: float, free_s: float
    ) -> tuple[Life, float]:
        """The same for a function that nobody has asked for before `now_s`."""
        begin_s = max(now_s, free_s)
        life = Life(function=function, index=index, gpus=gpus, at_s=begin_s)
        ready_s = begin_s + (self._startup(function, gpus)[0] if self.plan.hosting == "serverless" else 0.0)
        life.until(ready_s, "start-up")
        return life, ready_s

    def _startup(self, function: str, gpus: tuple[int, ...]) -> tuple[float, bool]:
        """Seconds of its start, and whether that wakes a process which is kept."""
        kept = self.plan.start == "warm" and (self.warm is None or (function, gpus) in self.warm)
        return (self.profile.data.warm_start_s if kept else self.profile.data.cold_start_s), kept
