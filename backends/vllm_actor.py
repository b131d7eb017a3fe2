"""What runs in a Ray worker process: one engine, and a thread that keeps what it hands over.

A controller speaks to it in turns, one a function invocation: `begin` brings the weights, `submit` adds responses,
`poll` hands over what has happened, `rearrange` gives up some of what is unfinished and `drain` all of it. Whatever
happens to a response comes back through `poll`, in order and once, so that a controller has one stream an actor to
follow. Calls of an earlier turn do nothing: an invocation that is over cannot reach into the next one.

This module loads without ray and vllm.
"""

import gc
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from backends import kv_transfer
from backends.engine import StepEngine
from backends.engine_types import EngineConfig, EngineCounters, EngineError, Finished, Partial, Request
from backends.weight_sync import Published, load, require_version
from rlhfless.errors import RlhflessError

POLL_S = 0.25
"""Seconds that a poll waits for something to happen (chosen: it also paces reports, and with 100 actors a controller
answers 400 idle polls a second at some 0.3 ms each)."""
REPORT_S = 0.25
"""Least seconds between reports of unfinished responses' tokens (chosen: an actor that dies loses at most these)."""
PUMP_S = 1.0
"""Seconds that the pump waits before it looks whether the engine is still there (chosen; it also returns at
once when a response ends)."""
READ_S = 0.01
"""Seconds between looks whether others have read KV (chosen: reading takes some 10 ms)."""

NOTHING = Partial(
    tokens=(), logprobs=(), cached_tokens=0, admitted_s=None, first_token_s=None, last_token_s=None
)  # fmt: skip
"""Of a response that has not reached the engine."""
NO_COUNTERS = EngineCounters()
"""Of an engine that has done nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An actor can work. Times are time.monotonic() of its host."""

    pid: int
    """Its process."""
    up_s: float
    """When the engine was last built or woken."""
    ready_s: float
    """When this turn's loading could begin."""
    loaded_s: float
    """When it had the weights."""
    counters: EngineCounters
    """The engine's totals before this turn's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What has happened since the last one."""

    finished: tuple[Finished, ...] = ()
    """Responses that have ended."""
    progress: dict[int, int] = field(default_factory=dict)
    """Unfinished response -> tokens generated here so far, of those that have any."""
    queue: tuple[int, ...] = ()
    """Unfinished responses without a slot, in order of admission."""
    report: dict[int, Partial] = field(default_factory=dict)
    """Unfinished responses, tokens and logprobs only those since the last report; at most one every REPORT_S."""
    parted: dict[int, Partial] = field(default_factory=dict)
    """Responses that it has given up while it goes on, with all that it has generated of them."""
    over: Literal["drained", "failed"] | None = None
    """Whether the actor has given up what it had not finished, and why; it takes nothing more in this turn."""
    given_up: dict[int, Partial] = field(default_factory=dict)
    """Once over: every response that it had not finished, with all that it has generated of it."""
    at_s: float = 0.0
    """When it was over, else now; time.monotonic() of its host."""
    error: str = ""
    """What has failed."""
    counters: EngineCounters = NO_COUNTERS
    """The engine's totals."""


class VllmActor:
    """One engine for one invocation after the other. Methods may be called from several threads."""

    def __init__(self, config: EngineConfig) -> None:
        """Build the engine. Raises what `StepEngine` raises."""
        gc.disable()  # importing vLLM makes a million objects that stay: 4.8 s of processor time, not 6.0 (measured)
        self._engine = StepEngine(config)
        gc.freeze()
        gc.enable()
        self._up_s = time.monotonic()
        self._changed = threading.Condition()
        # all that follows is guarded by _changed
        self._turn = 0
        self._received = 0
        self._live: set[int] = set()
        self._finished: list[Finished] = []
        self._reported: dict[int, int] = {}
        self._reported_s = 0.0
        self._parted: dict[int, Partial] = {}
        self._given_up: dict[int, Partial] | None = None
        self._over_s = 0.0
        self._error = ""
        self._asleep = False
        self._counters = self._engine.counters()
        threading.Thread(target=self._pump, name="pump", daemon=True).start()

    def begin(self, turn: int, version: str, published: Published | None, slots: int, fresh: bool) -> Begun:
        """Start a turn, above all earlier ones: from now on at most `slots` responses at once, drawn from `version`.

        Loads `published` where the engine has other weights; None stands for those that the model's folder holds.
        `fresh` forgets cached KV. Raises EngineError while responses of an earlier turn run, and what
        `backends.weight_sync.load` raises.
        """
        engine = self._engine
        with self._changed:
            if self._live or self._error:
                raise EngineError(self._error or f"{len(self._live)} responses still run")
            self._turn, self._received = turn, 0
            self._finished, self._reported, self._parted, self._given_up = [], {}, {}, None
            self._changed.notify_all()
            self._wake()
            ready_s = time.monotonic()
            if engine.weight_version == version:
                if fresh:
                    engine.reset_prefix_cache()
            elif published is None:
                engine.reset_prefix_cache()
                kv_transfer.set_namespace(version)
                engine.set_weight_version(version)
            else:
                load(engine, published)
            require_version(engine, version)
            engine.set_slots(slots)
            return Begun(
                pid=os.getpid(),
                up_s=self._up_s,
                ready_s=ready_s,
                loaded_s=time.monotonic(),
                counters=engine.counters(),
            )

    def up_for(self) -> float:
        """Seconds since the engine was built or last woken; between machines durations agree where clocks do not."""
        return time.monotonic() - self._up_s

    def sleep(self) -> None:
        """Give the memory of the GPUs away until `wake` or the next turn. Raises what `StepEngine.sleep` raises."""
        with self._changed:
            self._engine.sleep()
            self._asleep = True

    def wake(self) -> None:
        """Take it back, ahead of a turn."""
        with self._changed:
            self._wake()

    def submit(self, turn: int, requests: Sequence[Request]) -> None:
        """Queue responses; they are admitted in this order. What goes wrong comes with the next poll."""
        with self._changed:
            if turn == self._turn:
                self._received += len(requests)
                self._live.update(request.response for request in requests)
                try:
                    self._engine.submit(requests)
                except RlhflessError as error:
                    self._fail(error)
                self._changed.notify_all()

    def poll(self, turn: int, timeout_s: float) -> Update:
        """What has happened; waits up to `timeout_s` for a response to end or part."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._finished or self._parted or self._is_over or turn != self._turn, timeout_s
            )
            return self._update() if turn == self._turn else Update()

    def rearrange(self, turn: int, leaving: Sequence[int], first: Sequence[int]) -> None:
        """Give up the responses `leaving` between two iterations, those that wait and those that run, and go on with
        the rest; a poll hands them over. Each of `first` that waits goes to the head of the queue, one after the other.

        A response that has ended in the meantime is handed over as finished, and so will be one that has yet to come:
        what a turn is sent seldom comes in another order.
        """
        with self._changed:
            if turn != self._turn or self._error or self._given_up is not None:
                return
            try:
                parted = self._engine.abort(self._live.intersection(leaving), first)
            except EngineError as error:
                self._fail(error)
            else:
                self._live -= parted.keys()
                self._parted |= parted
                for response in parted:  # should it come back, it is to be reported from its first token on
                    self._reported.pop(response, None)
            self._changed.notify_all()

    def drain(self, turn: int, sent: int) -> None:
        """Give up all that is unfinished, once the `sent` responses of this turn have come; a poll hands it over.

        A response that has ended in the meantime is handed over as finished.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._received >= sent or self._error or turn != self._turn)
            if turn != self._turn or self._error:
                return
            try:
                partials = self._engine.abort(self._live)
            except EngineError as error:
                self._fail(error)
            else:
                self._live -= partials.keys()  # what is left has ended, and is on its way through the pump
                self._give_up(partials)
            self._changed.notify_all()

    def await_readers(self) -> None:
        """Return once no KV waits here for another engine to read it."""
        while self._engine.kept():
            time.sleep(READ_S)

    # ---- inside

    def _wake(self) -> None:
        if self._asleep:
            self._engine.wake()
            self._asleep, self._up_s = False, time.monotonic()

    @property
    def _is_over(self) -> bool:
        return self._given_up is not None and not self._live

    def _pump(self) -> None:
        try:
            while True:
                finished = self._engine.poll(PUMP_S)
                with self._changed:
                    if self._error:
                        return  # all that was unfinished has been given up, and may run elsewhere by now
                    self._finished += finished
                    self._live.difference_update(one.response for one in finished)
                    self._changed.notify_all()
        except RlhflessError as error:
            with self._changed:
                self._fail(error)
                self._changed.notify_all()

    def _fail(self, error: RlhflessError) -> None:
        """The engine is of no further use; what it has generated is."""
        if not self._error:
            self._error = str(error)
            partials = self._engine.salvage()
            ended = {one.response for one in self._finished}
            for response in self._live - partials.keys() - ended:
                partials[response] = NOTHING
            self._live.clear()
            self._give_up(partials)

    def _give_up(self, partials: dict[int, Partial]) -> None:
        self._given_up = partials
        self._over_s = time.monotonic()

    def _update(self) -> Update:
        now_s, progress = time.monotonic(), dict[int, int]()
        finished, self._finished = tuple(self._finished), []
        parted, self._parted = self._parted, {}
        queue: tuple[int, ...] = ()
        if not self._error:
            with suppress(EngineError):  # it has just failed; the pump will say so
                progress = {one: count for one, count in self._engine.progress().items() if count}
                queue, self._counters = tuple(self._engine.queue()), self._engine.counters()
        if self._is_over:
            given_up, self._given_up = self._given_up or {}, {}
            return Update(
                finished=finished,
                parted=parted,
                over="failed" if self._error else "drained",
                given_up=given_up,
                at_s=self._over_s,
                error=self._error,
                counters=self._counters,
            )
        report = self._report() if now_s - self._reported_s >= REPORT_S else {}
        return Update(
            finished=finished,
            progress=progress,
            queue=queue,
            report=report,
            parted=parted,
            at_s=now_s,
            counters=self._counters,
        )

    def _report(self) -> dict[int, Partial]:
        self._reported_s = time.monotonic()
        before, report = self._reported, {}
        partials = self._engine.salvage()
        for response, partial in partials.items():
            told = before.get(response, 0)
            if len(partial.tokens) > told:
                report[response] = replace(partial, tokens=partial.tokens[told:], logprobs=partial.logprobs[told:])
        self._reported = {response: len(partial.tokens) for response, partial in partials.items()}
        return report
