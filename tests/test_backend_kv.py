"""KV transfer without an engine: the block format, settings, and the store over a real Redis that fails."""

import dataclasses
import importlib.util
import math
import os
import shutil
import signal
import time
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import kv_transfer
from backends.kv_block import HEADER_BYTES, BadBlock, layout_digest, pack, unpack
from backends.kv_transfer import (
    KVCounters,
    RedisBlocks,
    RedisSettings,
    count,
    counters,
    current_version,
    nixl_config,
    redis_config,
    set_namespace,
    side_by_side,
    since,
    transfer_or_recompute,
)
from backends.redis_server import RedisServer, connect
from rlhfless.errors import InputError

LAYOUT = layout_digest("a model", 32)
URL = "redis://:secret@127.0.0.1:1"

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="needs redis-server and the package redis",
)


# ---- one block as bytes


@given(key=st.binary(max_size=80), kv=st.binary(max_size=300))
def test_a_block_comes_back(key: bytes, kv: bytes) -> None:
    value = pack(key, LAYOUT, kv)
    assert len(value) == HEADER_BYTES + len(kv)
    assert bytes(unpack(key, LAYOUT, value)) == kv


@given(key=st.binary(max_size=40), kv=st.binary(max_size=100), data=st.data())
def test_any_damage_is_seen(key: bytes, kv: bytes, data: st.DataObject) -> None:
    value = pack(key, LAYOUT, kv)
    at = data.draw(st.integers(0, len(value) - 1))
    flipped = bytearray(value)
    flipped[at] ^= data.draw(st.integers(1, 255))
    damaged = [bytes(flipped), value[:at], value + b"\0", value[at:] + value[:at] + b"x"]
    for each in damaged:
        with pytest.raises(BadBlock):
            unpack(key, LAYOUT, each)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_safely(value: bytes) -> None:
    with pytest.raises(BadBlock):
        unpack(b"key", LAYOUT, value)


def test_a_block_of_another_key_or_layout_is_not_ours() -> None:
    value = pack(b"key", LAYOUT, b"kv")
    with pytest.raises(BadBlock, match="changed"):
        unpack(b"other", LAYOUT, value)
    with pytest.raises(BadBlock, match="layout"):
        unpack(b"key", layout_digest("a model", 16), value)


def test_the_format_stays() -> None:
    """Engines of two releases may share a Redis: a change of format needs a new number."""
    head = bytes.fromhex("524c4b5601000000000102030405060708090a0b0c0d0e0f0200000000000000")
    check = zlib.crc32(b"k" + head + b"kv").to_bytes(4, "little")
    assert pack(b"k", bytes(range(16)), b"kv") == head + check + b"kv"


# ---- settings, and the choice


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "redis://10.0.0.9:6379"}, "needs a password"),
        ({"namespace": "a:b"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"version": "1 2"}, "weight version"),
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"budget_s": math.inf}, "budget_s"),
        ({"retry_s": "soon"}, "retry_s"),
        ({"colour": "red"}, "unknown setting colour"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        redis_config(**{"url": URL, "namespace": "run", **change})
    assert "secret" not in str(caught.value)


def test_redis_config_is_what_the_connector_reads() -> None:
    config = redis_config(URL, "run-7", version="3", ttl_s=60.0)
    assert config["kv_connector_module_path"] == "backends.redis_kv"
    assert (config["kv_connector"], config["kv_role"]) == ("RedisKVConnector", "kv_both")
    settings = RedisSettings(**config["kv_connector_extra_config"])
    assert settings == RedisSettings(url=URL, namespace="run-7", version="3", ttl_s=60.0)
    assert "secret" not in repr(settings)
    assert settings.key("3", b"\x01\x02") == b"rlkv:run-7:3:0/1:\x01\x02"


def test_a_part_is_found_by_its_number_among_how_many() -> None:
    settings = RedisSettings(url=URL, namespace="run-7")
    hashes = [bytes([number]) * 32 for number in range(2)]
    keys = [
        settings.key(version, each, part=part, parts=parts)
        for version in ("3", "30")
        for each in hashes
        for parts in (1, 2, 4, 12)
        for part in range(parts)
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * (1 + 2 + 4 + 12)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nixl_config(device: Any) -> None:
    assert nixl_config(device) == {
        "kv_connector": "NixlKVConnector",
        "kv_connector_module_path": "backends.nixl_kv",
        "kv_role": "kv_both",
        "kv_buffer_device": device,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 604800},
    }


def test_set_namespace_holds_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "_PROCESS", kv_transfer._Process())
    assert current_version("configured") == "configured"
    set_namespace(12)
    assert current_version("configured") == "12"
    with pytest.raises(InputError, match="weight version"):
        set_namespace("a:b")
    assert current_version("configured") == "12"


def test_the_sooner_way_is_taken() -> None:
    choose = partial(transfer_or_recompute, bandwidth_bytes_per_s=1e9, latency_s=0.5)
    assert choose(kv_bytes=1e9, prefill_s=1.6) == "transfer"
    assert choose(kv_bytes=1e9, prefill_s=1.5) == "recompute", "a tie"
    assert choose(kv_bytes=1e9, prefill_s=1.4) == "recompute"
    for wrong in ({"kv_bytes": -1}, {"prefill_s": math.nan}, {"latency_s": -1}, {"bandwidth_bytes_per_s": 0}):
        numbers = {"kv_bytes": 1.0, "bandwidth_bytes_per_s": 1.0, "latency_s": 0.0, "prefill_s": 1.0, **wrong}
        with pytest.raises(InputError, match="transfer or recompute"):
            transfer_or_recompute(**numbers)


# ---- the store


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(memory_bytes=256 << 20) as running:
        yield running


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def store_at(
    url: str, *, clock: Any = time.perf_counter, part_bytes: int = 64, parts: int = 1, **settings: Any
) -> RedisBlocks:
    """Blocks that wait for a server on a busy machine, unless the test is about waiting."""
    asked = RedisSettings(url=url, namespace="unit", **({"timeout_s": 10.0, "budget_s": 20.0} | settings))
    return RedisBlocks(asked, layout=LAYOUT, part_bytes=part_bytes, parts=parts, clock=clock)


def rows(first: int, end: int, *, part_bytes: int = 64) -> npt.NDArray[np.uint8]:
    return np.arange(first, end, dtype=np.uint8)[:, None].repeat(part_bytes, axis=1)


class Since:
    """What the counters have gained since this was made."""

    def __init__(self) -> None:
        self.start = counters()

    def __getattr__(self, name: str) -> float:
        gained: float = getattr(counters(), name) - getattr(self.start, name)
        return gained


def keys_of(count: int, name: str = "k") -> list[bytes]:
    return [f"rlkv:unit:{name}:{number}".encode() for number in range(count)]


@needs_redis
@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20])
def test_saved_blocks_are_fetched_in_any_chunks(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(kv_transfer, "CHUNK_BYTES", chunk_bytes)
    store, keys, since = store_at(server.url, ttl_s=30.0), keys_of(10, f"chunks{chunk_bytes}"), Since()
    store.save(keys, rows)
    assert [bytes(kv) for kv in store.fetch(keys)] == [bytes([number]) * 64 for number in range(10)]
    assert store.fetch([]) == []
    assert (since.saved_blocks, since.loaded_blocks, since.missing_blocks) == (10, 10, 0)
    assert since.saved_bytes == since.loaded_bytes == 10 * (64 + HEADER_BYTES)
    assert since.save_s > 0
    assert since.load_s > 0
    with connect(server.url) as client:
        assert all(0 < client.pttl(key) <= 30_000 for key in keys)
    store.close()


@needs_redis
def test_fetch_ends_at_the_first_block_that_is_not_right(server: RedisServer) -> None:
    store, keys = store_at(server.url), keys_of(6, "hole")
    store.save(keys, rows)
    with connect(server.url) as client:
        client.delete(keys[4])
        since = Since()
        assert len(store.fetch(keys)) == 4
        assert (since.missing_blocks, since.corrupt_blocks) == (1, 0)
        client.set(keys[2], client.get(keys[1]))
        assert len(store.fetch(keys)) == 2
        client.set(keys[0], pack(keys[0], LAYOUT, bytes(63)))  # whole, but not of this engine's size
        assert store.fetch(keys) == []
        assert since.corrupt_blocks == 2
    store.close()


@needs_redis
@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 20])
def test_a_block_is_there_when_all_of_its_parts_are(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(kv_transfer, "CHUNK_BYTES", chunk_bytes)
    settings, ranks, blocks = RedisSettings(url=server.url, namespace="parts"), 3, 5
    hashes = [bytes([chunk_bytes % 251, block]) for block in range(blocks)]
    of_rank = [[settings.key("0", each, part=rank, parts=ranks) for each in hashes] for rank in range(ranks)]
    whole = [key for block in zip(*of_rank, strict=True) for key in block]
    for rank, keys in enumerate(of_rank):  # each from a process of its own, otherwise
        store_at(server.url).save(keys, lambda first, end, rank=rank: rows(10 * rank + first, 10 * rank + end))  # type: ignore[misc]
    store = store_at(server.url, parts=ranks)
    since = Since()
    assert [kv[0] for kv in store.fetch(whole)] == [10 * rank + block for block in range(blocks) for rank in range(3)]
    assert (since.loaded_blocks, since.loaded_bytes) == (blocks, blocks * ranks * (64 + HEADER_BYTES))
    with connect(server.url) as client:
        client.set(of_rank[1][3], client.get(of_rank[2][3]))
        since = Since()
        assert len(store.fetch(whole)) == 3 * ranks, "another rank's part is not a part"
        assert (since.loaded_blocks, since.corrupt_blocks, since.missing_blocks) == (3, 1, 0)
        client.delete(of_rank[2][2])
        since = Since()
        assert len(store.fetch(whole)) == 2 * ranks
        assert (since.loaded_blocks, since.corrupt_blocks, since.missing_blocks) == (2, 0, 1)
        assert since.loaded_bytes == 2 * ranks * (64 + HEADER_BYTES), "of whole blocks"
    store.close()


@needs_redis
@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_saved_by_engines_of_one_size_are_found_by_those_of_another(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, ranks: int
) -> None:
    """Four parts; each rank saves its share of them for all blocks, and counts blocks."""
    monkeypatch.setattr(kv_transfer, "CHUNK_BYTES", chunk_bytes)
    settings, parts, blocks = RedisSettings(url=server.url, namespace="sizes"), 4, 5
    hashes = [bytes([chunk_bytes % 251, ranks, block]) for block in range(blocks)]

    def keys_of_parts(which: range) -> list[bytes]:
        return [settings.key("0", each, part=part, parts=parts) for each in hashes for part in which]

    for rank in range(ranks):
        own = range(rank * parts // ranks, (rank + 1) * parts // ranks)
        values = np.array([10 * block + part for block in range(blocks) for part in own], dtype=np.uint8)
        asked: list[tuple[int, int]] = []

        def read(
            first: int, end: int, values: npt.NDArray[np.uint8] = values, asked: list[tuple[int, int]] = asked
        ) -> npt.NDArray[np.uint8]:
            asked.append((first, end))
            return values[first:end, None].repeat(64, axis=1)

        since = Since()
        store_at(server.url, parts=len(own)).save(keys_of_parts(own), read)
        assert since.saved_blocks == blocks
        assert since.saved_bytes == blocks * len(own) * (64 + HEADER_BYTES)
        assert all(bound % len(own) == 0 for pair in asked for bound in pair), "whole blocks are read"
    found = store_at(server.url, parts=parts).fetch(keys_of_parts(range(parts)))
    assert [kv[0] for kv in found] == [10 * block + part for block in range(blocks) for part in range(parts)]


counts = st.builds(
    KVCounters,
    **{each.name: st.integers(0, 99) for each in dataclasses.fields(KVCounters)},
)


@given(counts, counts, counts)
def test_ranks_side_by_side_count_as_one(a: KVCounters, b: KVCounters, c: KVCounters) -> None:
    both = side_by_side(a, b)
    assert both == side_by_side(b, a)
    assert side_by_side(both, c) == side_by_side(a, side_by_side(b, c))
    assert both.saved_bytes == a.saved_bytes + b.saved_bytes
    assert both.failures == a.failures + b.failures
    assert both.saved_blocks == min(a.saved_blocks, b.saved_blocks), "a block without a part is of no use"
    assert both.refused_blocks == max(a.refused_blocks, b.refused_blocks)
    assert both.save_s == max(a.save_s, b.save_s), "they save at the same time"


def test_what_ranks_have_done_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "_PROCESS", kv_transfer._Process())
    done = KVCounters(saved_blocks=3, saved_bytes=300, save_s=0.5, failures=1)
    count(done)
    before = counters()
    assert before == done
    count(done)
    assert since(before) == done


@needs_redis
def test_a_dead_server_costs_one_failure_then_rest_then_is_found_again() -> None:
    clock = Clock()
    with RedisServer() as first:
        store, keys, since = store_at(first.url, clock=clock, retry_s=5.0), keys_of(3), Since()
        store.save(keys, rows)
        os.kill(first.pid, signal.SIGKILL)
        assert store.fetch(keys) == []
        assert (since.failures, since.skipped_blocks) == (1, 3)
        read: list[tuple[int, int]] = []

        def reading(first: int, end: int) -> npt.NDArray[np.uint8]:
            read.append((first, end))
            return rows(first, end)

        clock.now_s += 4.9
        store.save(keys, reading)
        assert (since.failures, since.skipped_blocks, read) == (1, 6, []), "not even copied while it rests"
        clock.now_s += 0.2
        store.save(keys, reading)
        assert since.failures == 2
        store.close()
    # the same address with a server behind it, whose password is another
    with RedisServer() as second:
        port = second.url.rpartition(":")[2]
        store, since = store_at(f"redis://:wrong@127.0.0.1:{port}", clock=clock), Since()
        assert store.fetch(keys) == []
        assert since.failures == 1
        with connect(second.url) as client:
            client.config_set("requirepass", "wrong")
            clock.now_s += 5.1
            store.save(keys, rows)
            assert len(store.fetch(keys)) == 3
        store.close()


@needs_redis
def test_a_server_that_hangs_is_waited_for_once(server: RedisServer) -> None:
    store, keys, since = store_at(server.url, timeout_s=0.1, retry_s=60.0), keys_of(3, "hang"), Since()
    store.save(keys, rows)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            assert store.fetch(keys) == []
            store.save(keys, rows)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert (since.failures, since.saved_blocks, since.skipped_blocks) == (1, 3, 120)
    store.close()


@needs_redis
def test_the_budget_of_a_step_is_kept(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "CHUNK_BYTES", 64)
    clock = Clock()
    store, keys, since = store_at(server.url, clock=clock, budget_s=2.0), keys_of(10, "budget"), Since()

    def slow(first: int, end: int) -> npt.NDArray[np.uint8]:
        clock.now_s += 0.9
        return rows(first, end)

    store.save(keys, slow)
    assert (since.saved_blocks, since.skipped_blocks, since.failures) == (3, 7, 0)
    store.close()


@needs_redis
def test_a_full_server_drops_old_blocks_and_never_run_state() -> None:
    part_bytes, limit = 64 << 10, 6 << 20
    with RedisServer(memory_bytes=limit) as small, connect(small.url) as client:
        client.set("rlhfless:checkpoint", bytes(100_000))
        store, keys, since = store_at(small.url, part_bytes=part_bytes), keys_of(200), Since()
        for at in range(0, 200, 10):  # as steps do
            store.save(keys[at : at + 10], partial(rows, part_bytes=part_bytes))
        assert (since.saved_blocks, since.refused_blocks, since.failures) == (200, 0, 0)
        assert client.info("memory")["used_memory"] < 1.5 * limit
        assert 0 < len(list(client.scan_iter("rlkv:*", count=1000))) < 100
        assert len(store.fetch(keys[-1:])) == 1
        assert len(store.fetch(keys)) < 100  # the oldest go first, but Redis only samples for them
        assert client.strlen("rlhfless:checkpoint") == 100_000
        store.close()


@needs_redis
def test_a_server_that_refuses_is_left_alone_for_a_while() -> None:
    part_bytes = 64 << 10
    clock = Clock()
    read = partial(rows, part_bytes=part_bytes)
    with RedisServer(memory_bytes=4 << 20) as small, connect(small.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        store, keys, since = store_at(small.url, clock=clock, part_bytes=part_bytes), keys_of(100), Since()
        store.save(keys, read)
        assert since.refused_blocks > 0
        assert since.saved_blocks + since.refused_blocks == 100
        store.save(keys[:5], read)
        assert since.skipped_blocks == 5
        assert len(store.fetch(keys[:1])) == 1, "what it has can still be fetched"
        client.flushall()
        clock.now_s += 5.1
        store.save(keys[:5], read)
        assert len(store.fetch(keys[:5])) == 5
        store.close()
