"""The generation phase of one step as its controller sees it: who owns each response, where it is, what is safe of it.

The twin of `sim.generation`: the same rules at the same moments. Events go in (an actor can work, an actor reports, an
actor has died), commands go out through a `Wire`. There is no Ray, no clock and no thread in here, so that every order
of events can be tried in tests.

Every unfinished response has one owner, the actor that is to finish it, and one place, the actor that has been sent it.
The two differ while it leaves a place for its owner, be it that the place ends or that it goes on with others. Its
tokens are safe here as far as they were reported; a place that dies takes the rest with it, and whoever goes on
generates the same tokens again.

A reserve actor has no process until a rule asks for it. Once it can work it is idle until a rule gives it responses.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from backends.engine_types import EngineCounters, EngineError, Finished, Partial, Request
from backends.generation_types import NOWHERE, Actor, Response, State, Wire
from backends.vllm_actor import NOTHING, Update
from rlhfless.scheduler.migration import GenerationView, Migration, Start, rule
from rlhfless.types.arrays import BoolArray, IntArray, ints, seen
from rlhfless.types.plan import MigrationSpec


class Generation:
    """Decoding of one step. It is over when `left` is 0."""

    def __init__(
        self,
        migration: MigrationSpec | None,
        requests: Sequence[Request],
        shares: Sequence[Sequence[int]],
        slots: Sequence[int],
        version: str,
        wire: Wire,
    ) -> None:
        """`shares`: responses of each actor in the order of their admission; `version`: weights to be drawn from."""
        self.rule = rule(migration) if migration else None
        self.version, self.wire = version, wire
        self.responses = [
            Response(request=request, tokens=[], logprobs=[], here=[], here_logprobs=[]) for request in requests
        ]
        self.actors = [Actor(index=index, slots=count) for index, count in enumerate(slots)]
        if migration is not None and migration.terms is not None:
            for index in migration.terms.reserve.tolist():
                self.actors[index].state = "reserved"
        self.left = len(requests)
        self.actor_of = [0] * self.left
        self.moves = [0] * self.left
        self.cuts = self.failures = 0
        self.computed_tokens = self.continued_tokens = self.recomputed_tokens = 0
        self.generated_tokens = self.preemptions = 0
        self.moved_kv_bytes = 0.0
        self._owner = [0] * self.left
        self._place = [0] * self.left
        self._owned: list[set[int]] = [set(share) for share in shares]
        self._at: list[dict[int, None]] = [dict.fromkeys(share) for share in shares]  # in order of admission
        for index, share in enumerate(shares):
            for response in share:
                self._owner[response] = self._place[response] = index
        self._assigned = np.array([len(share) for share in shares], dtype=np.int64)
        self._finished = np.zeros(len(shares), dtype=np.int64)
        self._held, self._room = np.zeros_like(self._finished), np.zeros_like(self._finished)
        self._ended = np.zeros(self.left, dtype=np.int64)  # context of what has ended
        self._stale = set(range(len(shares)))  # actors of which more is known than _held and _room say

    # ---- events

    def begin(self, index: int, counters: EngineCounters, offset_s: float = 0.0) -> None:
        """An actor can work from now on; its engine's totals so far."""
        actor = self.actors[index]
        assert actor.state in ("starting", "working"), "begun without need"
        self._stale.add(index)
        actor.begun, actor.base, actor.counters, actor.offset_s = True, counters, counters, offset_s
        if actor.state == "starting":
            actor.state = "idle"
            if self.left:
                self._decide()
            return
        self._submit(actor, list(self._at[index]))
        self._end_if_idle(actor)

    def update(self, index: int, update: Update) -> None:
        """An actor reports. Raises EngineError where it has drawn from other weights than it was told to."""
        actor = self.actors[index]
        assert actor.state != "gone", "a report of an actor that was released"
        actor.counters, actor.queue = update.counters, update.queue
        self._stale.add(index)
        for one in update.finished:
            self._finish(actor, one)
        for response, count in update.progress.items():
            if self._place[response] == index:
                self.responses[response].count = count
                self._stale.add(self._owner[response])
        for response, partial in update.report.items():
            if self._place[response] == index:
                self._note(actor, response, partial)
                self.responses[response].here += partial.tokens
                self.responses[response].here_logprobs += partial.logprobs
        self._depart(actor, update.parted)
        if update.over is not None:
            actor.over_s = update.at_s + actor.offset_s
        if update.over == "failed":
            self.fail(index, update.given_up)
        elif update.over == "drained":
            self._leave(actor, update.given_up)
        if update.finished and self.left and self.rule is not None:
            self._decide()
        self._end_if_idle(actor)

    def fail(self, index: int, given_up: Mapping[int, Partial] | None = None) -> None:
        """An actor has died, before it began or later; `given_up` is what could be saved of it, else its reports."""
        actor = self.actors[index]
        assert actor.state != "gone", "an actor that dies twice"
        self.failures += 1
        self._stale.add(index)
        here = self._collect(actor, given_up or {})
        self._account(actor, alive=False)
        actor.state = "gone"
        self.wire.release(index, "dead")
        heirs = [other for other in self.actors if other.state == "working"]
        if self._owned[index] and not heirs:
            self._revive(actor, here)
            return
        for response in sorted(self._owned[index]):
            self._give(response, min(heirs, key=lambda other: int(self._unfinished[other.index])))
        self._send(here)

    def here(self, index: int) -> int:
        """Responses that an actor has been sent, or would have been, and has not finished."""
        return len(self._at[index])

    @property
    def busy(self) -> bool:
        """Whether there is a response to finish, or an actor to drain."""
        return self.left > 0 or any(actor.state == "leaving" for actor in self.actors)

    # ---- inside

    @property
    def _unfinished(self) -> IntArray:
        return ints(self._assigned - self._finished)

    def _finish(self, actor: Actor, one: Finished) -> None:
        number, index = one.response, actor.index
        assert self._place[number] == index, "a response that ends where it is not"
        if one.weight_version != self.version:
            raise EngineError(f"response {number} was drawn from weights {one.weight_version}, not {self.version}")
        response = self.responses[number]
        self._note(actor, number, one.done)
        actor.accepted_tokens += len(one.done.tokens)
        response.keep(one.done.tokens, one.done.logprobs)
        assert one.done.last_token_s is not None
        response.end_s = one.done.last_token_s + actor.offset_s
        response.finish_reason, response.version = one.finish_reason, one.weight_version
        self.actor_of[number], self._place[number] = index, NOWHERE
        self._ended[number] = response.context_tokens
        del self._at[index][number]
        actor.parting.discard(number)
        owner = self._owner[number]
        self._owned[owner].discard(number)
        self._stale.add(owner)
        if owner != index:  # it was about to leave
            self._assigned[owner] -= 1
            self._assigned[index] += 1
            self._end_if_idle(self.actors[owner])
        self._finished[index] += 1
        self.left -= 1

    def _note(self, actor: Actor, number: int, partial: Partial) -> None:
        """Times and cache hits that come with tokens."""
        response = self.responses[number]
        if partial.first_token_s is None or partial.last_token_s is None or partial.admitted_s is None:
            return
        first_s, last_s = partial.first_token_s + actor.offset_s, partial.last_token_s + actor.offset_s
        actor.first_token_s = first_s if actor.first_token_s is None else min(first_s, actor.first_token_s)
        actor.last_token_s = last_s if actor.last_token_s is None else max(last_s, actor.last_token_s)
        if response.first_s is None:
            response.first_s = partial.admitted_s + actor.offset_s
            response.cached_tokens = partial.cached_tokens

    def _collect(self, actor: Actor, given_up: Mapping[int, Partial]) -> list[int]:
        """Everything leaves a place."""
        here = list(self._at[actor.index])
        self._take(actor, here, given_up)
        return here

    def _take(self, actor: Actor, numbers: Iterable[int], given_up: Mapping[int, Partial]) -> None:
        """Responses leave a place: with what is given up, else with what was reported."""
        for number in numbers:
            response, partial = self.responses[number], given_up.get(number)
            if partial is None or len(partial.tokens) < len(response.here):
                tokens, logprobs = response.here, response.here_logprobs
            else:
                tokens, logprobs = list(partial.tokens), list(partial.logprobs)
                self._note(actor, number, partial)
            actor.accepted_tokens += len(tokens)
            response.keep(tokens, logprobs)
            del self._at[actor.index][number]
            actor.parting.discard(number)

    def _depart(self, actor: Actor, parted: Mapping[int, Partial]) -> None:
        """An actor that goes on has given up some of its responses: they go to their owners."""
        numbers = [number for number in parted if self._place[number] == actor.index]
        self._take(actor, numbers, parted)
        self._send(numbers)

    def _account(self, actor: Actor, alive: bool) -> None:
        """Add an actor's totals to those of the step, once it is over."""
        last, base = actor.counters, actor.base
        continued = last.continued_tokens - base.continued_tokens
        self.computed_tokens += last.computed_tokens - base.computed_tokens - continued
        self.recomputed_tokens += last.recomputed_tokens - base.recomputed_tokens + continued
        self.preemptions += last.preemptions - base.preemptions
        self.moved_kv_bytes += last.moved_kv_bytes - base.moved_kv_bytes
        # what a dead one has generated beyond its reports is lost
        self.generated_tokens += last.generated_tokens - base.generated_tokens if alive else actor.accepted_tokens

    def _end_if_idle(self, actor: Actor) -> None:
        index = actor.index
        if actor.state == "working" and actor.begun and not self._owned[index] and not self._at[index]:
            self._account(actor, alive=True)
            self._stale.add(index)
            actor.state = "gone"
            self.wire.release(index, "done")

    def _leave(self, actor: Actor, given_up: Mapping[int, Partial]) -> None:
        assert actor.state == "leaving", "drained without a cut"
        here = self._collect(actor, given_up)
        self._account(actor, alive=True)
        actor.state = "gone"
        self.wire.release(actor.index, "cut")
        self._send(here)

    def _send(self, numbers: Sequence[int]) -> None:
        """Responses that have left their place go to their owners."""
        by_owner: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            self.moves[number] += 1
            by_owner[self._owner[number]].append(number)
        self._stale |= by_owner.keys()
        for owner, sent in by_owner.items():
            for number in sent:
                self._place[number] = owner
                self._at[owner][number] = None
            if self.actors[owner].begun:
                self._submit(self.actors[owner], sent)

    def _submit(self, actor: Actor, numbers: Sequence[int]) -> None:
        if numbers:
            self.wire.submit(actor.index, [self.responses[number].continued() for number in numbers])

    def _give(self, number: int, to: Actor) -> None:
        """Another actor is to finish a response."""
        owner = self._owner[number]
        if to.state == "idle":
            to.state = "working"
        self._owned[owner].discard(number)
        self._assigned[owner] -= 1
        self._stale |= {owner, to.index}
        self._owner[number] = to.index
        self._owned[to.index].add(number)
        self._assigned[to.index] += 1

    def _revive(self, actor: Actor, here: Sequence[int]) -> None:
        index = actor.index
        self.actors[index] = Actor(index=index, slots=actor.slots)
        for number in here:
            self._place[number] = index
            self._at[index][number] = None
        self.wire.revive(index)

    def _decide(self) -> None:
        assert self.rule is not None
        unfinished = self._unfinished
        assigned, finished = ints(self._assigned), ints(self._finished)
        if not self.rule.triggered(assigned, finished, unfinished):
            return
        for index in self._stale:
            self._look_at(index)
        self._stale.clear()
        running = np.minimum([self._slotted(actor) for actor in self.actors], unfinished)
        idle = self._are("idle")
        open_slots = [max(actor.slots - left, 0) for actor, left in zip(self.actors, unfinished.tolist(), strict=True)]
        view = GenerationView(
            assigned=assigned,
            finished=finished,
            running=ints(running),
            waiting=ints(unfinished - running),
            open_slots=np.where((unfinished > 0) | idle, ints(open_slots), 0),
            tokens_generated=ints([a.counters.generated_tokens - a.base.generated_tokens for a in self.actors]),
            context_tokens=ints(self._held),
            kv_headroom_tokens=ints(self._room),
            unfinished=self._contexts,
            queue=self._queue,
            ended=lambda: seen(self._ended),
            cuts_so_far=self.cuts,
            unasked=self._are("reserved"),
            starting=self._are("starting"),
            idle=idle,
        )
        by_source: dict[int, list[Migration]] = defaultdict(list)
        for decided in self.rule.decide(view):
            if isinstance(decided, Start):
                self.actors[decided.actor].state = "starting"
                self.wire.start(decided.actor)
            else:
                by_source[decided.source].append(decided)
        for source, migrations in by_source.items():
            self._reassign(self.actors[source], migrations)

    def _are(self, state: State) -> BoolArray:
        """bool[actors]: in a state."""
        return np.array([actor.state == state for actor in self.actors])

    def _slotted(self, actor: Actor) -> int:
        """Responses that an actor runs and is not to give up."""
        if actor.state != "working":
            return 0
        return max(0, actor.counters.running - len(actor.parting.difference(actor.queue)))

    def _context(self, number: int) -> int:
        return self.responses[number].context_tokens

    def _contexts(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses that an actor owns, those on their way to it included, and their contexts in tokens."""
        left = sorted(self._owned[index])
        return ints(left), ints([self._context(number) for number in left])

    def _queue(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses in an actor's queue that are its own, and their contexts in tokens."""
        queue = self.actors[index].queue if self.actors[index].begun else self._at[index]
        own = [number for number in queue if self._owner[number] == self._place[number] == index]
        return ints(own), ints([self._context(number) for number in own])

    def _look_at(self, index: int) -> None:
        """What a rule sees of an actor's KV: the context that it is to hold, and room that nothing uses or is promised.

        A response counts as using KV once it has generated where it is.
        """
        actor, held, promised = self.actors[index], 0, 0
        for number in self._owned[index]:
            context = self._context(number)
            held += context
            if self._place[number] != index or self.responses[number].count == 0:
                promised += context
        working = actor.begun and actor.state in ("idle", "working")
        self._held[index] = held
        self._room[index] = max(0, actor.counters.headroom_tokens - promised) if working else 0

    def _reassign(self, actor: Actor, migrations: Sequence[Migration]) -> None:
        """A rule sends responses of an actor elsewhere, or to the head of its queue: the owners change now, and the
        responses leave when it has given them up."""
        index, first = actor.index, [one.response for one in migrations if one.target == one.source]
        for migration in migrations:
            if migration.target != index:
                self._give(migration.response, self.actors[migration.target])
        if not self._owned[index]:
            self._cut(actor)
            return
        leaving = [one.response for one in migrations if one.target != index and self._place[one.response] == index]
        if not actor.begun:
            self._at[index] = dict.fromkeys((*reversed(first), *self._at[index]))
            self._depart(actor, dict.fromkeys(leaving, NOTHING))
        elif leaving or first:
            actor.parting.update(leaving)
            self.wire.rearrange(index, leaving, first)

    def _cut(self, actor: Actor) -> None:
        """A rule ends an actor."""
        self.cuts += 1
        actor.state = "leaving"
        if actor.begun and self._at[actor.index]:
            self.wire.drain(actor.index)
        else:  # nothing of it has been started
            self._leave(actor, {})
