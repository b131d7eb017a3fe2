"""What a policy achieved over the steps of a run, compared with another, and with what no policy can beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
import numpy.typing as npt

from rlhfless.accounting.billing import Bill, bill, total
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.profile import Profile
from rlhfless.types.report import IDLE, Activity, StepReport

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""0.975 quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, §1.3.6.7.2)."""
Z_975 = 1.959964
"""0.975 quantile of the normal distribution (same handbook, §1.3.6.7.1)."""
TAILS = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the responses' ends that a summary gives: median, p90, p99, the last."""
ENVELOPE_POINTS = 1025
"""Contexts at which the cost bound looks (chosen: it gives away about 0.1 % of the spread of costs over contexts)."""


def t_975(freedom: int) -> float:
    """0.975 quantile of Student's t; beyond the table by its expansion about z (Abramowitz & Stegun 26.7.5)."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z, v = Z_975, float(freedom)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity over the steps of a run."""

    values: FloatArray
    """float[steps]: its value in each step."""

    @property
    def mean(self) -> float:
        """Mean over the steps."""
        return float(self.values.mean())

    @property
    def half_width(self) -> float | None:
        """Half the width of the mean's 95 % confidence interval (Student t); None for a single step."""
        steps = self.values.size
        return t_975(steps - 1) * float(self.values.std(ddof=1)) / sqrt(steps) if steps > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy's run, step by step."""

    policy: str
    """Policy of the reports."""
    steps: IntArray
    """int[steps]: step numbers, in the order given."""
    bill: Bill
    """All steps' bills together."""
    generation_s: Series
    """Duration of the generation phase."""
    step_s: Series
    """Duration of the step."""
    executed_gpu_s: Series
    """GPU-seconds of work, as the paper counts cost."""
    held_gpu_s: Series
    """GPU-seconds held."""
    decode_executed_gpu_s: Series
    """GPU-seconds of work of the decode actors."""
    usd: Series
    """Price of the GPU-seconds held."""
    tokens: Series
    """Tokens generated."""
    tokens_per_s: Series
    """Tokens generated per second of the generation phase."""
    actors: Series
    """Decode actors invoked."""
    moves: Series
    """Responses that changed actor."""
    cuts: Series
    """Actors that a mid-step rule ended."""
    preemptions: Series
    """Responses that lost their KV because it ran out."""
    failures: Series
    """Actors that died."""
    prefill_tokens: Series
    """Tokens whose KV was computed from known tokens: by the prefill actor, by decode actors, and again."""
    redundant_prefill_tokens: Series | None
    """Of these, those beyond what had to be computed; None where the caller did not say how many had to be."""
    idle_share: tuple[tuple[Activity, Series], ...]
    """(cause, share of the GPU-seconds held), in the order of `IDLE`."""
    response_end_s: tuple[Series, ...]
    """Seconds after the step's start by which a share of the responses had ended, one for each of `TAILS`."""

    def idle(self, cause: Activity) -> Series:
        """Share of the GPU-seconds held that were idle for one cause."""
        return self.idle_share[IDLE.index(cause)][1]


def summarize(
    reports: Sequence[StepReport], usd_per_gpu_hour: float, needed_prefill_tokens: Sequence[int] | None = None
) -> Summary:
    """Summary of one policy's reports.

    `needed_prefill_tokens` [steps]: prompt tokens that had to be computed, each position of each distinct prompt once;
    the reports do not hold prompts.

    Raises InputError for no reports, reports of several policies, generation that takes no time, and as `bill`.
    """
    if not reports:
        raise InputError("summary: no step reports; at least one is needed")
    policies = sorted({report.policy for report in reports})
    if len(policies) > 1:
        raise InputError(f"summary: reports of several policies ({', '.join(policies)}); it takes those of one")
    if needed_prefill_tokens is not None and len(needed_prefill_tokens) != len(reports):
        raise InputError(f"summary: needed tokens of {len(needed_prefill_tokens)} steps, reports of {len(reports)}")
    for report in reports:
        if not report.phase_s("generation") > 0:
            raise InputError(f"report of step {report.step} ({report.policy}): generation takes no time")
    bills = [bill(report, usd_per_gpu_hour) for report in reports]

    def each(value: Callable[[StepReport], float]) -> Series:
        return Series(values=floats([value(report) for report in reports]))

    def cost(value: Callable[[Bill], float]) -> Series:
        return Series(values=floats([value(entry) for entry in bills]))

    def share(row: int) -> Series:
        return cost(lambda entry: entry.idle_gpu_s[row][1] / entry.held_gpu_s if entry.held_gpu_s else 0.0)

    computed = each(prefill_tokens)
    ends = np.array([np.quantile(report.end_s, TAILS) for report in reports])
    return Summary(
        policy=policies[0],
        steps=ints([report.step for report in reports]),
        bill=total(bills),
        generation_s=each(lambda report: report.phase_s("generation")),
        step_s=each(lambda report: report.step_s),
        executed_gpu_s=cost(lambda entry: entry.executed_gpu_s),
        held_gpu_s=cost(lambda entry: entry.held_gpu_s),
        decode_executed_gpu_s=cost(lambda entry: entry.function("decode").executed_gpu_s),
        usd=cost(lambda entry: entry.usd),
        tokens=each(lambda report: int(report.tokens.sum())),
        tokens_per_s=each(lambda report: int(report.tokens.sum()) / report.phase_s("generation")),
        actors=cost(lambda entry: entry.function("decode").invocations),
        moves=each(lambda report: report.counters.moves),
        cuts=each(lambda report: report.counters.cuts),
        preemptions=each(lambda report: report.counters.preemptions),
        failures=each(lambda report: report.counters.failures),
        prefill_tokens=computed,
        redundant_prefill_tokens=(
            None if needed_prefill_tokens is None else Series(values=floats(computed.values - needed_prefill_tokens))
        ),
        idle_share=tuple((cause, share(row)) for row, cause in enumerate(IDLE)),
        response_end_s=tuple(Series(values=floats(ends[:, column])) for column in range(len(TAILS))),
    )


def prefill_tokens(report: StepReport) -> int:
    """Tokens whose KV was computed from known tokens: first by the prefill or a decode actor, or once more."""
    counters = report.counters
    return counters.prefill_tokens + counters.decode_prefill_tokens + counters.recomputed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy against a baseline over the same steps, by the means over steps."""

    policy: str
    """Policy that is judged."""
    baseline: str
    """Policy that it is judged against."""
    steps: int
    """Steps that both carried out."""
    generation_speedup: float
    """The baseline's generation time over the policy's; above 1 is faster."""
    step_speedup: float
    """Likewise for the whole step."""
    executed_saving: float
    """Share of the baseline's executed GPU-seconds that is saved; below 0 is dearer."""
    held_saving: float
    """Likewise for the GPU-seconds held."""
    usd_saving: float
    """Likewise for the price."""


def compare(ours: Summary, baseline: Summary) -> Comparison:
    """Compare two runs of the same steps. Raises InputError when the steps differ."""
    if not np.array_equal(ours.steps, baseline.steps):
        raise InputError(
            f"comparison of {ours.policy} ({ours.steps.size} steps) with {baseline.policy} "
            f"({baseline.steps.size} steps): both must have carried out the same steps in the same order"
        )
    return Comparison(
        policy=ours.policy,
        baseline=baseline.policy,
        steps=int(ours.steps.size),
        generation_speedup=baseline.generation_s.mean / ours.generation_s.mean,
        step_speedup=baseline.step_s.mean / ours.step_s.mean,
        executed_saving=_saving(ours.executed_gpu_s, baseline.executed_gpu_s),
        held_saving=_saving(ours.held_gpu_s, baseline.held_gpu_s),
        usd_saving=_saving(ours.usd, baseline.usd),
    )


def _saving(ours: Series, baseline: Series) -> float:
    if baseline.mean == 0:  # nothing was paid, for instance at a price of 0
        return 0.0 if ours.mean == 0 else -inf
    return 1 - ours.mean / baseline.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBounds:
    """What no policy beats on a profile, whatever it knows of the lengths."""

    time_s: float
    """Least duration of generation."""
    decode_gpu_s: float
    """Least GPU-seconds that decode actors work."""


def generation_bounds(
    profile: Profile, prompt_tokens: npt.ArrayLike, response_tokens: npt.ArrayLike
) -> GenerationBounds:
    """Lower bounds of one step's generation from the true lengths.

    `prompt_tokens` int[prompts], `response_tokens` int[prompts, n]. A response of G tokens takes a prefill of something
    and G - 1 iterations, at the contexts prompt + 1, prompt + 2, ...: its first token comes with the prefill. Waits,
    transfers and start-up cost nothing here. The bounds hold for actors that run as the profile says (no noise, no
    faults) with at most max_slots responses; of the token that a response gets when it is computed again, on another
    actor or after preemption, they take it that this is not cheaper than an iteration.

    Time: each iteration of a response at context c runs in a batch of some size b. The others' contexts are at least
    the shortest prompt p, so the mean is at least (c + (b - 1) p) / b, and latency does not fall with the mean. The
    least latency over b, summed over the response's iterations; the largest such sum, and the prefill of one token. On
    profiles where company never speeds an iteration up, that is the longest response decoding alone.

    Cost: an iteration of b responses at mean context m costs latency(b, m), that is latency(b, m) / b for each token.
    Let g(m) be the least of these over the b that fit: at most max_slots, and b (m - longest prompt) tokens of KV
    below the capacity (prompts may share theirs). Any line below g may be summed over tokens instead of iterations; we
    take the one that touches the convex envelope of g at the mean context M of all (response, later token) pairs, the
    best for these (Jensen). A first token may come beside others' later ones: it costs nothing, or what the line says
    at its prompt where that is less. And no iteration, prefill or decode, gives more first tokens than there are slots.
    Each of an actor's tp GPUs pays it.

    Raises InputError when the shapes do not fit or a length is below 1.
    """
    prompts, lengths = ints(prompt_tokens), ints(response_tokens)
    if prompts.ndim != 1 or lengths.ndim != 2 or lengths.size == 0 or lengths.shape[0] != prompts.size:
        raise InputError(f"bounds: prompts {prompts.shape} and responses {lengths.shape} are not (P,) and (P, n)")
    if prompts.min() < 1 or lengths.min() < 1:
        raise InputError(f"bounds: a prompt of {prompts.min()} or response of {lengths.min()} tokens; the least is 1")
    first, beyond = int(prompts.min()), int((prompts + lengths.max(axis=1)).max())

    contexts = np.arange(first, beyond)
    least_s = np.full(contexts.size, inf)
    for batch in range(1, profile.data.max_slots + 1):
        mean = (contexts + (batch - 1) * first) / batch
        np.minimum(least_s, _iteration_s(profile, batch, mean), out=least_s)
    until_s = np.concatenate([[0.0], np.cumsum(least_s)])
    start = prompts[:, None] - first
    prefill_s = float(profile.prefill_s(1))
    time_s = prefill_s + float((until_s[start + lengths] - until_s[start + 1]).max())

    later = lengths - 1
    tokens = int(later.sum())
    context_sum = int((prompts[:, None] * later + later * lengths // 2).sum())
    mean_context = context_sum / tokens if tokens else float(prompts.mean())
    means = np.linspace(first, beyond, ENVELOPE_POINTS)
    token_s = _least_token_s(profile, means, int(prompts.max()))
    # g rises with m, so from one point up to the next it is at least its value at the first.
    rising_s = np.concatenate([token_s[:1], token_s[:-1]])
    at_mean_s, slope_s = _convex_envelope(means, rising_s, mean_context)
    first_s = lengths.shape[1] * float(np.minimum(at_mean_s + slope_s * (prompts - mean_context), 0.0).sum())
    begin_s = lengths.size / profile.data.max_slots * min(prefill_s, float(least_s[0]))
    return GenerationBounds(time_s=time_s, decode_gpu_s=max(tokens * at_mean_s + first_s, begin_s) * profile.data.tp)


def _iteration_s(profile: Profile, batch: int, means: FloatArray) -> FloatArray:
    """float[means]: as `Profile.decode_iteration_s`, which takes any batch, in a quarter of the time."""
    return floats(np.interp(means, profile.data.decode_context, profile.row_s[batch]))


def _least_token_s(profile: Profile, means: FloatArray, longest_prompt: int) -> FloatArray:
    """float[means]: g(m), the least seconds for a token when the mean context is m."""
    own = np.maximum(means - longest_prompt, 0.0)
    least_s = _iteration_s(profile, 1, means)
    for batch in range(2, profile.data.max_slots + 1):
        fits = batch * own <= profile.data.kv_capacity_tokens
        least_s = np.where(fits, np.minimum(least_s, _iteration_s(profile, batch, means) / batch), least_s)
    return least_s


def _convex_envelope(x: FloatArray, y: FloatArray, at: float) -> tuple[float, float]:
    """Value and slope at `at` of the greatest convex function below the points (x, y), x ascending."""
    hull: list[int] = []  # rows of the lower hull's corners (Andrew's monotone chain)
    for row in range(x.size):
        while len(hull) > 1:
            left, middle = hull[-2:]
            if (y[middle] - y[left]) * (x[row] - x[left]) < (y[row] - y[left]) * (x[middle] - x[left]):
                break
            hull.pop()
        hull.append(row)
    right = min(max(int(np.searchsorted(x[hull], at)), 1), len(hull) - 1)
    left, right = hull[right - 1], hull[right]
    slope = float((y[right] - y[left]) / (x[right] - x[left]))
    return float(y[left]) + slope * (at - float(x[left])), slope
