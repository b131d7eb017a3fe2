"""A decode actor of a running step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhfless.executor import Life
from rlhfless.types.report import Activity
from sim.engine import Engine

State = Literal["reserved", "starting", "idle", "working", "leaving", "gone"]


@dataclass(slots=True, kw_only=True)
class Actor:
    """A decode actor at work."""

    index: int
    """Number in the plan."""
    host: int
    """Host that carries its GPUs."""
    engine: Engine
    """Its continuous batching."""
    life: Life
    """Its invocation."""
    start_s: float
    """When its process, the weights and its KV are all there."""
    waits: Sequence[tuple[float, Activity]] = ()
    """What it waits for before that, in order: (until, activity)."""
    state: State = "working"
    """working: takes and decodes responses. leaving: a rule has cut it, it goes at its next boundary. gone. A reserve
    actor is reserved until it is asked for, then starting, then idle until it is given responses."""
    begun: bool = False
    """Whether `start_s` has come."""
    busy: bool = False
    """Inside a stretch."""
    decoded: bool = False
    """Whether it has begun to decode, after which prefills count as part of decoding."""
    dead: bool = False
    """Whether it has died, and the KV of what it sends on with it."""
    stretch_s: float = 0.0
    """Start of the running stretch."""
    iterations: int | None = None
    """Iterations after which the running stretch ends early; None for as planned."""
    event: int = 0
    """Number of the event that is awaited; others are out of date."""
    parting: list[int] = field(default_factory=list)
    """Responses in its engine that leave at its next boundary while it goes on."""
