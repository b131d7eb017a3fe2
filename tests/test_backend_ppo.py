"""PPO's advantages, rewards and value loss: against loops over the papers' equations, and their laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'rlhfless[cpu]'")

from backends import ppo  # noqa: E402
from tests.loss_batches import FEW, Batch, Tensor, critic_loss  # noqa: E402

# ---- PPO, against loops over the equations


def gae_by_definition(batch: Batch, rewards: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2016, equation 16, as a sum over the future of every token; TD errors by equation 9."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row in range(len(rewards)):
        tokens = batch.mask[row].nonzero().flatten().tolist()
        value = [batch.values[row, token].item() for token in tokens] + [0.0]
        error = [rewards[row, t].item() + gamma * value[i + 1] - value[i] for i, t in enumerate(tokens)]
        for i, token in enumerate(tokens):
            advantages[row, token] = sum((gamma * lam) ** (j - i) * error[j] for j in range(i, len(tokens)))
            returns[row, token] = advantages[row, token] + value[i]
    return advantages, returns


@FEW
@given(seed=st.integers(0, 10**6), holes=st.booleans(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae(seed: int, holes: bool, gamma: float, lam: float) -> None:
    batch = Batch(seed, holes=holes)
    found = ppo.gae(batch.returns, batch.values, batch.mask, gamma=gamma, lam=lam)
    expected = gae_by_definition(batch, batch.returns, gamma, lam)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    dirty = batch.soiled(math.nan)
    assert all(map(torch.equal, ppo.gae(dirty.returns, dirty.values, dirty.mask, gamma=gamma, lam=lam), found))


def test_with_lambda_one_the_return_is_what_is_yet_to_come() -> None:
    batch = Batch(7)
    rewards = torch.where(batch.mask, batch.returns, 0.0)
    _, returns = ppo.gae(rewards, batch.values, batch.mask, gamma=1.0, lam=1.0)
    expected = rewards.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns, torch.where(batch.mask, expected, 0.0))


@FEW
@given(seed=st.integers(0, 10**6), holes=st.booleans(), coefficient=st.floats(0, 1))
def test_token_rewards(seed: int, holes: bool, coefficient: float) -> None:
    batch = Batch(seed, holes=holes).soiled(math.nan)
    found = ppo.token_rewards(batch.scores, batch.old, batch.mask, coefficient, reference_logprobs=batch.reference)
    for row in range(len(found)):
        tokens = batch.mask[row].nonzero().flatten().tolist()
        expected = [0.0] * found.shape[1]
        for token in tokens:
            expected[token] = -coefficient * (batch.old[row, token] - batch.reference[row, token]).item()
            if token == tokens[-1]:
                expected[token] += batch.scores[row].item()
        assert found[row].tolist() == pytest.approx(expected)
    alone = ppo.token_rewards(batch.scores, batch.old, batch.mask, 0.0, reference_logprobs=None)
    assert alone.sum().item() == pytest.approx(batch.scores[batch.mask.any(-1)].sum().item())


@FEW
@given(seed=st.integers(0, 10**6), shift=st.floats(-50, 50), scale=st.floats(0.1, 50))
def test_whitening(seed: int, shift: float, scale: float) -> None:
    batch = Batch(seed, holes=True).soiled(math.nan)
    found = ppo.whiten(batch.returns * scale + shift, batch.mask)
    kept = found[batch.mask]
    if len(kept) < 2:
        assert not found.any()
        return
    assert kept.mean().item() == pytest.approx(0, abs=1e-9)
    assert kept.std().item() == pytest.approx(1, rel=1e-4)
    assert not found[~batch.mask].any()
    torch.testing.assert_close(found, ppo.whiten(batch.returns, batch.mask), rtol=1e-4, atol=1e-6)


def test_whitening_what_does_not_vary() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    assert not ppo.whiten(torch.full((2, 2), 3.0), mask).any()
    assert not ppo.whiten(torch.full((2, 2), 3.0), ~mask).any()


def test_experience_is_its_parts() -> None:
    batch = Batch(8, holes=True).soiled(math.nan)
    options = ppo.PpoOptions(kl_coefficient=0.2, gamma=0.9, lam=0.8)
    advantages, returns, metrics = ppo.experience(
        batch.scores, batch.old, batch.values, batch.mask, options, reference_logprobs=batch.reference
    )
    rewards = ppo.token_rewards(batch.scores, batch.old, batch.mask, 0.2, reference_logprobs=batch.reference)
    expected, expected_returns = gae_by_definition(batch, rewards, 0.9, 0.8)
    torch.testing.assert_close(advantages, ppo.whiten(expected, batch.mask))
    torch.testing.assert_close(returns, expected_returns)
    assert metrics["kl"].item() == pytest.approx((batch.old - batch.reference)[batch.mask].mean().item())
    assert metrics["value"].item() == pytest.approx(batch.values[batch.mask].mean().item())


@FEW
@given(seed=st.integers(0, 10**6), clip=st.floats(0.01, 2.0), coefficient=st.floats(0.1, 2.0))
def test_value_loss(seed: int, clip: float, coefficient: float) -> None:
    batch = Batch(seed, holes=True)
    found, metrics = critic_loss(batch, batch.values, value_clip=clip, value_coefficient=coefficient)
    columns = (batch.values, batch.old_values, batch.returns)
    larger, errors = 0, []
    for value, old, target in zip(*(each[batch.mask].tolist() for each in columns), strict=True):
        clipped = min(max(value, old - clip), old + clip)
        errors.append(max((value - target) ** 2, (clipped - target) ** 2) / 2)
        larger += (clipped - target) ** 2 > (value - target) ** 2
    assert found.item() == pytest.approx(coefficient * np.mean(errors))
    assert metrics["value_loss"].item() == found.item()
    assert metrics["value_clip_share"].item() == pytest.approx(larger / len(errors))
