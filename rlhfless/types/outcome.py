"""What really happens in a step. It goes from a trace straight to an executor; a planner never sees it."""

from dataclasses import dataclass

from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """True response lengths of one step."""

    response_tokens: IntArray
    """int[prompts, n]: tokens that each response has when it ends, at least 1."""
    rewards: FloatArray | None = None
    """float[prompts, n]: score of each response, where it is known."""

    def __post_init__(self) -> None:
        if self.response_tokens.ndim != 2 or self.response_tokens.size == 0:
            raise InputError(f"outcome: response_tokens has shape {self.response_tokens.shape}, not (prompts, n)")
        if self.response_tokens.min() < 1:
            raise InputError(f"outcome: a response of {self.response_tokens.min()} tokens; each has at least 1")
        if self.rewards is not None and self.rewards.shape != self.response_tokens.shape:
            raise InputError(f"outcome: rewards {self.rewards.shape}, lengths {self.response_tokens.shape}")
