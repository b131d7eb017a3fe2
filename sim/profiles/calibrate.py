"""Fits a profile to times that whole engines took: their work of every iteration, which operator tables leave out.

An actor's order of iterations depends on lengths, slots and KV alone, never on how long an iteration takes. Its time
on a profile with overhead h and speed factor s is therefore exactly s * (compute + h * iterations), and both sums come
from running the simulator's own engine (`sim.engine`) over the actor's queue. What remains is a fit of two numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlhfless.errors import InputError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, floats, ints
from rlhfless.types.codec import from_json
from rlhfless.types.profile import Profile
from rlhfless.units import MS
from sim.engine import Batch, Engine, prefill_timer

SCHEMA = 1
"""Version of the file of observations."""
LEAST = 2
"""Fewest observations that a fit takes: one leaves nothing to be wrong about."""
LEAST_HELD_OUT = 4
"""Fewest groups of observations of which some are held out (chosen: two parameters need two groups to be fitted on, and
one each way to be judged by)."""
MOST_FOLDS = 10
"""Folds of the held-out error (chosen: the usual ten; fewer groups are left out one by one)."""
BETTER = 0.9
"""A fit with one number more must bring the held-out error below this share of the simpler one's (chosen: less than a
tenth is within what a few runs differ by)."""
LEAST_GAIN = 0.001
"""And by this much (chosen: nobody's engines repeat to a tenth of a percent)."""
SEARCH_POINTS = 201
"""Values of the overhead that one round of the search tries (chosen)."""
SEARCH_ROUNDS = 5
"""Rounds, each a hundredth as wide as the one before: the last tells nanoseconds apart."""
MODELS = ("none", "overhead", "speed", "overhead+speed")
"""What may be fitted, simplest first."""
SIMPLE = MODELS[:3]
"""Of these, what "auto" chooses from where nothing can be held out: two numbers would pass through two runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """How long engines took that began together: `seconds` is the slowest one's time, first admission to last token."""

    prompt_tokens: IntArray
    """int[prompts]: tokens of each prompt."""
    response_tokens: IntArray
    """int[prompts, n]: lengths of the responses; response r is that of row r // n and column r % n."""
    actors: tuple[IntArray, ...]
    """Response numbers of each engine, in the order of its queue."""
    seconds: float
    """Measured."""
    group: int = 0
    """What is held out together, for instance the step: observations of one step share its accidents."""
    delivered: bool = False
    """The KV of the prompts came from elsewhere, so that these engines prefill nothing."""

    def __post_init__(self) -> None:
        prompts, (rows, _) = self.prompt_tokens.size, np.atleast_2d(self.response_tokens).shape
        if self.response_tokens.ndim != 2 or prompts != rows:
            raise InputError(f"observation: {prompts} prompts, responses of shape {self.response_tokens.shape}")
        if not self.seconds > 0 or not np.isfinite(self.seconds):
            raise InputError(f"observation of group {self.group}: {self.seconds} s; a time must be above 0")
        if min(self.prompt_tokens.min(initial=1), self.response_tokens.min(initial=1)) < 1:
            raise InputError(f"observation of group {self.group}: a length below 1 token")
        queued = np.concatenate([*self.actors, ints([])])
        if queued.size == 0 or np.unique(queued).size < queued.size:
            raise InputError(f"observation of group {self.group}: no response, or one that is queued twice")
        if queued.min() < 0 or queued.max() >= self.response_tokens.size:
            raise InputError(f"observation of group {self.group}: a response number beyond its lengths")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observed:
    """The fields of a file of observations."""

    schema: int
    """Version of this layout."""
    observations: tuple[Observation, ...]
    """The runs."""


def read(path: Path) -> tuple[Observation, ...]:
    """Observations from JSON: {"schema": 1, "observations": [{"prompt_tokens": [9, 9], "response_tokens": [[5, 7],
    [6, 8]], "actors": [[0, 1], [2, 3]], "seconds": 1.5, "group": 0, "delivered": false}, ...]}, the fields of
    `Observation`, the last two optional.

    Raises InputError for a missing file, SchemaError or InputError for bad content.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the observed runs ({error.strerror})") from None
    try:
        return from_json(text, _Observed, SCHEMA, "observations").observations
    except InputError as error:
        raise type(error)(f"{path}: {error}") from None


def step_observation(
    *,
    prompt_tokens: IntArray,
    response_tokens: IntArray,
    actors: int,
    seconds: float,
    group: int = 0,
    delivered: bool = False,
) -> Observation:
    """A whole step whose prompts, int[prompts], and responses, int[prompts, n], are dealt to `actors` engines in
    contiguous equal groups of prompts, as verl deals them; `seconds` is the generation time of the step.

    Raises InputError for no actors, fewer prompts than actors, a length or time that is not above 0.
    """
    prompts, n = np.atleast_2d(response_tokens).shape
    if not 1 <= actors <= prompts:
        raise InputError(f"observation of group {group}: {prompts} prompts on {actors} actors")
    queues = np.array_split(np.arange(prompts * n).reshape(prompts, n), actors)
    return Observation(
        prompt_tokens=ints(prompt_tokens),
        response_tokens=ints(response_tokens),
        actors=tuple(ints(queue.ravel()) for queue in queues),
        seconds=seconds,
        group=group,
        delivered=delivered,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Sizes of relative errors, predicted over measured less 1."""

    n: int
    """Observations."""
    median: float
    """Median size."""
    p90: float
    """90th percentile of the sizes."""
    bias: float
    """Median with its sign: below 0 where predictions are too short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted profile and how well it does."""

    profile: Profile
    """The profile with the fit in it."""
    model: str
    """What was fitted, one of MODELS."""
    overhead_s: float
    """Seconds of every iteration beside its tables; `speed` is on top."""
    speed: float
    """Factor on everything; above 1 is slower than the tables."""
    before: Errors
    """Of the profile as it was."""
    after: Errors
    """Of the fit, on what it was fitted to."""
    held_out: Errors | None
    """Of fits of the same kind that had not seen the group; None for too few groups."""


def finish_s(profile: Profile, observation: Observation, queue: IntArray) -> FloatArray:
    """float[queue]: when each response of one engine's queue ends, by the simulator's engine with prefix caching.

    Raises InfeasibleError where a response does not fit the profile's KV or grid.
    """
    prompt_tokens, targets = observation.prompt_tokens, observation.response_tokens
    n, rows = targets.shape[1], queue // targets.shape[1]
    profile.require_fit(int(prompt_tokens[rows].max()), int(targets.ravel()[queue].max()))
    batch = Batch(
        prompt_tokens=prompt_tokens.tolist(),
        responses_per_prompt=n,
        target=targets.ravel().tolist(),
        generated=[0] * targets.size,
        first_s=[-1.0] * targets.size,
    )
    engine = Engine(
        profile=profile,
        prefill_timer=prefill_timer(profile),
        batch=batch,
        slots=profile.data.max_slots,
        prefix_caching=True,
        first_tokens=dict(zip(queue.tolist(), prompt_tokens[rows].tolist(), strict=True)),
    )
    engine.submit(queue.tolist(), loaded=observation.delivered)
    now_s, end_s = 0.0, np.zeros(targets.size)
    while (stretch_s := engine.settle(now_s)) is not None:
        now_s += stretch_s
        end_s[engine.advance()] = now_s
    return np.asarray(end_s[queue])


def drive_s(profile: Profile, observation: Observation, queue: IntArray) -> float:
    """Seconds that one engine takes to run its queue. Raises as `finish_s` does."""
    return float(finish_s(profile, observation, queue).max())


def predict_s(profile: Profile, observations: Sequence[Observation]) -> FloatArray:
    """float[observations]: seconds of each one's slowest engine."""
    return floats([max(drive_s(profile, each, queue) for queue in each.actors) for each in observations])


def errors(predicted_s: FloatArray, measured_s: FloatArray) -> Errors:
    """Of predictions against measurements, elementwise."""
    off = predicted_s / measured_s - 1
    size = np.abs(off)
    return Errors(
        n=off.size, median=float(np.median(size)), p90=float(np.quantile(size, 0.9)), bias=float(np.median(off))
    )


def calibrate(profile: Profile, observations: Sequence[Observation], model: str = "auto") -> Calibration:
    """Fit `iteration_overhead_s` and, where that does not do, a speed factor that goes into the tables.

    The fit minimises the mean size of log(predicted / measured), so that one odd run does not carry it. `model` is one
    of MODELS, or "auto": the simplest whose held-out error (that of the fit itself where there are too few groups) no
    richer one beats by a tenth. The profile's own overhead is replaced. Raises InputError for fewer than LEAST
    observations or an unknown model, InfeasibleError for a response that does not fit the profile.
    """
    if len(observations) < LEAST:
        raise InputError(f"calibration: {len(observations)} observations, at least {LEAST} are needed")
    if model not in (*MODELS, "auto"):
        raise InputError(f"calibration: unknown model {model!r}; known are auto, {', '.join(MODELS)}")
    parts = _Parts.of(profile, observations)
    rich = np.unique(parts.group).size >= LEAST_HELD_OUT
    tried = (MODELS if rich else SIMPLE) if model == "auto" else (model,)
    fits = {name: (_fit(name, parts), _held_out(name, parts)) for name in tried}

    def score(name: str) -> float:
        (overhead_s, speed), held_out = fits[name]
        return (held_out or errors(parts.seconds(overhead_s, speed), parts.measured_s)).median

    best = tried[0]
    for name in tried[1:]:
        if score(name) < min(BETTER * score(best), score(best) - LEAST_GAIN):
            best = name
    (overhead_s, speed), held_out = fits[best]
    found = Calibration(
        profile=profile,
        model=best,
        overhead_s=overhead_s,
        speed=speed,
        before=errors(parts.seconds(profile.data.iteration_overhead_s, 1.0), parts.measured_s),
        after=errors(parts.seconds(overhead_s, speed), parts.measured_s),
        held_out=held_out,
    )
    return replace(found, profile=calibrated(profile, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What predictions are linear in: one entry an engine, observations one after the other."""

    compute_s: FloatArray
    """float[engines]: seconds by the tables alone."""
    iterations: FloatArray
    """float[engines]: iterations, of prefill and of decoding."""
    first: IntArray
    """int[observations]: first engine of each."""
    measured_s: FloatArray
    """float[observations]"""
    group: IntArray
    """int[observations]"""
    own_overhead_s: float
    """Overhead that the profile came with."""

    @classmethod
    def of(cls, profile: Profile, observations: Sequence[Observation]) -> "_Parts":
        bare, slower = (
            Profile(data=replace(profile.data, iteration_overhead_s=overhead_s)) for overhead_s in (0.0, 1.0)
        )
        engines = [(each, queue) for each in observations for queue in each.actors]
        compute_s = floats([drive_s(bare, *each) for each in engines])
        return cls(
            compute_s=compute_s,
            iterations=floats([drive_s(slower, *each) for each in engines] - compute_s),
            first=ints(np.cumsum([0, *(len(each.actors) for each in observations)])[:-1]),
            measured_s=floats([each.seconds for each in observations]),
            group=ints([each.group for each in observations]),
            own_overhead_s=profile.data.iteration_overhead_s,
        )

    def seconds(self, overhead_s: float, speed: float) -> FloatArray:
        """float[observations]: the slowest engine of each."""
        return np.asarray(np.maximum.reduceat(self.compute_s + overhead_s * self.iterations, self.first) * speed)

    def take(self, kept: BoolArray) -> "_Parts":
        """The observations where `kept`."""
        bounds = np.append(self.first, self.compute_s.size)
        engines = np.concatenate([np.arange(*bounds[at : at + 2]) for at in np.flatnonzero(kept)])
        return replace(
            self,
            compute_s=self.compute_s[engines],
            iterations=self.iterations[engines],
            first=ints(np.cumsum([0, *np.diff(bounds)[kept]])[:-1]),
            measured_s=self.measured_s[kept],
            group=self.group[kept],
        )


def _fit(model: str, parts: _Parts) -> tuple[float, float]:
    """(overhead, speed) of the least mean size of log(predicted / measured)."""

    def best_speed(overhead_s: float) -> float:
        if "speed" not in model:
            return 1.0
        return float(np.exp(np.median(np.log(parts.measured_s / parts.seconds(overhead_s, 1.0)))))

    def loss(overhead_s: float) -> float:
        predicted_s = parts.seconds(overhead_s, best_speed(overhead_s))
        return float(np.mean(np.abs(np.log(predicted_s / parts.measured_s))))

    if "overhead" not in model:
        return parts.own_overhead_s, best_speed(parts.own_overhead_s)
    low_s, high_s = 0.0, float(parts.measured_s.max() / parts.iterations.min())
    best_s = 0.0
    for _ in range(SEARCH_ROUNDS):
        tried_s = np.linspace(low_s, high_s, SEARCH_POINTS)
        best_s = float(tried_s[np.argmin([loss(each) for each in tried_s])])
        step_s = tried_s[1] - tried_s[0]
        low_s, high_s = max(0.0, best_s - step_s), best_s + step_s
    return best_s, best_speed(best_s)


def _held_out(model: str, parts: _Parts) -> Errors | None:
    groups = np.unique(parts.group)
    if groups.size < LEAST_HELD_OUT:
        return None
    fold = np.searchsorted(groups, parts.group) % min(groups.size, MOST_FOLDS)
    predicted_s = np.empty_like(parts.measured_s)
    for each in np.unique(fold):
        out = fold == each
        predicted_s[out] = parts.take(out).seconds(*_fit(model, parts.take(~out)))
    return errors(predicted_s, parts.measured_s)


def calibrated(profile: Profile, found: Calibration) -> Profile:
    """The profile with the fit in its file: speed in the tables, overhead beside them, both kept to the nanosecond."""
    data = profile.data
    note = (
        f"Calibrated: {found.overhead_s:.3g} s an iteration on top of the tables, all times {found.speed:.4g}; median "
        f"error {found.before.median:.1%} before, {found.after.median:.1%} after (n = {found.before.n})"
        + ("." if found.held_out is None else f", {found.held_out.median:.1%} on runs held out.")
    )
    changed = replace(
        data,
        name=f"{data.name}_calibrated",
        origin=f"{data.origin}; then calibrated to whole engines",
        notes=(*data.notes, note),
        decode_s=floats(np.round(data.decode_s * found.speed, 9)),
        prefill_s=floats(np.round(data.prefill_s * found.speed, 9)),
        iteration_overhead_s=round(found.overhead_s * found.speed, 9),
    )
    return Profile.from_json(Profile(data=changed).to_json(), changed.name)


def summary(found: Calibration) -> Iterator[str]:
    """Lines that say what was fitted and how far it was off before and is after."""
    what = "nothing, no fit was better" if found.model == "none" else found.model
    yield (
        f"fitted: {what}; {found.overhead_s / MS:.4g} ms an iteration beside the tables, all times {found.speed:.4g}"
    )
    for name, each in (("before", found.before), ("after", found.after), ("held out", found.held_out)):
        if each is None:
            yield f"held out: nothing; {LEAST_HELD_OUT} groups (steps) of observations are needed"
        else:
            yield f"{name}: median error {each.median:.2%}, p90 {each.p90:.2%}, bias {each.bias:+.2%} (n = {each.n})"
