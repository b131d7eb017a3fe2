"""StepReport: what an executor says of one step that it carried out.

Times are seconds from the step's start, the moment at which the learner of the step before has finished; functions
that were asked for ahead begin before 0.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.codec import from_json, to_json

SCHEMA = 1

Activity = Literal[
    "prefill", "decode", "score", "train", "send-kv",
    "start-up", "early", "wait-weights", "wait-kv", "wait-longest", "wait-phase",
]  # fmt: skip
"""What a function's GPUs do. The first row computes or sends. The second holds GPUs without using them: starting,
asked for too early, and waiting for weights, for prompt or migrated KV, for the step's longest response, for another
phase."""

WORK: tuple[Activity, ...] = ("prefill", "decode", "score", "train", "send-kv")
"""Activities that count as execution."""
IDLE: tuple[Activity, ...] = ("start-up", "early", "wait-weights", "wait-kv", "wait-longest", "wait-phase")
"""Activities that count as held without use, each a cause."""


FUNCTIONS_OF: dict[str, tuple[str, ...]] = {
    "generation": ("prefill", "decode"),
    "preparation": ("reward", "reference", "critic"),
    "learning": ("learner",),
}
"""Functions that work in each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of one function's life."""

    activity: Activity
    """What its GPUs do."""
    start_s: float
    """Beginning."""
    end_s: float
    """End, at least start_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One function invocation, from the moment GPUs are held to their release."""

    function: str
    """prefill, decode, reward, reference, critic or learner."""
    index: int
    """Number among the invocations of that function in the step."""
    gpus: tuple[int, ...]
    """GPUs that it holds."""
    spans: tuple[Span, ...]
    """Its life without gaps, in order."""

    @property
    def start_s(self) -> float:
        """When its GPUs are held."""
        return self.spans[0].start_s

    @property
    def end_s(self) -> float:
        """When its GPUs are released."""
        return self.spans[-1].end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One of the three phases of a step."""

    name: str
    """generation, preparation or learning."""
    start_s: float
    """Beginning."""
    end_s: float
    """End."""

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals of one step."""

    prefill_tokens: int
    """Prompt tokens that the prefill actor computed."""
    decode_prefill_tokens: int
    """Prompt tokens that decode actors computed, first-time work only."""
    recomputed_tokens: int
    """Tokens whose KV was computed again after a preemption or a move."""
    decoded_tokens: int
    """Response tokens that decode actors generated."""
    preemptions: int
    """Responses that lost their KV because it ran out."""
    cuts: int
    """Actors that a mid-step rule ended."""
    moves: int
    """Responses that changed actor."""
    failures: int
    """Actors that died."""
    moved_kv_bytes: float
    """KV sent between actors by moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step as it happened."""

    schema: int
    """Version of this layout."""
    policy: str
    """Policy of the plan."""
    step: int
    """Number of the step in the run."""
    epoch: int
    """Pass over the data set."""
    start_s: float
    """Time of the step's start since the run began."""
    prompt_ids: npt.NDArray[np.generic]
    """[prompts]: the workload's prompts."""
    responses_per_prompt: int
    """n."""
    tokens: IntArray
    """int[responses]: tokens generated, response numbers prompt * n + sample."""
    first_s: FloatArray
    """float[responses]: first admission to an actor."""
    end_s: FloatArray
    """float[responses]: last token."""
    actor: IntArray
    """int[responses]: decode actor that finished it."""
    moves: IntArray
    """int[responses]: how often it changed actor."""
    invocations: tuple[Invocation, ...]
    """Every function invocation of the step."""
    phases: tuple[Phase, ...]
    """Generation, preparation, learning, in order and without gaps."""
    reserved_gpus: int
    """GPUs that are held for the whole step whatever runs on them; 0 for serverless."""
    counters: Counters
    """Totals."""

    def phase_s(self, name: str) -> float:
        """Seconds of one phase."""
        return next(phase.duration_s for phase in self.phases if phase.name == name)

    def execution_s(self, name: str) -> float:
        """Seconds from the first work of a phase's functions to its end: its duration without waiting for starts."""
        phase = next(phase for phase in self.phases if phase.name == name)
        begins = [
            span.start_s
            for invocation in self.invocations
            if invocation.function in FUNCTIONS_OF[name]
            for span in invocation.spans
            if span.activity in WORK
        ]
        return phase.end_s - min(begins, default=phase.start_s)

    @property
    def step_s(self) -> float:
        """Seconds from the step's start to the learner's end."""
        return self.phases[-1].end_s

    @property
    def mean_lengths(self) -> FloatArray:
        """float[prompts]: mean response length of each prompt."""
        means: FloatArray = self.tokens.reshape(-1, self.responses_per_prompt).mean(axis=1)
        return means

    def to_json(self) -> str:
        """The report as canonical JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "report") -> "StepReport":
        """Read what `to_json` wrote. Raises SchemaError."""
        return from_json(text, cls, SCHEMA, where)
