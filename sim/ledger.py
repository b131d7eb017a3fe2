"""Who is to finish each response of a running step, and what mid-step rules see of its actors.

Every unfinished response has one owner, the actor that is to finish it, and is in an engine or on its way. While it is
on its way, its owner keeps room for it.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from rlhfless.scheduler.migration import GenerationView
from rlhfless.types.arrays import BoolArray, IntArray, ints, seen
from sim.actor import Actor, State
from sim.engine import Batch


class Ledger:
    """Ownership, and the columns of `GenerationView`, each as of its actor's last boundary."""

    def __init__(self, batch: Batch, actors: Sequence[Actor], *, watched: bool) -> None:
        """`watched`: whether there is a rule to see the columns."""
        self.batch, self.actors, self.watched = batch, actors, watched
        count, responses = len(actors), len(batch.target)
        came = zip(batch.generated, batch.target, strict=True)  # what has ended in an earlier step is in no engine
        self.end_s = [0.0 if generated == target else inf for generated, target in came]
        self.owner = [0] * responses
        self.owned: list[set[int]] = [set(actor.engine.waiting) for actor in actors]
        for actor in actors:
            for response in actor.engine.waiting:
                self.owner[response] = actor.index
        self.coming: dict[int, int] = {}  # response on its way -> context that its owner must have room for
        self.reserve = [actor for actor in actors if actor.state == "reserved"]
        self.slots = ints([actor.engine.slots for actor in actors])
        self.assigned = ints([actor.engine.unfinished for actor in actors]).copy()
        self.finished = np.zeros(count, dtype=np.int64)
        self.running = np.zeros(count, dtype=np.int64)
        self.generated = np.zeros(count, dtype=np.int64)
        self.context = np.zeros(count, dtype=np.int64)
        self.room = np.array([actor.engine.profile.data.kv_capacity_tokens for actor in actors], dtype=np.int64)
        self.promised = np.zeros(count, dtype=np.int64)

    @property
    def unfinished(self) -> IntArray:
        """int[actors]: responses that each has yet to finish."""
        return ints(self.assigned - self.finished)

    def context_of(self, response: int) -> int:
        """Tokens of prompt and response so far."""
        batch = self.batch
        return batch.prompt_tokens[response // batch.responses_per_prompt] + batch.generated[response]

    def give(self, response: int, to: Actor) -> None:
        """Another actor is to finish a response; it has yet to come there."""
        self.disown(response)
        self.owner[response] = to.index
        self.owned[to.index].add(response)
        self.assigned[to.index] += 1
        self.coming[response] = self.context_of(response)
        self.promised[to.index] += self.coming[response]

    def disown(self, response: int) -> None:
        """A response is no longer its owner's: it gets another, or has ended elsewhere."""
        self.come(response)
        self.owned[self.owner[response]].discard(response)
        self.assigned[self.owner[response]] -= 1

    def come(self, response: int) -> None:
        """Nothing has to be kept free for a response any more, for it is there or will not come."""
        self.promised[self.owner[response]] -= self.coming.pop(response, 0)

    def observe(self, actor: Actor) -> None:
        """Refresh what rules see of an actor; nothing is left to see of one that is cut."""
        if not self.watched:
            return
        engine, index = actor.engine, actor.index
        self.generated[index] = engine.generated_tokens
        if actor.state not in ("working", "idle"):
            self.running[index] = self.context[index] = self.room[index] = 0
            return
        self.running[index] = len(engine.running)
        self.context[index] = engine.context_tokens
        self.room[index] = engine.headroom_tokens - engine.queued_tokens
        self.overlook(actor, actor.parting)

    def overlook(self, actor: Actor, parting: Sequence[int]) -> None:
        """Rules no longer see responses that are about to leave an actor."""
        if parting:
            actor.engine.progress()
            self.running[actor.index] -= sum(response in actor.engine.running for response in parting)
            context = sum(self.context_of(response) for response in parting)
            self.context[actor.index] = max(0, int(self.context[actor.index]) - context)

    def view(self, cuts_so_far: int) -> GenerationView:
        """What a rule sees now."""
        unfinished, idle = self.unfinished, self._reserve("idle")
        return GenerationView(
            assigned=seen(self.assigned),
            finished=seen(self.finished),
            running=seen(self.running),
            waiting=unfinished - self.running,
            open_slots=np.where((unfinished > 0) | idle, np.maximum(self.slots - unfinished, 0), 0),
            tokens_generated=seen(self.generated),
            context_tokens=seen(self.context),
            kv_headroom_tokens=np.maximum(self.room - self.promised, 0),
            unfinished=self._unfinished,
            queue=self._queue,
            ended=self._ended,
            cuts_so_far=cuts_so_far,
            unasked=self._reserve("reserved"),
            starting=self._reserve("starting"),
            idle=idle,
        )

    def _reserve(self, state: State) -> BoolArray:
        """bool[actors]: reserve actors in a state."""
        found = np.zeros(len(self.actors), dtype=np.bool_)
        found[[actor.index for actor in self.reserve if actor.state == state]] = True
        return found

    def _unfinished(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses that an actor owns, those on their way to it included, and their contexts in tokens."""
        self.actors[index].engine.progress()
        left = sorted(self.owned[index])
        return ints(left), ints([self.context_of(response) for response in left])

    def _queue(self, index: int) -> tuple[IntArray, IntArray]:
        """Responses in an actor's queue that are its own, and their contexts in tokens."""
        queue = [response for response in self.actors[index].engine.waiting if self.owner[response] == index]
        return ints(queue), ints([self.context_of(response) for response in queue])

    def _ended(self) -> IntArray:
        """int[responses]: context of each that has ended, else 0."""
        ended = np.isfinite(self.end_s)
        prompts = np.repeat(np.array(self.batch.prompt_tokens), self.batch.responses_per_prompt)
        return ints(np.where(ended, prompts + np.array(self.batch.generated), 0))
