"""KV over Redis between engines of two tensor parallel ranks, a process each: tokens are those of engines of one."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from backends.environment import engine_env
from backends.kv_block import HEADER_BYTES
from backends.kv_transfer import redis_config
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
    tokens,
)
from tests.ray_steps import assert_gone

MISSING = [name for name in ("redis", "vllm", "torch", "transformers") if importlib.util.find_spec(name) is None]
MISSING += [] if shutil.which("redis-server") else ["redis-server"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'rlhfless[cpu]'"),
]

RANKS = 2
RUN = "ranks"
SCRIPT_S = 420.0
"""Longest wait for a script (chosen: some ten times what it takes; machines are shared)."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(memory_bytes=256 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def single(tiny_model: Path, server: RedisServer) -> Iterator[Engine]:
    """An engine of one rank, in the same run."""
    with Engine(tiny_model, redis_config(server.url, RUN)) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(single: Engine) -> dict[str, list[int]]:
    """What it makes of WHOLE, by itself."""
    single.set_version(0)
    return tokens(single.generate(WHOLE))


@pytest.fixture(scope="module")
def twins(tiny_model: Path, server: RedisServer) -> Iterator[tuple[Engine, Engine]]:
    start = partial(Engine, tiny_model, redis_config(server.url, RUN), tensor_parallel_size=RANKS)
    a, b = start(), start()  # side by side: most of a start is imports in the ranks
    with a, b:
        yield a, b


_versions = iter(range(1, 1000))


@pytest.fixture
def cold(twins: tuple[Engine, Engine], single: Engine) -> tuple[Engine, Engine, int]:
    """Two engines that share a namespace with nothing in it, and its weight version."""
    version = next(_versions)
    for engine in (*twins, single):
        engine.cold()
        engine.set_version(version)
    return (*twins, version)


def test_prefill_here_and_decode_there(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer
) -> None:
    a, b, version = cold
    at_a, at_b = Gained(a), Gained(b)
    a.generate(PREFILL)
    saved, names = at_a(), blocks_in(server, RUN, version)
    assert saved.saved_blocks == PROMPT_BLOCKS
    assert len(names) == HEADS * PROMPT_BLOCKS
    with connect(server.url) as client:
        assert saved.saved_bytes == sum(map(client.strlen, names))
        assert all(0 < client.ttl(name) <= 3600 for name in names)
    answers = b.generate(WHOLE)
    assert tokens(answers) == plain
    for name, prompt in PROMPTS.items():
        assert answers[name].cached == (len(prompt) - 1) // BLOCK * BLOCK
    gained = at_b()
    assert (gained.loaded_blocks, gained.loaded_bytes) == (PROMPT_BLOCKS, saved.saved_bytes)
    assert (gained.missing_blocks, gained.corrupt_blocks, gained.failures) == (0, 0, 0)
    assert saved.save_s > 0 < gained.load_s


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


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("damage", ["changed", "missing", "of the other rank"])
def test_a_block_with_one_bad_part_is_computed_again_and_mended(
    cold: tuple[Engine, Engine, int], plain: dict[str, list[int]], server: RedisServer, rank: int, damage: str
) -> None:
    a, b, version = cold
    a.generate(PREFILL)
    before = f"rlkv:{RUN}:{version}:".encode()
    with connect(server.url) as client:
        whole = {name: client.get(name) for name in blocks_in(server, RUN, version)}
        for name, value in whole.items():
            of, block_hash = name.removeprefix(before).split(b":", 1)
            if of != f"{rank}/{RANKS}".encode():
                continue
            if damage == "changed":
                client.set(name, value[:HEADER_BYTES] + bytes([value[HEADER_BYTES] ^ 1]) + value[HEADER_BYTES + 1 :])
            elif damage == "missing":
                client.delete(name)
            else:
                client.set(name, whole[before + f"{1 - rank}/{RANKS}:".encode() + block_hash])
        at_b = Gained(b)
        assert tokens(b.generate(WHOLE)) == plain
        gained = at_b()
        assert gained.loaded_blocks == gained.loaded_bytes == 0
        if damage == "missing":
            assert gained.missing_blocks > 0 == gained.corrupt_blocks
        else:
            assert (gained.missing_blocks, gained.corrupt_blocks) == (0, len(PROMPTS)), "looked at once a request"
        assert whole.keys() <= set(blocks_in(server, RUN, version)), "and saved again"
    a.cold()
    at_a = Gained(a)
    a.generate(PREFILL)
    assert at_a().loaded_blocks == PROMPT_BLOCKS


@pytest.mark.parametrize("widens", [True, False])
def test_a_half_done_response_moves_to_an_engine_of_another_size(
    cold: tuple[Engine, Engine, int], single: Engine, plain: dict[str, list[int]], widens: bool
) -> None:
    wide, _, _ = cold
    source, target = (single, wide) if widens else (wide, single)
    at_source, at_target = Gained(source), Gained(target)
    half = tokens(source.generate(WHOLE, stop_after=45))
    rest: Requests = {name: (prompt + half[name], NEW_TOKENS - len(half[name])) for name, prompt in PROMPTS.items()}
    answers = target.generate(rest)
    assert {name: half[name] + answers[name].tokens for name in PROMPTS} == plain
    for name, prompt in PROMPTS.items():
        made = len(prompt) + len(half[name]) - 1
        assert answers[name].cached == made // BLOCK * BLOCK > len(prompt) // BLOCK * BLOCK
    saved, loaded = at_source(), at_target()
    assert saved.saved_blocks == loaded.loaded_blocks > PROMPT_BLOCKS
    assert saved.saved_bytes == loaded.loaded_bytes
    assert (loaded.missing_blocks, loaded.corrupt_blocks) == (0, 0)


SCRIPT = """
import json, multiprocessing, os, sys
import psutil
from backends import kv_transfer
from backends.engine import StepEngine
from backends.engine_types import EngineConfig, EngineError, Request

model, url, ranks, prompts = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
engine = StepEngine(EngineConfig(
    model=model, dtype="float32", device="cpu", tp=ranks, max_model_len=1024, max_slots=8, kv_cache_bytes=16 << 20,
    block_size=32, max_batched_tokens=2048, prefix_caching=True,
    kv_connector=kv_transfer.redis_config(url, f"step{ranks}"),
))
ranks_of = multiprocessing.active_children()
family = [os.getpid(), *(one.pid for one in ranks_of)]

def submit(begun):
    engine.submit([
        Request(response=i, token_ids=prompt + begun[i], generated=len(begun[i]), max_tokens=60 - len(begun[i]),
                temperature=float(i % 2), seed=i, force_length=True)
        for i, prompt in enumerate(prompts)
    ])

def run(begun=None):
    begun = begun or [[] for _ in prompts]
    submit(begun)
    done = {}
    while len(done) < len(prompts):
        done |= {one.response: list(one.done.tokens) for one in engine.poll(60.0)}
    return [begun[i] + done[i] for i in range(len(prompts))]

def renew(version):
    engine.collective("reload_weights", weights_path=model)
    engine.reset_prefix_cache()
    kv_transfer.set_namespace(version)
    engine.set_weight_version(version)

sockets = [each for pid in family for each in psutil.Process(pid).net_connections() if each.status == "LISTEN"]
result = {"family": family, "listening": sorted({each.laddr.ip for each in sockets})}
renew("1")
result["first"] = run()
renew("2")
result["reloaded"] = run()
engine.reset_prefix_cache()
result["continued"] = run([made[:40] for made in result["first"]])
counts = engine.counters()
result["moved_kv_bytes"], result["continued_tokens"] = counts.moved_kv_bytes, counts.continued_tokens
result["loaded_bytes"] = kv_transfer.counters().loaded_bytes
if ranks > 1:  # one of them dies
    submit([[] for _ in prompts])
    while not any(engine.progress().values()):
        engine.poll(0.01)
    ranks_of[-1].kill()
    try:
        while True:
            engine.poll(60.0)
    except EngineError as error:
        result["error"] = str(error)
        result["left"] = [list(each.tokens) for _, each in sorted(engine.salvage().items())]
engine.close()
print(json.dumps(result), flush=True)
"""


def test_an_engine_of_two_ranks_is_one_to_its_user_and_fails_when_a_rank_does(
    tiny_model: Path, server: RedisServer
) -> None:
    prompts = json.dumps(list(PROMPTS.values()))
    running = {
        ranks: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tiny_model), server.url, str(ranks), prompts],
            env={**engine_env("cpu"), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for ranks in (1, RANKS)  # side by side: most of it is imports
    }
    results: dict[int, dict[str, Any]] = {}
    try:
        for ranks, process in running.items():
            out, err = process.communicate(timeout=SCRIPT_S)
            assert process.returncode == 0, err.decode()[-3000:]
            results[ranks] = json.loads(out.splitlines()[-1])
            assert_gone(results[ranks]["family"])
    finally:
        for process in running.values():
            process.kill()
    one, two = results[1], results[RANKS]
    assert (len(one["family"]), len(two["family"])) == (1, 1 + RANKS)
    assert set(two["listening"]) <= {"127.0.0.1"}
    assert two["first"] == one["first"], "greedy and sampled"
    for result in (one, two):
        assert result["reloaded"] == result["continued"] == result["first"]
        assert 0 < result["moved_kv_bytes"] == pytest.approx(result["loaded_bytes"])
        assert 0 < result["continued_tokens"] <= len(PROMPTS) * BLOCK
    assert "failed" in two["error"]
    for left, made in zip(two["left"], two["first"], strict=True):
        assert left == made[: len(left)]
    assert two["moved_kv_bytes"] == pytest.approx(one["moved_kv_bytes"])


def test_no_rank_outlives_its_engine(twins: tuple[Engine, Engine]) -> None:
    """The last: these engines are of no further use."""
    for engine, while_it_runs in zip(twins, (True, False), strict=True):
        pids = engine.pids()
        assert len(pids) == 1 + RANKS
        if while_it_runs:
            with pytest.raises(EOFError):
                engine.generate(WHOLE, at=(5, partial(os.kill, pids[0], signal.SIGKILL)))
        else:
            os.kill(pids[0], signal.SIGKILL)
        assert_gone(pids)
