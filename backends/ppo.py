"""Proximal Policy Optimization on responses (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022).

Pure: tensors in, tensors out. `backends.losses` says how batches, masks and micro-batches are laid out; the policy's
own loss is `losses.policy_loss` with the advantages of `experience`.
"""

from dataclasses import dataclass

import torch

from backends.losses import Items, Metrics, PolicyOptions, aggregate, clean, require_above_zero, token_mean
from rlhfless.errors import InputError

VARIANCE_EPS = 1e-8
"""Added to the variance in `whiten` (the usual value: OpenAI's lm-human-preferences, verl)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoOptions(PolicyOptions):
    """PPO's numbers. Raises InputError for values that cannot be."""

    kl_coefficient: float = 0.001
    """Weight of the KL penalty in every token's reward (verl's default; Ouyang et al. 2022 use 0.02). 0: no
    reference."""
    gamma: float = 1.0
    """Discount of a token (Ziegler et al. 2019; verl's default): the score comes at the end, whatever the length."""
    lam: float = 0.95
    """Lambda of the advantage estimator (Schulman et al. 2017, table 3; Ziegler et al. 2019); verl's default is 1."""
    value_clip: float = 0.2
    """The new value counts within +- value_clip of the old (lm-human-preferences; verl has 0.5)."""
    value_coefficient: float = 1.0
    """Weight of the value loss: 1 for a critic with an optimizer of its own. One optimizer for policy and critic wants
    0.1 (Ziegler et al. 2019, whose loss has the factor 1/2 too)."""

    def __post_init__(self) -> None:
        PolicyOptions.__post_init__(self)
        require_above_zero("PPO", value_clip=self.value_clip, value_coefficient=self.value_coefficient)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"PPO: {name} {getattr(self, name)} must lie in 0..1")
        if not 0 <= self.kl_coefficient < float("inf"):
            raise InputError(f"PPO: kl_coefficient {self.kl_coefficient} must be at least 0 and finite")


def experience(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: PpoOptions,
    *,
    reference_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    """What a batch teaches: whitened advantages and returns, [responses, tokens], and metrics; no gradient.

    `scores`: float[responses], of whole responses. `logprobs` and `values`: of policy and critic before the step's
    updates. For the whole batch at once, since advantages are whitened over it. Metrics: kl, the mean of k1 to the
    reference; value, the mean value.
    """
    assert options.kl_coefficient == 0 or reference_logprobs is not None, "a KL penalty needs the reference"
    items, metrics = Items.of(mask), {}
    with torch.no_grad():
        rewards = token_rewards(scores, logprobs, mask, options.kl_coefficient, reference_logprobs=reference_logprobs)
        advantages, returns = gae(rewards, values, mask, gamma=options.gamma, lam=options.lam)
        if reference_logprobs is not None:
            metrics["kl"] = token_mean(logprobs - reference_logprobs, mask, items)
        metrics["value"] = token_mean(values, mask, items)
    return whiten(advantages, mask), returns, metrics


def token_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    kl_coefficient: float,
    *,
    reference_logprobs: torch.Tensor | None,
) -> torch.Tensor:
    """[responses, tokens]: minus kl_coefficient times log(policy / reference), the k1 estimator, on every token, and
    the response's score on its last (Ouyang et al. 2022, equation 2). A response without tokens has no reward."""
    rewards = torch.zeros_like(logprobs)
    if reference_logprobs is not None:
        rewards = -kl_coefficient * clean(logprobs - reference_logprobs, mask)
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    last = (mask * places).argmax(-1, keepdim=True)
    return clean(rewards.scatter_add(-1, last, scores.to(rewards.dtype).unsqueeze(-1)), mask)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [responses, tokens], 0 beyond the mask (Schulman et al. 2016, equation 16).

    A token's successor is the next one under the mask, so tokens in between that the policy has not drawn take no
    time. After the last the value is 0, for responses that their budget has cut off too, as verl and TRL have it.
    """
    rewards, values = clean(rewards, mask), clean(values, mask)
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    carried = torch.zeros_like(rewards[:, 0])
    for token in reversed(range(rewards.shape[1])):
        here, value = mask[:, token], values[:, token]
        delta = rewards[:, token] + gamma * following - value
        carried = torch.where(here, delta + gamma * lam * carried, carried)
        following = torch.where(here, value, following)
        advantages[:, token] = carried
    advantages = clean(advantages, mask)
    return advantages, advantages + values


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` shifted and scaled to mean 0 and variance 1 (n - 1) over the mask, 0 beyond it. One token gives 0."""
    kept = values[mask]
    if kept.numel() < 2:
        return torch.zeros_like(values)
    return clean((values - kept.mean()) * torch.rsqrt(kept.var() + VARIANCE_EPS), mask)


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    options: PpoOptions,
    *,
    over: Items | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Half the squared error, of the value or of the value clipped to near the old, whichever is larger; a scalar.

    All tensors [responses, tokens]; `values` with gradient. Metrics: value_loss, and value_clip_share, tokens at which
    the clipped one is the larger.
    """
    items = Items.of(mask) if over is None else over
    values, old_values, returns = (clean(each, mask) for each in (values, old_values, returns))
    clipped = values.clamp(old_values - options.value_clip, old_values + options.value_clip)
    plain, bounded = (values - returns).square(), (clipped - returns).square()
    total = options.value_coefficient * aggregate(0.5 * torch.maximum(plain, bounded), mask, options.aggregation, items)
    metrics = {
        "value_loss": total.detach(),
        "value_clip_share": token_mean((bounded > plain).detach(), mask, items),
    }
    return total, metrics
