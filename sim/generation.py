"""The generation phase of one step in a SimPy environment: actors decode, rules cut, responses move, actors die.

Actors are driven by callbacks on timeouts, one a stretch (see `sim.engine`). When something happens to an actor inside
a stretch (a response arrives, the actor is cut), the stretch ends at the next boundary of two iterations. A rule sees
each actor as of that actor's last boundary, as a controller of a live cluster would.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import simpy

from rlhfless.scheduler.migration import GenerationView, Migration, rule
from rlhfless.types.arrays import IntArray, ints
from rlhfless.types.plan import MigrationSpec
from rlhfless.types.report import Activity
from sim.engine import Batch, Engine
from sim.functions import Life
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
    busy: bool = False
    """Inside a stretch."""
    decoded: bool = False
    """Whether it has begun to decode, after which prefills count as part of decoding."""
    stretch_s: float = 0.0
    """Start of the running stretch."""
    iterations: int | None = None
    """Iterations after which the running stretch ends early; None for as planned."""
    event: int = 0
    """Number of the event that is awaited; others are out of date."""
    incoming: set[int] = field(default_factory=set)
    """Responses on their way to it."""
    targets: dict[int, int] = field(default_factory=dict)
    """Response -> new actor, once a rule has cut it."""


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
        self.slots = ints([actor.engine.slots for actor in actors])
        self.assigned = ints([actor.engine.unfinished for actor in actors]).copy()
        self.finished = np.zeros(count, dtype=np.int64)
        self.running = np.zeros(count, dtype=np.int64)
        self.generated = np.zeros(count, dtype=np.int64)
        self.context = np.zeros(count, dtype=np.int64)
        self.kv = np.zeros(count, dtype=np.int64)

    def run(self, failures: Sequence[tuple[int, float]] = ()) -> float:
        """Carry the phase out; its end in seconds. `failures`: (actor, seconds)."""
        for actor in self.actors:
            self._begin(actor)
        for index, time_s in failures:
            if index < len(self.actors):
                self._after(time_s, partial(self._on_failure, self.actors[index]))
        self.env.run(until=self.done)
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
            self._waited(actor)
            self._boundary(actor)

    def _waited(self, actor: Actor) -> None:
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
        elif not actor.incoming:
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
        """Refresh what rules see of an actor."""
        engine, index = actor.engine, actor.index
        self.running[index] = len(engine.running)
        self.context[index] = engine.context_tokens
        self.kv[index] = engine.used_tokens
        self.generated[index] = engine.generated_tokens

    def _decide(self) -> None:
        assert self.rule is not None
        unfinished = self.assigned - self.finished
        if not self.rule.triggered(self.assigned, self.finished, unfinished):
            return
        capacity = self.actors[0].engine.profile.data.kv_capacity_tokens
        view = GenerationView(
            assigned=ints(self.assigned),
            finished=ints(self.finished),
            running=ints(self.running),
            waiting=ints(unfinished - self.running),
            open_slots=ints(np.where(unfinished > 0, np.maximum(self.slots - unfinished, 0), 0)),
            tokens_generated=ints(self.generated),
            context_tokens=ints(self.context),
            kv_headroom_tokens=ints(capacity - self.kv),
            unfinished=self._unfinished,
            cuts_so_far=self.cuts,
        )
        by_source: dict[int, list[Migration]] = defaultdict(list)
        for migration in self.rule.decide(view):
            by_source[migration.source].append(migration)
        for source, migrations in by_source.items():
            self._cut(self.actors[source], migrations)

    def _unfinished(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses that an actor still has, those on their way to it included, and their contexts in tokens."""
        actor, batch = self.actors[index], self.batch
        actor.engine.progress()
        left = [*actor.engine.running, *actor.engine.waiting, *sorted(actor.incoming)]
        n = batch.responses_per_prompt
        return ints(left), ints([batch.prompt_tokens[r // n] + batch.generated[r] for r in left])

    def _cut(self, actor: Actor, migrations: Sequence[Migration]) -> None:
        """A rule ends an actor: its numbers change now, its responses leave at its next boundary."""
        actor.state = "leaving"
        actor.targets = {migration.response: migration.target for migration in migrations}
        for migration in migrations:
            self.assigned[migration.target] += 1
            self.actors[migration.target].incoming.add(migration.response)
        self._forget(actor)
        self.cuts += 1
        if actor.busy:
            self._interrupt(actor)
        elif not actor.engine.unfinished:  # it only waited for responses on their way; they are sent on as they come
            self._leave(actor)

    def _forget(self, actor: Actor) -> None:
        """Nothing unfinished is left with an actor, as rules see it."""
        self.assigned[actor.index] = self.finished[actor.index]
        self.running[actor.index] = self.context[actor.index] = self.kv[actor.index] = 0

    def _leave(self, actor: Actor) -> None:
        """At its boundary, a cut actor sends its responses on and is released when they have gone."""
        actor.state = "gone"
        left = set(actor.engine.drain())
        now_s = sent_s = self.env.now
        for response, target in actor.targets.items():
            if response in left:
                sent_s = max(sent_s, self._send(response, actor.host, self.actors[target]))
            elif response not in actor.incoming:  # it ended at this very boundary
                self._uncall(self.actors[target], response)
        actor.life.until(now_s, "decode" if actor.decoded else "wait-kv")
        actor.life.until(sent_s, "send-kv")

    def _uncall(self, target: Actor, response: int) -> None:
        """A response that was on its way to `target` does not come."""
        target.incoming.discard(response)
        self.assigned[target.index] -= 1
        started = self.env.now >= target.start_s
        if target.state == "working" and started and not (target.busy or target.incoming or target.engine.unfinished):
            target.life.until(self.env.now, "wait-kv")
            target.state = "gone"

    def _send(self, response: int, host: int, target: Actor) -> float:
        """Move a response with its KV, or without it where computing it again is sooner; end of sending."""
        now_s, batch = self.env.now, self.batch
        context = batch.prompt_tokens[response // batch.responses_per_prompt] + batch.generated[response]
        profile = target.engine.profile
        size_bytes = context * profile.data.kv_bytes_per_token
        self.moves[response] += 1
        started = batch.generated[response] > 0
        arrival_s = self.links.quote(host, target.host, size_bytes, now_s)
        if not started or arrival_s - now_s >= target.engine.prefill_timer(context):
            self._after(0.0, partial(self._on_arrival, response, target, False))
            return now_s
        self.links.send(host, target.host, size_bytes, now_s)
        self.moved_kv_bytes += size_bytes
        self._after(arrival_s - now_s, partial(self._on_arrival, response, target, True))
        return arrival_s

    def _on_arrival(self, response: int, target: Actor, loaded: bool, _: simpy.Event) -> None:
        if response not in target.incoming:
            return  # the target has died, and the response was given to another
        target.incoming.discard(response)
        if target.state != "working":  # cut while the response was on its way: on to where the rule wants it
            self._send(response, target.host, self.actors[target.targets.pop(response)])
            return
        target.engine.submit([response], loaded=loaded)
        if target.busy:
            self._interrupt(target)
        elif self.env.now >= target.start_s:
            target.life.until(self.env.now, "wait-kv")
            self._boundary(target)

    def _on_failure(self, actor: Actor, _: simpy.Event) -> None:
        """An actor dies: tokens up to its last boundary were reported, its KV is lost, others take over."""
        now_s = self.env.now
        if actor.state == "gone" or actor.life.at_s > now_s:
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
        for response, target in actor.targets.items():
            self._uncall(self.actors[target], response)
        orphans = [*actor.engine.drain(), *sorted(actor.incoming)]
        actor.incoming.clear()
        actor.targets = {}
        self._waited(actor)
        actor.life.until(now_s, "decode" if actor.decoded else "wait-kv")
        self._forget(actor)
        actor.state = "gone"
        heirs = [other for other in self.actors if other.state == "working"]
        if not heirs:
            self._revive(actor, orphans)
            return
        for response in orphans:
            heir = min(heirs, key=lambda other: int(self.assigned[other.index] - self.finished[other.index]))
            self.assigned[heir.index] += 1
            self.moves[response] += 1
            heir.incoming.add(response)
            self._after(0.0, partial(self._on_arrival, response, heir, False))

    def _revive(self, actor: Actor, orphans: list[int]) -> None:
        """The last actor has died: a new process takes its place."""
        self.lives.append(actor.life)
        actor.start_s, actor.waits = self.restart(actor, self.env.now), ()
        actor.state, actor.decoded = "working", False
        self.assigned[actor.index] += len(orphans)
        actor.engine.submit(orphans)
        self._begin(actor)

    def _finish(self) -> None:
        self.lives.extend(actor.life for actor in self.actors)
        self.done.succeed()
