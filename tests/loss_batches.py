"""Batches of float64 tensors for the tests of losses."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from rlhfless.rng import stream

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'rlhfless[cpu]'")

from backends import grpo, losses, ppo  # noqa: E402
from backends.losses import Items  # noqa: E402

Tensor = Any
FEW = settings(max_examples=40, deadline=None)
"""Examples of a law over whole batches."""


class Batch:
    """A batch of float64 tensors, padded at random, with holes in its mask where asked."""

    def __init__(self, seed: int, rows: int = 6, width: int = 7, *, holes: bool = False, spread: float = 0.4) -> None:
        rng = stream(seed, "losses")
        lengths = rng.integers(0, width + 1, rows)
        lengths[rng.integers(rows)] = width
        mask = np.arange(width) < lengths[:, None]
        if holes:
            mask &= rng.random((rows, width)) < 0.7
            mask[0, 0] = True

        def near(base: Any, spread: float) -> Any:
            return base + rng.normal(0, spread, (rows, width))

        old = -rng.exponential(1.5, (rows, width))
        self.mask = torch.tensor(mask)
        self.old, self.new = torch.tensor(old), torch.tensor(near(old, spread))
        self.reference, self.engine = torch.tensor(near(old, spread)), torch.tensor(near(old, spread))
        self.entropy = torch.tensor(rng.exponential(1.0, (rows, width)))
        self.scores = torch.tensor(rng.normal(0, 1, rows))
        self.advantages = torch.tensor(rng.normal(0, 1, rows))
        self.values = torch.tensor(rng.normal(0, 1, (rows, width)))
        self.old_values = self.values + torch.tensor(rng.normal(0, spread, (rows, width)))
        self.returns = torch.tensor(rng.normal(0, 1, (rows, width)))

    def rows(self, which: Any) -> "Batch":
        """Some of the responses."""
        part = object.__new__(Batch)
        part.__dict__.update({name: tensor[which] for name, tensor in self.__dict__.items()})
        return part

    def soiled(self, with_what: float) -> "Batch":
        """The same with other padding."""
        other = object.__new__(Batch)
        for name, tensor in self.__dict__.items():
            pads = tensor.dim() == 2 and name != "mask"
            other.__dict__[name] = tensor.masked_fill(~self.mask, with_what) if pads else tensor
        return other


def grpo_loss(batch: Batch, new: Tensor, over: Items | None = None, **options: Any) -> tuple[Tensor, losses.Metrics]:
    return grpo.loss(
        new,
        batch.old,
        batch.advantages,
        batch.mask,
        grpo.GrpoOptions(**({"beta": 0.04, "entropy_coefficient": 0.01} | options)),
        reference_logprobs=batch.reference,
        engine_logprobs=batch.engine,
        entropy=batch.entropy,
        over=over,
    )


def critic_loss(batch: Batch, new: Tensor, over: Items | None = None, **options: Any) -> tuple[Tensor, losses.Metrics]:
    return ppo.value_loss(new, batch.old_values, batch.returns, batch.mask, ppo.PpoOptions(**options), over=over)
