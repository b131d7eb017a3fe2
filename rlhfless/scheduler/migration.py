"""Mid-step rules: which responses change actor while a step runs. Pure: facts in, decisions out (RLHFless §4.3)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler.elastic import ELASTIC, Elastic
from rlhfless.scheduler.midstep import GenerationView, Migration, MigrationRule, Room, Start, leaving_of
from rlhfless.scheduler.repack import REPACK, Repack
from rlhfless.scheduler.seer import SEER, Seer
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray
from rlhfless.types.plan import ElasticTerms, MigrationSpec

__all__ = ["GenerationView", "Migration", "MigrationRule", "Start", "rule"]
"""What executors need of mid-step rules."""

CUT_AND_MIGRATE = "cut-and-migrate"
GLOBAL_CUT = "global-cut"

DEFAULT_TAU = 0.7
"""Share of an actor's responses that must have finished before it can be cut (RLHFless §6)."""

MOST_LOOKS = 2
"""Ripe actors, those with the fewest unfinished responses, whose responses are looked at one by one before a decision
gives up (chosen: it bounds the work of a decision; where two do not fit for want of KV, larger ones rarely do)."""


@dataclass(frozen=True, slots=True)
class CutAndMigrate:
    """RLHFless §4.3: each actor is cut by itself, as soon as others have room for what it has not finished.

    An actor is ripe when it has finished a share of at least tau. A ripe one is cut when all its unfinished responses
    fit into open slots and KV headroom of others; else it goes on and nothing is lost. Of several the one with the
    fewest unfinished is cut first (ties: the highest index). Responses go, largest context first, to the actor with
    the lowest share finished, which will run longest anyway (ties: the lowest index), until it is full, then to the
    next. Each takes the largest that fit, so where KV is short a tighter packing may be missed and the cut waits, as it
    may when the MOST_LOOKS smallest do not fit. An actor that took responses is not cut in the same decision.
    """

    tau: float = DEFAULT_TAU
    """Share of the assigned responses that must have finished, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise InputError(f"{CUT_AND_MIGRATE}: tau {self.tau} must be above 0 and at most 1")

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=CUT_AND_MIGRATE, value=float(self.tau))

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: some actor is ripe, and another is there to take over."""
        return bool(self._ripe(assigned, finished, unfinished).any() and np.count_nonzero(unfinished) > 1)

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """See `MigrationRule`."""
        assigned, finished = view.assigned.copy(), view.finished
        unfinished = view.running + view.waiting
        room = Room.of(view)
        may_cut = self._ripe(assigned, finished, unfinished)
        decided: list[Migration] = []
        while True:
            # where all of an actor's context finds no headroom, the responses need not be looked at one by one
            spare = np.where(room.slots > 0, np.maximum(room.headroom, 0), 0)
            fits = (room.slots.sum() - room.slots >= unfinished) & (spare.sum() - spare >= view.context_tokens)
            ripe = np.flatnonzero(may_cut & fits)
            targets = np.flatnonzero(room.slots)
            targets = targets[np.argsort(_share(finished, assigned)[targets], kind="stable")]
            cut: list[Migration] = []
            for source in ripe[np.lexsort((-ripe, unfinished[ripe]))][:MOST_LOOKS].tolist():
                cut = room.take(leaving_of(view, source), targets[targets != source])
                if cut:
                    break
            if not cut:
                return tuple(decided)
            decided += cut
            took, taken = np.unique([migration.target for migration in cut], return_counts=True)
            assigned[took] += taken
            may_cut[took] = may_cut[cut[0].source] = False
            room.slots[cut[0].source] = 0

    def _ripe(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> BoolArray:
        ripe: BoolArray = (unfinished > 0) & (_share(finished, assigned) >= self.tau)
        return ripe


@dataclass(frozen=True, slots=True)
class GlobalCut:
    """RLHFuse's rule, a baseline: once few responses are left, gather them all on the fewest actors that hold them.

    Those with most left stay (ties: most context, then the lowest index) and all others end, once in a step. As many
    stay as slots and KV headroom need; while all must stay, nothing happens.
    """

    remaining: int
    """Unfinished responses of all actors at or below which the cut falls, at least 1."""

    def __post_init__(self) -> None:
        if self.remaining < 1:
            raise InputError(f"{GLOBAL_CUT}: remaining {self.remaining} must be at least 1 response")

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=GLOBAL_CUT, value=float(self.remaining))

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: few enough responses are left, on more than one actor."""
        return bool(np.sum(unfinished) <= self.remaining and np.count_nonzero(unfinished) > 1)

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """See `MigrationRule`."""
        unfinished = view.running + view.waiting
        if view.cuts_so_far or not self.triggered(view.assigned, view.finished, unfinished):
            return ()
        alive = np.flatnonzero(unfinished)
        ranked = alive[np.lexsort((alive, -view.context_tokens[alive], -unfinished[alive]))]
        groups = [leaving_of(view, actor) for actor in ranked.tolist()]
        context = np.array([sum(one.context_tokens for one in group) for group in groups])
        slots = np.cumsum((view.open_slots + view.running)[ranked])
        headroom = np.cumsum(np.maximum(view.kv_headroom_tokens[ranked], 0))
        enough = (slots >= unfinished.sum()) & (headroom >= context.sum() - np.cumsum(context))
        for stay in (np.flatnonzero(enough) + 1).tolist():
            moves = Room.of(view).take([one for group in groups[stay:] for one in group], ranked[:stay])
            if moves:
                return tuple(moves)
        return ()


_RULES: dict[str, Callable[[float], MigrationRule]] = {
    CUT_AND_MIGRATE: CutAndMigrate,
    GLOBAL_CUT: lambda value: GlobalCut(_whole(GLOBAL_CUT, value)),
    REPACK: lambda value: Repack(_whole(REPACK, value)),
}
_WEIGHING: dict[str, Callable[[float, ElasticTerms], MigrationRule]] = {
    ELASTIC: Elastic,
    SEER: lambda value, terms: Seer(_whole(SEER, value), terms),
}
"""Rules that need terms."""


def rule(spec: MigrationSpec) -> MigrationRule:
    """The rule that a plan names.

    Raises InputError for an unknown kind, a parameter out of range, or terms where there must be none or the reverse.
    """
    known = (*_RULES, *_WEIGHING)
    if spec.kind not in known:
        raise InputError(f"unknown migration rule {spec.kind!r}: known are {', '.join(known)}")
    if (spec.terms is None) == (spec.kind in _WEIGHING):
        raise InputError(f"{spec.kind}: {'needs its terms' if spec.terms is None else 'takes no terms'}")
    return _RULES[spec.kind](spec.value) if spec.terms is None else _WEIGHING[spec.kind](spec.value, spec.terms)


def _whole(kind: str, value: float) -> int:
    if not float(value).is_integer():
        raise InputError(f"{kind}: {value} must be a whole number of responses")
    return int(value)


def _share(finished: IntArray, assigned: IntArray) -> FloatArray:
    # compared as a quotient, not with tau * assigned: 11 of 20 is exactly the float 0.55, while 0.55 * 20 is above 11
    share: FloatArray = finished / np.maximum(assigned, 1)
    return share
