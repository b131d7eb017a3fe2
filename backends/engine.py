"""One replica of the policy: a vLLM engine in this process, stepped by a thread of its own.

The thread alone touches the engine. Whoever wants something of it leaves a call, which is served between two
iterations, so an answer takes at most one iteration; what has been generated so far is kept here, and reading it waits
for nothing. The simulator's twin is `sim.engine.Engine`.

One engine per process: a second one would share vLLM's global state with the first, and with a KV connector both would
silently compute wrong KV. Forking is fine before the engine is built, not after. With tensor parallelism each rank is
a child process, which ends when this process does; the engine fails when one of them ends.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Generic, TypeVar

from backends.engine_types import EngineConfig, EngineCounters, EngineError, Finished, Partial, Request
from backends.engine_vllm import Live, Tally, add, build, hasten, one_line, queue_of, scheduler_of
from backends.kv_rates import KVRates
from backends.kv_readers import LOOK_S, KVReaders
from backends.kv_transfer import NIXL
from rlhfless.errors import InputError

_T = TypeVar("_T")


class StepEngine:
    """An engine that steps as long as it has responses. Every method may be called from any thread.

    Raises EngineError from every call once the engine has failed or is closed, except `close`, `salvage`, and `poll`
    while it still has something to hand over.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Build the engine, in seconds. Raises InputError where vLLM is missing, EngineError for what it cannot build;
        the process is then of no further use."""
        self._config = config
        self._tally = Tally()
        self._engine = build(config, self._tally)
        self._version = str(self._engine.get_weight_version())
        self._changed = threading.Condition()
        # guarded by _changed; all but _calls and _finished are written by the engine's thread alone
        self._calls: deque[_Call[Any]] = deque()
        self._live: dict[int, Live] = {}
        self._queue: list[int] = []
        self._finished: list[Finished] = []
        self._continued_tokens = 0
        self._moved_kv_bytes = 0.0
        self._counters = self._tally.counters(self._engine.vllm_config.cache_config)
        self._readers = KVReaders(self._engine, config)
        stored = config.kv_connector is not None and config.kv_connector["kv_connector"] != NIXL
        self._rates = KVRates() if stored else None
        self._asleep = False
        self._error: EngineError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "StepEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weight_version(self) -> str:
        """Name of the weights that it runs."""
        return self._version

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue responses, all or none. They are admitted in this order as slots and KV allow.

        Raises InputError for a request that is malformed or whose response is already here, InfeasibleError for one
        that may outgrow max_model_len.
        """
        wanted = list(requests)
        seen: set[int] = set()
        for request in wanted:
            request.check(self._config)
            if request.response in seen:
                raise InputError(f"response {request.response} is submitted twice")
            seen.add(request.response)
        self._call(lambda: self._add(wanted))

    def poll(self, timeout_s: float) -> list[Finished]:
        """Responses that have ended since the last poll, each exactly once; waits up to timeout_s for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error or self._closing, timeout_s)
            if not self._finished:
                self._check()
            finished, self._finished = self._finished, []
            return finished

    def abort(self, responses: Iterable[int], first: Iterable[int] = ()) -> dict[int, Partial]:
        """Stop responses and hand over what they have generated; takes at most one iteration.

        A response that has ended in the meantime is not in the result: `poll` reports it, if it has not done so. Each
        of `first` that is in the queue goes to its head at the same time, one after the other.
        """
        wanted = list(dict.fromkeys(responses))

        def rearrange() -> dict[int, Partial]:
            hasten(self._engine, first)
            return self._abort(wanted)

        return self._call(rearrange)

    def salvage(self) -> dict[int, Partial]:
        """What unfinished responses have generated, also of an engine that has failed: they can go on elsewhere."""
        with self._changed:
            return {response: live.partial() for response, live in self._live.items()}

    def progress(self) -> dict[int, int]:
        """Unfinished response -> tokens generated here so far."""
        with self._changed:
            self._check()
            return {response: len(live.tokens) for response, live in self._live.items()}

    def queue(self) -> list[int]:
        """Unfinished responses without a slot, in order of admission, at the end of the last iteration."""
        with self._changed:
            self._check()
            return [response for response in self._queue if response in self._live]

    def held_tokens(self) -> int:
        """Context, prompt and generated so far, of everything unfinished, in slots and in the queue."""
        with self._changed:
            self._check()
            return sum(live.context_tokens for live in self._live.values())

    def counters(self) -> EngineCounters:
        """Totals so far."""
        with self._changed:
            self._check()
            return self._count()

    def kept(self) -> int:
        """Requests that are over and whose KV waits for another engine to read it."""
        with self._changed:
            self._check()
            return self._readers.kept

    def set_slots(self, slots: int) -> None:
        """Responses that run at once from now on, at most max_slots; what runs by now goes on."""

        def limit() -> None:
            scheduler_of(self._engine).max_num_active_reqs = slots

        self._call(limit)

    def set_weight_version(self, version: str) -> None:
        """Name the weights from now on. KV is shared only under one name, in this engine and through a connector.

        Raises InputError while responses run, since they would be drawn from two policies, and for an empty name.
        """
        if not version:
            raise InputError("a weight version must not be empty")

        def name() -> None:
            self._require_idle("weights cannot change")
            self._engine.set_weight_version(version)
            self._version = version
            if self._rates is not None:
                self._rates.forget_loads()

        self._call(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV, also what waits for others to read it. Raises InputError while responses run."""

        def reset() -> None:
            self._require_idle("the prefix cache cannot be reset")
            self._readers.release()
            if not self._engine.reset_prefix_cache():
                raise EngineError(f"{self._what}: vLLM refused to reset the prefix cache")

        self._call(reset)

    def sleep(self) -> None:
        """Give the memory of the GPUs away until `wake`: weights go to the host's memory, KV is forgotten.

        Weights come back as they were (vLLM's level 1), so that an engine whose weights are to stay is whole as well.
        Raises InputError while responses run, and for an engine that was built without `sleep_mode`.
        """

        def sleep() -> None:
            self._require_idle("it cannot sleep")
            if not self._config.sleep_mode:
                raise InputError(f"{self._what}: sleep needs sleep_mode")
            if not self._asleep:
                self._readers.release()
                self._engine.sleep(level=1)
                self._asleep = True

        self._call(sleep)

    def wake(self) -> None:
        """Take the memory back; nothing happens where it is there. Raises EngineError where vLLM cannot."""

        def wake() -> None:
            if self._asleep:
                if not self._engine.wake_up():
                    raise EngineError(f"{self._what}: vLLM is not fully awake")
                self._asleep = False

        self._call(wake)

    def collective(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, its own or the worker extension's; one result a worker. Between iterations.

        Raises EngineError, with the cause, when it fails; the engine goes on.
        """

        def call() -> list[Any]:
            try:
                return list(self._engine.collective_rpc(method, kwargs=kwargs))
            except Exception as error:
                raise EngineError(f"{self._what}: {method} failed: {one_line(error)}") from error

        return self._call(call)

    def close(self) -> None:
        """End the thread, at the end of its iteration, and release the engine. What is unfinished is given up."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()

    # ---- what follows runs in the engine's thread, or says so

    @property
    def _what(self) -> str:
        return f"engine of {self._config.model}"

    def _call(self, work: Callable[[], _T]) -> _T:
        """In the caller's thread: have `work` done in the engine's."""
        call = _Call(work)
        with self._changed:
            self._check()
            self._calls.append(call)
            self._changed.notify_all()
        return call.future.result()

    def _check(self) -> None:
        """With the lock held, in any thread."""
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error
        if self._closing:
            raise EngineError(f"{self._what} is closed")

    def _run(self) -> None:
        try:
            while self._attend():
                if self._live:
                    self._step()
                elif self._readers.waits:
                    self._readers.look()
        except BaseException as error:  # whatever ends the thread, callers must hear of it
            self._fail(error)

    def _attend(self) -> bool:
        """Serve what callers have left, waiting for them when there is nothing to step; False to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closing or self._live or self._readers.waits)
            calls, self._calls = self._calls, deque()
            closing = self._closing
        for call in calls:
            call.serve()
        return not closing

    def _step(self) -> None:
        started_s = time.perf_counter()
        outputs = self._engine.step()
        step_s = time.perf_counter() - started_s
        with self._changed:
            continued_tokens = sum(self._take(output) for output in outputs)
            before, self._counters = self._counters, self._tally.counters(self._engine.vllm_config.cache_config)
            self._queue = queue_of(self._engine)
            # new responses seldom begin in the same step as continued ones; then this is the most that it can be
            moved_tokens = min(continued_tokens, self._counters.external_tokens - before.external_tokens)
            if self._rates is not None:
                self._rates.note(step_s, before, self._counters)
                self._moved_kv_bytes += self._rates.bytes_of(moved_tokens, self._counters.block_tokens)
            self._moved_kv_bytes += self._readers.token_bytes * moved_tokens
            if self._finished:
                self._changed.notify_all()
        if self._counters.iterations == before.iterations:
            time.sleep(LOOK_S)  # all that it has waits for KV

    def _take(self, output: Any) -> int:
        """Write an output down; of a continued response with its first token here, tokens that were not computed."""
        response, found_tokens = int(output.request_id), 0
        live, new = self._live[response], output.outputs[0]
        if live.stats is None:
            live.stats, live.cached_tokens = output.metrics, output.num_cached_tokens
            if live.request.generated:
                found_tokens = live.cached_tokens
                self._continued_tokens += len(live.request.token_ids) - found_tokens
        live.tokens += new.token_ids
        live.logprobs += [of[token].logprob for token, of in zip(new.token_ids, new.logprobs, strict=True)]
        if output.finished:
            if new.finish_reason not in ("stop", "length"):
                raise EngineError(f"{self._what}: response {response} ended by {new.finish_reason!r}")
            live.kv = output.kv_transfer_params
            del self._live[response]
            self._finished.append(
                Finished(
                    response=response,
                    finish_reason=new.finish_reason,
                    weight_version=self._version,
                    done=live.partial(),
                )
            )
        return found_tokens

    def _add(self, requests: list[Request]) -> None:
        here = [request.response for request in requests if request.response in self._live]
        if here:
            raise InputError(f"response {here[0]} is already running ({len(here)} in all)")
        added: list[str] = []
        try:
            for request in requests:
                # the salt keeps KV of different weights apart, in the prefix cache and under a connector's keys
                add(self._engine, request, salt=self._version, recompute=self._recompute(request))
                added.append(str(request.response))
        except InputError:
            self._engine.abort_request(added)
            raise
        with self._changed:
            self._live.update((request.response, Live(request)) for request in requests)

    def _recompute(self, request: Request) -> bool:
        """Whether a response that comes from elsewhere is sooner computed again than fetched."""
        if self._rates is None or not request.generated:
            return False
        return self._rates.recompute(len(request.token_ids), self._counters.block_tokens)

    def _abort(self, responses: list[int]) -> dict[int, Partial]:
        left = [response for response in responses if response in self._live]
        for response, handle in self._readers.abort(left).items():
            self._live[response].kv = handle
        with self._changed:
            return {response: self._live.pop(response).partial() for response in left}

    def _require_idle(self, what: str) -> None:
        if self._live:
            raise InputError(f"{self._what}: {what} while {len(self._live)} responses run")

    def _count(self) -> EngineCounters:
        """With the lock held, in any thread."""
        last, live = self._counters, len(self._live)
        running = min(last.running, live)  # what was aborted since has left its slot
        return replace(
            last,
            continued_tokens=self._continued_tokens,
            moved_kv_bytes=self._moved_kv_bytes,
            running=running,
            waiting=live - running,
            kv_blocks_used=last.kv_blocks_used if live else 0,
        )

    def _fail(self, cause: BaseException) -> None:
        error = cause if isinstance(cause, EngineError) else EngineError(f"{self._what} failed: {one_line(cause)}")
        if error is not cause:
            error.__cause__ = cause
        with self._changed:
            self._error = error
            for call in self._calls:
                call.future.set_exception(error)
            self._calls.clear()
            self._changed.notify_all()


class _Call(Generic[_T]):
    """Work that a caller has left for the engine's thread, and where its result will be."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self.future: Future[_T] = Future()

    def serve(self) -> None:
        try:
            self.future.set_result(self._work())
        except BaseException as error:  # the caller's to handle; the engine goes on
            self.future.set_exception(error)
