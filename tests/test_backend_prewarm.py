"""Asking for processes ahead, resting between steps, and whether moved KV is fetched or computed again."""

import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import engine as engine_module
from backends import kv_transfer
from backends.engine import StepEngine
from backends.engine_types import EngineConfig, EngineCounters, Request
from backends.kv_rates import PREFILL_TOKENS, KVRates
from backends.kv_transfer import redis_config, transfer_or_recompute
from backends.prewarm import Prewarming, delay_s, guess
from backends.redis_server import RedisServer
from backends.vllm_actor import VllmActor
from rlhfless.errors import InputError
from rlhfless.types.plan import Plan, Prewarm
from tests import step_engines
from tests.ray_steps import plan, real, workload

LONG_S = 1e6
"""Further ahead than any test lasts."""


def asking(start: str, *waits_s: float, **changes: Any) -> Plan:
    """A plan of three actors, the first of them on the learner's GPU, that asks for decode processes ahead."""
    made = plan("dp", workload(0), actors=3, start=start)
    waits = [Prewarm(function="decode", ready_after_s=wait_s) for wait_s in waits_s]
    others = [Prewarm(function=name, ready_after_s=0.0) for name in ("prefill", "learner", "reward")]
    return replace(made, prewarm=(*waits, *others), **changes)


# ---- what is asked for, and when


def test_what_has_decoded_is_asked_for_but_never_on_the_learners_gpus() -> None:
    made = asking("prewarmed", 4.0)
    assert made.placement.learner == (0,)
    assert set(made.placement.decode) == {(0,), (1,), (2,)}
    assert set(guess(made)) == {(4.0, (1,)), (4.0, (2,))}
    wide = replace(made.placement, learner=(0, 1))
    assert guess(replace(made, placement=wide)) == ((4.0, (2,)),)


def test_cold_and_reserved_plans_ask_for_nothing() -> None:
    assert guess(asking("cold", 4.0)) == ()
    assert guess(asking("prewarmed", 4.0, hosting="colocated")) == ()
    assert guess(asking("prewarmed")) == ()


@given(ready_after_s=st.floats(0, 1e4), startup_s=st.none() | st.floats(0, 1e4))
def test_a_process_is_ready_when_it_should_be_or_as_soon_as_it_can(
    ready_after_s: float, startup_s: float | None
) -> None:
    asked_s = delay_s(ready_after_s, startup_s)
    assert asked_s >= 0
    if startup_s is None:
        assert asked_s == 0
    else:
        assert asked_s + startup_s == pytest.approx(max(ready_after_s, startup_s))


class Pool:
    """The part of a cluster that is asked."""

    def __init__(self, startup_s: float | None) -> None:
        self.startup_s = startup_s
        self.asked: list[tuple[tuple[int, ...], bool]] = []
        self.changed = threading.Condition()

    def ahead(self, gpus: tuple[int, ...], engine: object, *, new: bool) -> None:
        with self.changed:
            self.asked.append((gpus, new))
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 60)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayError=OSError))


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(("start", "new"), [("prewarmed", True), ("warm", False)])
def test_what_is_due_while_the_learner_works_is_asked_for_and_nothing_else(start: str, new: bool) -> None:
    pool = Pool(startup_s=5.0)
    made = asking(start, 5.0, LONG_S)
    with Prewarming(pool, made, None):  # type: ignore[arg-type]
        pool.wait(2)
    assert sorted(pool.asked) == [((1,), new), ((2,), new)]
    late = Pool(startup_s=5.0)
    with Prewarming(late, asking(start, LONG_S), None):  # type: ignore[arg-type]
        pass
    assert late.asked == []


@pytest.mark.usefixtures("no_ray")
def test_a_learner_that_fails_ends_the_asking() -> None:
    pool = Pool(startup_s=0.0)
    warming = Prewarming(pool, asking("prewarmed", LONG_S), None)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), warming:
        raise ZeroDivisionError
    assert not warming._thread.is_alive()
    assert pool.asked == []


# ---- fetching or computing


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The connector's counters, of which the rates know nothing else."""
    process = kv_transfer._Process()
    monkeypatch.setattr(kv_transfer, "_PROCESS", process)
    return process.counts


def fetched(counts: dict[str, float], blocks: int, block_bytes: int, seconds: float) -> None:
    for name, amount in (("loaded_blocks", blocks), ("loaded_bytes", blocks * block_bytes), ("load_s", seconds)):
        counts[name] = counts.get(name, 0) + amount


def step(rates: KVRates, seconds: float, prefilled: int = 0, decoded: int = 0) -> None:
    rates.note(seconds, EngineCounters(), EngineCounters(computed_tokens=prefilled, generated_tokens=decoded))


@given(
    context=st.integers(1, 5000),
    block_s=st.floats(1e-5, 1.0),
    token_s=st.floats(1e-6, 1e-2),
    block_tokens=st.sampled_from([16, 32]),
)
def test_the_sooner_way_is_taken(context: int, block_s: float, token_s: float, block_tokens: int) -> None:
    with pytest.MonkeyPatch.context() as patches:
        process = kv_transfer._Process()
        patches.setattr(kv_transfer, "_PROCESS", process)
        rates = KVRates()
        fetched(process.counts, 10, 1000, 10 * block_s)
        step(rates, 10 * block_s + 200 * token_s, prefilled=200)
        blocks = (context - 1) // block_tokens
        sooner = blocks * block_tokens * token_s * (1 - 1e-6) <= blocks * block_s if blocks else False
        if blocks and abs(block_tokens * token_s / block_s - 1) > 1e-3:
            assert rates.recompute(context, block_tokens) == sooner
        elif not blocks:
            assert not rates.recompute(context, block_tokens)  # nothing to fetch, nothing to skip


def test_what_has_not_been_measured_is_fetched(counts: dict[str, float]) -> None:
    rates = KVRates()
    assert not rates.recompute(1000, 16)
    step(rates, 0.1, prefilled=1000)
    assert not rates.recompute(1000, 16)  # no load seen
    counts["load_s"] = 50.0  # asked in vain, at length
    step(rates, 50.0)
    assert not rates.recompute(1000, 16)
    fetched(counts, 5, 100, 50.0)
    step(rates, 51.0)
    assert rates.recompute(1000, 16)
    rates.forget_loads()
    assert not rates.recompute(1000, 16)  # a new step looks again


def test_steps_that_decode_are_no_measure_of_prefill(counts: dict[str, float]) -> None:
    rates = KVRates()
    fetched(counts, 10, 100, 1.0)
    step(rates, 1.0)
    step(rates, 100.0, prefilled=PREFILL_TOKENS, decoded=PREFILL_TOKENS)
    step(rates, 100.0, prefilled=PREFILL_TOKENS - 1)
    assert not rates.recompute(1000, 16)
    step(rates, 0.001, prefilled=PREFILL_TOKENS, decoded=1)
    assert rates.recompute(1000, 16)
    # the same bytes over a link that is fast enough
    assert transfer_or_recompute(kv_bytes=6200, bandwidth_bytes_per_s=1e9, latency_s=0.0, prefill_s=0.01) == "transfer"


def test_bytes_of_what_was_fetched(counts: dict[str, float]) -> None:
    rates = KVRates()
    assert rates.bytes_of(0, 16) == rates.bytes_of(32, 16) == 0
    fetched(counts, 4, 1036, 1.0)
    step(rates, 1.0)
    assert rates.bytes_of(32, 16) == 2 * 1036


# ---- sleep and wake


class Engine:
    """What of vLLM's engine this needs: `build` would bring the rest."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.whole = True
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=16))
        inner = SimpleNamespace(scheduler=SimpleNamespace())
        self.engine_core = SimpleNamespace(shutdown=lambda: None, engine_core=inner)

    def get_weight_version(self) -> str:
        return "0"

    def set_weight_version(self, version: str) -> None:
        self.said.append(version)

    def reset_prefix_cache(self) -> bool:
        self.said.append("reset")
        return True

    def sleep(self, level: int = 1) -> None:
        self.said.append(("sleep", level))

    def wake_up(self) -> bool:
        self.said.append("wake")
        return self.whole


def gpu_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": "m", "dtype": "bfloat16", "device": "cuda", "max_model_len": 64, "max_slots": 4,
        "kv_cache_bytes": None, "block_size": 16, "max_batched_tokens": 64, "prefix_caching": True, "sleep_mode": True,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(engine_module, "build", lambda config, tally: made)
    return made


def test_an_engine_sleeps_and_wakes_once(vllm: Engine) -> None:
    with StepEngine(gpu_config()) as engine:
        engine.wake()
        assert vllm.said == []
        engine.sleep()
        engine.sleep()
        engine.wake()
        engine.wake()
        assert vllm.said == [("sleep", 1), "wake"]
        vllm.whole = False
        engine.sleep()
        with pytest.raises(engine_module.EngineError, match="not fully awake"):
            engine.wake()
    with StepEngine(gpu_config(sleep_mode=False)) as engine, pytest.raises(InputError, match="needs sleep_mode"):
        engine.sleep()


def test_a_turn_wakes_the_engine_before_it_brings_weights(vllm: Engine) -> None:
    actor = VllmActor(gpu_config())
    first = actor.begin(1, "0", None, 4, True)
    assert first.up_s <= first.ready_s <= first.loaded_s
    actor.sleep()
    vllm.said.clear()
    second = actor.begin(2, "7", None, 4, True)
    assert vllm.said == ["wake", "reset", "7"]
    assert first.loaded_s <= second.up_s <= second.ready_s
    actor.sleep()
    actor.wake()
    woken = actor.begin(3, "7", None, 4, False)
    assert second.up_s < woken.up_s <= woken.ready_s
    assert vllm.said.count("wake") == 2


def test_sleep_is_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="sleep_mode is for GPUs"):
        gpu_config(model=str(tmp_path), device="cpu", kv_cache_bytes=1 << 20)


def test_vllm_has_what_is_asked_of_it() -> None:
    """Signatures of the installed vLLM, read in its source: importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs vllm: pip install 'rlhfless[cpu]'")
    root = Path(spec.submodule_search_locations[0])
    llm_engine = (root / "v1/engine/llm_engine.py").read_text()
    assert "def sleep(self, level: int = 1" in llm_engine
    assert "def wake_up(self, tags: list[str] | None = None) -> bool" in llm_engine
    arguments = (root / "engine/arg_utils.py").read_text()
    assert "enable_sleep_mode: bool" in arguments
    assert "weight_transfer_config: WeightTransferConfig" in arguments
    assert "skip_reading_prefix_cache" in (root / "sampling_params.py").read_text()


def _moved(config: Any) -> dict[str, Any]:
    """A response that finds its KV where it moves to; then over a link that is slow; then as at first."""
    first = Request(response=0, token_ids=[5 + at % 80 for at in range(321)], max_tokens=8, temperature=0.0)

    def run(engine: StepEngine, request: Request) -> tuple[list[int], list[int]]:
        before = engine.counters()
        engine.submit([request])
        while not (done := engine.poll(60.0)):
            pass
        after = engine.counters()
        engine.reset_prefix_cache()
        names = ("external_tokens", "continued_tokens", "moved_kv_bytes")
        return list(done[0].done.tokens), [getattr(after, name) - getattr(before, name) for name in names]

    with StepEngine(config) as engine:
        tokens, counts = run(engine, replace(first, force_length=True))
        moved = replace(first, token_ids=[*first.token_ids, tokens[0]], generated=1, max_tokens=7, force_length=True)
        found = {"first": (tokens, counts), "fetched": run(engine, moved)}
        engine._rates._load_s *= 1e9  # as over a link that is as slow
        found["computed"] = run(engine, moved)
        engine.set_weight_version(engine.weight_version)
        found["again"] = run(engine, moved)
    return found


@pytest.mark.slow
@real
def test_a_moved_response_is_computed_again_over_a_link_that_is_slow(tiny_model: Path) -> None:
    """On a real engine: the same tokens either way."""
    with RedisServer() as redis:
        config = step_engines.config(tiny_model, kv_connector=redis_config(redis.url, "run"))
        found = step_engines.alone(_moved, config)
    tokens, counts = found["first"]
    assert counts == [0, 0, 0]
    block_bytes = found["fetched"][1][2] / 10
    assert block_bytes > 1000
    assert found["fetched"] == (tokens[1:], [320, 2, 10 * block_bytes])
    assert found["computed"] == (tokens[1:], [0, 322, 0])
    assert found["again"] == found["fetched"]  # another step looks anew
