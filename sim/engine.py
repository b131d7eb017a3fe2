"""Continuous batching on one decode actor, from event to event.

Between two events (a response ends, one arrives, KV runs out) the batch is constant and every context grows by one
token an iteration, so the time of the whole stretch has a closed form (`Profile.decode_run_s`). What an engine does at
the boundary of two iterations, in this order:

1. Admission, in order, head of line first: a waiting response enters when a slot is free and its KV fits, with room
   for one more token of everything that runs, until an iteration is full (`max_batched_tokens`, which the last to enter
   may exceed). A prompt's KV is held once, however many of its responses run.
2. Preemption by recompute when the next iteration's tokens do not fit: the last admitted goes back to the head of the
   queue and loses its KV (vLLM's rule).
3. One iteration: each running response gets one token. What was admitted and is not cached is prefilled in it
   (`Profile.mixed_iteration_s`). Responses that reach their length end.

With prefix caching, prompts that have run stay cached as long as nothing needs their space: the free cache favours
engines that prefill for themselves. KV that was delivered for a queued response, by the prefill actor or by a move,
waits in host memory until the response is admitted; taking it from there is not timed. KV that is there, cached or
delivered, is used in whole blocks (`ProfileData.kv_block_tokens`); the room that it takes is counted in tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

from rlhfless.types.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What all actors of a step share: true lengths and progress of every response, by response number."""

    prompt_tokens: list[int]
    """[prompts]: tokens of each prompt."""
    responses_per_prompt: int
    """n; response r belongs to prompt r // n."""
    target: list[int]
    """[responses]: true length of each response."""
    generated: list[int]
    """[responses]: tokens so far, at the last boundary of the actor that holds it."""
    first_s: list[float]
    """[responses]: first admission; negative until then."""


def prefill_timer(profile: Profile) -> Callable[[int], float]:
    """Seconds to prefill a whole number of tokens, remembered: most prompts of a step repeat a few sizes."""

    @cache
    def seconds(tokens: int) -> float:
        return float(profile.prefill_s(tokens))

    return seconds


@dataclass(slots=True, kw_only=True)
class Engine:
    """One actor's engine. Its caller owns the clock: `settle` begins a stretch, `advance` ends it."""

    profile: Profile
    """What an iteration costs."""
    prefill_timer: Callable[[int], float]
    """Seconds of a prefill without decoding beside it, shared by the engines of one profile."""
    batch: Batch
    """Responses of the step."""
    slots: int
    """Responses that run at once."""
    prefix_caching: bool
    """Whether prompts are kept, and shared by their responses."""
    first_tokens: Mapping[int, int]
    """Response -> prompt tokens to compute at its first admission, from the plan. A response that is not in it has
    moved here, and its prompt is computed again unless its KV comes along."""
    slowdown: float = 1.0
    """Factor on every duration of this engine."""
    prefilled_tokens: int = 0
    """Prompt tokens computed for the first time here."""
    recomputed_tokens: int = 0
    """Tokens whose KV was computed again."""
    preemptions: int = 0
    """Responses sent back to the queue because KV ran out."""
    generated_tokens: int = 0
    """Tokens decoded here."""
    waiting: deque[int] = field(default_factory=deque)
    """Queue of response numbers."""
    running: dict[int, int] = field(default_factory=dict)
    """Response -> iteration at which it ends, in order of admission."""
    used_tokens: int = 0
    """KV in use by what runs."""
    _iteration: int = 0
    _context_tokens: int = 0
    _queued_tokens: int = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _loaded: set[int] = field(default_factory=set)
    _met: set[int] = field(default_factory=set)
    _pins: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _cached_tokens: int = 0
    _planned: int = 0
    _stretch_batch: int = 0
    _prefills: bool = False

    def submit(self, responses: Iterable[int], *, loaded: bool = False) -> None:
        """Queue responses. `loaded`: the KV of their prompt and tokens so far has come with them."""
        responses = list(responses)
        self.waiting.extend(responses)
        self._queued_tokens += sum(map(self._context, responses))
        if loaded:
            self._loaded.update(responses)

    @property
    def unfinished(self) -> int:
        """Responses that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def decoding(self) -> bool:
        """Whether the running stretch only decodes."""
        return self._stretch_batch > 0 and not self._prefills

    @property
    def queued_tokens(self) -> int:
        """Context of what waits in the queue."""
        return self._queued_tokens

    @property
    def context_tokens(self) -> int:
        """Context of everything unfinished, in slots and in the queue."""
        return self._context_tokens + self._queued_tokens

    def _context(self, response: int) -> int:
        batch = self.batch
        return batch.prompt_tokens[response // batch.responses_per_prompt] + batch.generated[response]

    @property
    def headroom_tokens(self) -> int:
        """KV that nothing in a slot uses."""
        return self.profile.data.kv_capacity_tokens - self.used_tokens

    def settle(self, now_s: float) -> float | None:
        """Do the boundary's work and begin the next stretch; its seconds, or None when there is nothing to run."""
        prefill_tokens, decoding, context_tokens = self._admit(now_s)
        self._prefills = prefill_tokens > 0
        if self._prefills:
            self._stretch_batch, self._planned = len(self.running), 1
            if not decoding:
                return self.prefill_timer(prefill_tokens) * self.slowdown
            return self.profile.mixed_iteration_s(prefill_tokens, decoding, context_tokens / decoding) * self.slowdown
        if not self.running:
            assert not self.waiting, "a response that does not fit an empty engine; plans are checked against this"
            return None
        room = self.headroom_tokens
        while len(self.running) > room:
            self._preempt()
            room = self.headroom_tokens
        self._stretch_batch = size = len(self.running)
        self._planned = min(self._next_end() - self._iteration, room // size)
        return self.profile.decode_run_s(size, self._context_tokens / size, self._planned) * self.slowdown

    def iterations_by(self, elapsed_s: float) -> tuple[int, float]:
        """The first boundary of the running stretch at or after `elapsed_s`: iterations and seconds from its start.

        An iteration that prefills has no boundary before its end: (0, a negative number).
        """
        size = self._stretch_batch
        if self._prefills:
            return 0, -1.0
        mean = self._context_tokens / size
        count = self.profile.decode_run_iterations(size, mean, elapsed_s / self.slowdown, self._planned)
        return count, self.profile.decode_run_s(size, mean, count) * self.slowdown

    def advance(self, iterations: int | None = None) -> list[int]:
        """End the stretch after `iterations` (all that were planned by default); responses that ended, in order."""
        count = self._planned if iterations is None else iterations
        size = self._stretch_batch
        self._stretch_batch = self._planned = 0
        if count == 0:
            return []
        self._iteration += count
        self._context_tokens += size * count
        self.generated_tokens += size * count
        self.used_tokens += size * count
        self._trim_cache()
        ended = []
        while self._ends and self._ends[0][0] <= self._iteration:
            end, response = heappop(self._ends)
            if self.running.get(response) == end:
                self._leave(response)
                self.batch.generated[response] = self.batch.target[response]
                ended.append(response)
        return ended

    def progress(self) -> None:
        """Write the tokens so far of everything that runs into the batch."""
        for response, end in self.running.items():
            self.batch.generated[response] = self.batch.target[response] - (end - self._iteration)

    def drain(self) -> list[int]:
        """Give up everything unfinished, running first, and forget all KV, delivered KV too. Only between stretches."""
        self.progress()
        left = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self._ends.clear()
        self._loaded.clear()
        self._met.clear()
        self._pins.clear()
        self.first_tokens = {}
        self._drop_cache()
        self.used_tokens = self._context_tokens = self._queued_tokens = 0
        return left

    def release(self, responses: Iterable[int]) -> list[int]:
        """Give up those of `responses` that are here, queued or running; all else stays. Only between stretches."""
        self.progress()
        left = []
        for response in responses:
            if response in self.running:
                self._leave(response)
            elif response in self.waiting:
                self.waiting.remove(response)
                self._queued_tokens -= self._context(response)
                self._loaded.discard(response)
            else:
                continue
            left.append(response)
        return left

    def hasten(self, response: int) -> None:
        """A response of the queue is admitted next."""
        self.waiting.remove(response)
        self.waiting.appendleft(response)

    def _key(self, response: int) -> int:
        """What a response shares its prompt's KV by: its prompt, or nothing (its own number, negative)."""
        return response // self.batch.responses_per_prompt if self.prefix_caching else ~response

    def _admit(self, now_s: float) -> tuple[int, int, int]:
        """Move what fits from the queue into slots. Tokens to prefill; responses that then run and need none; their
        context."""
        batch, capacity, budget = self.batch, self.profile.data.kv_capacity_tokens, self.profile.data.max_batched_tokens
        prefill, decoding, context_tokens = 0, len(self.running), self._context_tokens
        while self.waiting and len(self.running) < self.slots and prefill + decoding < budget:
            response = self.waiting[0]
            prompt = response // batch.responses_per_prompt
            key, own, prompt_tokens = self._key(response), batch.generated[response], batch.prompt_tokens[prompt]
            shared = key in self._pins
            need = own + (0 if shared else prompt_tokens)
            if self.used_tokens + need + len(self.running) + 1 > capacity:
                break
            self.waiting.popleft()
            tokens = self._enter(response, key, shared)
            prefill += tokens
            if not tokens:
                decoding += 1
                context_tokens += prompt_tokens + own
            self.used_tokens += need
            self._context_tokens += prompt_tokens + own
            self._queued_tokens -= prompt_tokens + own
            end = self._iteration + batch.target[response] - own
            self.running[response] = end
            heappush(self._ends, (end, response))
            if batch.first_s[response] < 0:
                batch.first_s[response] = now_s
            self._trim_cache()
        return prefill, decoding, context_tokens

    def _enter(self, response: int, key: int, shared: bool) -> int:
        """Pin the prompt of a response that is admitted; tokens that must be computed for it."""
        own = self.batch.generated[response]
        prompt_tokens = self.batch.prompt_tokens[response // self.batch.responses_per_prompt]
        loaded = response in self._loaded
        self._loaded.discard(response)
        planned = None if loaded else self.first_tokens.get(response)
        self._pins[key] = self._pins.get(key, 0) + 1
        cached = key in self._cached
        if cached:
            self._cached_tokens -= self._cached.pop(key)
        first = 0
        if loaded or shared or cached:
            held = prompt_tokens + own if loaded else prompt_tokens
        elif planned is None or key in self._met:
            held = 0
        else:
            held, first = prompt_tokens - planned, planned
        tokens = self._uncached(prompt_tokens + own, held)
        if planned and not first and self.batch.first_s[response] < 0:  # what no cache saves, planned as well
            first = min(planned, tokens, self._uncached(prompt_tokens, prompt_tokens))
        self._met.add(key)
        self.prefilled_tokens += first
        self.recomputed_tokens += tokens - first
        return tokens

    def _uncached(self, tokens: int, held: int) -> int:
        """Tokens to compute of a context whose first `held` are there."""
        size = self.profile.data.kv_block_tokens
        most = tokens if size == 1 else (tokens - 1) // size * size
        return tokens - min(held // size * size, most)

    def _leave(self, response: int, *, keep: bool = True) -> None:
        """Take a response out of its slot; `keep` its prompt in the cache."""
        batch = self.batch
        end = self.running.pop(response)
        own = batch.target[response] - (end - self._iteration)
        prompt_tokens = batch.prompt_tokens[response // batch.responses_per_prompt]
        self._context_tokens -= prompt_tokens + own
        self.used_tokens -= own
        key = self._key(response)
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self.used_tokens -= prompt_tokens
            if keep and self.prefix_caching:
                self._cached[key] = prompt_tokens
                self._cached_tokens += prompt_tokens

    def _preempt(self) -> None:
        response, end = next(reversed(self.running.items()))
        assert len(self.running) > 1, "a single response outgrew the KV cache; plans are checked against this"
        self.batch.generated[response] = self.batch.target[response] - (end - self._iteration)
        self._leave(response, keep=False)
        self._drop_cache()
        self.waiting.appendleft(response)
        self._queued_tokens += self._context(response)
        self.preemptions += 1

    def _trim_cache(self) -> None:
        if self.used_tokens + self._cached_tokens > self.profile.data.kv_capacity_tokens:
            self._drop_cache()

    def _drop_cache(self) -> None:
        self._cached.clear()
        self._cached_tokens = 0

    def _next_end(self) -> int:
        while self.running.get(self._ends[0][1]) != self._ends[0][0]:
            heappop(self._ends)
        return self._ends[0][0]
