"""How many actors an elastic step starts with, and what its rule weighs (see `rlhfless.scheduler.elastic`).

With every response running from the start, A(t) responses run in iteration t on the N(t) = min(N, best number for A(t))
actors that the rule leaves. Time and cost are then sums over the stretches between the ends of responses, for any N to
start with and any price of time. What matters is the tail, which the mean lengths that estimators give do not have:
lengths are therefore drawn, once for each response, with the spread that earlier steps had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.scheduler.beliefs import Beliefs
from rlhfless.scheduler.elastic import least_running
from rlhfless.scheduler.estimate import Work, even_bounds, group_times
from rlhfless.scheduler.spread import Spread
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import Link
from rlhfless.types.plan import ElasticTerms, Speed
from rlhfless.types.profile import Profile

PRICES = 2.0 ** np.arange(-2, 13)
"""Prices of a second that are tried, in GPU-seconds for each GPU of an actor (chosen: at the least, all but the largest
batches are merged onto one actor; at the most, none is merged before it is down to its last responses)."""
STRETCHES = 128
"""Stretches of a step at most (chosen: with as many, doubling them moves no time by 1 %)."""
CANDIDATES = 40
"""Numbers of actors at most that are tried (chosen: steps of a tenth up to 64 actors, as fine as time and cost ask)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be beaten."""

    time_s: float
    """Duration of generation."""
    held_gpu_s: float
    """GPU-seconds that decode actors hold."""
    decode_gpu_s: float
    """GPU-seconds for which they decode."""


def draw(estimates: FloatArray, spread: Spread, n: int, cap: int, rng: np.random.Generator) -> FloatArray:
    """float[prompts, n]: a length for each response of the step, about the estimates, at most the cap.

    Even quantiles of what earlier steps strayed, in random order: the same tail whatever the order.
    """
    level = (np.arange(estimates.size * n) + 0.5) / (estimates.size * n)
    stray = rng.permutation(np.quantile(spread.strays, level)).reshape(-1, n)
    drawn = np.exp(spread.centre + spread.slope * np.log(estimates)[:, None] + stray)
    return np.asarray(np.clip(drawn, 1.0, float(cap)))


def unmoved_s(
    beliefs: Beliefs, drawn: FloatArray, prompt_tokens: IntArray, shares: Sequence[IntArray], done: float = 1.0
) -> FloatArray:
    """float[actors]: seconds of decoding until a share `done` of what each actor was given has ended, if nothing moves.

    `drawn`: float[prompts, n] lengths.
    """
    n, sizes = drawn.shape[1], np.array([share.size for share in shares])
    responses, lengths = np.concatenate(shares), drawn.ravel()
    order = responses[np.lexsort((lengths[responses], np.repeat(np.arange(sizes.size), sizes)))]
    last = np.cumsum(sizes)
    most = lengths[order][last - sizes + np.ceil(done * sizes).astype(np.int64) - 1]
    until, tokens = np.minimum(lengths[order], np.repeat(most, sizes)), prompt_tokens[order // n]
    work = Work.of(order // n, until, tokens, 1)
    shared = Work.of(order // n, until, tokens / n, 1)  # a prompt's responses share its KV
    work = replace(work, prompt_sum=shared.prompt_sum, kv_token_sum=shared.kv_token_sum)
    return group_times(beliefs.model, work, last - sizes, last, np.zeros(sizes.size))


def cut_and_migrate(
    beliefs: Beliefs, drawn: FloatArray, prompt_tokens: IntArray, shares: Sequence[IntArray], tau: float
) -> Goal:
    """Time and cost of a plan whose actors leave when a share tau has ended, all but the last, slower for nobody."""
    end_s = unmoved_s(beliefs, drawn, prompt_tokens, shares)
    leave_s = unmoved_s(beliefs, drawn, prompt_tokens, shares, tau)
    begin_s, held_s = _starts(beliefs, ints([end_s.size]))
    last = int(end_s.argmax())
    decode_s, tp = float(leave_s.sum() - leave_s[last] + end_s[last]), beliefs.model.profile.data.tp
    return Goal(
        time_s=float(begin_s[0] + end_s[last]),
        held_gpu_s=tp * (float(held_s[0]) + decode_s),
        decode_gpu_s=tp * decode_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """The start of an elastic step."""

    price: float
    """GPU-seconds that a second is worth to the rule."""
    actors: int
    """Actors to start with."""
    generation_s: float
    """What generation is expected to take."""
    decode_gpu_s: float
    """GPU-seconds for which actors are expected to decode."""


def choose(
    beliefs: Beliefs, drawn: FloatArray, prompt_tokens: IntArray, speed: Speed, candidates: IntArray, goal: Goal
) -> Width:
    """Of all candidates and PRICES the one that beats `goal` most: least in the largest of its ratios
    of time, GPU-seconds held, and GPU-seconds of decoding.

    `drawn`: float[prompts, n] lengths; `candidates`: numbers of actors, ascending. GPUs count from when they are
    held: starts, and waits for weights and KV, are in the cost. Ties go to the lower price, then to the fewer actors.
    """
    profile, lengths = beliefs.model.profile, np.sort(drawn.ravel())
    step, running = _stretches(lengths)
    generated = np.cumsum(step) - step / 2
    prompt = float(prompt_tokens.mean())
    most = np.clip(
        profile.data.kv_capacity_tokens / (prompt / drawn.shape[1] + generated), 1.0, float(profile.data.max_slots)
    )
    context = np.broadcast_to(prompt + generated, (candidates.size, step.size))
    begin_s, held_s = _starts(beliefs, candidates)
    queued_s = _queued_s(beliefs, drawn, prompt_tokens, candidates)
    time_s, cost, decode = [], [], []
    prices = PRICES * speed.gpus
    for price in prices:
        left = np.searchsorted(least_running(speed, price, int(candidates[-1])), running, side="right") - 1
        actors = np.minimum(candidates[:, None], left)
        batch = running / actors
        seconds = profile.decode_iteration_s(np.minimum(batch, most), context) * np.maximum(batch / most, 1.0) * step
        longer = np.maximum(queued_s / seconds.sum(axis=1), 1.0)
        decode.append(speed.gpus * (seconds * actors).sum(axis=1) * longer)
        time_s.append(begin_s + seconds.sum(axis=1) * longer)
        cost.append(decode[-1] + speed.gpus * held_s)
    times, costs = np.array(time_s), np.array(cost)
    ratios = (times / goal.time_s, costs / goal.held_gpu_s, np.array(decode) / goal.decode_gpu_s)
    score = np.maximum.reduce(ratios)
    row, column = np.unravel_index(int(score.argmin()), score.shape)
    return Width(
        price=float(prices[row]),
        actors=int(candidates[column]),
        generation_s=float(times[row, column]),
        decode_gpu_s=float(decode[row][column]),
    )


def _queued_s(beliefs: Beliefs, drawn: FloatArray, prompt_tokens: IntArray, candidates: IntArray) -> FloatArray:
    """float[candidates]: seconds of decoding of the actor with the longest response, if nothing moves.

    More than the stretches say where responses queue for slots or KV and a long one starts late.
    """
    n = drawn.shape[1]
    rank = np.argsort(-drawn.mean(axis=1), kind="stable")
    longest = int(np.flatnonzero(rank == drawn.max(axis=1).argmax())[0])
    shares = []
    for actors in candidates.tolist():
        seat = min(longest % (2 * actors), 2 * actors - 1 - longest % (2 * actors))
        own = np.sort(np.append(rank[seat :: 2 * actors], rank[2 * actors - 1 - seat :: 2 * actors]))
        shares.append((own[:, None] * n + np.arange(n)).ravel())
    return unmoved_s(beliefs, drawn, prompt_tokens, shares)


def terms(beliefs: Beliefs, speed: Speed, actors: int, link: Link) -> ElasticTerms:
    """What the rule weighs on `actors` of one speed: a response moves over `link` or computes its context again."""
    data, context = beliefs.model.profile.data, max(_mean_context(beliefs), 1.0)
    move_s = min(
        link.transfer_s(context * data.kv_bytes_per_token), float(beliefs.model.profile.prefill_s(np.ceil(context)))
    )
    return ElasticTerms(
        speeds=(speed,), speed_of=ints(np.zeros(actors, dtype=np.int64)), move_s_per_token=move_s / context
    )


def speed_of(beliefs: Beliefs) -> Speed:
    """The speed of an actor at the step's mean context, up to as many responses as its slots and KV hold together."""
    profile, work = beliefs.model.profile, beliefs.work
    footprint = float(work.kv_token_sum[-1] / work.tokens_sum[-1])
    return at_context(profile, _mean_context(beliefs), footprint)


def at_context(profile: Profile, context_tokens: float, footprint_tokens: float) -> Speed:
    """The same from a mean context and the KV that a running response holds, both in tokens."""
    data = profile.data
    most = int(np.clip(data.kv_capacity_tokens / footprint_tokens, 1, data.max_slots))
    batch = np.append(data.decode_batch[data.decode_batch < most], most)
    seconds = profile.decode_iteration_s(batch, np.full(batch.size, context_tokens))
    return Speed(gpus=data.tp, batch=ints(batch), iteration_s=floats(seconds))


def _mean_context(beliefs: Beliefs) -> float:
    """Tokens of context, mean over all iterations of all responses."""
    return float(beliefs.work.context_token_sum[-1] / beliefs.work.tokens_sum[-1])


def _stretches(lengths: FloatArray) -> tuple[FloatArray, IntArray]:
    """Iterations and running responses of each stretch of the step, [stretches]; those inside one end in its middle.

    Stretches are shorter towards the end, where each response counts.
    """
    count = lengths.size
    left = np.unique(np.geomspace(1, count, min(count, STRETCHES)).round().astype(np.int64))[::-1]
    last = np.append(count - left, count - 1) if left[0] < count else np.append(count - left[1:], count - 1)
    first = np.append(0, last[:-1] + 1)
    running = count - (first + last) // 2
    return np.diff(lengths[last], prepend=0.0), running


def _starts(beliefs: Beliefs, candidates: IntArray) -> tuple[FloatArray, FloatArray]:
    """For each candidate: when its last actor begins to decode, own prefill included; seconds for which all its actors
    are held before they decode."""
    starts, ends = even_bounds(beliefs.work.lengths.size, candidates)
    first = np.cumsum(candidates) - candidates
    position = np.arange(starts.size) - np.repeat(first, candidates)
    arrived_s = beliefs.prefill_s + beliefs.kv_s(starts, ends, position)
    own_s = beliefs.model.profile.prefill_s(beliefs.own_prefill(starts, ends))
    begin_s = np.maximum(beliefs.ready_s[position], arrived_s) + own_s
    held_s = np.add.reduceat(begin_s, first) + beliefs.start_sum[candidates]
    return np.maximum.reduceat(begin_s, first), held_s
