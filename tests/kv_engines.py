"""vLLM engines for the tests of KV transfer: one process each, forked from one that has imported vLLM already.

`multiprocessing`'s fork server imports PRELOAD before the first engine; a start then takes a second or two instead of
ten, and vLLM stays out of pytest's own process.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from backends.kv_transfer import KVCounters
from backends.redis_server import RedisServer, connect

PRELOAD = "tests.vllm_preload"
START_S = 240.0
"""Longest wait for an engine, or for an answer of one (a hung one must not hang the tests)."""
END_S = 10.0
"""Longest wait for one to end by itself."""

Requests = dict[str, tuple[list[int], int]]
"""Prompt token ids and tokens to generate, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine made of one request."""

    tokens: list[int]
    cached: int
    """vLLM's own count of prompt tokens that it found in a cache, its own or an external one."""


NEW_TOKENS = 60
BLOCK = 32
HEADS = 2
"""KV heads of the tiny model: parts of a block."""


def ids(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 90, count).tolist()
    return tokens


PROMPTS = {f"r{number}": ids(number, 230 + 9 * number) for number in range(4)}
WHOLE: Requests = {name: (prompt, NEW_TOKENS) for name, prompt in PROMPTS.items()}
PREFILL: Requests = {name: (prompt, 1) for name, prompt in PROMPTS.items()}
PROMPT_BLOCKS = sum(len(prompt) // BLOCK for prompt in PROMPTS.values())


class Engine:
    """An engine in a process of its own; a context manager."""

    def __init__(
        self, model: Path, kv: Mapping[str, Any] | None, *, unset: tuple[str, ...] = (), **arguments: Any
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, model, kv, unset, arguments), daemon=True)
        self._process.start()
        child.close()

    def __enter__(self) -> "Engine":
        try:
            self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("end",))
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def generate(
        self, requests: Requests, *, stop_after: int | None = None, at: tuple[int, Callable[[], object]] | None = None
    ) -> dict[str, Answer]:
        """Run `requests` to their end, or until each has `stop_after` tokens, and are then aborted.

        `at` is a number of tokens and what happens in the engine's process, once, when each request has that many.
        """
        answer: dict[str, Answer] = self._ask("generate", requests, stop_after, at)
        return answer

    def cold(self) -> None:
        """Drop the engine's own prefix cache."""
        assert self._ask("cold") is True

    def counters(self) -> dict[str, float]:
        """Of `backends.kv_transfer`, in the engine's process."""
        counts: dict[str, float] = self._ask("counters")
        return counts

    def set_version(self, version: int) -> None:
        """`backends.kv_transfer.set_namespace` in the engine's process."""
        self._ask("version", version)

    def pids(self) -> list[int]:
        """Its process, and those of its ranks where there are several."""
        found: list[int] = self._ask("pids")
        return found

    def preemptions(self) -> int:
        """Requests that the scheduler has pushed out for want of KV."""
        count: int = self._ask("preemptions")
        return count

    def _ask(self, *message: object) -> Any:
        self._pipe.send(message)
        return self._receive()

    def _receive(self) -> Any:
        assert self._pipe.poll(START_S), "the engine does not answer"
        worked, answer = self._pipe.recv()
        assert worked, answer
        return answer


def tokens(answers: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def blocks_in(server: RedisServer, namespace: str, version: int) -> list[bytes]:
    with connect(server.url) as client:
        return sorted(client.scan_iter(f"rlkv:{namespace}:{version}:*", count=1000))


class Gained:
    """What an engine's counters have gained."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._start = engine, engine.counters()

    def __call__(self) -> KVCounters:
        now = self._engine.counters()
        return KVCounters(**{name: now[name] - self._start[name] for name in now})  # type: ignore[arg-type]


def _serve(
    pipe: Connection, model: Path, kv: Mapping[str, Any] | None, unset: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    for variable in unset:
        os.environ.pop(variable, None)
    # a daemon, so that it ends with pytest, may else have no children, and so no ranks
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from backends import kv_transfer

        settings: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 1024,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 32 << 20,
            "kv_transfer_config": None if kv is None else KVTransferConfig(**kv),
            **arguments,
        }
        engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        scheduler = engine.engine_core.engine_core.scheduler
        preempted: list[str] = []
        preempt = scheduler._preempt_request

        def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = counting
        pipe.send((True, None))
        while True:
            match pipe.recv():
                case ("end",):
                    break
                case ("generate", requests, stop_after, at):
                    pipe.send((True, _generate(engine, requests, stop_after, at)))
                case ("cold",):
                    pipe.send((True, engine.reset_prefix_cache(reset_connector=True)))
                case ("counters",):
                    counts = kv_transfer.counters()
                    pipe.send((True, {name: getattr(counts, name) for name in counts.__dataclass_fields__}))
                case ("version", version):
                    kv_transfer.set_namespace(version)
                    pipe.send((True, None))
                case ("pids",):
                    pipe.send((True, [os.getpid(), *(child.pid for child in multiprocessing.active_children())]))
                case ("preemptions",):
                    pipe.send((True, len(preempted)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _generate(
    engine: Any, requests: Requests, stop_after: int | None, at: tuple[int, Callable[[], object]] | None
) -> dict[str, Answer]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    for name, (prompt, tokens) in requests.items():
        engine.add_request(
            name,
            {"prompt_token_ids": prompt},
            SamplingParams(
                temperature=0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
    made: dict[str, list[int]] = {name: [] for name in requests}
    cached: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] += output.outputs[0].token_ids
            if output.num_cached_tokens is not None:
                cached.setdefault(output.request_id, output.num_cached_tokens)
        least = min(map(len, made.values()))
        if at is not None and least >= at[0]:
            at[1]()
            at = None
        if stop_after is not None and least >= stop_after:
            engine.abort_request(list(requests))
            break
    return {name: Answer(tokens=made[name], cached=cached.get(name, 0)) for name in requests}
