"""Console logs of verl (github.com/volcengine/verl): statistics of each step's lengths, and lengths that match them.

A log holds no response's length, only mean, max, min and the share at the cap. `matching` makes lengths of which all
four hold. They are a log-normal censored at the step's maximum: lengths of language models are skewed with a long
tail, and this is the family of which the printed figures leave nothing free. Its share at or above the maximum is the
share that was clipped (one response where none was), and the spread is what then gives the mean.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.workload import Algorithm
from traces.format import Trace, TraceInfo

PROMPT_SHARE = 0.59
"""Share of the spread of log lengths that lies between prompts; the same as of the preset gsm8k (measured, GSM8K's
recorded solutions). It says which responses share a prompt, and changes no statistic of a step."""
ROUNDING = 0.0005
"""Half of the last digit that a log prints of a mean or a share."""
_FLOAT_DUST = 1e-6
"""Rounding errors of a product of a mean and a count (chosen: far below one token)."""
_BISECTIONS = 60
"""Halvings of a spread's interval: down to rounding errors of floats."""
_MOST_SPREAD = 64.0
"""Spread of log lengths at which all but the longest are as short as can be, whatever the cap (chosen)."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"\((\w+ pid=\d+[^)]*)\) ?")
_BEGIN = re.compile(r"(?<![\w/])step:(\d+) - ")
_PIECE = re.compile(r"[\w./@()+-]*(:[\w./@()+-]*)?")
_METRIC = re.compile(r"([A-Za-z_][\w./@-]*):(?:np\.\w+\()?([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFacts:
    """What a step's line says of its prompts or responses."""

    mean: float
    """Tokens, to three digits behind the point."""
    most: int
    """Longest, in tokens."""
    least: int
    """Shortest, in tokens."""
    clip_ratio: float
    """Share that is as long as the cap, to three digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One training step."""

    where: str
    """File and step, for messages."""
    step: int
    """Its number in the log, from 1."""
    responses: LengthFacts
    """Of its responses."""
    prompts: LengthFacts
    """Of its prompts."""
    metrics: Mapping[str, float]
    """All that the line holds, by verl's names."""

    def metric(self, name: str) -> float:
        """The value of a metric. Raises InputError where the step has none."""
        return _metric(self.metrics, name, self.where)

    @property
    def epoch(self) -> int:
        """Pass over the data, from 0; 0 where the log does not say."""
        return int(self.metric("training/epoch")) if "training/epoch" in self.metrics else 0


def read(path: str | Path) -> tuple[LoggedStep, ...]:
    """The training steps of a log, ascending; of a step that stands twice (a run that was resumed), the later.

    Lines that only hold a validation are passed over. Metrics may go on over several lines of one process. Raises
    InputError for a missing file, a log without steps, and a step without the statistics of its lengths.
    """
    return steps_of(_text(Path(path)), str(path))


def steps_of(text: str, where: str) -> tuple[LoggedStep, ...]:
    """The same for a log's text; `where` is what messages call it."""
    found: dict[int, LoggedStep] = {}
    for number, line in _records(text):
        metrics = {name: float(value) for name, value in _METRIC.findall(line)}
        if not any(name.startswith("response_length/") for name in metrics):
            continue
        here = f"{where}, step {number}"
        found[number] = LoggedStep(
            where=here,
            step=number,
            responses=_facts(metrics, "response_length", here),
            prompts=_facts(metrics, "prompt_length", here),
            metrics=metrics,
        )
    if not found:
        raise InputError(f"{where}: no training step of verl in it; its lines begin with 'step:1 - '")
    return tuple(found[number] for number in sorted(found))


def matching(facts: LengthFacts, count: int, cap: int, where: str, spread: float | None = None) -> IntArray:
    """int[count], ascending: lengths with the mean, max, min and clip ratio of `facts`, each to the digits printed.

    `spread`: standard deviation of the log lengths below the maximum, instead of the one that goes with the clip
    ratio; for asking how much hangs on the shape. Raises InputError for statistics that no lengths have.
    """
    low, top = facts.least, facts.most
    if not 1 <= low <= top <= cap:
        raise InputError(f"{where}: lengths from {low} to {top} tokens; they must lie in 1..{cap}, the cap")
    for pinned in _tops(facts, count, cap):
        high = top - 1 if top == cap else top  # a response below the cap was not clipped
        free = count - pinned
        if low == top:
            least = most = count * top if free == 0 or top < cap else -1
        else:
            least = pinned * top + free * low
            most = pinned * top + low + (free - 1) * high if free else -1
        total = min(max(round(facts.mean * count), least), most)
        if least <= total and abs(total - facts.mean * count) <= ROUNDING * count + _FLOAT_DUST:
            return ints(_fill(total, count, pinned, (low, high, top), spread))
    raise InputError(
        f"{where}: no {count} lengths have mean {facts.mean}, max {top}, min {low}, clip ratio {facts.clip_ratio} "
        f"at a cap of {cap}; the number of responses or the cap is another"
    )


def _tops(facts: LengthFacts, count: int, cap: int) -> list[int]:
    """How many lengths may be the longest: those that print as the clip ratio, the likeliest first."""
    if facts.most < cap:
        return [1] if facts.clip_ratio <= ROUNDING else []
    around = facts.clip_ratio * count
    width = ROUNDING * count + _FLOAT_DUST
    every = range(max(1, math.ceil(around - width)), min(count, math.floor(around + width)) + 1)
    return sorted(every, key=lambda number: abs(number - around))


def _fill(total: int, count: int, pinned: int, bounds: tuple[int, int, int], spread: float | None) -> IntArray:
    """int[count] of this sum: the shortest, `pinned` of the longest, log-normal ones between."""
    low, high, top = bounds
    lengths = np.full(count, top, dtype=np.int64)
    free = count - pinned
    if free == 0 or low == top:
        return lengths
    normal = _normal_scores(count)[:free]
    edge = NormalDist().inv_cdf(1 - pinned / count)
    wanted = total - pinned * top

    def drawn(level: float) -> FloatArray:
        """Lengths for a spread (or, where the spread is given, a shift of log lengths): the higher, the shorter."""
        exponent = (normal - edge) * level if spread is None else normal * spread - level
        values = np.clip(top * np.exp(np.maximum(exponent, -_MOST_SPREAD)), low, high)
        values[0] = low
        return np.asarray(values)

    least, most = (0.0, _MOST_SPREAD) if spread is None else (-_MOST_SPREAD, _MOST_SPREAD)
    for _ in range(_BISECTIONS):
        middle = (least + most) / 2
        least, most = (middle, most) if drawn(middle).sum() > wanted else (least, middle)
    below = np.rint(drawn((least + most) / 2)).astype(np.int64)
    while left := wanted - int(below.sum()):  # what rounding has left over, a token each
        room = 1 + np.flatnonzero(below[1:] < high if left > 0 else below[1:] > low)
        at = room[np.linspace(0, room.size - 1, min(abs(left), room.size)).astype(np.int64)]
        below[at] += 1 if left > 0 else -1
    lengths[:free] = np.sort(below)
    return lengths


@cache
def _normal_scores(count: int) -> FloatArray:
    """float[count]: the standard normal's quantiles in the middle of `count` equal shares."""
    inverse = NormalDist().inv_cdf
    return floats([inverse((number + 0.5) / count) for number in range(count)])


def recorded(
    path: str | Path,
    *,
    prompts_per_step: int | None = None,
    responses_per_prompt: int | None = None,
    max_prompt_tokens: int | None = None,
    max_response_tokens: int | None = None,
    algorithm: Algorithm | None = None,
    prompt_share: float = PROMPT_SHARE,
    spread: float | None = None,
    seed: int = 0,
) -> Trace:
    """A log as a trace: made-up lengths whose statistics are those of each step (see `matching`).

    What is None is read from the configuration that verl prints at its start. No prompt comes twice, for a log does not
    say which prompts a step has: length history has nothing to learn from such a trace. Raises InputError for what
    `read` refuses, for a size that neither the log nor the caller gives, and for one that a step's total of tokens
    contradicts.
    """
    path = Path(path)
    text = _text(path)
    logged = steps_of(text, str(path))
    prompts = _size("prompts_per_step", prompts_per_step, text, path)
    n = _size("responses_per_prompt", responses_per_prompt, text, path)
    prompt_cap = _size("max_prompt_tokens", max_prompt_tokens, text, path)
    cap = _size("max_response_tokens", max_response_tokens, text, path)
    if not 0 <= prompt_share <= 1:
        raise InputError(f"prompt_share is {prompt_share}; it must lie in 0..1")
    if spread is not None and not 0 <= spread <= _MOST_SPREAD:
        raise InputError(f"spread is {spread}; it must lie in 0..{_MOST_SPREAD:g}")
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be at least 0")
    for each in logged:
        _require_count(each, prompts * n)
    rng = {name: stream(seed, "traces", "verl", name) for name in ("prompts", "responses")}
    prompt_tokens, lengths = [], []
    for each in logged:
        asked = matching(each.prompts, prompts, prompt_cap, f"{each.where}, prompt_length")
        prompt_tokens.append(rng["prompts"].permutation(asked))
        made = matching(each.responses, prompts * n, cap, f"{each.where}, response_length", spread)
        scores = math.sqrt(prompt_share) * rng["responses"].standard_normal((prompts, 1))
        scores = scores + math.sqrt(1 - prompt_share) * rng["responses"].standard_normal((prompts, n))
        dealt = np.empty(prompts * n, dtype=np.int64)
        dealt[np.argsort(scores, axis=None)] = made
        lengths.append(dealt)
    critic = re.search(r"adv_estimator'?[=:] *'?gae\b", text) is not None
    tokens, many = np.concatenate(lengths), len(logged) * prompts
    return Trace(
        info=TraceInfo(
            model=_model(text),
            dataset="unknown: prompts of a verl run",
            tokenizer="the model's own",
            algorithm=algorithm or ("ppo" if critic else "grpo"),
            responses_per_prompt=n,
            max_prompt_tokens=prompt_cap,
            max_response_tokens=cap,
            source=f"verl console log {path.name}: lengths are synthesized, a log-normal censored at the maximum "
            + ("" if spread is None else f"with spread {spread:g} ")
            + "that has each step's logged mean, max, min and clip ratio; prompts are anonymous and never repeat, "
            f"{prompt_share:g} of the spread between prompts is assumed; licence: the log's",
            seed=seed,
        ),
        prompt_ids=np.array([f"step{each.step}-{number}" for each in logged for number in range(prompts)]),
        prompt_tokens=np.concatenate(prompt_tokens),
        epoch=np.repeat([each.epoch for each in logged], prompts * n),
        step=np.repeat([each.step for each in logged], prompts * n),
        prompt=np.repeat(np.arange(many), n),
        sample=np.tile(np.arange(n), many),
        response_tokens=tokens,
        truncated=tokens == cap,
    )


def _require_count(step: LoggedStep, count: int) -> None:
    """Raise InputError where the step's total of tokens belongs to another number of responses."""
    total = step.metrics.get("perf/total_num_tokens")
    if total is None:
        return
    found = total / (step.prompts.mean + step.responses.mean)
    if abs(found - count) > 0.5 + 2 * ROUNDING * found:
        raise InputError(
            f"{step.where}: its tokens are those of {found:.0f} responses, prompts_per_step x responses_per_prompt is "
            f"{count}; give both as options"
        )


def _text(path: Path) -> str:
    """The log without colours; bytes that are no UTF-8, as crashed processes leave them, are replaced."""
    if not path.is_file():
        raise InputError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    try:
        return _COLOUR.sub("", path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InputError(f"{path}: cannot read it ({error.strerror})") from None


def _records(text: str) -> list[tuple[int, str]]:
    """(step, its metrics on one line); what a process prints between is left out, what it wraps is joined again."""
    found: list[tuple[int, list[str]]] = []
    unfinished: dict[str, list[str]] = {}  # process -> the record that its next line may go on with
    for line in text.splitlines():
        named = _PROCESS.match(line)
        process = named.group(1) if named else ""
        said = line[named.end() :] if named else line
        if begin := _BEGIN.search(said):
            unfinished[process] = [said[begin.start() :]]
            found.append((int(begin.group(1)), unfinished[process]))
        elif process in unfinished:
            pieces = said.strip(" -").split(" - ")
            if re.search(r"[\d/:_]", said) and all(map(_PIECE.fullmatch, pieces)):
                unfinished[process].append(said)
            else:
                del unfinished[process]
    return [(number, "".join(lines)) for number, lines in found]


def _metric(metrics: Mapping[str, float], name: str, where: str) -> float:
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        raise InputError(f"{where}: no {name}" if value is None else f"{where}: {name} is {value}")
    return value


def _facts(metrics: Mapping[str, float], name: str, where: str) -> LengthFacts:
    mean, most, least, clip_ratio = (
        _metric(metrics, f"{name}/{what}", where) for what in ("mean", "max", "min", "clip_ratio")
    )
    if not 0 <= clip_ratio <= 1:
        raise InputError(f"{where}: {name}/clip_ratio is {clip_ratio}; it must lie in 0..1")
    return LengthFacts(mean=mean, most=round(most), least=round(least), clip_ratio=clip_ratio)


_SETTINGS = {
    "prompts_per_step": (r"\bdata\.train_batch_size=(\d+)", r"'train_batch_size': (\d+)"),
    "responses_per_prompt": (r"\brollout\.n=(\d+)", r"'rollout': \{.*?'n': (\d+)"),
    "max_prompt_tokens": (r"\bdata\.max_prompt_length=(\d+)", r"'max_prompt_length': (\d+)"),
    "max_response_tokens": (r"\bdata\.max_response_length=(\d+)", r"'max_response_length': (\d+)"),
}
"""Where a log says a size: in the command that started it, or in the configuration that verl prints."""


def _size(name: str, given: int | None, text: str, path: Path) -> int:
    """What the caller gives, else what the log says. Raises InputError where neither does, or for less than 1."""
    if given is None:
        hits = (re.search(pattern, text, re.DOTALL) for pattern in _SETTINGS[name])
        given = next((int(hit.group(1)) for hit in hits if hit), None)
    if given is None:
        raise InputError(f"{path}: the log does not say {name}; give it as an option")
    if given < 1:
        raise InputError(f"{path}: {name} is {given}; it must be at least 1")
    return given


def _model(text: str) -> str:
    hit = re.search(r"actor_rollout_ref\.model\.path=([^\s']+)", text) or re.search(r"'path': '([^']+)'", text)
    if hit is None:
        return "unknown"
    cached = re.search(r"models--([^/]+?)--([^/]+)", hit.group(1))
    return f"{cached.group(1)}/{cached.group(2)}" if cached else Path(hit.group(1)).name
