"""`seer`: what waits goes where slots are open, longest group first, and what runs goes where it ends sooner.

Source: Seer (arXiv 2511.14617), divided rollout with context-aware scheduling. A prompt's first response is its probe:
probes are admitted before all others, and the longest response of a group that has ended says how long the rest of it
may be. A group of which none has ended counts as the longest. What had to be assumed here:

- responses belong to an actor's queue from the start, in place of one buffer that all actors draw from. The queue of
  each is kept in order, and whatever waits may leave it;
- a response that runs may leave at the end of another, in place of the borders of chunks of its own. It goes from the
  actor with most to that with the fewest, where it is expected to end sooner for all that moving takes;
- KV goes from actor to actor or is computed again, whichever is sooner, in place of a pool that holds all of it;
- speculative decoding, which Seer drafts from the group's other responses, is left out.
"""

from dataclasses import dataclass

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler.iteration import iteration_s
from rlhfless.scheduler.midstep import GenerationView, Migration, Room
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.plan import ElasticTerms, MigrationSpec

SEER = "seer"

KV_KEPT = 0.1
"""Share of its KV that an actor keeps free of what it takes, for responses to grow (chosen, as `repack` does)."""


@dataclass(frozen=True, slots=True, eq=False)
class Seer:
    """See the module. No actor gives its last response away, so none ends before its work does."""

    n: int
    """Responses of a group, at least 1."""
    terms: ElasticTerms
    """Speeds and the cost of moves."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(f"{SEER}: n {self.n} must be at least 1 response")

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=SEER, value=float(self.n), terms=self.terms)

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: an actor has more than one response, which may wait for a slot or move."""
        return bool(unfinished.max(initial=0) > 1)

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """See `MigrationRule`."""
        unfinished = view.running + view.waiting
        alive = unfinished[unfinished > 0]
        if not self.triggered(view.assigned, view.finished, unfinished):
            return ()
        if not view.waiting.any() and alive.max() - alive.min() < 2:
            return ()
        longest = self._longest(view)
        room = Room.of(view)
        room.headroom[:] -= np.ceil(KV_KEPT * (view.context_tokens + view.kv_headroom_tokens)).astype(np.int64)
        decided = self._waiting(view, unfinished, longest, room)
        if not view.waiting.any():
            decided = self._running(view, unfinished, longest, room)
        return tuple(decided)

    def _longest(self, view: GenerationView) -> FloatArray:
        """float[groups]: largest context at which a response of each has ended, tokens; infinite where none has."""
        longest = view.ended().reshape(-1, self.n).max(axis=1)
        return np.where(longest > 0, longest, np.inf)

    def _waiting(self, view: GenerationView, unfinished: IntArray, longest: FloatArray, room: Room) -> list[Migration]:
        """What waits, in order of admission: to open slots of others, else to its place in its own queue."""
        queues = {actor: view.queue(actor) for actor in np.flatnonzero(view.waiting).tolist()}
        waiting = [
            (response, context, source)
            for source, (responses, contexts) in queues.items()
            for response, context in zip(responses.tolist(), contexts.tolist(), strict=True)
        ]
        waiting.sort(key=lambda one: self._rank(one[0], longest))
        decided: list[Migration] = []
        stay: dict[int, list[int]] = {source: [] for source in queues}
        for response, context, source in waiting:
            fits = (room.slots > 0) & (room.headroom >= context)
            fits[source] = False
            if unfinished[source] > 1 and fits.any():
                target = int(np.flatnonzero(fits)[np.argmin(unfinished[fits])])
                decided.append(Migration(response, source, target))
                _account(unfinished, room, decided[-1], context)
            else:
                stay[source].append(response)
        for source, (responses, _) in queues.items():
            decided += _to_head(source, stay[source], responses.tolist())
        return decided

    def _rank(self, response: int, longest: FloatArray) -> tuple[bool, float, int]:
        """Probes of groups of which none has ended, then the longest groups, then the order of prompts."""
        tokens = float(longest[response // self.n])
        return not (response % self.n == 0 and tokens == np.inf), -tokens, response

    def _running(self, view: GenerationView, unfinished: IntArray, longest: FloatArray, room: Room) -> list[Migration]:
        """From the actor with most to that with the fewest, the one with most left first, while it ends sooner so."""
        mean = float(view.tokens_generated.sum() / max(view.finished.sum(), 1))
        decided: list[Migration] = []
        moved: set[int] = set()
        while True:
            open_to = np.flatnonzero((room.slots > 0) & (room.headroom > 0) & (unfinished > 0))
            if not open_to.size:
                return decided
            source = int(np.argmax(unfinished))
            target = int(open_to[np.argmin(unfinished[open_to])])
            if unfinished[source] - unfinished[target] < 2:
                return decided
            batches = np.array([unfinished[source], unfinished[target] + 1.0])
            from_s, to_s = (
                float(iteration_s(self.terms.speeds[self.terms.speed_of[actor]], batches[[at]])[0])
                for at, actor in enumerate((source, target))
            )
            move = self._pays(view, source, target, from_s - to_s, longest, mean, int(room.headroom[target]), moved)
            if move is None:
                return decided
            decided.append(move[0])
            moved.add(move[0].response)
            _account(unfinished, room, *move)

    def _pays(
        self,
        view: GenerationView,
        source: int,
        target: int,
        saved_s: float,
        longest: FloatArray,
        mean: float,
        headroom: int,
        moved: set[int],
    ) -> tuple[Migration, int] | None:
        """The response of `source` with most left that fits and ends sooner, and its context.

        What has outgrown its group, or has none to go by, is expected to last for the step's mean of tokens generated
        over responses finished, as if lengths were exponential.
        """
        responses, contexts = view.unfinished(source)
        left = longest[responses // self.n] - contexts
        left = np.where((left > 0) & np.isfinite(left), left, mean)
        pays = (left * saved_s > self.terms.move_s_per_token * contexts) & (contexts <= headroom)
        pays &= ~np.isin(responses, list(moved))
        if not pays.any():
            return None
        best = int(np.argmax(np.where(pays, left, -1.0)))
        return Migration(int(responses[best]), source, target), int(contexts[best])


def _account(unfinished: IntArray, room: Room, move: Migration, context: int) -> None:
    unfinished[move.source] -= 1
    unfinished[move.target] += 1
    room.slots[move.target] -= 1
    room.headroom[move.target] -= context


def _to_head(actor: int, wanted: list[int], queue: list[int]) -> list[Migration]:
    """The fewest moves to the head of an actor's queue that bring what stays in it into the order that is wanted."""
    at = len(wanted)
    for response in reversed(queue):
        if at and wanted[at - 1] == response:
            at -= 1
    return [Migration(response, actor, actor) for response in reversed(wanted[:at])]
