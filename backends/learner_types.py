"""How a learner learns, and what from: plain values, the same on every rank."""

from dataclasses import dataclass
from pathlib import Path

import torch

from backends.environment import Device
from backends.grpo import GrpoOptions
from backends.learner_batch import Batch
from backends.ppo import PpoOptions
from rlhfless.errors import InputError, RlhflessError
from rlhfless.rng import stream
from rlhfless.types.workload import Algorithm


class LearnerError(RlhflessError):
    """Learning cannot go on, such as after a gradient that is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How a learner learns. Raises InputError for values that cannot be."""

    model: str
    """Hugging Face folder: what the policy and the critic start from, and the reference."""
    options: GrpoOptions | PpoOptions
    """The algorithm's numbers."""
    device: Device = "cpu"
    """cpu or cuda."""
    learning_rate: float
    """Of the policy."""
    critic_learning_rate: float
    """Of the critic; for PPO alone."""
    weight_decay: float = 0.0
    """Decoupled (AdamW)."""
    warmup_steps: int = 0
    """Updates over which learning rates rise from 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    minibatches: int = 1
    """Updates of one pass over a step's responses, each on an equal part of them."""
    epochs: int = 1
    """Passes over a step's responses."""
    tokens_per_microbatch: int
    """Tokens, padding included, of one forward and backward pass of a rank."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again for the backward pass."""
    seed: int = 0
    """Seed of the minibatches."""

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise InputError(f"learner: {self.model} is not a folder with a Hugging Face model (no config.json)")
        for name in ("learning_rate", "critic_learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError(f"learner: {name} {getattr(self, name)} must be above 0 and finite")
        for name in ("minibatches", "epochs", "tokens_per_microbatch"):
            if getattr(self, name) < 1:
                raise InputError(f"learner: {name} {getattr(self, name)} must be at least 1")
        if self.warmup_steps < 0 or not 0 <= self.weight_decay < 1:
            raise InputError(
                f"learner: warmup_steps {self.warmup_steps} must be at least 0, weight_decay {self.weight_decay} in "
                "0..1, without 1"
            )

    @property
    def algorithm(self) -> Algorithm:
        """ppo or grpo."""
        return "ppo" if isinstance(self.options, PpoOptions) else "grpo"

    @property
    def has_reference(self) -> bool:
        """Whether a KL term asks for the reference's log-probabilities."""
        options = self.options
        return (options.kl_coefficient if isinstance(options, PpoOptions) else options.beta) > 0

    @property
    def functions(self) -> tuple[str, ...]:
        """Preparation functions that the learner's ranks carry out, by their names in plans."""
        return (*(("reference",) if self.has_reference else ()), *(("critic",) if self.algorithm == "ppo" else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """What an update learns from; tensors are float32[responses, tokens] unless they say otherwise."""

    batch: Batch
    """The responses."""
    step: int
    """Step of the run, which names the minibatches."""
    old_logprobs: torch.Tensor
    """Of the policy before the step's updates."""
    advantages: torch.Tensor
    """[responses] or [responses, tokens]."""
    engine_logprobs: torch.Tensor | None = None
    """The engines' own, where they are to correct the loss."""
    reference_logprobs: torch.Tensor | None = None
    """The reference's, for GRPO's KL term."""
    old_values: torch.Tensor | None = None
    """The critic's before the updates, for PPO."""
    returns: torch.Tensor | None = None
    """What values should have been, for PPO."""


def minibatches(responses: int, config: LearnerConfig, step: int) -> list[list[int]]:
    """Responses of every update of a step, in order. Raises InputError where they cannot be divided equally."""
    count = config.minibatches
    if responses % count:
        raise InputError(f"learner: {responses} responses of a step cannot be divided into {count} equal minibatches")
    found = []
    for epoch in range(config.epochs):
        order = stream(config.seed, "minibatches", step, epoch).permutation(responses)
        found += [sorted(part) for part in order.reshape(count, -1).tolist()]
    return found
