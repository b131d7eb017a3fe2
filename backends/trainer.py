"""The seam between the executor and what learns: a step's responses go in, rewards and new weights come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from backends.engine_types import FinishReason
from backends.weight_sync import Published
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One response."""

    tokens: IntArray
    """int[tokens]: token ids, the end token included."""
    logprobs: FloatArray
    """float[tokens]: their log-probabilities under the model that drew them, without temperature."""
    finish_reason: FinishReason
    """stop: the model ended it. length: its budget is used up."""
    weight_version: str
    """Weights that drew it."""
    cached_tokens: int
    """Prompt tokens that were not computed when it was first admitted: cached there, or fetched."""


class Trainer(Protocol):
    """What learns (`backends.training`). `cores`: those that a function may use, where it computes on CPUs."""

    @property
    def version(self) -> str:
        """Name of the weights that it has; "0" are those of the model's folder."""
        ...

    @property
    def functions(self) -> tuple[str, ...]:
        """Preparation functions that it has, of those that plans name."""
        ...

    def score(self, workload: Workload, responses: Sequence[Generated], /) -> FloatArray:
        """float[responses]: rewards, of responses that are not to be learned from."""
        ...

    def prepare(
        self, function: str, cores: int, workload: Workload, responses: Sequence[Generated], /
    ) -> FloatArray | None:
        """Carry out one of its functions; the rewards, where that is what it gives."""
        ...

    def learn(self, cores: int, workload: Workload, responses: Sequence[Generated], /) -> Any:
        """Update the models; what there is to tell of it."""
        ...

    def publish(self, folder: Path, /) -> Published:
        """Put the weights where engines find them."""
        ...

    def rest(self) -> None:
        """Leave GPUs to the engines."""
        ...

    def wake(self) -> None:
        """Take them back."""
        ...
