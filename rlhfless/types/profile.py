"""Profile: what a model on a GPU type costs, as a planner or an executor reads it.

The decode grid gives the latency of one decode iteration for (batch, mean context). It is linear between grid
points, so the time of many iterations of a constant batch has a closed form: the mean context grows by one token
an iteration, and each stretch between two grid contexts is an arithmetic series.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.cluster import GPUS
from rlhfless.types.codec import from_json, to_json

SCHEMA = 1

COLD_START_GPU_SHARE = 0.7
"""Part of a new process's start that needs its GPUs to itself: memory profiling and CUDA graph capture, 28 of the 40 s
that shipped profiles take a start to be (chosen with it). The rest may overlap what still runs there."""

_MOST_GRID = 10**9
"""Largest batch and most tokens at a grid point (chosen, like all limits here: far beyond any machine, and small enough
that no sum or table of a step overflows)."""
_MOST_S = 1e6
"""Seconds of one iteration or start-up."""
_MOST = {
    "tp": 1024,
    "max_slots": 1 << 16,
    "max_batched_tokens": _MOST_GRID,
    "kv_block_tokens": _MOST_GRID,
    "kv_capacity_tokens": 10**12,
    "parameters": 1e15,
    "weight_bytes": 1e16,
    "kv_bytes_per_token": 1e10,
    "iteration_overhead_s": _MOST_S,
    "cold_start_s": _MOST_S,
    "warm_start_s": _MOST_S,
}
"""The largest value of each field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileData:
    """The fields of a profile file."""

    schema: int
    """Version of this layout."""
    name: str
    """What commands call it, for instance qwen2.5-3b_l40s_tp2."""
    model: str
    """Hugging Face name of the model."""
    gpu: str
    """GPU type, a key of `rlhfless.types.cluster.GPUS`."""
    tp: int
    """GPUs of one actor: the tensor-parallel size."""
    kind: str
    """How it was made: tables, roofline, vidur or measured."""
    origin: str
    """What was measured, by whom, and the command that made this file."""
    licence: str
    """Licence of the figures."""
    notes: tuple[str, ...]
    """Doubts and choices that a reader of results should know."""
    parameters: float
    """Weights of the model, counted."""
    weight_bytes: float
    """Bytes of one copy of the weights, all ranks together."""
    kv_bytes_per_token: float
    """Bytes of one token's KV, all ranks together."""
    kv_capacity_tokens: int
    """Tokens whose KV one actor holds at once."""
    max_slots: int
    """Responses that one actor runs at once."""
    max_batched_tokens: int
    """Tokens that one prefill iteration takes; more are split over iterations."""
    decode_batch: IntArray
    """int[B]: grid batches, ascending, the first 1."""
    decode_context: IntArray
    """int[C]: grid mean contexts in tokens, ascending."""
    decode_s: FloatArray
    """float[B, C]: seconds of one decode iteration."""
    prefill_tokens: IntArray
    """int[P]: grid sizes of one prefill iteration in tokens, ascending, up to max_batched_tokens."""
    prefill_s: FloatArray
    """float[P]: seconds of one prefill iteration."""
    iteration_overhead_s: float
    """Seconds of engine work that come on top of every iteration."""
    cold_start_s: float
    """Seconds from asking for an actor's process to an engine that waits for weights, nothing prepared."""
    warm_start_s: float
    """The same for a process kept alive."""
    kv_block_tokens: int = 1
    """Tokens of a KV block. An engine shares prefixes in whole ones, and computes a prompt's last token, from whose
    output it draws, in any case; 1: it shares them token by token, and whole prompts at no cost."""


def _check(data: ProfileData, where: str) -> None:
    """Raise InputError unless the grids are complete, positive and monotone, the GPU known, all within limits."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"{where}: {what}")

    for name in ("decode_batch", "decode_context", "prefill_tokens"):
        axis = getattr(data, name)
        require(axis.ndim == 1 and axis.size >= 2, f"{name} needs at least two grid points")
        require(bool(np.all(np.diff(axis) > 0)) and axis[0] >= 1, f"{name} must ascend from at least 1")
        require(axis[-1] <= _MOST_GRID, f"{name} goes on to {axis[-1]}; it must end at {_MOST_GRID} at most")
    require(data.decode_batch[0] == 1, f"decode_batch must begin at 1, not {data.decode_batch[0]}")
    shape = (data.decode_batch.size, data.decode_context.size)
    require(data.decode_s.shape == shape, f"decode_s has shape {data.decode_s.shape}, the grid needs {shape}")
    require(data.prefill_s.shape == data.prefill_tokens.shape, "prefill_s and prefill_tokens differ in length")
    for name in ("decode_s", "prefill_s"):
        values = getattr(data, name)
        bad = ~((values > 0) & (values <= _MOST_S))
        right = f"every latency must be above 0 s and at most {_MOST_S:.0f} s"
        require(not bad.any(), f"{name} holds {values[bad][0] if bad.any() else ''}; {right}")
    decode_axes = {"batch": data.decode_batch, "context": data.decode_context}
    for name, axes in (("decode_s", decode_axes), ("prefill_s", {"size": data.prefill_tokens})):
        for number, grows in enumerate(axes):
            falls = np.argwhere(np.diff(getattr(data, name), axis=number) < 0)
            at = ", ".join(f"{key} {axes[key][falls[0][i]]}" for i, key in enumerate(axes)) if falls.size else ""
            require(not falls.size, f"{name} must not fall as the {grows} grows, which it does after {at}")
    require(data.max_slots <= data.decode_batch[-1], f"max_slots {data.max_slots} lies beyond the decode grid")
    require(data.max_batched_tokens <= data.prefill_tokens[-1], "max_batched_tokens lies beyond the prefill grid")
    above_zero = ("tp", "max_slots", "max_batched_tokens", "kv_capacity_tokens", "kv_block_tokens")
    for name in (*above_zero, "parameters", "weight_bytes"):
        require(getattr(data, name) > 0, f"{name} is {getattr(data, name)}; it must be above 0")
    for name in ("kv_bytes_per_token", "iteration_overhead_s", "cold_start_s", "warm_start_s"):
        require(getattr(data, name) >= 0, f"{name} is {getattr(data, name)}; it must not be negative")
    for name, most in _MOST.items():
        require(getattr(data, name) <= most, f"{name} is {getattr(data, name)}; it must be at most {most:.0f}")
    require(data.gpu in GPUS, f"unknown GPU {data.gpu!r}: known are {', '.join(GPUS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A checked profile with the tables that make its closed forms quick."""

    data: ProfileData
    """What the file holds."""
    speed: float = 1.0
    """Factor on every compute latency: 1.1 is a profile that is 10 % slower. For perturbing a world or a planner."""
    row_s: FloatArray = field(init=False, repr=False, compare=False)
    """float[max_slots + 1, C]: iteration latency for every whole batch at the grid contexts; row 0 is unused."""
    _context: list[float] = field(init=False, repr=False, compare=False)
    _rows: list[list[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        data = self.data
        batches = np.arange(data.max_slots + 1, dtype=np.float64)
        columns = [np.interp(batches, data.decode_batch, data.decode_s[:, c]) for c in range(data.decode_context.size)]
        rows = (np.stack(columns, axis=1) + data.iteration_overhead_s) * self.speed
        rows.flags.writeable = False
        object.__setattr__(self, "row_s", rows)
        object.__setattr__(self, "_context", data.decode_context.astype(float).tolist())
        object.__setattr__(self, "_rows", rows.tolist())

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> "Profile":
        """Read a profile file's text. Raises SchemaError or InputError, naming `where`."""
        data = from_json(text, ProfileData, SCHEMA, where)
        _check(data, where)
        return cls(data=data)

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read a profile file. Raises InputError if it is missing, as `from_json` otherwise."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot read the profile ({error.strerror})") from None
        return cls.from_json(text, str(path))

    def to_json(self) -> str:
        """The file's text. `speed` is a perturbation of one run and is not part of the file."""
        return to_json(self.data)

    @property
    def max_context(self) -> int:
        """Longest mean context, in tokens, that the decode grid covers."""
        return int(self.data.decode_context[-1])

    def require_fit(self, max_prompt_tokens: int, max_response_tokens: int) -> None:
        """Raise InfeasibleError unless one response of these sizes fits the grid and an actor's KV cache."""
        if self.fits(max_prompt_tokens, max_response_tokens):
            return
        grid, kv = self.max_context, self.data.kv_capacity_tokens
        limit = min(grid, kv)
        what, other = "decode grid", "take a profile with a longer grid"
        if kv < grid:
            what, other = "KV cache", "take a profile with more GPUs per actor"
        room = limit - max_prompt_tokens
        remedy = f"lower the cap to at most {room} or {other}" if room > 0 else f"the prompt alone fills it: {other}"
        raise InfeasibleError(
            f"profile {self.data.name}: prompt {max_prompt_tokens} + response {max_response_tokens} tokens exceed the "
            f"{what} of {limit} tokens; {remedy}"
        )

    def fits(self, max_prompt_tokens: int, max_response_tokens: int) -> bool:
        """Whether one response of these sizes fits the grid and an actor's KV cache."""
        return max_prompt_tokens + max_response_tokens <= min(self.max_context, self.data.kv_capacity_tokens)

    def decode_iteration_s(self, batch: npt.ArrayLike, context: npt.ArrayLike) -> FloatArray:
        """Seconds of one decode iteration, elementwise. `batch` real in 0..max_slots, `context` the mean, in tokens.

        Linear between grid points in both directions; below the first grid context, that context's value.
        """
        knots = self.data.decode_context
        b = np.asarray(batch, dtype=np.float64)
        c = np.clip(np.asarray(context, dtype=np.float64), knots[0], knots[-1])
        low_b = np.clip(b.astype(np.int64), 1, self.data.max_slots - 1) if self.data.max_slots > 1 else np.int64(1)
        low_c = np.clip(np.searchsorted(knots, c, side="right") - 1, 0, knots.size - 2)
        share_c = (c - knots[low_c]) / (knots[low_c + 1] - knots[low_c])
        flat, width = self.row_s.ravel(), knots.size
        at = low_b * width + low_c
        lower = flat[at] + share_c * (flat[at + 1] - flat[at])
        if self.data.max_slots == 1:
            return np.asarray(lower)
        upper = flat[at + width] + share_c * (flat[at + width + 1] - flat[at + width])
        return np.asarray(lower + np.clip(b - low_b, 0.0, 1.0) * (upper - lower))

    def decode_run_s(self, batch: int, context: float, iterations: int) -> float:
        """Seconds of `iterations` decode iterations of a constant batch whose mean context begins at `context`.

        Exact: equal to summing `decode_iteration_s(batch, context + j)` for j < iterations.
        """
        knots, row = self._context, self._rows[batch]
        last = len(knots) - 2
        total, at, left = 0.0, context, iterations
        if at < knots[0]:
            flat = min(left, ceil(knots[0] - at))
            total, at, left = flat * row[0], at + flat, left - flat
        segment = min(bisect_right(knots, at) - 1, last)
        while left > 0:
            slope = (row[segment + 1] - row[segment]) / (knots[segment + 1] - knots[segment])
            count = left if segment == last else min(left, ceil(knots[segment + 1] - at))
            first = row[segment] + slope * (at - knots[segment])
            total += count * first + slope * (count * (count - 1) / 2)
            at, left, segment = at + count, left - count, segment + 1
        return total

    def decode_run_iterations(self, batch: int, context: float, time_s: float, most: int) -> int:
        """The fewest iterations, at most `most`, whose `decode_run_s` is at least `time_s`."""
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if self.decode_run_s(batch, context, middle) >= time_s:
                high = middle
            else:
                low = middle + 1
        return low

    def prefill_s(self, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds to prefill `tokens` prompt tokens, elementwise, in iterations of at most max_batched_tokens.

        Below the first grid size, that size's value (an iteration has a least cost); 0 tokens take no time.
        """
        data = self.data
        count = np.asarray(tokens, dtype=np.float64)
        full, rest = np.divmod(count, data.max_batched_tokens)
        whole_s = np.interp(data.max_batched_tokens, data.prefill_tokens, data.prefill_s) + data.iteration_overhead_s
        rest_s = np.interp(rest, data.prefill_tokens, data.prefill_s) + data.iteration_overhead_s
        return np.asarray((full * whole_s + np.where(rest > 0, rest_s, 0.0)) * self.speed)

    def mixed_iteration_s(self, tokens: int, batch: int, context: float) -> float:
        """Seconds to prefill `tokens` in one iteration with the next token of `batch` responses of mean `context`.

        The layers compute all tokens as one prefill; what a decode iteration takes at this context more than at the
        grid's shortest, its reading of KV, comes on top. At least that decode iteration. (Chunked prefill, as in vLLM;
        Agrawal et al., Sarathi-Serve, OSDI 2024, section 4.) Where the tokens exceed max_batched_tokens, the seconds
        are those of several iterations.
        """
        decode_s = self.decode_run_s(batch, context, 1)
        reading_s = decode_s - self.decode_run_s(batch, 0.0, 1)
        return max(float(self.prefill_s(tokens + batch)) + reading_s, decode_s)


def check_sizes(profiles: Mapping[int, Profile]) -> None:
    """Raise InputError unless profiles by tensor-parallel size are of that size, one model, one GPU type."""
    first = next(iter(profiles.values())).data
    for tp, profile in profiles.items():
        data = profile.data
        if data.tp != tp:
            raise InputError(f"profile {data.name} is of actors of {data.tp} GPUs, not {tp}")
        for name in ("model", "gpu", "weight_bytes", "kv_bytes_per_token", "kv_block_tokens"):
            if getattr(data, name) != getattr(first, name):
                raise InputError(
                    f"profiles {first.name} and {data.name} must have the same {name}, not "
                    f"{getattr(first, name)} and {getattr(data, name)}"
                )
