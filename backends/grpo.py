"""Group Relative Policy Optimization (Shao et al. 2024, "DeepSeekMath" §4.1): no critic, a group is its own baseline.

Pure: tensors in, tensors out. `backends.losses` says how batches, masks and micro-batches are laid out.
"""

from dataclasses import dataclass

import torch

from backends.losses import Items, Metrics, PolicyOptions, aggregate, k3, policy_loss, token_mean
from rlhfless.errors import InputError

STD_EPS = 1e-6
"""Added to a group's standard deviation (verl's; TRL has 1e-4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions(PolicyOptions):
    """GRPO's numbers. Raises InputError for values that cannot be."""

    scale_by_std: bool = True
    """Whether advantages are divided by the group's standard deviation; Dr. GRPO (Liu et al. 2025 §3.1) does not, since
    it makes prompts count more that are nearly always or nearly never solved."""
    beta: float = 0.001
    """Weight of the KL term (verl's default; DeepSeekMath §4.2 uses 0.04, TRL's default is 0). 0: no reference."""

    def __post_init__(self) -> None:
        PolicyOptions.__post_init__(self)
        if not 0 <= self.beta < float("inf"):
            raise InputError(f"GRPO: beta {self.beta} must be at least 0 and finite")


def group_advantages(rewards: torch.Tensor, group: int, *, scale_by_std: bool = True) -> torch.Tensor:
    """float[responses]: reward minus the group's mean, over its standard deviation (n - 1) plus `STD_EPS`.

    A group is `group` responses that follow each other, all of one prompt. Equal rewards give exactly 0, and so does a
    group of one. Raises InputError where the responses are no whole number of groups.
    """
    if rewards.dim() != 1 or group < 1 or rewards.numel() % group:
        raise InputError(f"GRPO: rewards of shape {tuple(rewards.shape)} are no whole number of groups of {group}")
    grouped = rewards.reshape(-1, group)
    # from the first one on: a mean of equal rewards is rounded, and a tiny deviation would blow the rest up
    grouped = grouped - grouped[:, :1]
    centred = grouped - grouped.mean(1, keepdim=True)
    if scale_by_std and group > 1:
        centred = centred / (grouped.std(1, keepdim=True) + STD_EPS)
    return centred.reshape(-1)


def loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    options: GrpoOptions,
    *,
    reference_logprobs: torch.Tensor | None = None,
    engine_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    over: Items | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """DeepSeekMath's equation 3, to be minimised: `losses.policy_loss`, and beta times `losses.k3` to the reference.

    `advantages` float[responses], all else as in `losses.policy_loss`. Metrics: its own, and kl (to the reference).
    """
    assert options.beta == 0 or reference_logprobs is not None, "a KL term needs the reference's log-probabilities"
    items = Items.of(mask) if over is None else over
    total, metrics = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        options,
        engine_logprobs=engine_logprobs,
        entropy=entropy,
        over=items,
    )
    if reference_logprobs is not None:
        kl = k3(logprobs, reference_logprobs, mask)
        metrics["kl"] = token_mean(kl.detach(), mask, items)
        if options.beta:
            total = total + options.beta * aggregate(kl, mask, options.aggregation, items)
    return total, metrics
