"""Processes for the next step, asked for while this one still learns (RLHFless §5).

The next step is planned when this one has ended, so what it will need is a guess: the GPUs that this one has decoded
on, at the time that this plan's `Prewarm` names. What the next plan can use it takes; the rest ends as it begins, and
either way its report bills them from the moment at which they were asked for. Those of a run's last step have no such
report.
"""

import threading
import time
from contextlib import suppress

from backends.cluster import RayCluster, StepError
from backends.engine_types import EngineConfig
from rlhfless.types.plan import Plan


def guess(plan: Plan) -> tuple[tuple[float, tuple[int, ...]], ...]:
    """(Seconds after the start of learning at which a process should be ready, its GPUs), of all that a plan asks for
    ahead of the next generation.

    Never on the learner's GPUs, whose memory is in use. So the prefill actor is not among them, which runs there.
    """
    if plan.start == "cold" or plan.hosting != "serverless":
        return ()
    learner = set(plan.placement.learner)
    return tuple(
        (prewarm.ready_after_s, gpus)
        for prewarm in plan.prewarm
        if prewarm.function == "decode"
        for actor, gpus in zip(plan.actors, plan.placement.decode, strict=True)
        if actor.responses.size and learner.isdisjoint(gpus)  # one in reserve starts when a rule asks for it
    )


def delay_s(ready_after_s: float, startup_s: float | None) -> float:
    """When to ask, seconds after the start of learning; at once where no start-up has been measured."""
    return 0.0 if startup_s is None else max(0.0, ready_after_s - startup_s)


class Prewarming:
    """Asks at the right times while its context lasts, in a thread of its own. What was not due by its end is not asked
    for: the next step will ask itself."""

    def __init__(self, cluster: RayCluster, plan: Plan, engine: EngineConfig) -> None:
        """`engine`: of this step, and likely of the next. Warm processes are woken, and none is started in their
        place."""
        self._cluster, self._engine, self._new = cluster, engine, plan.start == "prewarmed"
        self._due = sorted((delay_s(ready_after_s, cluster.startup_s), gpus) for ready_after_s, gpus in guess(plan))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prewarm", daemon=True)

    def __enter__(self) -> "Prewarming":
        if self._due:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._due:
            self._thread.join()

    def _run(self) -> None:
        from ray.exceptions import RayError

        started_s = time.monotonic()
        for at_s, gpus in self._due:
            if self._over.wait(max(0.0, started_s + at_s - time.monotonic())):
                return
            with suppress(StepError, RayError):  # a host or Ray itself is gone: the next step meets that itself
                self._cluster.ahead(gpus, self._engine, new=self._new)
