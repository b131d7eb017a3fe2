"""Step engines on CPUs for tests: one process each, forked from one that has imported vLLM already."""

import importlib.util
import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from backends.engine import StepEngine
from backends.engine_types import EngineConfig, Finished, Request

MISSING = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
real = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'rlhfless[cpu]'")

WAIT_S = 120.0
"""After which a test gives up on an engine."""
EOS = 1
"""The tiny model's end token."""
PROMPTS = [[5, 6, 7, 8 + i, 20, 30, 40] * (9 + i) for i in range(6)]
"""63 to 98 tokens; no two share a block."""


def config(model: str | Path, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": str(model),
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


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own, which ends well."""
    child = Child()
    try:
        return child(function, *args)
    finally:
        assert child.close() == 0


def make_model(folder: Path, seed: int) -> Path:
    """A tiny model, in a process that has PyTorch."""
    from backends.tiny import make_tiny

    return make_tiny(folder, seed=seed)


# ---- what runs beside an engine, in its process


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


def reference(folder: str | Path, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
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
