"""Made-up response lengths with the statistics of real runs: spread, tail, persistence of prompts, drift.

    log length = log median + epoch * log growth + prompt effect + response effect

The prompt effect is normal and moves between epochs as an AR(1) process of constant variance; the response effect is
Student-t, for a response's length has a heavier tail than a normal one. A length above the cap becomes the cap, with
finish_reason "length". Prompt and reference-answer lengths are lognormal, tied to the prompt effect by a Gaussian
copula. Every parameter stands in presets.toml with its origin.
"""

import math
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files as package_files
from typing import Any

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.workload import Algorithm
from traces.format import LARGEST, Trace, TraceInfo

MOST_RESPONSES = 10_000_000
"""Responses of the largest trace that is drawn (chosen: it takes up to 5 GB of memory, at 0.2 to 0.5 kB a response,
measured)."""
RECORDED_SAMPLES = 4
"""Solutions a problem over whose mean the presets' rank correlations were measured (GSM8K's recorded solutions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Statistics of one data set. Lengths in tokens; spreads are standard deviations of log lengths."""

    model: str
    """Policy whose lengths are imitated."""
    cap_tokens: int
    """Cap for which median_tokens is meant; stretching scales by cap / cap_tokens."""
    median_tokens: float
    """Median response length in the first epoch."""
    length_spread: float
    """Spread of response lengths over all prompts and samples."""
    prompt_share: float
    """Share of length_spread squared that lies between prompts."""
    tail_freedom: float
    """Degrees of freedom of the response effect; smaller is a heavier tail, above 2."""
    persistence: float
    """Correlation of a prompt's effect between consecutive epochs."""
    epoch_growth: float
    """Factor on all lengths from one epoch to the next."""
    reference_median_tokens: float
    """Median length of the reference answers."""
    reference_spread: float
    """Spread of reference answer lengths."""
    reference_rank_correlation: float
    """Spearman correlation of reference length and the mean of RECORDED_SAMPLES responses."""
    prompt_median_tokens: float
    """Median prompt length, without a chat template."""
    prompt_spread: float
    """Spread of prompt lengths."""
    prompt_rank_correlation: float
    """Spearman correlation of prompt length and the mean of RECORDED_SAMPLES responses."""
    max_prompt_tokens: int
    """Cap on prompts."""


@cache
def preset_table() -> dict[str, dict[str, Any]]:
    """presets.toml: for each preset and parameter, its value and its source."""
    return tomllib.loads((package_files("traces") / "presets.toml").read_text(encoding="utf-8"))


def preset_names() -> tuple[str, ...]:
    """Names of the presets, in the order of presets.toml."""
    return tuple(preset_table())


def load_preset(name: str) -> Preset:
    """The preset of this name. Raises InputError listing the known ones."""
    if name not in preset_table():
        raise InputError(f"unknown preset {name!r}; known are {', '.join(preset_names())}")
    entry = preset_table()[name]
    return Preset(**{field.name: entry[field.name]["value"] for field in fields(Preset)})


def synthesize(
    preset: str,
    *,
    prompts: int,
    epochs: int,
    responses_per_prompt: int,
    max_response_tokens: int,
    prompts_per_step: int,
    seed: int,
    algorithm: Algorithm,
    stretch: bool = False,
) -> Trace:
    """A synthetic trace of `epochs` passes over `prompts` prompts, shuffled anew for each epoch.

    Prompts that do not fill a last step are left out, the same ones in every epoch; `source` says how many. With
    `stretch`, lengths scale by max_response_tokens / the preset's cap; without, the same lengths are cut at the cap.
    Times, actors and rewards are unknown. Draws of an epoch do not depend on the cap, the step size or later epochs.
    Raises InputError for an unknown preset or a number out of range.
    """
    known = load_preset(preset)
    sizes = {
        "prompts": prompts,
        "epochs": epochs,
        "responses_per_prompt": responses_per_prompt,
        "max_response_tokens": max_response_tokens,
        "prompts_per_step": prompts_per_step,
    }
    for name, value in sizes.items():
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1")
    if max_response_tokens > LARGEST:
        raise InputError(f"max_response_tokens is {max_response_tokens}; it must be at most {LARGEST}")
    if prompts * epochs * responses_per_prompt > MOST_RESPONSES:
        raise InputError(
            f"prompts {prompts} x epochs {epochs} x responses_per_prompt {responses_per_prompt} are more responses "
            f"than the {MOST_RESPONSES} that a synthetic trace may have"
        )
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    kept = prompts // prompts_per_step * prompts_per_step
    if kept == 0:
        raise InputError(f"prompts_per_step is {prompts_per_step}, but there are only {prompts} prompts")

    first_effect = _normal(seed, preset, "prompt effect", prompts)
    scale = max_response_tokens / known.cap_tokens if stretch else 1.0
    lengths = _lengths(known, first_effect, epochs, responses_per_prompt, scale, seed, preset)[:, :kept]
    order = np.stack([stream(seed, "traces", preset, "order", epoch).permutation(kept) for epoch in range(epochs)])
    drawn = np.take_along_axis(lengths, order[:, :, None], axis=1).ravel()
    n, size = responses_per_prompt, epochs * kept * responses_per_prompt
    note = f", lengths stretched by {scale:g}" if scale != 1 else ""
    return Trace(
        info=TraceInfo(
            model=known.model,
            dataset=preset,
            tokenizer="none: lengths are drawn, not counted",
            algorithm=algorithm,
            responses_per_prompt=n,
            max_prompt_tokens=known.max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            source=f"synthetic: traces.synthesize, preset {preset}{note}; {prompts - kept} of {prompts} prompts "
            "left out because they did not fill a step; Apache-2.0",
            seed=seed,
        ),
        prompt_ids=np.array([f"{preset}-{i:0{len(str(prompts - 1))}d}" for i in range(kept)]),
        prompt_tokens=_side_lengths(
            known,
            first_effect,
            _normal(seed, preset, "prompt tokens", prompts),
            known.prompt_rank_correlation,
            known.prompt_median_tokens,
            known.prompt_spread,
            known.max_prompt_tokens,
        )[:kept],
        reference_tokens=_side_lengths(
            known,
            first_effect,
            _normal(seed, preset, "reference tokens", prompts),
            known.reference_rank_correlation,
            known.reference_median_tokens * scale,
            known.reference_spread,
            max_response_tokens,
        )[:kept],
        epoch=np.repeat(np.arange(epochs), kept * n),
        step=np.arange(size) // (prompts_per_step * n),
        prompt=np.repeat(order.ravel(), n),
        sample=np.tile(np.arange(n), epochs * kept),
        response_tokens=np.minimum(drawn, max_response_tokens),
        truncated=drawn > max_response_tokens,
    )


def _normal(seed: int, preset: str, name: str, count: int) -> FloatArray:
    return stream(seed, "traces", preset, name).standard_normal(count)


def _lengths(known: Preset, effect: FloatArray, epochs: int, n: int, scale: float, seed: int, preset: str) -> IntArray:
    """int[epochs, prompts, n]: lengths before the cap, at least 1. `effect` is float[prompts], standard normal."""
    between = known.length_spread * math.sqrt(known.prompt_share)
    # A Student-t draw has variance freedom / (freedom - 2); divide it out so that the spread is what the preset says.
    within = known.length_spread * math.sqrt((1 - known.prompt_share) * (known.tail_freedom - 2) / known.tail_freedom)
    moved = math.sqrt(1 - known.persistence**2)
    drawn = np.empty((epochs, len(effect), n), dtype=np.int64)
    for epoch in range(epochs):
        rng = stream(seed, "traces", preset, "lengths", epoch)
        if epoch:
            effect = known.persistence * effect + moved * rng.standard_normal(len(effect))
        level = math.log(known.median_tokens * scale) + epoch * math.log(known.epoch_growth)
        noise = within * rng.standard_t(known.tail_freedom, (len(effect), n))
        log_length = level + between * effect[:, None] + noise
        drawn[epoch] = np.rint(np.exp(np.minimum(log_length, _LARGEST_LOG)))
    return np.maximum(drawn, 1)


_LARGEST_LOG = 40.0
"""Log of a length beyond any cap that still fits int64 (chosen)."""


def _side_lengths(
    known: Preset, effect: FloatArray, own: FloatArray, rank_correlation: float, median: float, spread: float, cap: int
) -> IntArray:
    """int[prompts]: lognormal lengths whose rank correlation with the mean of RECORDED_SAMPLES responses is as given.

    A Gaussian copula has Pearson 2 sin(pi/6 * Spearman). The mean over samples is a noisy view of the prompt effect,
    so the correlation with the effect itself is larger by the inverse of that view's reliability.
    """
    reliability = known.prompt_share / (known.prompt_share + (1 - known.prompt_share) / RECORDED_SAMPLES)
    shared = min(2 * math.sin(math.pi / 6 * rank_correlation) / math.sqrt(reliability), 1.0)
    z = shared * effect + math.sqrt(1 - shared**2) * own
    return np.clip(np.rint(median * np.exp(spread * z)), 1, cap).astype(np.int64)
