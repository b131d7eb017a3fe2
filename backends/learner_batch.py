"""How a step's responses become tensors: rows padded on the right, micro-batches within a budget of tokens.

Prompts and responses are padded on the right alone, so that causal attention needs no mask: what comes before a token
is never padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray, ints

PAD = 0
"""Token id beyond the end of a row; any would do, since nothing looks at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The responses of a step, in order: n that follow each other are of one prompt."""

    prompts: tuple[IntArray, ...]
    """Token ids of each response's prompt."""
    responses: tuple[IntArray, ...]
    """Token ids that were drawn, each at least one."""
    group: int
    """n."""

    def __post_init__(self) -> None:
        assert len(self.prompts) == len(self.responses) > 0
        assert min(map(len, self.prompts)) > 0
        assert min(map(len, self.responses)) > 0

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def sizes(self) -> IntArray:
        """int[responses]: tokens of prompt and response together."""
        return ints([len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)])

    @property
    def mask(self) -> torch.Tensor:
        """bool[responses, tokens]: whether the policy has drawn a token there."""
        lengths = torch.tensor([len(response) for response in self.responses])
        return torch.arange(int(lengths.max())) < lengths.unsqueeze(1)

    def padded(self, rows: Sequence[FloatArray]) -> torch.Tensor:
        """float32[responses, tokens] of one row a response."""
        found = torch.zeros(len(self), max(map(len, self.responses)))
        for number, row in enumerate(rows):
            found[number, : len(row)] = torch.tensor(row, dtype=torch.float32)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One micro-batch on a device."""

    ids: torch.Tensor
    """int64[rows, length]: prompts with their responses."""
    start: int
    """First position whose prediction is wanted: that of the last token of the shortest prompt."""
    at: torch.Tensor
    """int64[rows, tokens]: where a response's tokens are predicted, counted from `start`."""
    mask: torch.Tensor
    """bool[rows, tokens]: where there is one."""

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[int], tokens: int, device: torch.device) -> "Rows":
        """The responses `rows` of a batch, with `tokens` columns as its padded tensors have them."""
        prompts = torch.tensor([len(batch.prompts[row]) for row in rows])
        lengths = torch.tensor([len(batch.responses[row]) for row in rows])
        ids = torch.full((len(rows), int((prompts + lengths).max())), PAD, dtype=torch.int64)
        for number, row in enumerate(rows):
            whole = np.concatenate([batch.prompts[row], batch.responses[row]])
            ids[number, : whole.size] = torch.from_numpy(whole)
        start = int(prompts.min()) - 1
        columns = torch.arange(tokens)
        mask = columns < lengths.unsqueeze(1)
        at = torch.where(mask, prompts.unsqueeze(1) - 1 - start + columns, 0)
        return cls(ids=ids.to(device), start=start, at=at.to(device), mask=mask.to(device))

    @property
    def kept(self) -> int:
        """Positions at the end of the rows whose predictions are computed."""
        return int(self.ids.shape[1]) - self.start

    def take(self, predictions: torch.Tensor) -> torch.Tensor:
        """[rows, tokens] of [rows, kept - 1]; beyond the mask stands anything."""
        return predictions.gather(1, self.at)


def shares(sizes: IntArray, ranks: int) -> list[list[int]]:
    """Responses of each rank: the largest first, each to the rank with the fewest tokens so far."""
    loads, found = [0] * ranks, [list[int]() for _ in range(ranks)]
    for row in np.argsort(-sizes, kind="stable").tolist():
        rank = loads.index(min(loads))
        loads[rank] += int(sizes[row])
        found[rank].append(row)
    return found


def micro_batches(rows: Sequence[int], sizes: IntArray, budget: int) -> list[list[int]]:
    """`rows` in groups whose padded size, rows x longest, is at most `budget` tokens; the longest first.

    Raises InputError for a response that is larger than the budget by itself.
    """
    ordered = sorted(rows, key=lambda row: (-int(sizes[row]), row))
    if ordered and sizes[ordered[0]] > budget:
        raise InputError(
            f"learner: a response of {sizes[ordered[0]]} tokens, prompt included, is above tokens_per_microbatch "
            f"{budget}"
        )
    cuts, longest = [0], 0
    for number, row in enumerate(ordered):
        if number == cuts[-1]:
            longest = int(sizes[row])
        elif (number + 1 - cuts[-1]) * longest > budget:
            cuts.append(number)
            longest = int(sizes[row])
    return [ordered[start:end] for start, end in pairwise([*cuts, len(ordered)]) if end > start]
