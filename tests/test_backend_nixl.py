"""KV by NIXL between real engines, from memory to memory: whatever is read, the tokens are those of an engine alone."""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.engine import StepEngine
from backends.engine_types import Request
from backends.kv_transfer import nixl_config
from tests.kv_engines import BLOCK, ids
from tests.step_engines import MISSING, WAIT_S, Child, config, continued, count, gather

LACKING = [*MISSING, *(["nixl"] if importlib.util.find_spec("nixl") is None else [])]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: pip install 'rlhfless[cpu,nixl]'"),
]

PROMPTS = [ids(seed, 150 + 19 * seed) for seed in range(4)]
TOKENS = 40


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Iterator[Child]:
    yield from child(tiny_model, kv=False)


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[tuple[Child, Child]]:
    with contextmanager(child)(tiny_model) as a, contextmanager(child)(tiny_model) as b:
        yield a, b


@pytest.fixture
def cold(pair: tuple[Child, Child]) -> tuple[Child, Child]:
    for engine in pair:
        engine(forget)
    return pair


def child(model: Path, *, kv: bool = True) -> Iterator[Child]:
    made = Child(config(model, kv_connector=nixl_config("cpu") if kv else None))
    yield made
    made.close()


# ---- in an engine's process


def run(engine: StepEngine, wanted: list[Request]) -> Any:
    engine.submit(wanted)
    return gather(engine, len(wanted))


def forget(engine: StepEngine) -> None:
    engine.reset_prefix_cache()


def kept(engine: StepEngine) -> int:
    return engine.kept()


def name_weights(engine: StepEngine, version: str) -> None:
    engine.set_weight_version(version)


def cut(engine: StepEngine, wanted: list[Request], at: int) -> Any:
    """Abort all once each has `at` tokens."""
    engine.submit(wanted)
    while min(engine.progress().values()) < at:
        time.sleep(0.001)
    return engine.abort([one.response for one in wanted])


def cut_first(engine: StepEngine, wanted: list[Request]) -> Any:
    """Abort the first as soon as it is submitted."""
    engine.submit(wanted)
    engine.abort([wanted[0].response])
    return gather(engine, len(wanted) - 1)


# ---- outside


def responses(prompts: list[list[int]], n: int = 1, temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            response=number, token_ids=prompt, max_tokens=TOKENS, temperature=temperature, seed=number,
            force_length=True,
        )
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(n))
    ]  # fmt: skip


def handles(engine: Child, prompts: list[list[int]]) -> list[Any]:
    """Have `prompts` computed, and handed over."""
    made = engine(run, [replace(one, max_tokens=1, hand_over=True) for one in responses(prompts)])
    return [made[number].done.kv for number in range(len(prompts))]


def same(alone: Child, wanted: list[Request], made: Any) -> None:
    """Whether these tokens are those of an engine alone."""
    expected = alone(run, wanted)
    assert {number: one.done.tokens for number, one in made.items()} == {
        number: expected[number].done.tokens for number in made
    }


class Gained:
    """What an engine's counters have gained."""

    def __init__(self, engine: Child) -> None:
        self._engine, self._before = engine, engine(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine(count), name) - getattr(self._before, name)


def assert_read(engine: Child) -> None:
    """Nothing of an engine waits for readers, soon."""
    until_s = time.monotonic() + WAIT_S
    while engine(kept):
        assert time.monotonic() < until_s, "KV is still kept"
        time.sleep(0.01)


def whole(tokens: int) -> int:
    """Tokens of the whole blocks that are read of so many: one at least is computed."""
    return (tokens - 1) // BLOCK * BLOCK


def test_prefill_here_and_decode_there(cold: tuple[Child, Child], alone: Child) -> None:
    """A prompt's three responses read its KV once."""
    a, b = cold
    at_a, at_b = Gained(a), Gained(b)
    kv = handles(a, PROMPTS)
    assert a(kept) == len(PROMPTS)
    assert at_a.computed_tokens == sum(map(len, PROMPTS))
    wanted = responses(PROMPTS, n=3)
    made = b(run, [replace(one, kv=kv[one.response // 3]) for one in wanted])
    same(alone, wanted, made)
    read = [whole(len(prompt)) for prompt in PROMPTS]
    assert at_b.external_tokens == sum(read)
    assert at_b.cached_tokens == 2 * sum(read)
    assert at_b.computed_tokens == 3 * (sum(map(len, PROMPTS)) - sum(read))
    assert [made[3 * number].done.cached_tokens for number in range(len(PROMPTS))] == read
    assert_read(a)


def test_a_handle_may_cover_a_part_of_the_prompt(cold: tuple[Child, Child], alone: Child) -> None:
    a, b = cold
    at_b, shared = Gained(b), PROMPTS[3][: 3 * BLOCK + 5]
    (kv,) = handles(a, [shared])
    wanted = responses([shared + PROMPTS[0], shared + PROMPTS[1]])
    same(alone, wanted, b(run, [replace(one, kv=kv) for one in wanted]))
    assert at_b.external_tokens == 3 * BLOCK
    assert_read(a)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cut_response_goes_on_with_its_own_kv(cold: tuple[Child, Child], alone: Child, temperature: float) -> None:
    a, b = cold
    wanted = responses(PROMPTS, temperature=temperature)
    parts = a(cut, wanted, 20)
    at_b = Gained(b)
    rest = [replace(continued(one, parts[one.response].tokens), kv=parts[one.response].kv) for one in wanted]
    assert all(one.kv is not None for one in rest)
    made = b(run, rest)
    expected = alone(run, wanted)
    for one in wanted:
        assert parts[one.response].tokens + made[one.response].done.tokens == expected[one.response].done.tokens
    assert at_b.external_tokens == sum(whole(len(one.token_ids)) for one in rest)
    assert at_b.moved_kv_bytes > 0
    assert_read(a)


def test_kv_of_other_weights_is_never_read(cold: tuple[Child, Child], alone: Child) -> None:
    a, b = cold
    kv, at_b, wanted = handles(a, PROMPTS), Gained(b), responses(PROMPTS)
    b(name_weights, "2")
    same(alone, wanted, b(run, [replace(one, kv=kv[one.response]) for one in wanted]))
    assert (at_b.external_tokens, a(kept)) == (0, len(PROMPTS))
    b(forget)
    b(name_weights, "1")
    a(name_weights, "1")
    same(alone, wanted, b(run, [replace(one, kv=kv[one.response]) for one in wanted]))
    assert at_b.external_tokens == 0, "KV that is older than the name of the weights"
    a(forget)
    assert a(kept) == 0
    for engine in cold:
        engine(name_weights, "default")


def test_a_reader_that_is_aborted_leaves_the_kv_to_the_next(cold: tuple[Child, Child], alone: Child) -> None:
    a, b = cold
    kv, wanted = handles(a, PROMPTS[:1]), responses(PROMPTS[:1], n=4)
    same(alone, wanted, b(cut_first, [replace(one, kv=kv[0]) for one in wanted]))
    assert_read(a)


def test_no_more_is_kept_than_leaves_room_to_compute(cold: tuple[Child, Child], alone: Child) -> None:
    a, b = cold
    prompts = [ids(100 + number, 10 * BLOCK) for number in range(20)]
    blocks = a(count).kv_blocks
    kv = handles(a, prompts)
    assert 10 * a(kept) <= blocks / 2 < 10 * (a(kept) + 1)
    assert sum(one is not None for one in kv) == a(kept)
    wanted = responses(prompts[:3] + prompts[-3:])
    at_b = Gained(b)
    same(alone, wanted, b(run, [replace(one, kv=kv[(*range(3), *range(-3, 0))[one.response]]) for one in wanted]))
    assert at_b.external_tokens == 3 * whole(10 * BLOCK)
    a(forget)
    assert a(kept) == 0


def test_what_cannot_be_read_is_computed(cold: tuple[Child, Child], alone: Child, tiny_model: Path) -> None:
    """Another engine at the address, and one that was killed: before it is known to the reader, and afterwards."""
    a, b = cold
    (kv,) = handles(a, PROMPTS[:1])
    wanted, at_b = responses(PROMPTS[:1], n=2), Gained(b)
    same(alone, wanted, b(run, [replace(one, kv={**kv, "remote_engine_id": "another"}) for one in wanted]))
    assert at_b.external_tokens == 0
    dies = Child(config(tiny_model, kv_connector=nixl_config("cpu")))
    kv = handles(dies, PROMPTS)
    first = responses(PROMPTS[:1])
    b(forget)
    same(alone, first, b(run, [replace(first[0], kv=kv[0])]))
    assert at_b.external_tokens == whole(len(PROMPTS[0]))
    assert dies.process.pid is not None
    os.kill(dies.process.pid, signal.SIGKILL)
    dies.process.join()
    for reader in (b, a):
        reader(forget)
        at, wanted = Gained(reader), responses(PROMPTS[1:], n=2)
        same(alone, wanted, reader(run, [replace(one, kv=kv[1 + one.response // 2]) for one in wanted]))
        assert at.external_tokens == 0
        assert at.computed_tokens == sum(2 * len(prompt) - whole(len(prompt)) for prompt in PROMPTS[1:])
