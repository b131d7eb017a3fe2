"""The real engine on CPUs. Every engine has a process of its own, forked from one that has imported vLLM."""

import importlib.util
import math
import multiprocessing as mp
import os
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine import StepEngine
from backends.engine_types import EngineConfig, EngineError, Finished, Request
from backends.environment import engine_env, require
from rlhfless.errors import InfeasibleError, InputError

MISSING = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
real = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'rlhfless[cpu]'")
pytestmark = pytest.mark.slow

WAIT_S = 120.0
"""After which a test gives up on an engine."""
EOS = 1
"""The tiny model's end token."""
PROMPTS = [[5, 6, 7, 8 + i, 20, 30, 40] * (9 + i) for i in range(6)]
"""63 to 98 tokens; no two share a block."""


def config(model: str, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "max_slots": 32,
        "kv_cache_bytes": 32 << 20,
        "block_size": 32,
        "max_batched_tokens": 4096,
        "prefix_caching": True,
    }
    return EngineConfig(**(values | changes))


# ---- processes: a function and its arguments go in, what it returns comes out


class Child:
    """A process that calls functions, with its engine as the first argument if it has one."""

    def __init__(self, built: EngineConfig | None = None) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.vllm_preload"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, built), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self._pipe.send((function, args))
        assert self._pipe.poll(WAIT_S), f"{function.__name__} does not end"
        good, result = self._pipe.recv()
        assert good, result
        return result

    def close(self) -> int | None:
        """End it and return its exit code."""
        self._pipe.close()
        self.process.join(WAIT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def _serve(pipe: Connection, built: EngineConfig | None) -> None:
    engine = StepEngine(built) if built else None
    first = (engine,) if engine else ()
    try:
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(*first, *args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        if engine:
            engine.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Child]]:
    """The tiny model's folder, and a process without an engine that has made it."""
    child = Child()
    try:
        yield child(_make, tmp_path_factory.mktemp("tiny") / "model"), child
    finally:
        child.close()


@pytest.fixture(scope="module")
def pair(model: tuple[str, Child]) -> Iterator[tuple[Child, Child]]:
    """Two engines of the same model."""
    children = (Child(config(model[0])), Child(config(model[0])))
    try:
        yield children
    finally:
        assert [child.close() for child in children] == [0, 0]


@pytest.fixture(scope="module")
def small(model: tuple[str, Child]) -> Iterator[Child]:
    """An engine with little KV and little work an iteration: it preempts, and prefills in pieces."""
    child = Child(config(model[0], kv_cache_bytes=3 << 20, max_batched_tokens=48, max_slots=8, max_model_len=300))
    try:
        yield child
    finally:
        assert child.close() == 0


def _make(folder: Path) -> str:
    from backends.tiny import make_tiny

    return str(make_tiny(folder, seed=1))


# ---- what runs beside an engine


def requests(n: int, tokens: int, temperature: float, *, force: bool = True, prompts: Any = PROMPTS) -> list[Request]:
    """n responses, those of a prompt with different seeds."""
    return [
        Request(
            response=number,
            token_ids=prompts[number % len(prompts)],
            max_tokens=tokens,
            temperature=temperature,
            seed=1000 + number,
            force_length=force,
        )
        for number in range(n)
    ]


def gather(engine: StepEngine, count: int) -> dict[int, Finished]:
    """Poll until `count` have finished; none may come twice."""
    ended: dict[int, Finished] = {}
    until = time.monotonic() + WAIT_S
    while len(ended) < count:
        assert time.monotonic() < until, f"{len(ended)} of {count} have finished"
        for one in engine.poll(1.0):
            assert one.response not in ended
            ended[one.response] = one
    return ended


def run(engine: StepEngine, wanted: list[Request]) -> dict[int, Finished]:
    engine.reset_prefix_cache()
    engine.submit(wanted)
    return gather(engine, len(wanted))


def run_alone(engine: StepEngine, wanted: list[Request]) -> dict[int, Finished]:
    return {one.response: run(engine, [one])[one.response] for one in wanted}


def run_and_cut(engine: StepEngine, wanted: list[Request], at: list[int]) -> Any:
    """Run; abort response i once it has at[i] tokens. Partials of those, and the others, finished."""
    engine.reset_prefix_cache()
    engine.submit(wanted)
    cut: dict[int, Any] = {}
    while len(cut) < len(at):
        ripe = [one for one, count in engine.progress().items() if one < len(at) and count >= at[one]]
        cut |= engine.abort(ripe)
    return cut, gather(engine, len(wanted) - len(cut))


def count(engine: StepEngine) -> Any:
    return engine.counters()


def continued(request: Request, tokens: tuple[int, ...]) -> Request:
    return Request(
        response=request.response,
        token_ids=[*request.token_ids, *tokens],
        generated=len(tokens),
        max_tokens=request.max_tokens - len(tokens),
        temperature=request.temperature,
        seed=request.seed,
        force_length=request.force_length,
    )


# ---- the model and its forward pass


def _reference(folder: str, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of transformers, stopping at the end token, and their log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.no_grad():
            while len(tokens) < count and EOS not in tokens:
                row = torch.log_softmax(lm(torch.tensor([[*prompt, *tokens]])).logits[0, -1], -1)
                tokens.append(int(row.argmax()))
                logprobs.append(float(row.max()))
        found.append((tokens, logprobs))
    return found


def _next_token(folder: str, prompt: list[int]) -> list[float]:
    """Logits after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: list[float] = lm(torch.tensor([prompt])).logits[0, -1].double().tolist()
    return logits


def _tiny_facts(folder: str, other: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from backends.tiny import CHARACTERS, make_tiny

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(CHARACTERS)["input_ids"]
    weights = [(Path(path) / "model.safetensors").read_bytes() for path in (folder, make_tiny(other, seed=1))]
    return {
        "ids": ids,
        "round": tokenizer.decode(ids) == CHARACTERS,
        "same": weights[0] == weights[1],
        "differs": (make_tiny(other / "b", seed=2) / "model.safetensors").read_bytes() != weights[0],
        "parameters": sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()),
        "eos": tokenizer.eos_token_id,
    }


@real
def test_tiny_model_is_the_same_for_a_seed_and_loads_as_any(model: tuple[str, Child], tmp_path: Path) -> None:
    facts = model[1](_tiny_facts, model[0], tmp_path / "again")
    assert facts["same"]
    assert facts["differs"]
    assert facts["round"]
    assert len(set(facts["ids"])) == len(facts["ids"])  # one token a character
    assert facts["eos"] == EOS
    assert 2.3e6 < facts["parameters"] < 2.5e6


@real
def test_greedy_equals_transformers(model: tuple[str, Child], pair: tuple[Child, Child]) -> None:
    prompts = [*PROMPTS, *([40 + i, 9, 9 + i] for i in range(14))]
    expected = model[1](_reference, model[0], prompts, 40)
    got = pair[0](run, requests(len(prompts), 40, 0.0, force=False, prompts=prompts))
    for number, (tokens, logprobs) in enumerate(expected):
        assert list(got[number].done.tokens) == tokens
        assert np.abs(np.array(got[number].done.logprobs) - logprobs).max() < 1e-3
        assert got[number].finish_reason == ("stop" if EOS in tokens else "length")
    assert {one.finish_reason for one in got.values()} == {"stop", "length"}
    assert max(len(set(tokens)) for tokens, _ in expected) > 10  # not one token over and over


# ---- moves


@real
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_a_response_that_moves_equals_one_that_stays(pair: tuple[Child, Child], temperature: float) -> None:
    here, there = pair
    wanted = requests(12, 90, temperature)
    whole = here(run, wanted)
    cut, stayed = here(run_and_cut, wanted, [3, 17, 30, 31, 50, 64])
    assert sorted([*cut, *stayed]) == list(range(12))
    assert len(cut) == 6
    before = there(count)
    rest = there(run, [continued(wanted[one], cut[one].tokens) for one in cut])
    for one, partial in cut.items():
        assert 0 < len(partial.tokens) < 90
        assert partial.tokens + rest[one].done.tokens == whole[one].done.tokens
        logprobs = np.array(partial.logprobs + rest[one].done.logprobs)
        assert np.abs(logprobs - whole[one].done.logprobs).max() < 1e-4
    assert all(stayed[one].done.tokens == whole[one].done.tokens for one in stayed)
    after = there(count)
    moved = sum(len(wanted[one].token_ids) + len(cut[one].tokens) for one in cut)
    assert after.prompt_tokens - before.prompt_tokens == moved
    assert after.continued_tokens - before.continued_tokens == after.computed_tokens - before.computed_tokens
    if temperature:
        assert whole[0].done.tokens != whole[6].done.tokens  # same prompt, other seed


@real
def test_a_response_does_not_depend_on_its_neighbours(pair: tuple[Child, Child]) -> None:
    """Greedy and sampled ones side by side, ending at different times, so that rows of the batch change places."""
    both = [*requests(9, 40, 0.0, force=False), *requests(18, 120, 1.0, force=False)[9:]]
    together, alone = pair[0](run, both), pair[1](run_alone, both)
    assert len({len(one.done.tokens) for one in together.values()}) > 5
    assert {n: one.done.tokens for n, one in together.items()} == {n: one.done.tokens for n, one in alone.items()}


@real
def test_preemption_and_prefill_in_pieces_change_nothing(pair: tuple[Child, Child], small: Child) -> None:
    wanted = requests(8, 150, 1.0)
    whole, squeezed = pair[0](run, wanted), small(run, wanted)
    assert {n: one.done.tokens for n, one in whole.items()} == {n: one.done.tokens for n, one in squeezed.items()}
    totals = small(count)
    assert totals.preemptions > 0
    assert totals.recomputed_tokens > 0
    assert totals.generated_tokens == 8 * 150
    assert totals.prompt_tokens == totals.cached_tokens + totals.external_tokens + totals.computed_tokens
    assert totals.prompt_tokens == sum(len(one.token_ids) for one in wanted)


# ---- sampling


@real
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_has_the_distribution_of_the_model(
    model: tuple[str, Child], pair: tuple[Child, Child], temperature: float
) -> None:
    draws = 3000
    logits = np.array(model[1](_next_token, model[0], PROMPTS[0])) / temperature
    expected = draws * np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    ended = pair[0](run, requests(draws, 1, temperature, prompts=PROMPTS[:1]))
    seen = np.bincount([one.done.tokens[0] for one in ended.values()], minlength=logits.size)
    common = expected >= 5
    table = np.array([(*seen[common], seen[~common].sum()), (*expected[common], expected[~common].sum())])
    degrees = int(common.sum())
    assert degrees > 5
    chi_square = ((table[0] - table[1]) ** 2 / table[1]).sum()
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # four standard deviations, with fixed seeds


def _noise(keys: list[tuple[int, int]], size: int) -> Any:
    import torch

    from backends.sampling import gumbel, stream_key

    return gumbel(torch.tensor([stream_key(*key) for key in keys]), size).numpy()


@real
def test_noise_is_gumbel_and_a_function_of_seed_and_position(model: tuple[str, Child]) -> None:
    keys = [(seed, position) for seed in (0, 1, -5, 2**63) for position in range(100)]
    noise = model[1](_noise, keys, 500)
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    ordered, n = np.sort(np.exp(-np.exp(-noise.ravel()))), noise.size
    assert np.abs(ordered - np.arange(1, n + 1) / n).max() < 2 / math.sqrt(n)  # Kolmogorov-Smirnov
    assert np.unique(noise).size == n
    for other in (noise[1:], noise[100:]):  # the next position, the next seed
        assert abs(np.corrcoef(noise[: len(other)].ravel(), other.ravel())[0, 1]) < 0.01
    assert (model[1](_noise, keys[::-1][:7], 200) == noise[::-1][:7, :200]).all()


def _bad_noise(engine: StepEngine) -> list[str]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    told = []
    for temperature, extra in ((1.0, {"noise_seed": 1, "noise_temperature": 1.0}), (0.0, {"noise_seed": 1})):
        try:
            engine._engine.add_request(
                "x", tokens_input([5]), SamplingParams(temperature=temperature, extra_args=extra)
            )
        except Exception as error:
            told.append(str(error))
    return told


@real
def test_noise_on_top_of_vllms_own_sampling_is_refused(pair: tuple[Child, Child]) -> None:
    told = pair[0](_bad_noise)
    assert len(told) == 2
    assert all("temperature" in message for message in told)


# ---- lengths and counters


@real
def test_force_length_gives_exactly_that_many_tokens(pair: tuple[Child, Child]) -> None:
    free = pair[0](run, requests(32, 200, 1.0, force=False))
    forced = pair[0](run, requests(32, 200, 1.0))
    assert all(len(one.done.tokens) == 200 and one.finish_reason == "length" for one in forced.values())
    early = [number for number, one in free.items() if one.finish_reason == "stop"]
    assert len(early) > 3
    assert len({len(free[number].done.tokens) for number in early}) > 3
    for number in early:
        tokens = free[number].done.tokens
        assert tokens.index(EOS) == len(tokens) - 1
        assert forced[number].done.tokens[: len(tokens)] == tokens
    for length in (1, 2):
        assert len(pair[0](run, requests(1, length, 1.0))[0].done.tokens) == length


@real
def test_samples_of_a_prompt_share_its_prefill(pair: tuple[Child, Child]) -> None:
    before = pair[0](count)
    ended = pair[0](run, requests(8, 3, 1.0, prompts=[PROMPTS[5]]))
    after = pair[0](count)
    prompt, shared = len(PROMPTS[5]), (len(PROMPTS[5]) - 1) // 32 * 32
    assert sorted(one.done.cached_tokens for one in ended.values()) == [0, *[shared] * 7]
    assert after.prompt_tokens - before.prompt_tokens == 8 * prompt
    assert after.cached_tokens - before.cached_tokens == 7 * shared
    assert after.computed_tokens - before.computed_tokens == 8 * prompt - 7 * shared
    assert after.generated_tokens - before.generated_tokens == 24
    assert after.iterations - before.iterations == 3
    assert (after.running, after.waiting, after.kv_blocks_used) == (0, 0, 0)
    assert after.headroom_tokens == after.kv_blocks * 32 > 0
    for one in ended.values():
        done = one.done
        assert done.admitted_s is not None
        assert done.admitted_s <= done.first_token_s < done.last_token_s


def _while_running(engine: StepEngine) -> dict[str, Any]:
    """What an engine says of 40 responses in 32 slots, and what it refuses meanwhile."""
    wanted = requests(40, 300, 0.0)
    engine.submit(wanted)
    while min(list(engine.progress().values())[:32]) < 5:
        time.sleep(0.01)
    totals, progress, held = engine.counters(), engine.progress(), engine.held_tokens()
    refused = []
    for attempt in (
        engine.reset_prefix_cache,
        lambda: engine.set_weight_version("2"),
        lambda: engine.submit([requests(1, 2, 0.0)[0]]),
    ):
        with pytest.raises(InputError) as caught:
            attempt()
        refused.append(str(caught.value))
    partials = engine.abort(range(50))
    return {
        "totals": totals,
        "progress": progress,
        "held": held,
        "refused": refused,
        "partials": partials,
        "prompts": sum(len(one.token_ids) for one in wanted),
        "after": (engine.progress(), engine.held_tokens(), engine.poll(0), engine.abort([3])),
    }


@real
def test_a_running_engine_says_where_it_stands(pair: tuple[Child, Child]) -> None:
    seen = pair[1](_while_running)
    totals = seen["totals"]
    assert (totals.running, totals.waiting) == (32, 8)
    assert 0 < totals.kv_blocks_used <= totals.kv_blocks
    assert seen["held"] >= seen["prompts"] + sum(seen["progress"].values())
    assert [list(seen["progress"].values())[32:], len(seen["progress"])] == [[0] * 8, 40]
    assert ["40 responses run" in line for line in seen["refused"]] == [True, True, False]
    assert "response 0 is already running" in seen["refused"][2]
    assert sorted(seen["partials"]) == list(range(40))
    for one, partial in seen["partials"].items():
        assert len(partial.tokens) == len(partial.logprobs) >= seen["progress"][one]
        assert (partial.first_token_s is None) == (not partial.tokens)
    assert seen["after"] == ({}, 0, [], {})


def _versions(engine: StepEngine) -> list[tuple[str, int]]:
    found = []
    engine.reset_prefix_cache()
    for version in ("7", "7", "8", "8", "7"):
        engine.set_weight_version(version)
        engine.submit(requests(1, 2, 0.0))
        ended = gather(engine, 1)[0]
        assert engine.weight_version == version
        found.append((ended.weight_version, ended.done.cached_tokens))
    return found


@real
def test_kv_is_never_shared_between_weights(pair: tuple[Child, Child]) -> None:
    assert pair[0](_versions) == [("7", 0), ("7", 32), ("8", 0), ("8", 32), ("7", 32)]


# ---- many callers


def _storm(engine: StepEngine, wanted: list[Request]) -> dict[int, tuple[int, ...]]:
    """Threads submit, abort and resubmit while others poll; the tokens with which each response has ended."""
    ended: dict[int, tuple[int, ...]] = {}
    done = {one.response: () for one in wanted}
    errors: list[BaseException] = []
    lock = threading.Lock()

    def mover(mine: list[Request], seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for one in mine:
                engine.submit([one])
            for _ in range(25):
                for number, partial in engine.abort(rng.choice(len(wanted), 6).tolist()).items():
                    with lock:
                        done[number] += partial.tokens
                        rest = continued(wanted[number], done[number])
                    engine.submit([rest])
        except BaseException as error:
            errors.append(error)

    def poller() -> None:
        try:
            while len(ended) < len(wanted) and not errors:
                for one in engine.poll(0.5):
                    with lock:
                        assert one.response not in ended, "ended twice"
                        ended[one.response] = done[one.response] + one.done.tokens
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=mover, args=(wanted[i::3], i)) for i in range(3)]
    threads += [threading.Thread(target=poller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    assert engine.progress() == {}
    return ended


@real
def test_many_callers_lose_nothing(pair: tuple[Child, Child]) -> None:
    wanted = requests(60, 60, 1.0, force=False)
    ended = pair[0](_storm, wanted)
    whole = pair[1](run, wanted)
    assert ended == {number: one.done.tokens for number, one in whole.items()}


# ---- errors and ends


def _break(folder: str) -> dict[str, Any]:
    """An engine whose step raises in the middle: what callers get, what is left."""
    threads = set(threading.enumerate())
    engine = StepEngine(config(folder))
    step = engine._engine.step
    told: list[str] = []

    def failing() -> Any:
        if len(engine._live) > 1:
            return step()
        caller.start()
        while not engine._calls:  # a call that is left while the step fails must not wait for ever
            time.sleep(0.001)
        raise RuntimeError("the device\nis gone")

    def call() -> None:
        try:
            engine.abort([9])
        except EngineError as error:
            told.append(str(error))

    caller = threading.Thread(target=call, daemon=True)

    engine._engine.step = failing
    long = Request(response=9, token_ids=[5, 6], max_tokens=400, temperature=0, force_length=True)
    engine.submit([*requests(3, 4, 0.0), long])
    until = time.monotonic() + WAIT_S
    polled: list[int] = []
    failed = False
    while not failed and time.monotonic() < until:
        try:
            polled += [one.response for one in engine.poll(1.0)]
        except EngineError as error:
            told.append(str(error))
            failed = True
    caller.join(WAIT_S / 4)
    for attempt in (
        engine.counters,
        engine.progress,
        engine.held_tokens,
        engine.reset_prefix_cache,
        lambda: engine.submit(requests(1, 1, 0.0)),
        lambda: engine.abort([9]),
        lambda: engine.collective("list_loras"),
    ):
        try:
            attempt()
        except EngineError as error:
            told.append(str(error))
    saved = {number: len(partial.tokens) for number, partial in engine.salvage().items()}
    engine.close()
    engine.close()
    with pytest.raises(EngineError):
        engine.poll(0)
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    return {"polled": sorted(polled), "told": told, "saved": saved, "left": left}


@real
def test_an_error_in_the_engines_thread_reaches_every_caller(model: tuple[str, Child]) -> None:
    child = Child()
    try:
        seen = child(_break, model[0])
    finally:
        code = child.close()
    assert seen["polled"] == [0, 1, 2]  # what had ended before is handed over first
    assert seen["told"] == [f"engine of {model[0]} failed: RuntimeError: the device is gone"] * 9
    assert seen["saved"] == {9: 4}
    assert seen["left"] == []
    assert code == 0


def _close_in_mid_step(folder: str) -> tuple[list[str], list[str]]:
    threads = set(threading.enumerate())
    with StepEngine(config(folder, prefix_caching=False)) as engine:
        told = []
        outside = Request(response=1, token_ids=[5, 10**6], max_tokens=1, temperature=0)
        for attempt in (
            lambda: engine.collective("no_such_method"),
            lambda: engine.submit([*requests(1, 1, 0.0), outside]),  # all or none
        ):
            try:
                attempt()
            except (EngineError, InputError) as error:
                told.append(str(error))
        assert engine.progress() == {}
        engine.submit(requests(20, 300, 1.0))
        while not engine.counters().iterations:
            time.sleep(0.01)
    try:
        engine.submit(requests(1, 1, 1.0))
    except EngineError as error:
        told.append(str(error))
    return told, [thread.name for thread in threading.enumerate() if thread not in threads]


@real
def test_close_leaves_nothing_behind(model: tuple[str, Child]) -> None:
    child = Child()
    try:
        told, left = child(_close_in_mid_step, model[0])
    finally:
        code = child.close()
    assert "no_such_method failed: " in told[0]
    assert "response 1: " in told[1]
    assert "vocabulary" in told[1]
    assert told[2] == f"engine of {model[0]} is closed"
    assert left == []
    assert code == 0


def _unbuildable(folder: str) -> str:
    try:
        StepEngine(config(folder, kv_cache_bytes=1 << 20))
    except EngineError as error:
        return str(error)
    return "built"


@real
def test_an_engine_that_cannot_be_built_says_why(model: tuple[str, Child]) -> None:
    child = Child()
    try:
        told = child(_unbuildable, model[0])
    finally:
        child.close()
    assert told.startswith(f"engine of {model[0]} cannot be built: ")
    assert "KV cache" in told
    assert "\n" not in told


# ---- without vLLM


def test_bad_configurations_and_requests_name_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    good = config(str(tmp_path))
    for changes, match in (
        ({"max_slots": 0}, "max_slots 0"),
        ({"max_batched_tokens": 8}, "max_batched_tokens 8"),
        ({"kv_cache_bytes": None}, "kv_cache_bytes"),
        ({"model": str(tmp_path / "none")}, r"none is not a folder"),
    ):
        with pytest.raises(InputError, match=match):
            config(**{"model": str(tmp_path), **changes})
    fine: dict[str, Any] = {"response": 4, "token_ids": [1, 2], "max_tokens": 3, "temperature": 0.0}
    Request(**fine).check(good)
    for changes, match in (
        ({"token_ids": []}, "0 token_ids"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"generated": 2}, "generated 2"),
        ({"generated": -1}, "generated -1"),
        ({"temperature": -0.1}, r"temperature -0\.1"),
        ({"temperature": math.nan}, "temperature nan"),
    ):
        with pytest.raises(InputError, match=f"response 4: .*{match}"):
            Request(**fine | changes).check(good)
    with pytest.raises(InfeasibleError, match="max_model_len 512"):
        Request(**fine | {"max_tokens": 511}).check(good)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require("json")
    for name in ("vllm", "ray", "redis"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InputError, match=rf"{name} is not installed: pip install 'rlhfless\[cpu\]'.*\[gpu\]"):
            require(name)


def test_the_environment_of_gpu_engines_has_nothing_of_cpus() -> None:
    cpu, cuda = engine_env("cpu"), engine_env("cuda")
    assert cuda.items() < cpu.items()
    assert {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE"} <= cpu.keys() - cuda.keys()


@pytest.mark.parametrize(("body", "state"), [("raise RuntimeError('no operator')", "None"), ("", "module")])
def test_only_packages_that_cannot_be_imported_are_stubbed(tmp_path: Path, body: str, state: str) -> None:
    """In a process of its own: torchvision is broken or not, torchaudio is not there at all."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "ops.py").write_text("")
    (tmp_path / "torchvision" / "__init__.py").write_text(f"import torchvision.ops\n{body}\n")
    code = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from backends.environment import ENGINE_ENV, prepare
        prepare("cpu")
        prepare("cpu")
        assert ENGINE_ENV.items() <= os.environ.items()
        assert "vllm" not in sys.modules
        print(type(sys.modules["torchvision"]).__name__.removesuffix("Type"), "torchvision.ops" in sys.modules)
    """
    env = {name: value for name, value in os.environ.items() if name != "RLHFLESS_BROKEN_PACKAGES"}  # as found so far
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert told.stdout.split() == [state, str(state == "module")]
