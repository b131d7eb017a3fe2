"""What the controller of a generation keeps of its actors and responses, and what it asks of actors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from backends.engine_types import EngineCounters, FinishReason, Request
from backends.vllm_actor import NO_COUNTERS

State = Literal["reserved", "starting", "idle", "working", "leaving", "gone"]
End = Literal["done", "cut", "dead"]

NOWHERE = -1
"""Place of a response that has ended."""


class Wire(Protocol):
    """What a generation asks of its actors. Nothing is answered: what comes of it is an event."""

    def submit(self, actor: int, requests: Sequence[Request]) -> None:
        """Send responses to an actor that has begun."""
        ...

    def drain(self, actor: int) -> None:
        """Have an actor give up all that it has not finished."""
        ...

    def rearrange(self, actor: int, leaving: Sequence[int], first: Sequence[int]) -> None:
        """Have an actor give up the responses `leaving` and go on with the rest; each of `first` that waits for a slot
        goes to the head of its queue, one after the other."""
        ...

    def release(self, actor: int, end: End) -> None:
        """An actor has nothing more to do: all its responses have ended, a rule has cut it, or it has died."""
        ...

    def start(self, actor: int) -> None:
        """A rule asks for a reserve actor: start its process."""
        ...

    def revive(self, actor: int) -> None:
        """Start a new process in the place of an actor that has died, since no other is left."""
        ...


@dataclass(slots=True, kw_only=True)
class Actor:
    """A decode actor at work."""

    index: int
    """Number in the plan."""
    slots: int
    """Responses that it runs at once."""
    state: State = "working"
    """working: takes and decodes responses. leaving: a rule has cut it, it is being drained. gone. A reserve actor is
    reserved until it is asked for, then starting, then idle until it is given responses."""
    begun: bool = False
    """Whether it can be sent responses."""
    offset_s: float = 0.0
    """What its clock must be given to read like ours."""
    base: EngineCounters = NO_COUNTERS
    """Its engine's totals when it began."""
    counters: EngineCounters = NO_COUNTERS
    """The latest."""
    accepted_tokens: int = 0
    """Tokens that it has generated and that are safe here."""
    first_token_s: float | None = None
    """When it had generated its first token, by our clock."""
    last_token_s: float | None = None
    """When it had generated the last that is known."""
    over_s: float | None = None
    """When it had given up what it had not finished."""
    queue: Sequence[int] = ()
    """Responses that it had, without a slot, in order of admission, at its last report."""
    parting: set[int] = field(default_factory=set)
    """Responses that it has been asked to give up while it goes on."""


@dataclass(slots=True, kw_only=True)
class Response:
    """What is known of a response."""

    request: Request
    """As it is to be generated from the start."""
    tokens: list[int]
    """Generated and safe, at places that it has left."""
    logprobs: list[float]
    """Theirs."""
    here: list[int]
    """Reported by the place where it is."""
    here_logprobs: list[float]
    """Theirs."""
    count: int = 0
    """Tokens that the place where it is has generated, reported in full or not."""
    first_s: float | None = None
    """First admission, by our clock."""
    end_s: float = 0.0
    """Last token, by our clock."""
    cached_tokens: int | None = None
    """Prompt tokens that were not computed at first admission."""
    finish_reason: FinishReason = "length"
    """Why it ended."""
    version: str = ""
    """Weights that generated it."""

    @property
    def context_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.tokens) + self.count

    def continued(self) -> Request:
        """What is left to do."""
        if not self.tokens:
            return self.request
        return replace(
            self.request,
            token_ids=[*self.request.token_ids, *self.tokens],
            generated=len(self.tokens),
            max_tokens=self.request.max_tokens - len(self.tokens),
        )

    def keep(self, tokens: Iterable[int], logprobs: Iterable[float]) -> None:
        """It leaves its place with these tokens."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.here, self.here_logprobs, self.count = [], [], 0
