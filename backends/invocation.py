"""One function on one process, while a step lasts, and the weights that it draws from."""

from dataclasses import dataclass, field

from backends.cluster import Process
from backends.vllm_actor import Begun
from backends.weight_sync import Published
from rlhfless.executor import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a step draws from."""

    version: str
    """Name of the weights."""
    published: Published | None
    """Where they are; None for those that the model's folder holds."""


@dataclass(slots=True, kw_only=True, eq=False)
class Invocation:
    """One function on one process, while it lasts."""

    function: str
    """prefill or decode."""
    index: int
    """Replica, or number in the plan."""
    process: Process
    """Where it runs."""
    life: Life
    """Its record."""
    called_s: float
    """When it was called, by our clock."""
    seen_s: float
    """When it last gave a sign of life, or was given something to do."""
    begun: Begun | None = None
    """Its first answer."""
    offset_s: float = 0.0
    """What its clock must be given to read like ours."""
    sent: int = 0
    """Responses that it has been sent."""
    parted: bool = False
    """Whether it has given up responses, all or some."""
    owed: set[int] = field(default_factory=set)
    """Prefixes that it has been sent and has not computed."""
    iterations: int = -1
    """Its engine's, when it last reported."""

    @property
    def holds_kv(self) -> bool:
        """Whether its engine may hold KV that others have yet to read, once it is over."""
        return self.function == "prefill" or self.parted
