"""One step's prompts, as much of them as a planner may know."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError
from rlhfless.types.arrays import IntArray

Algorithm = Literal["ppo", "grpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The generation work of one training step. Responses are numbered prompt * n + sample."""

    step: int
    """Number of the step in the run, from 0."""
    epoch: int
    """Pass over the data set that the step belongs to, from 0."""
    algorithm: Algorithm
    """What learns from the step; PPO adds a critic."""
    prompt_ids: npt.NDArray[np.generic]
    """[prompts]: what names a prompt across epochs; int64 or str."""
    prompt_tokens: IntArray
    """int[prompts]: tokens of each prompt, at least 1."""
    responses_per_prompt: int
    """n: responses sampled for each prompt."""
    max_response_tokens: int
    """Cap on a response's length."""
    reference_tokens: IntArray | None = None
    """int[prompts]: tokens of the data set's reference answer, where it has one."""
    prompts: tuple[IntArray, ...] | None = None
    """Token ids of each prompt, where they are known; they show which prefixes are shared."""
    common_prefix_tokens: int = 0
    """Tokens that all prompts begin with, where token ids are not known (a shared header)."""

    def __post_init__(self) -> None:
        count = len(self.prompt_ids)
        where = f"workload of step {self.step}"
        if count == 0:
            raise InputError(f"{where}: no prompts; at least one is needed")
        for name, column in (("prompt_tokens", self.prompt_tokens), ("reference_tokens", self.reference_tokens)):
            if column is None:
                continue
            if column.shape != (count,):
                raise InputError(f"{where}: {name} has shape {column.shape}, {count} prompts need ({count},)")
            if column.min() < 1:
                raise InputError(f"{where}: {name} has {column.min()}; every value must be at least 1")
        if self.responses_per_prompt < 1 or self.max_response_tokens < 1:
            raise InputError(
                f"{where}: responses_per_prompt {self.responses_per_prompt} and max_response_tokens "
                f"{self.max_response_tokens} must be at least 1"
            )
        if self.algorithm not in ("ppo", "grpo"):
            raise InputError(f"{where}: unknown algorithm {self.algorithm!r}: known are ppo, grpo")
        if self.prompts is not None and [len(p) for p in self.prompts] != self.prompt_tokens.tolist():
            raise InputError(f"{where}: prompt_tokens must be the lengths of the token ids in prompts")
        if not 0 <= self.common_prefix_tokens <= int(self.prompt_tokens.min()):
            raise InputError(
                f"{where}: common_prefix_tokens {self.common_prefix_tokens} must lie in "
                f"0..{self.prompt_tokens.min()}, the shortest prompt"
            )

    @property
    def size(self) -> int:
        """Prompts in the step."""
        return len(self.prompt_ids)

    @property
    def responses(self) -> int:
        """Responses in the step, prompts x n."""
        return self.size * self.responses_per_prompt
