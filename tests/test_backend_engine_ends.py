"""How the real engine ends, and what keeps it from beginning."""

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backends.engine import StepEngine
from backends.engine_types import EngineError, Request
from backends.environment import engine_env, require
from rlhfless.errors import InfeasibleError, InputError
from tests.step_engines import WAIT_S, alone, config, real, requests

pytestmark = pytest.mark.slow


# ---- errors and ends


def _break(folder: Path) -> dict[str, Any]:
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
def test_an_error_in_the_engines_thread_reaches_every_caller(tiny_model: Path) -> None:
    seen = alone(_break, tiny_model)
    assert seen["polled"] == [0, 1, 2]  # what had ended before is handed over first
    assert seen["told"] == [f"engine of {tiny_model} failed: RuntimeError: the device is gone"] * 9
    assert seen["saved"] == {9: 4}
    assert seen["left"] == []


def _close_in_mid_step(folder: Path) -> tuple[list[str], list[str]]:
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
def test_close_leaves_nothing_behind(tiny_model: Path) -> None:
    told, left = alone(_close_in_mid_step, tiny_model)
    assert "no_such_method failed: " in told[0]
    assert "response 1: " in told[1]
    assert "vocabulary" in told[1]
    assert told[2] == f"engine of {tiny_model} is closed"
    assert left == []


def _unbuildable(folder: Path) -> str:
    try:
        StepEngine(config(folder, kv_cache_bytes=1 << 20))
    except EngineError as error:
        return str(error)
    return "built"


@real
def test_an_engine_that_cannot_be_built_says_why(tiny_model: Path) -> None:
    told = alone(_unbuildable, tiny_model)
    assert told.startswith(f"engine of {tiny_model} cannot be built: ")
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
