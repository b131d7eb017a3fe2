"""The real engine on CPUs: its tokens, its moves, its sampling, its counters."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.engine import StepEngine
from backends.engine_types import Request
from rlhfless.errors import InputError
from tests.step_engines import (
    EOS,
    PROMPTS,
    WAIT_S,
    Child,
    config,
    continued,
    count,
    gather,
    real,
    reference,
    requests,
    run,
    run_alone,
    run_and_cut,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[tuple[Child, Child]]:
    """Two engines of the same model."""
    children = (Child(config(tiny_model)), Child(config(tiny_model)))
    try:
        yield children
    finally:
        assert [child.close() for child in children] == [0, 0]


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Child]:
    """An engine with little KV and little work an iteration: it preempts, and prefills in pieces."""
    child = Child(config(tiny_model, kv_cache_bytes=3 << 20, max_batched_tokens=48, max_slots=8, max_model_len=300))
    try:
        yield child
    finally:
        assert child.close() == 0


def _next_token(folder: Path, prompt: list[int]) -> list[float]:
    """Logits after the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: list[float] = lm(torch.tensor([prompt])).logits[0, -1].double().tolist()
    return logits


def _tiny_facts(folder: Path, other: Path) -> dict[str, Any]:
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
def test_tiny_model_is_the_same_for_a_seed_and_loads_as_any(beside: Child, tiny_model: Path, tmp_path: Path) -> None:
    facts = beside(_tiny_facts, tiny_model, tmp_path / "again")
    assert facts["same"]
    assert facts["differs"]
    assert facts["round"]
    assert len(set(facts["ids"])) == len(facts["ids"])  # one token a character
    assert facts["eos"] == EOS
    assert 2.3e6 < facts["parameters"] < 2.5e6


@real
def test_greedy_equals_transformers(beside: Child, tiny_model: Path, pair: tuple[Child, Child]) -> None:
    prompts = [*PROMPTS, *([40 + i, 9, 9 + i] for i in range(14))]
    expected = beside(reference, tiny_model, prompts, 40)
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


def _rearranged(engine: StepEngine, wanted: list[Request]) -> Any:
    """Two slots. Once two have begun, one of them and one that waits are stopped, and others go first."""
    engine.reset_prefix_cache()
    engine.set_slots(2)
    engine.submit(wanted)
    while min(list(engine.progress().values())[:2]) < 3:
        time.sleep(0.001)
    queue = engine.queue()
    partials = engine.abort([0, 9], first=[11, 4, 0, 99])
    ended = gather(engine, len(wanted) - 2)
    engine.set_slots(32)
    return queue, partials, ended


@real
def test_some_are_stopped_and_others_go_first_while_the_rest_goes_on(pair: tuple[Child, Child]) -> None:
    wanted = requests(12, 40, 1.0)
    whole = pair[0](run, wanted)
    queue, partials, ended = pair[0](_rearranged, wanted)
    assert queue == list(range(2, 12))
    assert 3 <= len(partials[0].tokens) < 40
    assert partials[0].tokens == whole[0].done.tokens[: len(partials[0].tokens)]
    assert partials[9].tokens == ()
    assert sorted([*partials, *ended]) == list(range(12))
    order = sorted(ended, key=lambda number: ended[number].done.admitted_s)
    assert order == [1, 4, 11, 2, 3, 5, 6, 7, 8, 10]
    assert {n: one.done.tokens for n, one in ended.items()} == {n: whole[n].done.tokens for n in ended}
    starts, ends = (sorted(getattr(one.done, name) for one in ended.values()) for name in TIMES)
    assert all(start_s >= end_s for start_s, end_s in zip(starts[2:], ends, strict=False)), "two at once"


TIMES = ("admitted_s", "last_token_s")


# ---- sampling


@real
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_has_the_distribution_of_the_model(
    beside: Child, tiny_model: Path, pair: tuple[Child, Child], temperature: float
) -> None:
    draws = 3000
    logits = np.array(beside(_next_token, tiny_model, PROMPTS[0])) / temperature
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
def test_noise_is_gumbel_and_a_function_of_seed_and_position(beside: Child) -> None:
    keys = [(seed, position) for seed in (0, 1, -5, 2**63) for position in range(100)]
    noise = beside(_noise, keys, 500)
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    ordered, n = np.sort(np.exp(-np.exp(-noise.ravel()))), noise.size
    assert np.abs(ordered - np.arange(1, n + 1) / n).max() < 2 / math.sqrt(n)  # Kolmogorov-Smirnov
    assert np.unique(noise).size == n
    for other in (noise[1:], noise[100:]):  # the next position, the next seed
        assert abs(np.corrcoef(noise[: len(other)].ravel(), other.ravel())[0, 1]) < 0.01
    assert (beside(_noise, keys[::-1][:7], 200) == noise[::-1][:7, :200]).all()


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
