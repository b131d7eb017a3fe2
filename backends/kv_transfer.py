"""KV from one engine to another: a store of KV blocks, what vLLM is told to use it, and when not to (RLHFless §4.2).

Two ways, each a dictionary of arguments for vLLM's `KVTransferConfig`: `redis_config` for our connector over Redis
(`backends.redis_kv`), and `nixl_config` for vLLM's own NIXL connector (`backends.nixl_kv`): from one engine's memory
into another's, without a server between.

Over Redis a block is found by what it holds: its key is the run, the weight version and vLLM's hash of all tokens up
to its end. Nobody hands anything over: an engine saves each block in the step that fills it, prompt and response alike,
and another engine that is given the same tokens finds them. A block that is gone, cut short, changed or of another
layout is computed again, as is everything while Redis is away; neither gives a wrong answer or stops a step.

A block is kept in parts, values of their own whose keys say which part of how many: one for each KV head of the model,
over all layers. A tensor parallel rank saves those of its heads and loads them, so engines of any size find what those
of any other have saved. A block is there when all of its parts are.

This module loads without vLLM and torch.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from operator import add
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from backends.environment import Device
from backends.kv_block import HEADER_BYTES, BadBlock, pack, unpack
from backends.redis_server import check_url, connect
from rlhfless.errors import InputError

DEFAULT_TTL_S = 3600.0
"""Seconds that a saved block lives (chosen: a few of the longest steps; blocks of old weights are of no use)."""
DEFAULT_TIMEOUT_S = 0.5
"""Seconds that one command to Redis may take (chosen: a chunk takes some 10 ms on 10 Gbit/s)."""
DEFAULT_BUDGET_S = 2.0
"""Seconds that one step may spend on saving, and one request on loading (chosen); the rest is computed again."""
DEFAULT_RETRY_S = 5.0
"""Seconds after a failure before Redis is asked again (chosen: a dead one costs a tenth of the time)."""
CHUNK_BYTES = 8 << 20
"""KV in one command (chosen: large enough that round trips do not count, small enough to fit the timeout)."""

NIXL = "NixlKVConnector"
"""vLLM's NIXL connector as `backends.nixl_kv` has it."""
LEASE_S = 7 * 24 * 3600
"""Seconds after which vLLM frees KV that nobody has read, read or not (chosen: longer than any step, since a reader
that comes later would read what is there by then; `StepEngine` frees it when a step is over)."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
"""Run ids and weight versions: what keys can be split at again."""


# ---- what has happened, for the whole process


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCounters:
    """What the stores of an engine have done since its process started. Blocks are whole ones, of all ranks."""

    saved_blocks: int = 0
    """Blocks that Redis has taken."""
    saved_bytes: int = 0
    """Their bytes, headers included."""
    save_s: float = 0.0
    """Seconds spent on saving, copies included."""
    loaded_blocks: int = 0
    """Blocks that came back whole."""
    loaded_bytes: int = 0
    """Their bytes, headers included."""
    load_s: float = 0.0
    """Seconds spent on asking and checking, in vain or not."""
    missing_blocks: int = 0
    """Blocks asked for that were not there."""
    corrupt_blocks: int = 0
    """Blocks that came back but failed the check: cut short, changed, or of another layout."""
    refused_blocks: int = 0
    """Blocks that Redis answered with an error, for instance because it is full."""
    skipped_blocks: int = 0
    """Blocks not tried: Redis was away a moment ago, or the step's budget was spent."""
    failures: int = 0
    """Commands that failed: no connection, no answer in time, wrong password."""


@dataclass(slots=True)
class _Process:
    """vLLM makes the connector itself, deep inside the engine: the process is where it and its user can meet."""

    counts: dict[str, float] = field(default_factory=dict)
    version: str | None = None


_PROCESS = _Process()


def counters() -> KVCounters:
    """A snapshot. Of this process, and of its engine's ranks in others: with the scheduler elsewhere, ask there."""
    return KVCounters(**_PROCESS.counts)  # type: ignore[arg-type]  # counts are whole, seconds are not


def since(before: KVCounters) -> KVCounters:
    """What has been counted after the snapshot `before`."""
    now = counters()
    return KVCounters(**{name: getattr(now, name) - getattr(before, name) for name in _COUNTS})


def side_by_side(a: KVCounters, b: KVCounters) -> KVCounters:
    """What two ranks have done with their parts of the same blocks at the same time, counted in blocks.

    A block is saved where both have saved it, and in trouble where either is; bytes and failures add up.
    """
    return KVCounters(**{name: _COUNTS[name](getattr(a, name), getattr(b, name)) for name in _COUNTS})


def count(gained: KVCounters) -> None:
    """Add what ranks in other processes have done."""
    _count(**asdict(gained))


_FEWEST = ("saved_blocks", "loaded_blocks")
_SUM = ("saved_bytes", "loaded_bytes", "failures")
_COUNTS: dict[str, Callable[[Any, Any], Any]] = {
    each.name: min if each.name in _FEWEST else add if each.name in _SUM else max for each in fields(KVCounters)
}
"""How each counter of two ranks becomes one."""


def _count(**amounts: float) -> None:
    for name, amount in amounts.items():
        _PROCESS.counts[name] = _PROCESS.counts.get(name, 0) + amount


def set_namespace(version: str | int) -> None:
    """From now on this process saves and loads KV of weight version `version`, whatever its config said.

    Call it between steps, once the new weights are in and the engine's own prefix cache is reset. Requests admitted
    before are saved no more: their KV is of two versions. Raises InputError for a version that cannot be in a key.
    """
    _PROCESS.version = _name("weight version", str(version))


def current_version(configured: str) -> str:
    """The weight version that `set_namespace` was last given, else the one that the config names."""
    return _PROCESS.version if _PROCESS.version is not None else configured


# ---- the store


class BlockStore(Protocol):
    """Where blocks are kept. Nothing that befalls a store is raised: what it cannot give is computed again."""

    def fetch(self, keys: Sequence[bytes]) -> list[memoryview]:
        """KV of the first `keys`, up to the first block of which a part is not there or not right: KV is used from the
        left only."""
        ...

    def save(self, keys: Sequence[bytes], read: Callable[[int, int], npt.NDArray[np.uint8]]) -> None:
        """Keep parts of blocks; `read(i, j)` gives the KV of keys[i:j], whole blocks, as uint8[j - i, part bytes]."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """What the connector is told. Raises InputError for a value out of range or an url that `check_url` refuses."""

    url: str = field(repr=False)
    """Address with the password."""
    namespace: str
    """Run id: runs do not see each other's KV."""
    version: str = "0"
    """Weight version to begin with, see `set_namespace`."""
    ttl_s: float = DEFAULT_TTL_S
    """Seconds that a block lives."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds that one command may take."""
    budget_s: float = DEFAULT_BUDGET_S
    """Seconds that a step's saving, or a request's loading, may take; plus at most one timeout."""
    retry_s: float = DEFAULT_RETRY_S
    """Seconds of rest after a failure."""

    def __post_init__(self) -> None:
        check_url(self.url)
        _name("namespace", self.namespace)
        _name("weight version", self.version)
        for name in ("ttl_s", "timeout_s", "budget_s", "retry_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0.001 <= value < math.inf):
                raise InputError(f"KV over Redis: {name} {value} must be at least 0.001 seconds and finite")

    def key(self, version: str, block_hash: bytes, *, part: int = 0, parts: int = 1) -> bytes:
        """Where Redis keeps `part` of `parts` of the block with vLLM's hash `block_hash`, computed with weights
        `version`."""
        return f"rlkv:{self.namespace}:{version}:{part}/{parts}:".encode() + block_hash


class RedisBlocks:
    """Blocks in Redis. After a failure it rests for `retry_s`, so a dead server costs one timeout, not one a step.

    How much is kept is up to the server (maxmemory). With `volatile-lru`, as `RedisServer` sets it, a full server drops
    the blocks longest unused; one that refuses instead is left alone for `retry_s` too.
    """

    def __init__(
        self,
        settings: RedisSettings,
        *,
        layout: bytes,
        part_bytes: int,
        parts: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Values hold `part_bytes` of KV each; those of the `parts` of a block that are asked for here come one after
        the other."""
        from redis.exceptions import RedisError

        self._settings, self._layout, self._clock = settings, layout, clock
        self._part_bytes, self._parts = part_bytes, parts
        self._client = connect(settings.url, timeout_s=settings.timeout_s)
        self._failures = (RedisError, OSError)
        self._chunk = max(1, CHUNK_BYTES // (part_bytes * parts)) * parts
        self._rest_until_s = self._full_until_s = -math.inf

    def fetch(self, keys: Sequence[bytes]) -> list[memoryview]:
        """See `BlockStore`."""
        started_s, found = self._clock(), list[memoryview]()
        for at in range(0, len(keys), self._chunk):
            asked = keys[at : at + self._chunk]
            values = self._try(partial(self._client.mget, asked))
            if values is None or self._clock() - started_s > self._settings.budget_s:
                _count(skipped_blocks=(len(keys) - at) // self._parts)
                break
            good = self._leading(asked, values)
            found += good
            if len(good) < len(asked):
                break
        blocks = len(found) // self._parts
        del found[blocks * self._parts :]
        _count(loaded_blocks=blocks, loaded_bytes=sum(map(len, found)) + HEADER_BYTES * len(found),
               load_s=self._clock() - started_s)  # fmt: skip
        return found

    def save(self, keys: Sequence[bytes], read: Callable[[int, int], npt.NDArray[np.uint8]]) -> None:
        """See `BlockStore`."""
        started_s = self._clock()
        for at in range(0, len(keys), self._chunk):
            now_s, end = self._clock(), min(at + self._chunk, len(keys))
            tired = now_s - started_s > self._settings.budget_s or now_s < max(self._full_until_s, self._rest_until_s)
            if tired or not self._save_chunk(keys[at:end], read(at, end)):
                _count(skipped_blocks=(len(keys) - at) // self._parts)
                break
        _count(save_s=self._clock() - started_s)

    def close(self) -> None:
        """See `BlockStore`."""
        self._client.close()

    def _leading(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> list[memoryview]:
        found: list[memoryview] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                _count(missing_blocks=len({at // self._parts for at, each in enumerate(values) if each is None}))
                break
            try:
                kv = unpack(key, self._layout, value)
                if len(kv) != self._part_bytes:
                    raise BadBlock("of another size")
            except BadBlock:
                _count(corrupt_blocks=1)
                break
            found.append(kv)
        return found

    def _save_chunk(self, keys: Sequence[bytes], rows: npt.NDArray[np.uint8]) -> bool:
        """Whether Redis has answered, be it with a refusal."""
        from redis.exceptions import ResponseError

        values = [pack(key, self._layout, memoryview(row)) for key, row in zip(keys, rows, strict=True)]
        commands = self._client.pipeline(transaction=False)
        for key, value in zip(keys, values, strict=True):
            commands.set(key, value, px=max(1, round(self._settings.ttl_s * 1000)))
        answers = self._try(partial(commands.execute, raise_on_error=False))
        if answers is None:
            return False
        taken = [answer is True for answer in answers]
        blocks = sum(all(taken[first : first + self._parts]) for first in range(0, len(taken), self._parts))
        saved_bytes = sum(len(value) for value, kept in zip(values, taken, strict=True) if kept)
        _count(saved_blocks=blocks, saved_bytes=saved_bytes, refused_blocks=len(values) // self._parts - blocks)
        if any(isinstance(answer, ResponseError) for answer in answers):
            self._full_until_s = self._clock() + self._settings.retry_s
        return True

    def _try(self, command: Callable[[], Any]) -> Any:
        """What `command` gives; None while Redis rests or where it fails."""
        if self._clock() < self._rest_until_s:
            return None
        try:
            return command()
        except self._failures:
            _count(failures=1)
            self._rest_until_s = self._clock() + self._settings.retry_s
            self._client.connection_pool.disconnect()  # an answer that comes late must not meet the next question
            return None


# ---- what vLLM is told


def redis_config(url: str, namespace: str, **settings: Any) -> dict[str, Any]:
    """Arguments of `vllm.config.KVTransferConfig` for our connector; `settings` are the fields of `RedisSettings`.

    Engines that share KV need the same model, dtype, block size and `prefix_caching_hash_algo`: sha256, vLLM's default,
    or sha256_cbor; both give the same hashes in every process as long as PYTHONHASHSEED is unset or the same in all.
    The dictionary holds the password: do not print it. Raises InputError for settings that cannot be.
    """
    unknown = settings.keys() - RedisSettings.__dataclass_fields__.keys()
    if unknown:
        raise InputError(f"KV over Redis: unknown setting {sorted(unknown)[0]}, known: {', '.join(_SETTINGS)}")
    checked = RedisSettings(url=url, namespace=namespace, **settings)
    return {
        "kv_connector": "RedisKVConnector",
        "kv_connector_module_path": "backends.redis_kv",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": asdict(checked),
    }


_SETTINGS = tuple(RedisSettings.__dataclass_fields__)


def nixl_config(device: Device) -> dict[str, Any]:
    """Arguments of `vllm.config.KVTransferConfig` for KV from the memory of one engine into another's, `device`'s own.

    Engines find each other at the address that VLLM_NIXL_SIDE_CHANNEL_HOST names in their environment, by default
    loopback; a port is picked. They need the same vLLM, model, dtype and block size, and the package nixl, whose own
    thread keeps a processor core busy in every engine, idle or not (measured, nixl 1.5.1).
    """
    return {
        "kv_connector": NIXL,
        "kv_connector_module_path": "backends.nixl_kv",
        "kv_role": "kv_both",
        "kv_buffer_device": device,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }


def transfer_or_recompute(
    *, kv_bytes: float, bandwidth_bytes_per_s: float, latency_s: float, prefill_s: float
) -> Literal["transfer", "recompute"]:
    """The sooner way to have a response's KV on another actor; computing wins a tie, since it holds up no link.

    `prefill_s` is the target's time for the tokens that the KV stands for. Raises InputError for a negative or missing
    number.
    """
    numbers = {"kv_bytes": kv_bytes, "latency_s": latency_s, "prefill_s": prefill_s}
    for name, value in numbers.items():
        if not value >= 0:
            raise InputError(f"transfer or recompute: {name} {value} must be at least 0")
    if not bandwidth_bytes_per_s > 0:
        raise InputError(f"transfer or recompute: bandwidth {bandwidth_bytes_per_s} bytes/s must be above 0")
    return "transfer" if latency_s + kv_bytes / bandwidth_bytes_per_s < prefill_s else "recompute"


def _name(what: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise InputError(f"KV over Redis: {what} {value!r} must be 1 to 100 letters, digits, '.', '_' or '-'")
    return value
