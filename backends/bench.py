"""Times iterations of a running engine with dummy batches (RLHFless §4.4); `backends.measure` makes a profile of them.

What is timed is the very engine of an actor, one whole iteration at a time: scheduling, forward pass, sampling with the
actor's noise, and the handling of outputs. Other work on a machine only ever adds time. So every point is measured in
rounds, in another order each time; of a round the median counts, and of the rounds the least.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.engine_types import EngineConfig, EngineError, Request
from backends.engine_vllm import Tally, add, build
from rlhfless.errors import InputError

PROMPT_CAP_TOKENS = 1024
"""Longest prompt of the paper (RLHFless §6): larger prefills are batches of prompts of this size."""
FIRST_PREFILL = 16
"""Smallest prefill that is measured, in tokens; larger ones double."""
STEPS = 10
"""Decode iterations whose median is one measurement (chosen)."""
SPREAD = 0.03
"""Measuring ends early once the two best rounds of a point differ by this share or less, on average (chosen)."""
MIN_ROUNDS = 3
"""Rounds before that can be: two that happen to agree prove little."""
HELD_OUT = 8
"""Points between those of the grid that are measured to judge it."""

Point = tuple[int, int]
"""(batch, mean context) of a decode iteration; (0, tokens) of a prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured. Raises InputError for what cannot be."""

    batches: tuple[int, ...]
    """Decode batches, ascending from 1; the last is the engine's number of slots."""
    contexts: tuple[int, ...]
    """Mean contexts in tokens, ascending."""
    max_batched_tokens: int
    """Largest prefill iteration."""

    def __post_init__(self) -> None:
        for name, values, first in (("batches", self.batches, 1), ("contexts", self.contexts, STEPS)):
            if len(values) < 2 or any(a >= b for a, b in itertools.pairwise(values)) or values[0] < first:
                raise InputError(f"{name} {','.join(map(str, values))}: at least two, ascending from {first} or above")
        if self.batches[0] != 1:
            raise InputError(f"batches {','.join(map(str, self.batches))}: the first must be 1")
        least, most = max(self.slots, 2 * FIRST_PREFILL), self.slots * self.prompt_tokens
        if not least <= self.max_batched_tokens <= most:
            raise InputError(
                f"max-batched-tokens {self.max_batched_tokens}: must be from {least} to {most}, "
                f"{self.slots} prompts of {self.prompt_tokens} tokens"
            )

    @property
    def slots(self) -> int:
        """Responses at once."""
        return self.batches[-1]

    @property
    def prompt_tokens(self) -> int:
        """Longest prompt in a prefill."""
        return min(PROMPT_CAP_TOKENS, self.contexts[-1])

    @property
    def spare(self) -> int:
        """Tokens that a response may grow by: those that start first decode until the last has been prefilled."""
        return 2 * STEPS + math.ceil(self.slots * self.contexts[-1] / self.max_batched_tokens)

    @property
    def longest(self) -> int:
        """Tokens that a response may reach."""
        return self.contexts[-1] + self.spare

    @property
    def prefills(self) -> tuple[int, ...]:
        """Sizes of prefill iterations, doubling."""
        doubling = itertools.takewhile(
            lambda tokens: tokens < self.max_batched_tokens, (FIRST_PREFILL << n for n in itertools.count())
        )
        return (*doubling, self.max_batched_tokens)

    @property
    def held_out(self) -> tuple[Point, ...]:
        """Points midway between those of the grid."""
        batches, contexts = (
            [(a + b) // 2 for a, b in itertools.pairwise(axis) if b - a > 1] or list(axis)
            for axis in (self.batches, self.contexts)
        )
        far = len(batches) // 2
        pairs = [(batches[(n + shift) % len(batches)], c) for shift in (0, far) for n, c in enumerate(contexts)]
        return tuple(dict.fromkeys(pairs))[:HELD_OUT]


class Bench:
    """An engine that runs dummy batches, in this thread. Every response has a prompt of its own: KV is not shared."""

    def __init__(self, config: EngineConfig, grid: Grid) -> None:
        """Raises as `build`."""
        self._tally, self._grid = Tally(), grid
        self._engine = build(config, self._tally)
        self.counters = self._tally.counters(self._engine.vllm_config.cache_config)
        model = self._engine.vllm_config.model_config
        self.value_bytes: int = model.dtype.itemsize
        self._rng = np.random.default_rng(0)
        self._vocabulary: int = model.get_vocab_size()
        self._prompts = [self._tokens(grid.contexts[-1]) for _ in range(grid.slots)]
        self._next = itertools.count()

    def fits(self, batch: int, context: int) -> bool:
        """Whether the KV of such a batch fits, to the end of its measurement."""
        blocks = math.ceil((context + self._grid.spare) / self.counters.block_tokens)
        return batch * blocks <= self.counters.kv_blocks

    def kv_bytes_per_token(self) -> float:
        """As the workers report it, all ranks together."""
        ranks = self._engine.collective_rpc("get_kv_cache_spec")
        return float(sum(spec.page_size_bytes / spec.block_size for rank in ranks for spec in rank.values()))

    def warm(self) -> None:
        """Prefill prompts once. They stay in the prefix cache, so that a decode point does not wait for its prefill."""
        longest = self._grid.contexts[-1]
        slots = [slot for slot in range(self._grid.slots) if self.fits(slot + 1, longest)]
        self._submit([self._prompts[slot] for slot in slots], 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self.time((0, FIRST_PREFILL))
        self.time((1, self._grid.contexts[0]))

    def time(self, point: Point) -> float:
        """Seconds of one iteration. Raises EngineError where the engine does not do what is to be measured."""
        batch, tokens = point
        return self._decode_s(batch, tokens) if batch else self._prefill_s(tokens)

    def update_s(self) -> float:
        """Seconds to read the model's weights from disk into the running engine, and to forget its KV."""
        started_s = time.perf_counter()
        self._engine.collective_rpc("reload_weights")
        self._engine.reset_prefix_cache()
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Release the engine."""
        self._engine.engine_core.shutdown()

    def _decode_s(self, batch: int, context: int) -> float:
        prompt = context - STEPS // 2  # so that half of the iterations are below `context`, half above
        names = self._submit([tokens[:prompt] for tokens in self._prompts[:batch]], self._grid.longest - prompt)
        begun: set[str] = set()
        while len(begun) < batch:
            begun.update(output.request_id for output in self._engine.step())
        times_s = []
        for _ in range(STEPS):
            started_s = time.perf_counter()
            outputs = self._engine.step()
            times_s.append(time.perf_counter() - started_s)
            if len(outputs) != batch:
                raise EngineError(f"measure: {len(outputs)} of {batch} responses of {context} tokens ran together")
        self._engine.abort_request(names)
        return statistics.median(times_s)

    def _prefill_s(self, tokens: int) -> float:
        whole, rest = divmod(tokens, self._grid.prompt_tokens)
        sizes = [self._grid.prompt_tokens] * whole + [rest] * (rest > 0)
        self._submit([self._tokens(size) for size in sizes], 1)
        started_s = time.perf_counter()
        outputs = self._engine.step()
        took_s = time.perf_counter() - started_s
        if len(outputs) != len(sizes):
            raise EngineError(f"measure: {tokens} prompt tokens were not prefilled in one iteration")
        return took_s

    def _submit(self, prompts: Sequence[list[int]], max_tokens: int) -> list[str]:
        wanted = [
            Request(response=number, token_ids=prompt, max_tokens=max_tokens, temperature=1.0, force_length=True)
            for number, prompt in zip(self._next, prompts, strict=False)
        ]
        for one in wanted:
            add(self._engine, one, salt="measure")
        return [str(one.response) for one in wanted]

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, self._vocabulary, count).tolist()
        return tokens


def measure_points(
    time_point: Callable[[Point], float],
    points: Sequence[Point],
    *,
    until_s: float,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[Point, list[float]]:
    """Seconds of every point, ascending, one of each round.

    Ends once `spread` is at most SPREAD, or at `until_s` of the clock, but not before every point has two.
    """
    found: dict[Point, list[float]] = {point: [] for point in points}
    order, rng = list(points), random.Random(0)
    for number in itertools.count(1):
        rng.shuffle(order)
        for point in order:
            if number > 2 and clock() >= until_s:
                return found
            found[point] = sorted([*found[point], time_point(point)])
        told = f"round {number}: {len(points)} points"
        if number > 1:
            told += f", the two best rounds differ by {spread(found):.1%}"
        progress(told)
        if number >= MIN_ROUNDS and spread(found) <= SPREAD:
            break
    return found


def spread(times: dict[Point, list[float]]) -> float:
    """Share by which the second-best round of a point is slower than the best, on average."""
    return statistics.fmean(of[1] / of[0] - 1 for of in times.values())


def noise(times: dict[Point, list[float]]) -> float:
    """Share by which the median round of a point is slower than the best, on average."""
    return statistics.fmean(statistics.median(of) / of[0] - 1 for of in times.values())
