"""The generation phase of one step in a SimPy environment: actors decode, rules cut, responses move, actors die.

Actors are driven by callbacks on timeouts, one a stretch (see `sim.engine`). When something happens to an actor inside
a stretch (a response arrives, the actor is cut), the stretch ends at the next boundary of two iterations. A rule sees
each actor as of that actor's last boundary, as a controller of a live cluster would.

A rule changes the owner of a response at once (see `sim.ledger`); the response itself leaves its engine at that actor's
next boundary, and whoever meets a response that is not its own sends it on to the owner. An actor that keeps none of
its own is cut. One that goes on decodes while what leaves it is sent.

A reserve actor holds nothing until a rule asks for it; then its process starts, and when that is there the weights are
sent.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import simpy

from rlhfless.executor import Life
from rlhfless.scheduler.migration import Migration, Start, rule
from rlhfless.types.arrays import BoolArray, FloatArray
from rlhfless.types.plan import MigrationSpec
from sim.actor import Actor
from sim.engine import Batch
from sim.ledger import Ledger
from sim.network import Links


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
        start: Callable[[Actor, float], float],
        load: Callable[[Actor, float], float],
        enough: Callable[[FloatArray], BoolArray | None] | None = None,
    ) -> None:
        """`restart(actor, now)` gives a dead actor a new life and says when it can work again; `start(actor, now)`
        gives a reserve actor its life and says when its process is there; `load(actor, now)` sends it the weights then
        and says when they have come. `enough` is `World.enough` for this step."""
        self.env = simpy.Environment()
        self.done = self.env.event()
        self.batch, self.actors, self.links = batch, actors, links
        self.restart, self.start, self.load = restart, start, load
        self.rule = rule(migration) if migration else None
        self.enough = enough
        self.chosen: BoolArray | None = None
        self.ledger = Ledger(batch, actors, watched=migration is not None)
        self.left = sum(actor.engine.unfinished for actor in actors)
        self.actor_of = [0] * len(batch.target)
        self.moves = [0] * len(batch.target)
        self.cuts = self.failures = 0
        self.moved_kv_bytes = 0.0
        self.lives: list[Life] = []

    def run(self, failures: Sequence[tuple[int, float]] = ()) -> float:
        """Carry the phase out; its end in seconds. `failures`: (actor, seconds)."""
        for actor in self.actors:
            if actor.state == "working":
                self._begin(actor)
        for index, time_s in failures:
            if index < len(self.actors):
                self._after(time_s, partial(self._on_failure, self.actors[index]))
        with _uncollected():
            self.env.run(until=self.done)
        if self.left:  # enough had ended
            self.ledger.end_s = [min(end_s, self.env.now) for end_s in self.ledger.end_s]
            return float(self.env.now)
        assert not any(self.ledger.owned), "a response without an end"
        assert (self.ledger.assigned == self.ledger.finished).all(), "a response that is counted twice or not at all"
        return float(self.env.now)

    def _after(self, delay_s: float, act: Callable[[simpy.Event], None]) -> None:
        timeout = self.env.timeout(max(0.0, delay_s))
        assert timeout.callbacks is not None
        timeout.callbacks.append(act)

    def _begin(self, actor: Actor) -> None:
        actor.event += 1
        self._after(actor.start_s - self.env.now, partial(self._on_start, actor, actor.event))

    def _on_start(self, actor: Actor, number: int, _: simpy.Event) -> None:
        if actor.event != number:
            return
        actor.begun = True
        self._waited(actor)
        if actor.state != "starting":
            self._boundary(actor)
            return
        actor.state = "idle"
        self.ledger.observe(actor)
        self._decide()

    def _ask(self, actor: Actor) -> None:
        """A rule asks for a reserve actor."""
        actor.state = "starting"
        actor.event += 1
        ready_s = self.start(actor, self.env.now)
        self._after(ready_s - self.env.now, partial(self._on_process, actor, actor.event))

    def _on_process(self, actor: Actor, number: int, _: simpy.Event) -> None:
        """The process of a reserve actor is there; the weights follow."""
        if actor.event == number:
            actor.start_s = self.load(actor, self.env.now)
            actor.waits = ((actor.start_s, "wait-weights"),)
            self._begin(actor)

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
        if actor.parting:
            self._part(actor)
        duration_s = actor.engine.settle(self.env.now)
        self.ledger.observe(actor)
        if duration_s is not None:
            actor.busy, actor.stretch_s, actor.iterations = True, self.env.now, None
            self._await(actor, duration_s)
        elif not self.ledger.owned[actor.index]:
            actor.state = "gone"
            if not self.left and not self.done.triggered:  # all had ended in earlier steps
                self._stop()
                self._finish()

    def _await(self, actor: Actor, delay_s: float) -> None:
        actor.event += 1
        self._after(delay_s, partial(self._on_stretch_end, actor, actor.event))

    def _on_stretch_end(self, actor: Actor, number: int, _: simpy.Event) -> None:
        if actor.event != number:
            return
        self._close_stretch(actor, actor.iterations)
        if self.left and self.chosen is None:
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
            self.ledger.end_s[response] = now_s
            self.actor_of[response] = actor.index
            owner = self.ledger.owner[response]
            if owner == actor.index:
                self.ledger.come(response)
                self.ledger.owned[owner].discard(response)
            else:  # it was to leave at this very boundary
                self.ledger.disown(response)
                self.ledger.assigned[actor.index] += 1
                self._end_if_idle(self.actors[owner])
        self.left -= len(ended)
        actor.parting = [response for response in actor.parting if response not in ended]
        self.ledger.finished[actor.index] += len(ended)
        self.ledger.observe(actor)
        if self.enough is not None and self.chosen is None:
            self.chosen = self.enough(np.array(self.ledger.end_s))
        if self.rule is not None and self.left and self.chosen is None:
            self._decide()

    def _halt(self, actor: Actor) -> None:
        """End a stretch now, after its last whole iteration."""
        elapsed_s = self.env.now - actor.stretch_s
        iterations, at_s = actor.engine.iterations_by(elapsed_s)
        late = actor.engine.decoding and actor.stretch_s + at_s > self.env.now
        self._close_stretch(actor, iterations - 1 if late else iterations)

    def _interrupt(self, actor: Actor) -> None:
        """Something waits for the actor: end its decode stretch at the next boundary. Prefill is not interrupted."""
        if not actor.busy or not actor.engine.decoding:
            return
        actor.iterations, at_s = actor.engine.iterations_by(self.env.now - actor.stretch_s)
        self._await(actor, actor.stretch_s + at_s - self.env.now)

    def _decide(self) -> None:
        assert self.rule is not None
        ledger = self.ledger
        if not self.rule.triggered(ledger.assigned, ledger.finished, ledger.unfinished):
            return
        by_source: dict[int, list[Migration]] = defaultdict(list)
        for decided in self.rule.decide(ledger.view(self.cuts)):
            if isinstance(decided, Start):
                self._ask(self.actors[decided.actor])
            else:
                by_source[decided.source].append(decided)
        leaving = {source: self._reassign(self.actors[source], moves) for source, moves in by_source.items()}
        for source, responses in leaving.items():
            self._let_go(self.actors[source], responses)

    def _give(self, response: int, to: Actor) -> None:
        if to.state == "idle":
            to.life.until(self.env.now, "early")
            to.state = "working"
        self.ledger.give(response, to)

    def _reassign(self, actor: Actor, migrations: Sequence[Migration]) -> list[int]:
        """A rule sends responses of an actor elsewhere, or to the head of its queue; those that are in its engine."""
        leaving = []
        for migration in migrations:
            response = migration.response
            if migration.target == actor.index:
                actor.engine.hasten(response)
                self._interrupt(actor)
                continue
            if response not in self.ledger.coming:
                leaving.append(response)
            self._give(response, self.actors[migration.target])
        return leaving

    def _let_go(self, actor: Actor, leaving: Sequence[int]) -> None:
        """What a rule has given away leaves at the actor's next boundary, and the actor with it if it keeps nothing."""
        if not self.ledger.owned[actor.index]:
            self._cut(actor)
        elif leaving:
            actor.parting += leaving
            self.ledger.overlook(actor, leaving)
            if actor.busy:
                self._interrupt(actor)
            elif not actor.begun:  # no boundary to wait for
                self._part(actor)

    def _part(self, actor: Actor) -> None:
        """At its boundary, an actor sends on what it is not to finish."""
        parting, actor.parting = actor.parting, []
        for response in parting:
            if self.ledger.owner[response] == actor.index:  # it has been given back
                self.ledger.come(response)
        self._send_all(actor.engine.release(r for r in parting if self.ledger.owner[r] != actor.index), actor)

    def _cut(self, actor: Actor) -> None:
        """A rule ends an actor: the responses leave at its next boundary."""
        actor.state = "leaving"
        self.ledger.observe(actor)
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
        self.ledger.observe(actor)
        actor.parting = []
        sent_s = self._send_all(actor.engine.drain(), actor)
        actor.life.until(self.env.now, "decode" if actor.decoded else "wait-kv")
        actor.life.until(sent_s, "send-kv")

    def _end_if_idle(self, actor: Actor) -> None:
        """An actor that waits for nothing any more ends."""
        if actor.state == "working" and actor.begun and not actor.busy and not self.ledger.owned[actor.index]:
            actor.life.until(self.env.now, "wait-kv")
            actor.state = "gone"

    def _send_all(self, responses: Iterable[int], source: Actor) -> float:
        """Responses leave together for their owners, each with its KV or, where computing it again is sooner, without;
        end of sending. An owner computes all that comes without in one go, and each of them waits for all."""
        now_s = sent_s = self.env.now
        again: dict[int, int] = defaultdict(int)  # owner -> tokens that it is to compute again
        for response in responses:
            target, context = self.actors[self.ledger.owner[response]], self.ledger.context_of(response)
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
        if self.ledger.owner[response] != actor.index:  # cut or dead while the response was on its way
            self._send_all([response], actor)
            return
        self.ledger.come(response)
        actor.engine.submit([response], loaded=loaded)
        if actor.busy:
            self._interrupt(actor)
        elif actor.begun:
            actor.life.until(self.env.now, "wait-kv")
            self._boundary(actor)

    def _on_failure(self, actor: Actor, _: simpy.Event) -> None:
        """An actor dies: tokens up to its last boundary were reported, its KV is lost, others take over."""
        now_s = self.env.now
        if actor.state in ("gone", "reserved") or actor.life.start_s > now_s:
            return
        if actor.busy:
            self._halt(actor)
            if not self.left or self.chosen is not None:
                self._finish()
                return
        self.failures += 1
        actor.event += 1
        actor.life.cut(now_s)
        self._waited(actor)
        actor.life.until(now_s, "decode" if actor.decoded else "early" if actor.state == "idle" else "wait-kv")
        actor.state, actor.dead = "gone", True
        here, actor.parting = actor.engine.drain(), []
        heirs = [other for other in self.actors if other.state == "working"]
        if not heirs:
            self._revive(actor, here)
            return
        for response in sorted(self.ledger.owned[actor.index]):
            heir = min(
                heirs, key=lambda other: int(self.ledger.assigned[other.index] - self.ledger.finished[other.index])
            )
            self._give(response, heir)
        self.ledger.observe(actor)
        self._send_all(here, actor)

    def _revive(self, actor: Actor, here: list[int]) -> None:
        """The last actor has died: a new process takes its place."""
        self.lives.append(actor.life)
        actor.start_s, actor.waits = self.restart(actor, self.env.now), ()
        actor.state, actor.dead, actor.begun, actor.decoded = "working", False, False, False
        actor.engine.submit(here)
        self.ledger.observe(actor)
        self._begin(actor)

    def _stop(self) -> None:
        """Enough has ended: all actors stop, and what they have not finished stays as it is."""
        for actor in self.actors:
            if actor.state in ("working", "leaving"):
                if actor.busy:
                    self._halt(actor)
                elif not actor.begun:
                    actor.life.cut(self.env.now)
                    self._waited(actor)
                actor.engine.progress()
                actor.life.until(self.env.now, "decode" if actor.decoded else "wait-kv")

    def _finish(self) -> None:
        if self.left:
            self._stop()
        for actor in self.actors:
            if actor.state in ("starting", "idle"):  # it was not needed
                actor.life.cut(self.env.now)
                self._waited(actor)
                actor.life.until(self.env.now, "early")
        self.lives.extend(actor.life for actor in self.actors)
        self.done.succeed()
