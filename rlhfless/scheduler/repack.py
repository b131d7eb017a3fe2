"""`repack`: gather what is left on as few actors as KV and a bound on their batch allow (Laminar, arXiv 2510.12633)."""

from dataclasses import dataclass

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler.midstep import GenerationView, Migration, leaving_of
from rlhfless.types.arrays import IntArray
from rlhfless.types.plan import MigrationSpec

REPACK = "repack"

KV_FULL = 0.9
"""Share of its KV up to which an actor is filled (chosen: what it takes must be able to grow)."""


@dataclass(frozen=True, slots=True)
class Repack:
    """All responses of one actor go to one other, the fullest that can take them: best fit.

    An actor without waiting responses may go or take. Those with the least context go first (ties: the highest index).
    Afterwards the target has at most `most` responses and KV_FULL of its KV in use. Who took does not go in the same
    decision.
    """

    most: int
    """Responses that an actor is filled up to, at least 1."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise InputError(f"{REPACK}: most {self.most} must be at least 1 response")

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=REPACK, value=float(self.most))

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: the two actors with the fewest fit together."""
        alive = unfinished[unfinished > 0]
        return bool(alive.size > 1 and np.partition(alive, 1)[:2].sum() <= self.most)

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """See `MigrationRule`."""
        unfinished = view.running + view.waiting
        if not self.triggered(view.assigned, view.finished, unfinished):
            return ()
        slots, headroom, context = view.open_slots.copy(), view.kv_headroom_tokens.copy(), view.context_tokens.copy()
        limit = KV_FULL * (context + headroom)
        packable = (unfinished > 0) & (view.waiting == 0)
        may_go = packable.copy()
        decided: list[Migration] = []
        for source in np.lexsort((-np.arange(unfinished.size), context)).tolist():
            if not may_go[source]:
                continue
            fits = packable & (slots >= unfinished[source]) & (unfinished + unfinished[source] <= self.most)
            fits &= (context + context[source] <= limit) & (headroom >= context[source])
            fits[source] = False
            targets = np.flatnonzero(fits)
            if not targets.size:
                continue
            target = int(targets[np.lexsort((targets, -context[targets]))[0]])
            leaving = leaving_of(view, source)
            tokens = sum(one.context_tokens for one in leaving)
            if tokens > headroom[target]:  # the columns are as of the actor's last event
                continue
            decided += [Migration(one.response, source, target) for one in leaving]
            slots[target] -= unfinished[source]
            headroom[target] -= tokens
            unfinished[target] += unfinished[source]
            context[target] += tokens
            unfinished[source] = 0
            packable[source] = may_go[source] = may_go[target] = False
        return tuple(decided)
