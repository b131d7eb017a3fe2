"""Losses: against TRL's own code, their gradients, the laws of the policy loss, and GRPO's advantages."""

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.rng import stream

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'rlhfless[cpu]'")

from backends import grpo, losses, ppo  # noqa: E402
from backends.losses import Aggregation, Items, PolicyOptions  # noqa: E402
from tests.loss_batches import FEW, Batch, Tensor, critic_loss, grpo_loss  # noqa: E402

Loss = Callable[..., tuple[Any, losses.Metrics]]
LOSSES = [
    pytest.param(grpo_loss, "new", "token-mean", id="policy-token-mean"),
    pytest.param(grpo_loss, "new", "sequence-mean", id="policy-sequence-mean"),
    pytest.param(critic_loss, "values", "token-mean", id="value-token-mean"),
]


def graded(loss: Loss, batch: Batch, name: str, **options: Any) -> tuple[Tensor, Tensor, losses.Metrics]:
    """Loss, its gradient, metrics."""
    variable = getattr(batch, name).clone().requires_grad_()
    total, metrics = loss(batch, variable, **options)
    total.backward()
    assert not any(metric.requires_grad or metric.dim() for metric in metrics.values())
    return total.detach(), variable.grad, metrics


# ---- against TRL


@pytest.fixture(scope="module")
def trl_trainer() -> Any:
    pytest.importorskip("trl", reason="needs TRL: pip install 'trl>=1.16,<2'")
    from backends.environment import prepare

    prepare("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL warns of the installed vLLM as it looks for one
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def trl_loss(trainer: Any, batch: Batch, new: Tensor, loss_type: str, beta: float, cap: float | None) -> Tensor:
    """What `GRPOTrainer` makes of the same tensors: its own method, on a stand-in for the trainer."""
    nothing = batch.mask[:, :0].long()
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda tensor, reduction: tensor, gather=lambda each: each)
    these = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, batch.entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.3,
        use_vllm=cap is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": trainer_metrics()},
    )
    correction = (batch.old - batch.engine).exp().clamp(max=cap) if cap is not None else None
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch.mask.long(),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": correction,
    }
    return trainer._compute_loss(these, None, inputs), these._metrics["train"]


def trainer_metrics() -> Any:
    from collections import defaultdict

    return defaultdict(list)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    ("loss_type", "how"), [("dapo", "token-mean"), ("bnpo", "token-mean"), ("grpo", "sequence-mean")]
)
def test_policy_loss_is_trls(
    trl_trainer: Any, loss_type: str, how: Aggregation, beta: float, cap: float | None, seed: int
) -> None:
    batch = Batch(seed)
    some = batch.rows(batch.mask.any(-1))  # TRL counts a response without tokens among those it averages over
    variable = some.new.clone().requires_grad_()
    expected, told = trl_loss(trl_trainer, some, variable, loss_type, beta, cap)
    expected.backward()
    total, gradient, metrics = graded(
        grpo_loss, some, "new", clip_high=0.3, beta=beta, tis_cap=cap, aggregation=how, entropy_coefficient=0.0
    )
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, variable.grad, rtol=1e-12, atol=1e-15)
    assert metrics["clip_share"].item() == pytest.approx(told["clip_ratio/region_mean"][0], rel=1e-6)
    assert metrics["entropy"].item() == pytest.approx(told["entropy"][0], rel=1e-12)
    if beta:
        assert metrics["kl"].item() == pytest.approx(told["kl"][0], rel=1e-12)


# ---- gradients


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss", "name", "how"), LOSSES)
def test_gradients_are_those_of_finite_differences(loss: Loss, name: str, how: Aggregation, seed: int) -> None:
    batch = Batch(seed, rows=3, width=4, holes=True)
    variable = getattr(batch, name).clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: loss(batch, each, aggregation=how)[0], (variable,))


@FEW
@given(seed=st.integers(0, 10**6), holes=st.booleans(), pad=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@pytest.mark.parametrize(("loss", "name", "how"), LOSSES)
def test_padding_never_matters(loss: Loss, name: str, how: Aggregation, seed: int, holes: bool, pad: float) -> None:
    batch = Batch(seed, holes=holes)
    total, gradient, metrics = graded(loss, batch, name, aggregation=how)
    dirty_total, dirty_gradient, dirty_metrics = graded(loss, batch.soiled(pad), name, aggregation=how)
    assert torch.equal(total, dirty_total)
    assert torch.equal(gradient, dirty_gradient)
    assert not gradient[~batch.mask].any()
    assert metrics == dirty_metrics


@FEW
@given(seed=st.integers(0, 10**6), split=st.lists(st.integers(0, 2), min_size=6, max_size=6))
@pytest.mark.parametrize(("loss", "name", "how"), LOSSES)
def test_micro_batches_add_up(loss: Loss, name: str, how: Aggregation, seed: int, split: list[int]) -> None:
    batch, parts = Batch(seed, holes=True), torch.tensor(split)
    total, gradient, metrics = graded(loss, batch, name, aggregation=how)
    items = Items.of(batch.mask)
    found, sums = 0.0, dict.fromkeys(metrics, 0.0)
    counted = Items(tokens=0, sequences=0)
    for part in range(3):
        here = batch.rows(parts == part)
        counted += Items.of(here.mask)
        one, slope, told = graded(loss, here, name, aggregation=how, over=items)
        found += one.item()
        torch.testing.assert_close(slope, gradient[parts == part], rtol=1e-12, atol=1e-16)
        for metric, value in told.items():
            sums[metric] += value.item()
    assert counted == items
    assert found == pytest.approx(total.item(), rel=1e-9, abs=1e-12)
    assert sums == pytest.approx({name: value.item() for name, value in metrics.items()}, rel=1e-6, abs=1e-12)


def test_a_ratio_beyond_numbers_gives_finite_gradients() -> None:
    new = torch.tensor([[800.0, -800.0, 0.0]], requires_grad=True)
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    total, _ = grpo.loss(new, old, torch.ones(1), mask, grpo.GrpoOptions(), reference_logprobs=old)
    total.backward()
    assert torch.isfinite(total)
    assert torch.isfinite(new.grad).all()


# ---- laws of the policy loss


@FEW
@given(seed=st.integers(0, 10**6), low=st.floats(0.05, 0.9), high=st.floats(0.05, 2.0))
def test_clipping_bounds_what_a_token_gains(seed: int, low: float, high: float) -> None:
    batch = Batch(seed, spread=1.5)
    options = PolicyOptions(clip_low=low, clip_high=high)
    for row, token in batch.mask.nonzero().tolist():
        one = torch.zeros_like(batch.mask)
        one[row, token] = True
        new = batch.new.clone().requires_grad_()
        total, metrics = losses.policy_loss(new, batch.old, batch.advantages, one, options)
        total.backward()
        ratio, advantage = math.exp(batch.new[row, token] - batch.old[row, token]), batch.advantages[row].item()
        bounded = min(max(ratio, 1 - low), 1 + high)
        assert total.item() == pytest.approx(-min(ratio * advantage, bounded * advantage))
        assert -total.item() <= max((1 + high) * advantage, (1 - low) * advantage) + 1e-12
        clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        assert metrics["clip_share"].item() == clipped
        expected = 0.0 if clipped else -ratio * advantage
        assert new.grad[row, token].item() == pytest.approx(expected)


def test_before_any_update_the_gradient_is_the_policy_gradient() -> None:
    batch = Batch(1)
    old = batch.old.clone().requires_grad_()
    losses.policy_loss(old, batch.old, batch.advantages, batch.mask, PolicyOptions())[0].backward()
    expected = -batch.advantages[:, None] * batch.mask / batch.mask.sum()
    torch.testing.assert_close(old.grad, expected)


@pytest.mark.parametrize("how", ["token-mean", "sequence-mean"])
def test_the_loss_is_the_sum_of_its_terms(how: Aggregation) -> None:
    batch = Batch(5, holes=True)
    total, metrics = grpo_loss(batch, batch.new, aggregation=how, beta=0.3, entropy_coefficient=0.2)
    plain, _ = grpo_loss(batch, batch.new, aggregation=how, beta=0.0, entropy_coefficient=0.0)
    items = Items.of(batch.mask)
    kl, entropy = losses.k3(batch.new, batch.reference, batch.mask), batch.entropy
    terms = [losses.aggregate(each, batch.mask, how, items).item() for each in (kl, entropy)]
    assert total.item() == pytest.approx(plain.item() + 0.3 * terms[0] - 0.2 * terms[1])
    assert metrics["policy_loss"].item() == plain.item()
    log_ratio = (batch.new - batch.old)[batch.mask]  # of tokens that the old policy drew
    assert metrics["approx_kl"].item() == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item())


def test_aggregations_by_loops() -> None:
    batch = Batch(3, holes=True)
    batch.mask[1] = False
    rows = [row[kept] for row, kept in zip(batch.values, batch.mask, strict=True) if kept.any()]
    items = Items.of(batch.mask)
    flat = [value.item() for row in rows for value in row]
    assert (items.tokens, items.sequences) == (len(flat), len(rows))
    by_token = losses.aggregate(batch.values, batch.mask, "token-mean", items)
    assert by_token.item() == pytest.approx(np.mean(flat))
    by_row = losses.aggregate(batch.values, batch.mask, "sequence-mean", items)
    assert by_row.item() == pytest.approx(np.mean([row.mean().item() for row in rows]))


@FEW
@given(seed=st.integers(0, 10**6), cap=st.floats(0.5, 4.0))
def test_truncated_weights(seed: int, cap: float) -> None:
    batch = Batch(seed)
    correction = (batch.old - batch.engine).exp()
    _, gradient, metrics = graded(grpo_loss, batch, "new", tis_cap=cap, beta=0.0, entropy_coefficient=0.0)
    _, plain, _ = graded(grpo_loss, batch, "new", tis_cap=None, beta=0.0, entropy_coefficient=0.0)
    torch.testing.assert_close(gradient, plain * torch.where(batch.mask, correction.clamp(max=cap), 0.0))
    kept = correction[batch.mask]
    assert metrics["tis_weight"].item() == pytest.approx(kept.clamp(max=cap).mean().item())
    assert metrics["tis_capped_share"].item() == pytest.approx((kept > cap).double().mean().item(), rel=1e-6)
    batch.engine = batch.old
    same, _, metrics = graded(grpo_loss, batch, "new", tis_cap=2.0)
    assert same.item() == pytest.approx(graded(grpo_loss, batch, "new", tis_cap=None)[0].item())
    assert (metrics["tis_weight"].item(), metrics["tis_capped_share"].item()) == (1.0, 0.0)


@FEW
@given(seed=st.integers(0, 10**6))
def test_k3_is_an_estimator_of_kl(seed: int) -> None:
    """Its mean over all tokens of a vocabulary, weighted by the policy, is the divergence; a sample of it is >= 0."""
    rng = stream(seed, "k3")
    policy, reference = (torch.tensor(rng.normal(0, 1, (1, 20))).log_softmax(-1) for _ in range(2))
    mask = torch.ones_like(policy, dtype=torch.bool)
    found = losses.k3(policy, reference, mask)
    assert (found >= 0).all()
    kl = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    assert (policy.exp() * found).sum().item() == pytest.approx(kl.item(), rel=1e-9, abs=1e-12)
    assert not losses.k3(policy, policy, mask).any()


def test_mismatch() -> None:
    batch = Batch(4, holes=True).soiled(math.nan)
    found = losses.mismatch(batch.old, batch.engine, batch.mask)
    pairs = zip(batch.old[batch.mask].tolist(), batch.engine[batch.mask].tolist(), strict=True)
    apart = [one - other for one, other in pairs]
    assert asdict(found) == pytest.approx(
        {
            "mean_abs": sum(map(abs, apart)) / len(apart),
            "max_abs": max(map(abs, apart)),
            "mean_ratio": sum(map(math.exp, apart)) / len(apart),
        }
    )


# ---- GRPO


@FEW
@given(
    rewards=st.lists(st.lists(st.floats(-100, 100), min_size=4, max_size=4), min_size=1, max_size=5),
    scale=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_group_advantages(rewards: list[list[float]], scale: bool, dtype: Any) -> None:
    given_rewards = torch.tensor(rewards, dtype=dtype)
    found = grpo.group_advantages(given_rewards.reshape(-1), 4, scale_by_std=scale).reshape(-1, 4)
    size = 1.0 if scale else 200.0
    assert found.sum(1).abs().max() <= 1e-5 * size
    for row, advantages in zip(given_rewards.double().numpy(), found, strict=True):
        expected = row - row.mean()
        if scale:
            expected = expected / (row.std(ddof=1) + grpo.STD_EPS)
        if row.std() > 1e-3:  # below, float32 has too few digits to tell
            assert advantages.numpy() == pytest.approx(expected, rel=1e-2, abs=1e-3 * size)
        order = np.argsort(row, kind="stable")
        assert (np.diff(advantages.numpy()[order]) >= 0).all()


@given(reward=st.floats(-1e6, 1e6, width=32), group=st.integers(1, 9), scale=st.booleans())
def test_equal_rewards_teach_nothing(reward: float, group: int, scale: bool) -> None:
    rewards = torch.full((2 * group,), reward, dtype=torch.float32)
    assert not grpo.group_advantages(rewards, group, scale_by_std=scale).any()


def test_groups_must_be_whole() -> None:
    for rewards, group in ((torch.ones(5), 2), (torch.ones(2, 2), 2), (torch.ones(4), 0)):
        with pytest.raises(InputError, match="whole number of groups"):
            grpo.group_advantages(rewards, group)


# ---- what cannot be


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (PolicyOptions, {"clip_low": 0.0}, "clip_low"),
        (PolicyOptions, {"clip_low": 1.5}, "clip_low"),
        (PolicyOptions, {"clip_high": -0.1}, "clip_high"),
        (PolicyOptions, {"tis_cap": 0.0}, "tis_cap"),
        (PolicyOptions, {"entropy_coefficient": math.nan}, "entropy_coefficient"),
        (PolicyOptions, {"aggregation": "mean"}, "known are token-mean, sequence-mean"),
        (grpo.GrpoOptions, {"beta": -1.0}, "beta"),
        (grpo.GrpoOptions, {"clip_high": math.inf}, "clip_high"),
        (ppo.PpoOptions, {"gamma": 1.1}, "gamma"),
        (ppo.PpoOptions, {"lam": -0.1}, "lam"),
        (ppo.PpoOptions, {"kl_coefficient": math.inf}, "kl_coefficient"),
        (ppo.PpoOptions, {"value_clip": 0.0}, "value_clip"),
        (ppo.PpoOptions, {"value_coefficient": 0.0}, "value_coefficient"),
    ],
)
def test_options_that_cannot_be(kind: Any, options: dict[str, Any], says: str) -> None:
    kind()
    with pytest.raises(InputError, match=says):
        kind(**options)
