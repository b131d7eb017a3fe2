"""The generation phase of one step in a SimPy environment: actors decode, rules cut, responses move, actors die.

Actors are driven by callbacks on timeouts, one a stretch (see `sim.engine`). When something happens to an actor inside
a stretch (a response arrives, the actor is cut), the stretch ends at the next boundary of two iterations. A rule sees
each actor as of that actor's last boundary, as a controller of a live cluster would.

Every unfinished response has one owner, the actor that is to finish it, and is at one place: in an engine, or on its
way. A cut changes the owner at once; the response itself leaves its engine at that actor's next boundary, and whoever
meets a response that is not its own sends it on to the owner.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import simpy

from rlhfless.executor import Life
from rlhfless.scheduler.migration import GenerationView, Migration, rule
from rlhfless.types.arrays import IntArray, ints, seen
from rlhfless.types.plan import MigrationSpec
from rlhfless.types.report import Activity
from sim.engine import Batch, Engine
from sim.network import Links

State = Literal["working", "leaving", "gone"]


@dataclass(slots=True, kw_only=True)
class Actor:
    """A decode actor at work."""

    index: int
    """Number in the plan."""
    host: int
    """Host that carries its GPUs."""
    engine: Engine
    """Its continuous batching."""
    life: Life
    """Its invocation."""
    start_s: float
    """When its process, the weights and its KV are all there."""
    waits: Sequence[tuple[float, Activity]] = ()
    """What it waits for before that, in order: (until, activity)."""
    state: State = "working"
    """working: takes and decodes responses. leaving: a rule has cut it, it goes at its next boundary. gone."""
    begun: bool = False
    """Whether `start_s` has come."""
    busy: bool = False
    """Inside a stretch."""
    decoded: bool = False
    """Whether it has begun to decode, after which prefills count as part of decoding."""
    dead: bool = False
    """Whether it has died, and the KV of what it sends on with it."""
    stretch_s: float = 0.0
    """Start of the running stretch."""
    iterations: int | None = None
    """Iterations after which the running stretch ends early; None for as planned."""
    event: int = 0
    """Number of the event that is awaited; others are out of date."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: a step makes millions of small objects and no cycles among them, and looking for
    some takes as long again as all else (measured at 300,000 responses: 19 s with, 10 s without)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Generation:
    """Decoding of one step. `run` returns when the last response has ended."""

    def __init__(
        self,
        migration: MigrationSpec | None,
        batch: Batch,
        actors: list[Actor],
        links: Links,
        restart: Callable[[Actor, float], float],
    ) -> None:
        """`restart(actor, now)` gives a dead actor a new life and says when it can work again."""
        self.env = simpy.Environment()
        self.done = self.env.event()
        self.batch, self.actors, self.links, self.restart = batch, actors, links, restart
        self.rule = rule(migration) if migration else None
        count, responses = len(actors), len(batch.target)
        self.left = responses
        self.end_s = [0.0] * responses
        self.actor_of = [0] * responses
        self.moves = [0] * responses
        self.cuts = self.failures = 0
        self.moved_kv_bytes = 0.0
        self.lives: list[Life] = []
        self.owner = [0] * responses
        self.owned: list[set[int]] = [set(actor.engine.waiting) for actor in actors]
        for actor in actors:
            for response in actor.engine.waiting:
                self.owner[response] = actor.index
        self.coming: dict[
            int, int
        ] = {}  # response on its way to its owner -> context that the owner must have room for
        self.slots = ints([actor.engine.slots for actor in actors])
        self.assigned = ints([actor.engine.unfinished for actor in actors]).copy()
        self.finished = np.zeros(count, dtype=np.int64)
        self.running = np.zeros(count, dtype=np.int64)
        self.generated = np.zeros(count, dtype=np.int64)
        self.context = np.zeros(count, dtype=np.int64)
        self.room = np.array([actor.engine.profile.data.kv_capacity_tokens for actor in actors], dtype=np.int64)
        self.promised = np.zeros(count, dtype=np.int64)

    def run(self, failures: Sequence[tuple[int, float]] = ()) -> float:
        """Carry the phase out; its end in seconds. `failures`: (actor, seconds)."""
        for actor in self.actors:
            self._begin(actor)
        for index, time_s in failures:
            if index < len(self.actors):
                self._after(time_s, partial(self._on_failure, self.actors[index]))
        with _uncollected():
            self.env.run(until=self.done)
        assert not any(self.owned), "a response without an end"
        assert (self.assigned == self.finished).all(), "a response that is counted twice or not at all"
        return float(self.env.now)

    def _after(self, delay_s: float, act: Callable[[simpy.Event], None]) -> None:
        timeout = self.env.timeout(max(0.0, delay_s))
        assert timeout.callbacks is not None
        timeout.callbacks.append(act)

    def _begin(self, actor: Actor) -> None:
        actor.event += 1
        self._after(actor.start_s - self.env.now, partial(self._on_start, actor, actor.event))

    def _on_start(self, actor: Actor, number: int, _: simpy.Event) -> None:
        if actor.event == number:
            actor.begun = True
            self._waited(actor)
            self._boundary(actor)

    def _waited(self, actor: Actor) -> None:
        """Write down what the actor has waited for so far."""
        for until_s, activity in actor.waits:
            actor.life.until(min(until_s, self.env.now), activity)

    def _boundary(self, actor: Actor) -> None:
        """Between two iterations: leave if cut, else begin the next stretch, else wait or end."""
        if actor.state == "leaving":
            self._leave(actor)
        if actor.state == "gone":
            return
        duration_s = actor.engine.settle(self.env.now)
        self._observe(actor)
        if duration_s is not None:
            actor.busy, actor.stretch_s, actor.iterations = True, self.env.now, None
            self._await(actor, duration_s)
        elif not self.owned[actor.index]:
            actor.state = "gone"

    def _await(self, actor: Actor, delay_s: float) -> None:
        actor.event += 1
        self._after(delay_s, partial(self._on_stretch_end, actor, actor.event))

    def _on_stretch_end(self, actor: Actor, number: int, _: simpy.Event) -> None:
        if actor.event != number:
            return
        self._close_stretch(actor, actor.iterations)
        if self.left:
            self._boundary(actor)
        else:
            self._finish()

    def _close_stretch(self, actor: Actor, iterations: int | None) -> None:
        """Account for a stretch that ends now, after `iterations` (None: all that were planned)."""
        now_s, decoding = self.env.now, actor.engine.decoding
        actor.decoded = actor.decoded or decoding
        actor.life.until(now_s, "decode" if actor.decoded else "prefill")
        actor.busy = False
        ended = actor.engine.advance(iterations)
        if not ended:
            return
        for response in ended:
            self.end_s[response] = now_s
            self.actor_of[response] = actor.index
            owner = self.owner[response]
            if owner == actor.index:
                self.owned[owner].discard(response)
            else:  # it was to leave at this very boundary
                self._disown(response)
                self.assigned[actor.index] += 1
                self._end_if_idle(self.actors[owner])
        self.left -= len(ended)
        self.finished[actor.index] += len(ended)
        self._observe(actor)
        if self.rule is not None and self.left:
            self._decide()

    def _interrupt(self, actor: Actor) -> None:
        """Something waits for the actor: end its decode stretch at the next boundary. Prefill is not interrupted."""
        if not actor.busy or not actor.engine.decoding:
            return
        actor.iterations, at_s = actor.engine.iterations_by(self.env.now - actor.stretch_s)
        self._await(actor, actor.stretch_s + at_s - self.env.now)

    def _observe(self, actor: Actor) -> None:
        """Refresh what rules see of an actor; nothing is left to see of one that is cut."""
        if self.rule is None:
            return
        engine, index = actor.engine, actor.index
        self.generated[index] = engine.generated_tokens
        if actor.state != "working":
            self.running[index] = self.context[index] = self.room[index] = 0
            return
        self.running[index] = len(engine.running)
        self.context[index] = engine.context_tokens
        self.room[index] = engine.headroom_tokens - engine.queued_tokens

    def _decide(self) -> None:
        assert self.rule is not None
        unfinished = self.assigned - self.finished
        if not self.rule.triggered(self.assigned, self.finished, unfinished):
            return
        view = GenerationView(
            assigned=seen(self.assigned),
            finished=seen(self.finished),
            running=seen(self.running),
            waiting=unfinished - self.running,
            open_slots=np.where(unfinished > 0, np.maximum(self.slots - unfinished, 0), 0),
            tokens_generated=seen(self.generated),
            context_tokens=seen(self.context),
            kv_headroom_tokens=np.maximum(self.room - self.promised, 0),
            unfinished=self._unfinished,
            cuts_so_far=self.cuts,
        )
        by_source: dict[int, list[Migration]] = defaultdict(list)
        for migration in self.rule.decide(view):
            by_source[migration.source].append(migration)
        for source, migrations in by_source.items():
            self._cut(self.actors[source], migrations)

    def _unfinished(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses that an actor owns, those on their way to it included, and their contexts in tokens."""
        self.actors[index].engine.progress()
        left = sorted(self.owned[index])
        return ints(left), ints([self._context(response) for response in left])

    def _context(self, response: int) -> int:
        batch = self.batch
        return batch.prompt_tokens[response // batch.responses_per_prompt] + batch.generated[response]

    def _give(self, response: int, to: Actor) -> None:
        """Another actor is to finish a response; it has yet to come there."""
        self._disown(response)
        self.owner[response] = to.index
        self.owned[to.index].add(response)
        self.assigned[to.index] += 1
        self.coming[response] = self._context(response)
        self.promised[to.index] += self.coming[response]

    def _disown(self, response: int) -> None:
        """A response is no longer its owner's: it gets another, or has ended elsewhere."""
        self._come(response)
        self.owned[self.owner[response]].discard(response)
        self.assigned[self.owner[response]] -= 1

    def _come(self, response: int) -> None:
        """Nothing has to be kept free for a response any more, for it is there or will not come."""
        self.promised[self.owner[response]] -= self.coming.pop(response, 0)

    def _cut(self, actor: Actor, migrations: Sequence[Migration]) -> None:
        """A rule ends an actor: the owners change now, the responses leave at its next boundary."""
        for migration in migrations:
            self._give(migration.response, self.actors[migration.target])
        assert not self.owned[actor.index], "a rule moves all or none of an actor's responses"
        actor.state = "leaving"
        self._observe(actor)
        self.cuts += 1
        if actor.busy:
            self._interrupt(actor)
        elif not (actor.begun and actor.engine.unfinished):  # nothing is being decoded: no boundary to wait for
            self._leave(actor)

    def _leave(self, actor: Actor) -> None:
        """At its boundary, a cut actor sends its responses on and is released when they have gone."""
        actor.state = "gone"
        actor.event += 1
        self._waited(actor)
        self._observe(actor)
        sent_s = self._send_all(actor.engine.drain(), actor)
        actor.life.until(self.env.now, "decode" if actor.decoded else "wait-kv")
        actor.life.until(sent_s, "send-kv")

    def _end_if_idle(self, actor: Actor) -> None:
        """An actor that waits for nothing any more ends."""
        if actor.state == "working" and actor.begun and not actor.busy and not self.owned[actor.index]:
            actor.life.until(self.env.now, "wait-kv")
            actor.state = "gone"

    def _send_all(self, responses: Iterable[int], source: Actor) -> float:
        """Responses leave together for their owners, each with its KV or, where computing it again is sooner, without;
        end of sending. An owner computes all that comes without in one go, and each of them waits for all."""
        now_s = sent_s = self.env.now
        again: dict[int, int] = defaultdict(int)  # owner -> tokens that it is to compute again
        for response in responses:
            target, context = self.actors[self.owner[response]], self._context(response)
            profile = target.engine.profile
            size_bytes = context * profile.data.kv_bytes_per_token
            self.moves[response] += 1
            arrival_s = self.links.quote(source.host, target.host, size_bytes, now_s)
            useful = self.batch.generated[response] > 0 and not source.dead
            anew = again[target.index] + context
            if not useful or arrival_s - now_s >= target.engine.prefill_timer(anew):
                again[target.index] = anew
                self._after(0.0, partial(self._on_arrival, response, target, False))
                continue
            self.links.send(source.host, target.host, size_bytes, now_s)
            self.moved_kv_bytes += size_bytes
            self._after(arrival_s - now_s, partial(self._on_arrival, response, target, True))
            sent_s = max(sent_s, arrival_s)
        return sent_s

    def _on_arrival(self, response: int, actor: Actor, loaded: bool, _: simpy.Event) -> None:
        if self.owner[response] != actor.index:  # cut or dead while the response was on its way
            self._send_all([response], actor)
            return
        self._come(response)
        actor.engine.submit([response], loaded=loaded)
        if actor.busy:
            self._interrupt(actor)
        elif actor.begun:
            actor.life.until(self.env.now, "wait-kv")
            self._boundary(actor)

    def _on_failure(self, actor: Actor, _: simpy.Event) -> None:
        """An actor dies: tokens up to its last boundary were reported, its KV is lost, others take over."""
        now_s = self.env.now
        if actor.state == "gone" or actor.life.start_s > now_s:
            return
        if actor.busy:
            iterations, at_s = actor.engine.iterations_by(now_s - actor.stretch_s)
            late = actor.engine.decoding and actor.stretch_s + at_s > now_s
            self._close_stretch(actor, iterations - 1 if late else iterations)
            if not self.left:
                self._finish()
                return
        self.failures += 1
        actor.event += 1
        actor.life.cut(now_s)
        self._waited(actor)
        actor.life.until(now_s, "decode" if actor.decoded else "wait-kv")
        actor.state, actor.dead = "gone", True
        here = actor.engine.drain()
        heirs = [other for other in self.actors if other.state == "working"]
        if not heirs:
            self._revive(actor, here)
            return
        for response in sorted(self.owned[actor.index]):
            heir = min(heirs, key=lambda other: int(self.assigned[other.index] - self.finished[other.index]))
            self._give(response, heir)
        self._observe(actor)
        self._send_all(here, actor)

    def _revive(self, actor: Actor, here: list[int]) -> None:
        """The last actor has died: a new process takes its place."""
        self.lives.append(actor.life)
        actor.start_s, actor.waits = self.restart(actor, self.env.now), ()
        actor.state, actor.dead, actor.begun, actor.decoded = "working", False, False, False
        actor.engine.submit(here)
        self._observe(actor)
        self._begin(actor)

    def _finish(self) -> None:
        self.lives.extend(actor.life for actor in self.actors)
        self.done.succeed()
