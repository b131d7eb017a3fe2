"""From a trace to the steps of a run: what a planner may know, and what really happens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.types.arrays import IntArray, floats, ints
from rlhfless.types.outcome import Outcome
from rlhfless.types.workload import Workload
from traces.format import Trace


def steps(trace: Trace) -> Iterator[tuple[Workload, Outcome]]:
    """The trace's steps by (epoch, step), numbered from 0 through the run; prompts as they stand in the trace.

    Reference lengths and rewards are given for a step only where all of its prompts (responses) have one.
    """
    n = trace.n
    prompt = trace.prompt[::n]
    bounds = [*_step_starts(trace).tolist(), len(prompt)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        here = prompt[start:stop]
        rows = slice(start * n, stop * n)
        reference = None if trace.reference_tokens is None else trace.reference_tokens[here]
        rewards = None if trace.reward is None else trace.reward[rows].reshape(-1, n)
        workload = Workload(
            step=number,
            epoch=int(trace.epoch[start * n]),
            algorithm=trace.info.algorithm,
            prompt_ids=trace.prompt_ids[here],
            prompt_tokens=ints(trace.prompt_tokens[here]),
            responses_per_prompt=n,
            max_response_tokens=trace.info.max_response_tokens,
            reference_tokens=None if reference is None or not reference.all() else ints(reference),
            prompts=None if trace.prompt_token_ids is None else tuple(trace.prompt_token_ids[i] for i in here),
        )
        yield (
            workload,
            Outcome(
                response_tokens=ints(trace.response_tokens[rows].reshape(-1, n)),
                rewards=None if rewards is None or np.isnan(rewards).any() else floats(rewards),
            ),
        )


def _step_starts(trace: Trace) -> IntArray:
    """int[steps]: first block (n rows of one prompt) of each step."""
    epoch, step = trace.epoch[:: trace.n], trace.step[:: trace.n]
    return np.flatnonzero(np.diff(epoch, prepend=-1) | np.diff(step, prepend=-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebatched:
    """A trace in other steps than it was recorded in."""

    trace: Trace
    """The regrouped run; times and actors are unknown, for it never ran in this form."""
    dropped_prompts: int
    """Prompts left out of each epoch because they did not fill a step (the most of any epoch)."""


def batch(trace: Trace, prompts_per_step: int, seed: int) -> Rebatched:
    """Regroup each epoch's prompts into steps of `prompts_per_step`, in an order shuffled anew for every epoch.

    What does not fill a last step is dropped; the choice is made once, so that epochs over the same prompts keep the
    same prompts. Raises InputError when an epoch holds a prompt twice or has too few for one step.
    """
    if prompts_per_step < 1:
        raise InputError(f"prompts_per_step is {prompts_per_step}; it must be at least 1")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    n = trace.n
    epoch, prompt = trace.epoch[::n], trace.prompt[::n]
    rank = stream(seed, "traces", "batch", "keep").permutation(len(trace.prompt_ids))
    blocks, dropped = [], 0
    for number in np.unique(epoch).tolist():
        here = np.flatnonzero(epoch == number)
        if len(np.unique(prompt[here])) < len(here):
            raise InputError(f"epoch {number} holds a prompt more than once; its steps cannot be regrouped")
        kept = len(here) // prompts_per_step * prompts_per_step
        if kept == 0:
            raise InputError(f"epoch {number} has {len(here)} prompts; prompts_per_step is {prompts_per_step}")
        dropped = max(dropped, len(here) - kept)
        here = here[np.argsort(rank[prompt[here]])][:kept]
        blocks.append(stream(seed, "traces", "batch", "order", number).permutation(here))
    block = np.concatenate(blocks)
    rows = (block[:, None] * n + np.arange(n)).ravel()
    used, renumbered = np.unique(trace.prompt[rows], return_inverse=True)
    note = f"; regrouped into steps of {prompts_per_step} prompts with seed {seed}, {dropped} prompts an epoch dropped"
    return Rebatched(
        trace=Trace(
            info=replace(trace.info, source=trace.info.source + note),
            prompt_ids=trace.prompt_ids[used],
            prompt_tokens=trace.prompt_tokens[used],
            reference_tokens=None if trace.reference_tokens is None else trace.reference_tokens[used],
            prompt_token_ids=None if trace.prompt_token_ids is None else tuple(trace.prompt_token_ids[i] for i in used),
            epoch=trace.epoch[rows],
            step=np.arange(len(rows)) // (prompts_per_step * n),
            prompt=renumbered,
            sample=trace.sample[rows],
            response_tokens=trace.response_tokens[rows],
            truncated=trace.truncated[rows],
            reward=None if trace.reward is None else trace.reward[rows],
        ),
        dropped_prompts=dropped,
    )
