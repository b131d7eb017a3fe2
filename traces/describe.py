"""What a trace looks like: lengths, stability over epochs, what predicts what. Undefined statistics are None."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.types.arrays import FloatArray, IntArray
from traces.format import Trace

MOVES_TOKENS = (50, 100)
"""Movements between epochs whose share RLHFless §4.3 reports."""


def describe(trace: Trace) -> dict[str, Any]:
    """Counts, lengths per epoch, and the statistics below; plain numbers, ready for JSON.

    `between_prompt_share`: share of length variance that lies between prompts (one-way ANOVA estimate, within an
    epoch; for n = 1, prompts over epochs with each epoch's mean removed). `moved_at_most_N_tokens`: share of prompts
    whose mean length over their responses moves by at most N between consecutive epochs. Rank correlations are
    Spearman's: of prompts' mean lengths in consecutive epochs, and of those in the first epoch with the reference
    answers. `mean_drift`: mean length of the last epoch over the first, None for a single epoch.
    """
    numbers = np.unique(trace.epoch)
    epochs = [_epoch(trace, int(number)) for number in numbers]
    means = _prompt_means(trace, numbers)
    step_pairs = np.unique(np.stack([trace.epoch, trace.step]), axis=1)
    moves = np.abs(np.diff(means, axis=0))
    moves = moves[~np.isnan(moves)]
    between = [_rank_correlation(a, b) for a, b in pairwise(means)]
    return {
        "model": trace.info.model,
        "dataset": trace.info.dataset,
        "algorithm": trace.info.algorithm,
        "source": trace.info.source,
        "responses": len(trace),
        "prompts": len(trace.prompt_ids),
        "responses_per_prompt": trace.n,
        "epochs": len(numbers),
        "steps": step_pairs.shape[1],
        "max_response_tokens": trace.info.max_response_tokens,
        "prompt_mean_tokens": float(trace.prompt_tokens.mean()),
        "response_mean_tokens": float(trace.response_tokens.mean()),
        "clip_ratio": float(trace.truncated.mean()),
        "mean_reward": None if trace.reward is None else float(np.nanmean(trace.reward)),
        "between_prompt_share": _between_prompt_share(trace, means),
        **{f"moved_at_most_{t}_tokens": float((moves <= t).mean()) if moves.size else None for t in MOVES_TOKENS},
        "epoch_rank_correlation": _mean([r for r in between if r is not None]),
        "reference_rank_correlation": _with_reference(trace, means[0]),
        "mean_drift": epochs[-1]["mean_tokens"] / epochs[0]["mean_tokens"] if len(epochs) > 1 else None,
        "per_epoch": epochs,
    }


def _epoch(trace: Trace, number: int) -> dict[str, Any]:
    here = trace.epoch == number
    lengths = trace.response_tokens[here]
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return {
        "epoch": number,
        "responses": len(lengths),
        "mean_tokens": float(lengths.mean()),
        "p50_tokens": p50,
        "p90_tokens": p90,
        "p99_tokens": p99,
        "max_tokens": int(lengths.max()),
        "clip_ratio": float(trace.truncated[here].mean()),
    }


def _prompt_means(trace: Trace, numbers: IntArray) -> FloatArray:
    """float[epochs, prompts]: mean length of the prompt's responses in the epoch, NaN where it has none."""
    prompts = len(trace.prompt_ids)
    cell = np.searchsorted(numbers, trace.epoch) * prompts + trace.prompt
    size = len(numbers) * prompts
    count = np.bincount(cell, minlength=size)
    total = np.bincount(cell, weights=trace.response_tokens, minlength=size)
    means = np.full(size, np.nan)
    np.divide(total, count, out=means, where=count > 0)
    return means.reshape(len(numbers), prompts)


def _between_prompt_share(trace: Trace, means: FloatArray) -> float | None:
    if trace.n > 1:
        groups, epoch = trace.lengths.astype(np.float64), trace.epoch[:: trace.n]
        parts = [_anova(groups[epoch == number]) for number in np.unique(epoch)]
        return _mean([part for part in parts if part is not None])
    steady = means[:, ~np.isnan(means).any(axis=0)]
    if len(steady) < 2 or steady.size == 0:
        return None
    return _anova((steady - steady.mean(axis=1, keepdims=True)).T)


def _anova(groups: FloatArray) -> float | None:
    """Intraclass correlation of float[groups, members], (B - W) / (B + (k - 1) W), at least 0."""
    count, members = groups.shape
    if count < 2 or members < 2:
        return None
    between = members * float(groups.mean(axis=1).var(ddof=1))
    within = float(groups.var(axis=1, ddof=1).mean())
    total = between + (members - 1) * within
    return max((between - within) / total, 0.0) if total > 0 else None


def _with_reference(trace: Trace, lengths: FloatArray) -> float | None:
    if trace.reference_tokens is None:
        return None
    return _rank_correlation(lengths, np.where(trace.reference_tokens > 0, trace.reference_tokens, np.nan))


def _rank_correlation(a: FloatArray, b: FloatArray) -> float | None:
    """Spearman's, over the entries known in both; None for fewer than two or where one side never varies."""
    both = ~(np.isnan(a) | np.isnan(b))
    if both.sum() < 2:
        return None
    x, y = _ranks(a[both]), _ranks(b[both])
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: npt.NDArray[np.float64]) -> FloatArray:
    """Ranks from 1, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank: FloatArray = np.cumsum(counts) - (counts - 1) / 2
    return mean_rank[inverse]


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None
