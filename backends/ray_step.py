"""The generation phase of one step on Ray: starts processes, follows what they say, notices when they say nothing.

One thread and one loop. Every live invocation has one call under way, `begin` and then `poll` after `poll`; each answer
is an event for `backends.generation`, which decides. A call that fails, and silence beyond a deadline, mean that the
process is dead: it is killed, so that it cannot come back, and others go on.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from backends.cluster import RayCluster, StepError
from backends.engine_types import EngineConfig, Request
from backends.generation import Generation
from backends.generation_types import End
from backends.handles import Handles
from backends.invocation import Invocation, Weights
from backends.ray_config import RayConfig
from backends.step_inputs import replicas_of
from backends.vllm_actor import POLL_S, Begun, Update
from rlhfless.errors import RlhflessError
from rlhfless.executor import Life
from rlhfless.types.plan import Plan
from rlhfless.types.report import Activity

TICK_S = 0.5
"""Seconds between looks at deadlines when nothing happens (chosen: far below any timeout)."""
MOST_REVIVALS = 2
"""New processes in a step for actors of which no other was left (chosen: a fault that three of them die of is not
theirs)."""
UP_S = 0.2
"""Seconds that processes which nobody needs have for saying since when they have been up (chosen: an answer takes
some milliseconds, and one that does not come is that of a process that is still starting)."""
MOST_CAUSE = 300
"""Characters of a cause that are told."""


class RayStep:
    """Carries out the generation phase of a plan; the wire of its `Generation`."""

    def __init__(
        self,
        plan: Plan,
        requests: Sequence[Request],
        prefixes: Sequence[Request],
        *,
        cluster: RayCluster,
        config: RayConfig,
        engine: EngineConfig,
        weights: Weights,
        number: int,
        zero_s: float,
    ) -> None:
        """`prefixes`: what the prefill actor computes; `number`: of this execution; `zero_s`: the step's start."""
        self.plan, self.cluster, self.config, self.engine, self.weights = plan, cluster, config, engine, weights
        self.number, self.zero_s = number, zero_s
        self.prefixes = prefixes
        self.generation = Generation(
            plan.migration,
            requests,
            [actor.responses.tolist() for actor in plan.actors],
            [actor.slots for actor in plan.actors],
            weights.version,
            self,
        )
        self.handles = Handles(plan, config)
        self.lives: list[Life] = []
        self.prefill_end_s: float | None = None
        self.prefilled_tokens = self.prefill_failures = 0
        self.revivals = self.untaken = 0
        self.causes: list[str] = []
        self._keep = plan.start == "warm" or plan.hosting != "serverless"
        self._reserve = {actor.index for actor in self.generation.actors if actor.state == "reserved"}
        self._shares: list[Sequence[Request]] = []
        self._prefill: dict[int, Invocation] = {}
        self._decode: dict[int, Invocation] = {}
        self._serving: list[Invocation] = []
        self._calls: dict[Any, tuple[Invocation, Callable[[Any], None]]] = {}

    def run(self) -> None:
        """Generate every response. Raises StepError when actors keep dying, and whatever interrupts it; what it has
        taken from the cluster is then still there, for the caller to end."""
        self._end_untaken()
        shared = self._start_prefill()
        for actor, gpus in zip(self.generation.actors, self.plan.placement.decode, strict=True):
            if actor.state == "working" and shared.isdisjoint(gpus):
                self._start_decode(actor.index)
        if not self._prefill:
            self._end_prefill()
        import ray

        while self.generation.busy:
            done, waiting = ray.wait(list(self._calls), num_returns=1, timeout=TICK_S)
            if done and waiting:
                more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                done += more
            for call in done:
                if call in self._calls:  # else its process was ended by what came before it
                    self._answer(call)
            self._look_at_deadlines()
        for invocation in list(self._decode.values()):  # still starting or idle, while others have done its work
            self._part(invocation, "done")
        for invocation in list(self._serving):
            self._end_serving(invocation)
        self.cluster.rest()

    # ---- what a generation asks for

    def submit(self, actor: int, requests: Sequence[Request]) -> None:
        """See `backends.generation_types.Wire`."""
        invocation = self._decode[actor]
        if self._is_early(invocation):
            invocation.life.until(self._now(), "early")
        self._submit(invocation, self.handles.sent(actor, requests))

    def drain(self, actor: int) -> None:
        """See `backends.generation_types.Wire`."""
        invocation = self._decode[actor]
        invocation.process.actor.drain.remote(invocation.process.turn, invocation.sent)

    def rearrange(self, actor: int, leaving: Sequence[int], first: Sequence[int]) -> None:
        """See `backends.generation_types.Wire`."""
        invocation = self._decode[actor]
        invocation.process.actor.rearrange.remote(invocation.process.turn, leaving, first)

    def release(self, actor: int, end: End) -> None:
        """See `backends.generation_types.Wire`."""
        invocation = self._decode.get(actor)
        if invocation is not None:  # else its GPUs are still prefilling
            self._part(invocation, end)

    def start(self, actor: int) -> None:
        """See `backends.generation_types.Wire`."""
        self._start_decode(actor)

    def revive(self, actor: int) -> None:
        """See `backends.generation_types.Wire`."""
        self.handles.forget(actor)
        self.revivals += 1
        if self.revivals > MOST_REVIVALS:
            raise StepError(f"step {self.plan.step}: its actors keep dying, {self.causes[-1]}")
        self._start_decode(actor, len(self.plan.actors) + self.untaken + self.revivals - 1)

    # ---- invocations

    def _end_untaken(self) -> None:
        """End processes that were asked for ahead and are of no use in this step, and write them down."""
        import ray
        from ray.exceptions import RayError

        wanted = {*self.plan.placement.decode, *replicas_of(self.plan)}
        processes = self.cluster.untaken(wanted, self.engine)
        asked = [process.actor.up_for.remote() for process in processes]
        answered = set(ray.wait(asked, num_returns=len(asked), timeout=UP_S)[0]) if asked else set()
        for number, (process, call) in enumerate(zip(processes, asked, strict=True), len(self.plan.actors)):
            assert process.ahead_s is not None
            life = Life(function="decode", index=number, gpus=process.gpus, at_s=self._since(process.ahead_s))
            if call in answered:
                with suppress(RayError):  # it has died in the attempt, and has held its GPUs no less
                    life.until(self._now() - ray.get(call), "start-up")
                    life.until(self._now(), "early")
            life.until(self._now(), "start-up")
            self.lives.append(life)
            self.cluster.end(process)
        self.untaken = len(processes)

    def _start_prefill(self) -> set[int]:
        """Start the prefill actor's replicas; the GPUs that they hold until it ends."""
        replicas = replicas_of(self.plan)
        if not replicas:
            return set()
        bounds = [len(self.prefixes) * index // len(replicas) for index in range(len(replicas) + 1)]
        # neighbours have most in common, and are computed by one replica
        self._shares = [self.prefixes[start:end] for start, end in pairwise(bounds)]
        for index, gpus in enumerate(replicas):
            self._prefill[index] = self._start("prefill", index, index, gpus, self.config.max_slots)
        return {gpu for gpus in replicas for gpu in gpus}

    def _start_decode(self, index: int, number: int | None = None) -> None:
        gpus, slots = self.plan.placement.decode[index], self.plan.actors[index].slots
        self._decode[index] = self._start("decode", index, index if number is None else number, gpus, slots)

    def _start(self, function: str, index: int, number: int, gpus: tuple[int, ...], slots: int) -> Invocation:
        now_s = time.monotonic()
        process = self.cluster.take(gpus, self.engine)
        held_s, process.ahead_s = now_s if process.ahead_s is None else process.ahead_s, None
        life = Life(function=function, index=number, gpus=gpus, at_s=self._since(held_s))
        self.lives.append(life)
        invocation = Invocation(
            function=function,
            index=index,
            process=process,
            life=life,
            called_s=now_s,
            seen_s=now_s,
        )
        process.turn += 1
        fresh, process.last_step = process.last_step != self.number, self.number
        call = process.actor.begin.remote(process.turn, self.weights.version, self.weights.published, slots, fresh)
        self._calls[call] = (invocation, partial(self._on_begun, invocation))
        return invocation

    def _on_begun(self, invocation: Invocation, begun: Begun) -> None:
        process, life = invocation.process, invocation.life
        process.answered(begun.pid)
        invocation.begun, now_s = begun, time.monotonic()
        # processes of one machine share a clock; from another, the answer's way counts as no time
        invocation.offset_s = 0.0 if process.here else now_s - begun.loaded_s
        invocation.seen_s = now_s
        up_s = begun.up_s + invocation.offset_s
        if process.turn == 1:
            self.cluster.started_up(process, up_s)
        if self._since(up_s) > life.at_s:
            life.until(self._since(up_s), "start-up")
            life.until(self._since(invocation.called_s), "early")
        life.until(self._since(begun.ready_s + invocation.offset_s), "start-up")
        life.until(self._since(begun.loaded_s + invocation.offset_s), "wait-weights")
        if invocation.function == "prefill":
            share = self.handles.prefills(self._shares[invocation.index], process.gpus)
            invocation.owed = {request.response for request in share}
            self._submit(invocation, share)
            self._poll(invocation)
        elif self.prefill_end_s is not None:
            self._open(invocation)

    def _open(self, invocation: Invocation) -> None:
        """A decode actor has all that it waits for."""
        assert invocation.begun is not None
        invocation.life.until(self._now(), "wait-kv" if self.plan.prefill else "wait-weights")
        invocation.seen_s = time.monotonic()
        self.generation.begin(invocation.index, invocation.begun.counters, invocation.offset_s)
        if self._decode.get(invocation.index) is invocation:
            self._poll(invocation)

    def _poll(self, invocation: Invocation) -> None:
        process = invocation.process
        call = process.actor.poll.remote(process.turn, POLL_S)
        self._calls[call] = (invocation, partial(self._on_update, invocation))

    def _submit(self, invocation: Invocation, requests: Sequence[Request]) -> None:
        invocation.sent += len(requests)
        invocation.seen_s = time.monotonic()
        invocation.process.actor.submit.remote(invocation.process.turn, list(requests))

    # ---- answers

    def _answer(self, call: Any) -> None:
        import ray
        from ray.exceptions import RayError

        invocation, act = self._calls.pop(call)
        try:
            answer = ray.get(call)
        except (RayError, RlhflessError) as error:  # what an actor has raised is both
            if invocation in self._serving:
                self._end_serving(invocation)
                return
            if invocation.begun is not None:
                invocation.seen_s = time.monotonic()  # news of a death come at once
            self._on_death(invocation, _cause(error))
        else:
            act(answer)

    def _on_update(self, invocation: Invocation, update: Update) -> None:
        prefilling = invocation.function == "prefill"
        owed = len(invocation.owed) if prefilling else self.generation.here(invocation.index)
        if update.counters.iterations != invocation.iterations or not owed:
            invocation.iterations = update.counters.iterations
            invocation.seen_s = time.monotonic()
        if update.over == "failed":
            self._note_cause(invocation, update.error)
        invocation.parted |= bool(update.parted or update.given_up)
        self.handles.cut(update.parted | update.given_up)
        if prefilling:
            self._on_prefill(invocation, update)
            still_there = self._prefill.get(invocation.index) is invocation
        else:
            self.generation.update(invocation.index, update)
            still_there = self._decode.get(invocation.index) is invocation
        if still_there:
            self._poll(invocation)

    def _on_prefill(self, invocation: Invocation, update: Update) -> None:
        invocation.owed.difference_update(one.response for one in update.finished)
        self.handles.prefilled(update.finished)
        if update.over == "failed":
            self._end_replica(invocation, "dead")
        elif not invocation.owed:
            assert invocation.begun is not None
            self.prefilled_tokens += update.counters.computed_tokens - invocation.begun.counters.computed_tokens
            ends_s = [one.done.last_token_s for one in update.finished if one.done.last_token_s is not None]
            invocation.life.until(self._since(max(ends_s, default=0.0) + invocation.offset_s), "prefill")
            self._end_replica(invocation, "done")

    def _end_replica(self, invocation: Invocation, end: End) -> None:
        """A replica has computed its prefixes, or died: decode actors then compute what it has not sent."""
        self.prefill_failures += end == "dead"
        self._part(invocation, end)
        if not self._prefill:
            self._end_prefill()

    def _end_prefill(self) -> None:
        """Decode actors may begin; those on the prefill actor's GPUs are started now."""
        self.prefill_end_s = self._now() if self.plan.prefill else 0.0
        for index in range(len(self.plan.actors)):
            invocation = self._decode.get(index)
            if invocation is None:
                if self.generation.actors[index].state == "working":
                    self._start_decode(index)
            elif invocation.begun is not None:
                self._open(invocation)

    # ---- ends

    def _part(self, invocation: Invocation, end: End) -> None:
        """An invocation is over: write the end of its record, keep its process or end it."""
        where = self._prefill if invocation.function == "prefill" else self._decode
        del where[invocation.index]
        for call in [call for call, (one, _) in self._calls.items() if one is invocation]:
            del self._calls[call]
        if invocation.function == "decode":
            self._write_decode(invocation, end)
        if end == "dead" and invocation.sent:
            decoding = bool(invocation.life.spans) and invocation.life.spans[-1].activity == "decode"
            invocation.life.until(self._since(invocation.seen_s), "decode" if decoding else "prefill")
        idle: Activity = "early" if self._is_early(invocation) else "wait-phase"
        invocation.life.until(self._now(), "start-up" if invocation.begun is None else idle)
        if end != "dead" and self._keep:
            self.cluster.keep(invocation.process)
        elif end != "dead" and invocation.holds_kv and self.config.kv == "nixl":
            self._serve(invocation)
        else:
            self.cluster.end(invocation.process, hangs=end == "dead")

    def _serve(self, invocation: Invocation) -> None:
        """Others read its KV from its memory: it ends when they have, at the latest with the step."""
        self._serving.append(invocation)
        call = invocation.process.actor.await_readers.remote()
        self._calls[call] = (invocation, lambda _: self._end_serving(invocation))

    def _end_serving(self, invocation: Invocation) -> None:
        self._serving.remove(invocation)
        invocation.life.until(self._now(), "send-kv")
        for call in [call for call, (one, _) in self._calls.items() if one is invocation]:
            del self._calls[call]
        self.cluster.end(invocation.process)

    def _is_early(self, invocation: Invocation) -> bool:
        """Whether it is in reserve and has had no responses yet."""
        return invocation.function == "decode" and invocation.index in self._reserve and not invocation.sent

    def _write_decode(self, invocation: Invocation, end: End) -> None:
        actor, life = self.generation.actors[invocation.index], invocation.life
        if not invocation.sent:
            return
        life.until(_since(actor.first_token_s, self.zero_s), "prefill")
        life.until(_since(actor.last_token_s, self.zero_s), "decode")
        if end == "cut":
            life.until(_since(actor.over_s, self.zero_s), "decode" if actor.first_token_s else "prefill")
            if self.generation.left:
                life.until(self._now(), "send-kv")

    def _on_death(self, invocation: Invocation, cause: str) -> None:
        self._note_cause(invocation, cause)
        if invocation.function == "prefill":
            self._end_replica(invocation, "dead")
        else:
            self.generation.fail(invocation.index)

    def _look_at_deadlines(self) -> None:
        now_s = time.monotonic()
        for invocation in {invocation for invocation, _ in self._calls.values()}:
            # who waits for the prefill actor has no call under way, and no deadline
            limit_s = self.config.hang_timeout_s if invocation.begun else self.config.start_timeout_s
            where = self._prefill if invocation.function == "prefill" else self._decode
            if now_s - invocation.seen_s > limit_s and where.get(invocation.index) is invocation:
                self._on_death(invocation, f"no sign of life for {limit_s:g} s")

    def _note_cause(self, invocation: Invocation, cause: str) -> None:
        self.causes.append(f"{invocation.function} {invocation.index} on GPUs {list(invocation.process.gpus)}: {cause}")

    def _now(self) -> float:
        return time.monotonic() - self.zero_s

    def _since(self, time_s: float) -> float:
        return time_s - self.zero_s


def _since(time_s: float | None, zero_s: float) -> float | None:
    return None if time_s is None else time_s - zero_s


def _cause(error: BaseException) -> str:
    """The line of Ray's long story that says what happened: its last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:MOST_CAUSE] if lines else type(error).__name__
