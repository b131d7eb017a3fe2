"""How many actors an elastic step starts with, and what its rule weighs (see `rlhfless.scheduler.elastic`).

With every response running from the start, A(t) responses run in iteration t on the N(t) = min(N, best number for A(t))
actors that the rule leaves. Time and cost are then sums over the stretches between the ends of responses, for any N to
start with and any price of time. What matters is the tail, which the mean lengths that estimators give do not have:
lengths are therefore drawn, once for each response, with the spread that earlier steps had.

A larger actor in reserve takes over at the A(t) at which the rule promotes (see `rlhfless.scheduler.promotion`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from rlhfless.scheduler.beliefs import Beliefs
from rlhfless.scheduler.estimate import KV_SHARE, Work, even_bounds, group_times, running_sum
from rlhfless.scheduler.iteration import best_number, least_running, price_of_iteration
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
FIRST = 64
"""Pairs of a price and a number of actors that are looked at first for what a reserve would do, so that its result
spares the most of the others (chosen)."""
ROUNDING = 1e-9
"""Relative difference of scores that is rounding."""
REST = 0.03
"""Weight of all three ratios to the goal beside the largest of them: the largest decides, and where estimates hardly
tell it apart, the others do (measured on every shipped preset and profile: time +0.2 %, cost -2 %, against none)."""
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
    stray = rng.permutation(_quantiles(spread.strays, level)).reshape(-1, n)
    drawn = np.exp(spread.centre + spread.slope * np.log(estimates)[:, None] + stray)
    return np.asarray(np.clip(drawn, 1.0, float(cap)))


def _quantiles(ascending: FloatArray, level: FloatArray) -> FloatArray:
    """`np.quantile`, bit for bit, of what is sorted already: many levels take it ten times as long."""
    at = (ascending.size - 1) * level
    low = at.astype(np.int64)
    begin, end = ascending[low], ascending[np.minimum(low + 1, ascending.size - 1)]
    share, rise = at - low, end - begin
    return np.where(share < 0.5, begin + rise * share, end - rise * (1 - share))


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
    shared, work = tokens / n, Work.of(order // n, until, tokens, 1)
    # a prompt's responses share its KV
    held = until * shared + until * until * KV_SHARE
    work = replace(work, prompt_sum=running_sum(shared), kv_token_sum=running_sum(held))
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
class Reserve:
    """A larger actor that a step may keep in reserve."""

    profile: Profile
    """Its latencies."""
    speed: Speed
    """The same as the rule sees them."""
    gpus: tuple[int, ...]
    """Where it would run."""
    start_s: float
    """Seconds from asking for it until it can take responses."""
    beside: int
    """Actors that can begin without being in its way."""


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
    reserve: Reserve | None
    """What it has in reserve."""
    terms: ElasticTerms
    """What the rule weighs."""
    score: float
    """How near it comes to what is to be beaten, the least the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A step with every response running from the start, in stretches; columns [stretches]."""

    step: FloatArray
    """Iterations of each."""
    running: IntArray
    """Responses that run."""
    context: FloatArray
    """Their mean context in tokens."""
    footprint: FloatArray
    """KV that each of them holds, in tokens: a prompt's responses share its."""

    @classmethod
    def of(cls, drawn: FloatArray, prompt_tokens: IntArray) -> "Course":
        """From lengths, float[prompts, n]."""
        step, running = _stretches(np.sort(drawn.ravel()))
        generated, prompt = np.cumsum(step) - step / 2, float(prompt_tokens.mean())
        return cls(
            step=step, running=running, context=prompt + generated, footprint=prompt / drawn.shape[1] + generated
        )

    def seconds(self, profile: Profile, actors: IntArray) -> FloatArray:
        """float[..., stretches]: time of each on so many actors, which take turns where slots or KV are short."""
        data, batch = profile.data, self.running / actors
        most = np.clip(data.kv_capacity_tokens / self.footprint, 1.0, float(data.max_slots))
        iteration_s = profile.decode_iteration_s(np.minimum(batch, most), np.broadcast_to(self.context, batch.shape))
        return np.asarray(iteration_s * np.maximum(batch / most, 1.0) * self.step)


def choose(
    beliefs: Beliefs,
    drawn: FloatArray,
    prompt_tokens: IntArray,
    candidates: IntArray,
    goal: Goal,
    reserves: Sequence[Reserve],
    link: Link,
    limit: float = np.inf,
) -> Width | None:
    """Of all candidates, PRICES and reserves (or none) the one that beats `goal` most: least in the largest of its
    ratios of time, GPU-seconds held, and GPU-seconds of decoding, and a little in all (see REST). None if that is sure
    to be above `limit`.

    `drawn`: float[prompts, n] lengths; `candidates`: numbers of actors, ascending; `link`: what moves go over. GPUs
    count from when they are held: starts, and waits for weights and KV, are in the cost. Ties go to none in reserve,
    then to the lower price, then to the fewer actors. What a bound shows that it cannot win is not looked at.
    """
    profile, course = beliefs.model.profile, Course.of(drawn, prompt_tokens)
    speed, move_s = speed_of(beliefs, profile), move_s_per_token(beliefs, link)
    prices = floats(PRICES * speed.gpus)
    least = least_running(speed, prices[:, None], int(candidates[-1]))
    best = np.stack([best_number(row, course.running) for row in least])[:, None]
    # rows from here on: pairs of a price and a candidate
    wanted, shape = candidates[:, None] <= best, (prices.size * candidates.size, course.running.size)
    actors = np.where(wanted, candidates[:, None], best).reshape(shape)
    of_candidate, of_best = course.seconds(profile, candidates[:, None]), course.seconds(profile, best)
    seconds = np.where(wanted, of_candidate, of_best).reshape(shape)
    price, column = np.repeat(prices, candidates.size), np.tile(np.arange(candidates.size), prices.size)
    begin_s, held_s = _starts(beliefs, candidates)
    begin_s, waits_gpu_s = begin_s[column], speed.gpus * held_s[column]

    def score_of(pairs: IntArray | slice, time_s: FloatArray, held: FloatArray, decode: FloatArray) -> FloatArray:
        time, cost, work = (
            (time_s + begin_s[pairs]) / goal.time_s,
            (held + waits_gpu_s[pairs]) / goal.held_gpu_s,
            decode / goal.decode_gpu_s,
        )
        return np.asarray(np.maximum(np.maximum(time, cost), work) + REST * (time + cost + work))

    # however well all moves to a reserve, each stretch is on the one or the other
    there_s = [course.seconds(each.profile, np.ones_like(course.running)) for each in reserves]
    there_gpu_s = [each.speed.gpus * one_s for each, one_s in zip(reserves, there_s, strict=True)]
    fewest_s = reduce(np.minimum, there_s, seconds).sum(axis=1)
    fewest_gpu_s = reduce(np.minimum, there_gpu_s, speed.gpus * seconds * actors).sum(axis=1)
    bound = score_of(slice(None), fewest_s, fewest_gpu_s, fewest_gpu_s) * (1 - ROUNDING)
    if bound.min() > limit:
        return None
    queued_s = _queued_s(beliefs, drawn, prompt_tokens, candidates)[column]
    seconds *= np.maximum(queued_s / seconds.sum(axis=1), 1.0)[:, None]
    time_s, decode, score = np.full((3, 1 + len(reserves), column.size), np.inf)
    time_s[0], decode[0] = seconds.sum(axis=1), (speed.gpus * seconds * actors).sum(axis=1)
    score[0] = score_of(slice(None), time_s[0], decode[0], decode[0])
    promising = np.argsort(bound)
    for part in (promising[:FIRST], promising[FIRST:]):
        some = part[bound[part] <= min(limit, score.min())]
        for kind, (reserve, one_s) in enumerate(zip(reserves, there_s, strict=True), 1):
            at = some[candidates[column[some]] <= reserve.beside]
            moved_s, held, decode[kind, at] = _promoted(
                course, reserve, speed, price[at, None], actors[at], seconds[at], one_s, move_s
            )
            time_s[kind, at], score[kind, at] = moved_s, score_of(at, moved_s, held, decode[kind, at])
    kind, pair = map(int, np.unravel_index(int(score.argmin()), score.shape))
    count, kept = int(candidates[column[pair]]), reserves[kind - 1] if kind else None
    return Width(
        price=float(price[pair]),
        actors=count,
        generation_s=float(time_s[kind, pair] + begin_s[pair]),
        decode_gpu_s=float(decode[kind, pair]),
        reserve=kept,
        terms=_terms(speed, count, kept, move_s),
        score=float(score.min()),
    )


def _promoted(
    course: Course,
    reserve: Reserve,
    speed: Speed,
    price: FloatArray,
    actors: IntArray,
    seconds: FloatArray,
    there_s: FloatArray,
    move_s_per_token: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """float[pairs] each: seconds, GPU-seconds held and decoding, where all moves to the reserve when the rule says.

    `price`: float[pairs, 1]; `actors`, `seconds`: [pairs, stretches], without a reserve; `there_s`: float[stretches],
    on the reserve. Infinite where it is not used.
    """
    running, large, one = course.running, reserve.speed, np.ones_like(course.running)
    priced = (price_of_iteration(each, price, count, running) for each, count in ((speed, actors), (large, one)))
    saved = np.subtract(*priced)
    ended = -np.diff(running, append=0)
    gain = np.cumsum((saved / running * ended)[:, ::-1], axis=1)[:, ::-1]
    gain[:, running > int(large.batch[-1])] = 0.0
    past_s = np.cumsum(seconds, axis=1) - seconds
    at = np.maximum(gain.argmax(axis=1), (past_s < reserve.start_s).sum(axis=1))
    used = (gain.max(axis=1) > 0) & (at < running.size)
    at = np.minimum(at, running.size - 1)
    before = np.arange(running.size) < at[:, None]
    here, there = np.where(before, seconds, 0.0), np.where(before, 0.0, there_s)
    decode = (speed.gpus * here * actors + large.gpus * there).sum(axis=1)
    moving_s = running[at] * course.context[at] * move_s_per_token
    left = np.take_along_axis(actors, at[:, None], axis=1)[:, 0]
    waiting = large.gpus * reserve.start_s + (speed.gpus * left + large.gpus) * moving_s
    time_s = here.sum(axis=1) + there.sum(axis=1) + moving_s
    never = np.where(used, 0.0, np.inf)
    return time_s + never, decode + waiting + never, decode + never


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


def move_s_per_token(beliefs: Beliefs, link: Link) -> float:
    """Seconds for a token of context when a response moves: over `link`, or computed again."""
    profile, context = beliefs.model.profile, max(_mean_context(beliefs), 1.0)
    sent_s = link.transfer_s(context * profile.data.kv_bytes_per_token)
    return min(sent_s, float(profile.prefill_s(np.ceil(context)))) / context


def _terms(speed: Speed, actors: int, reserve: Reserve | None, move_s: float) -> ElasticTerms:
    """What the rule weighs on the actors that begin and the one in reserve, numbered after them."""
    later = int(reserve is not None)
    return ElasticTerms(
        speeds=(speed,) if reserve is None else (speed, reserve.speed),
        speed_of=ints(np.repeat([0, 1], [actors, later])),
        move_s_per_token=move_s,
        reserve=ints(actors + np.arange(later)),
        start_s=0.0 if reserve is None else reserve.start_s,
    )


def speed_of(beliefs: Beliefs, profile: Profile) -> Speed:
    """The speed of an actor at the step's mean context, up to as many responses as its slots and KV hold together."""
    work = beliefs.work
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
