"""Whether the KV of a response that has moved is fetched or computed again, from what an engine has seen of both.

No profile: how long a block takes to load is read off the connector's own counters, how long a token takes to compute
off the engine's own steps. What has not been seen yet is found out by fetching.
"""

from backends import kv_transfer
from backends.engine_types import EngineCounters
from backends.kv_transfer import KVCounters, transfer_or_recompute

PREFILL_TOKENS = 64
"""Tokens before first tokens at or above which a step is a measure of prefill (chosen: below, the fixed part of a step
is most of it)."""
PREFILL_SHARE = 0.9
"""Share of such tokens among all of a step's, at least (chosen: the rest decodes, at another speed)."""


class KVRates:
    """What one engine, alone in its process, has seen of fetching and computing."""

    def __init__(self) -> None:
        self._seen = kv_transfer.counters()
        self._blocks = self._bytes = self._load_s = 0.0
        self._tokens = self._prefill_s = 0.0

    def note(self, step_s: float, before: EngineCounters, after: EngineCounters) -> None:
        """A step that took `step_s` from counters `before` to `after`; what it fetched is asked of the connector."""
        last, self._seen = self._seen, kv_transfer.counters()
        load_s = self._seen.load_s - last.load_s
        if self._seen.loaded_blocks > last.loaded_blocks:  # asking in vain says nothing of how fast blocks come
            self._blocks += self._seen.loaded_blocks - last.loaded_blocks
            self._bytes += self._seen.loaded_bytes - last.loaded_bytes
            self._load_s += load_s
        tokens = after.computed_tokens - before.computed_tokens
        decoded = after.generated_tokens - before.generated_tokens
        if tokens >= PREFILL_TOKENS and tokens >= PREFILL_SHARE * (tokens + decoded):
            self._tokens += tokens
            self._prefill_s += max(0.0, step_s - load_s)

    def forget_loads(self) -> None:
        """Measure the way to the store anew, so that one slow step does not turn an engine away from it for good."""
        self._blocks = self._bytes = self._load_s = 0.0

    def recompute(self, context_tokens: int, block_tokens: int) -> bool:
        """Whether a context is sooner computed than its whole blocks are fetched; False until both are measured."""
        blocks = (context_tokens - 1) // block_tokens
        if not (blocks and self._blocks and self._load_s and self._tokens):
            return False
        way = transfer_or_recompute(
            kv_bytes=blocks * self._bytes / self._blocks,
            bandwidth_bytes_per_s=self._bytes / self._load_s,
            latency_s=0.0,  # in the measured bandwidth
            prefill_s=blocks * block_tokens * self._prefill_s / self._tokens,
        )
        return way == "recompute"

    def bytes_of(self, tokens: int, block_tokens: int) -> float:
        """Bytes over the link of the blocks that hold `tokens`, headers included."""
        total: KVCounters = self._seen
        if not tokens or not total.loaded_blocks:
            return 0.0
        return tokens / block_tokens * total.loaded_bytes / total.loaded_blocks
