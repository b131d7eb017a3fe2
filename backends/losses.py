"""What the losses of GRPO and PPO share: means over a response mask, ratios between policies, their clipped objective.

Tensors of one batch are [responses, tokens], padded to the longest response; `mask` is True where the policy has drawn
a token. What stands elsewhere, NaN included, changes neither a value nor a gradient.

Exact gradient accumulation: a batch is split by responses into micro-batches, each is given the `Items` of the whole
batch, and losses and metrics then add up to those of the whole (where ranks average gradients, multiply by their
number). Left out, `Items` are those of the tensors at hand.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from rlhfless.errors import InputError

Metrics = dict[str, torch.Tensor]
"""Named means over the tokens of a batch, each a scalar without gradient; those of micro-batches add up."""
Aggregation = Literal["token-mean", "sequence-mean"]
"""token-mean: every token counts the same (DAPO §3.3; TRL's dapo, verl's token-mean). sequence-mean: the mean over
responses of their token means (DeepSeekMath, equation 3; TRL's grpo, verl's seq-mean-token-mean). The constant
denominator of Dr. GRPO is token-mean up to a factor that is the same for every token of a batch."""

MOST_LOG_RATIO = 20.0
"""Bound on |log ratio| before it is exponentiated (chosen, as in verl): beyond it, an infinite ratio that the clip has
ruled out would still make the gradient NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """What means over a batch divide by."""

    tokens: int
    """Tokens under the mask."""
    sequences: int
    """Responses with at least one of them."""

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Items":
        """Count a mask, bool[responses, tokens]."""
        return cls(tokens=int(mask.sum()), sequences=int(mask.any(-1).sum()))

    def __add__(self, other: "Items") -> "Items":
        return Items(tokens=self.tokens + other.tokens, sequences=self.sequences + other.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The clipped objective. Raises InputError for values that cannot be."""

    clip_low: float = 0.2
    """The ratio counts down to 1 - clip_low (Schulman et al. 2017, table 1; default of verl and TRL)."""
    clip_high: float = 0.2
    """... and up to 1 + clip_high; the same in PPO, 0.28 in DAPO §4.1."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number (token-mean is verl's default)."""
    tis_cap: float | None = 2.0
    """Cap C of the weight min(learner / engine, C) on every token: truncated importance sampling, which corrects for
    engines whose kernels do not give the learner's probabilities (Yao et al. 2025; 2 is verl's default threshold).
    None: no weight."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus (0 is verl's default; Schulman et al. 2017 use 0.01 for Atari)."""

    def __post_init__(self) -> None:
        require_above_zero("policy loss", clip_high=self.clip_high)
        if not 0 < self.clip_low <= 1:
            raise InputError(f"policy loss: clip_low {self.clip_low} must be above 0 and at most 1")
        if self.tis_cap is not None:
            require_above_zero("policy loss", tis_cap=self.tis_cap)
        if not self.entropy_coefficient >= 0:
            raise InputError(f"policy loss: entropy_coefficient {self.entropy_coefficient} must be at least 0")
        if self.aggregation not in get_args(Aggregation):
            known = ", ".join(get_args(Aggregation))
            raise InputError(f"policy loss: aggregation {self.aggregation!r}: known are {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the engines' log-probabilities are from the learner's, for the same weights and tokens."""

    mean_abs: float
    """Mean of |learner - engine|, nats."""
    max_abs: float
    """Its maximum."""
    mean_ratio: float
    """Mean of learner / engine probability; its expectation is 1 where the engine drew from what it reports."""


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    options: PolicyOptions,
    *,
    engine_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    over: Items | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The clipped objective of Schulman et al. 2017, equation 7, to be minimised; a scalar, and metrics.

    `logprobs`: of the tokens under the policy that learns, with gradient. `old_logprobs`: the same model's before this
    step's updates; where they are the engines' own, leave `engine_logprobs` out. `advantages`: [responses] or
    [responses, tokens]. `entropy`: of the policy at each token, nats. All others [responses, tokens].

    Metrics: policy_loss (without the entropy bonus); clip_share, of tokens whose gradient the clip has cut off;
    approx_kl, KL(old || new) by `k3`; entropy; tis_weight and tis_capped_share.
    """
    assert options.entropy_coefficient == 0 or entropy is not None, "an entropy bonus needs entropies"
    items = Items.of(mask) if over is None else over
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1).expand_as(mask)
    weight = clean(advantages, mask)
    ratio = log_ratios(logprobs, old_logprobs, mask).exp()
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -torch.minimum(ratio * weight, bounded * weight)
    with torch.no_grad():
        above = (ratio > 1 + options.clip_high) & (weight > 0)
        below = (ratio < 1 - options.clip_low) & (weight < 0)
        metrics = {
            "clip_share": token_mean(above | below, mask, items),
            "approx_kl": token_mean(k3(old_logprobs, logprobs, mask), mask, items),
        }
    if options.tis_cap is not None and engine_logprobs is not None:
        correction = log_ratios(old_logprobs, engine_logprobs, mask).exp().detach()
        capped = correction.clamp(max=options.tis_cap)
        loss = loss * capped
        metrics["tis_weight"] = token_mean(capped, mask, items)
        metrics["tis_capped_share"] = token_mean(correction > options.tis_cap, mask, items)
    total = aggregate(loss, mask, options.aggregation, items)
    metrics["policy_loss"] = total.detach()
    if entropy is not None:
        metrics["entropy"] = token_mean(entropy.detach(), mask, items)
        if options.entropy_coefficient:
            total = total - options.entropy_coefficient * aggregate(entropy, mask, options.aggregation, items)
    return total, metrics


def k3(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[responses, tokens]: r - 1 - log r with r = reference / policy, 0 beyond the mask.

    At least 0 everywhere, and without bias for KL(policy || reference) on tokens that the policy drew (Schulman 2020,
    "Approximating KL divergence"; DeepSeekMath, equation 4).
    """
    log_ratio = log_ratios(reference_logprobs, logprobs, mask)
    return log_ratio.exp() - 1 - log_ratio


def mismatch(learner_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compare log-probabilities, [responses, tokens], of the same tokens under the same weights."""
    assert mask.any(), "no token to compare"
    apart = (learner_logprobs - engine_logprobs)[mask].detach().double()
    return Mismatch(
        mean_abs=float(apart.abs().mean()), max_abs=float(apart.abs().max()), mean_ratio=float(apart.exp().mean())
    )


# ---- over a mask


def clean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 beyond the mask, and no gradient there. A product with the mask would keep NaN and infinity."""
    assert values.shape == mask.shape, (values.shape, mask.shape)
    assert mask.dtype == torch.bool, mask.dtype
    return values.masked_fill(~mask, 0)


def log_ratios(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Difference of log-probabilities, bounded so that its exponential is finite; 0 beyond the mask."""
    return (clean(numerator, mask) - clean(denominator, mask)).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def aggregate(values: torch.Tensor, mask: torch.Tensor, how: Aggregation, over: Items) -> torch.Tensor:
    """One number of [responses, tokens]; see `Aggregation`. 0 where there is no token at all."""
    kept = clean(values, mask)
    if how == "token-mean":
        return kept.sum() / max(over.tokens, 1)
    means = kept.sum(-1) / mask.sum(-1).clamp(min=1)
    return means.sum() / max(over.sequences, 1)


def token_mean(values: torch.Tensor, mask: torch.Tensor, over: Items) -> torch.Tensor:
    """`aggregate` by tokens, of numbers or of bools."""
    return aggregate(values if values.is_floating_point() else values.float(), mask, "token-mean", over)


def require_above_zero(where: str, **numbers: float) -> None:
    """Raise InputError unless each is finite and above 0."""
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise InputError(f"{where}: {name} {number} must be above 0 and finite")
