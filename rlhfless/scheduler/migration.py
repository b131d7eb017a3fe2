"""Mid-step rules: which responses change actor while a step runs. Pure: facts in, decisions out (RLHFless §4.3).

An executor calls `triggered` each time a response finishes, and `decide` where that holds. Rules have no memory and
see no true lengths.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray
from rlhfless.types.plan import MigrationSpec

CUT_AND_MIGRATE = "cut-and-migrate"
GLOBAL_CUT = "global-cut"

DEFAULT_TAU = 0.7
"""Share of an actor's responses that must have finished before it can be cut (RLHFless §6)."""

MOST_LOOKS = 2
"""Ripe actors, those with the fewest unfinished responses, whose responses are looked at one by one before a decision
gives up (chosen: it bounds the work of a decision; where two do not fit for want of KV, larger ones rarely do)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationView:
    """What is known of the decode actors at one moment of a step; columns int64[actors]."""

    assigned: IntArray
    """Responses that each actor was given, those moved to it included."""
    finished: IntArray
    """Responses that it has finished."""
    running: IntArray
    """Responses that it decodes, each in a slot."""
    waiting: IntArray
    """Responses that it has queued, without a slot."""
    open_slots: IntArray
    """Slots that its finished responses have left and nothing waits for."""
    tokens_generated: IntArray
    """Response tokens that it has generated in this step."""
    context_tokens: IntArray
    """Context, prompt and generated so far, of its unfinished responses; at most the sum over `unfinished`."""
    kv_headroom_tokens: IntArray
    """Further tokens whose KV it can hold."""
    cuts_so_far: int
    """Actors that mid-step rules have ended in this step."""
    unfinished: Callable[[int], tuple[IntArray, IntArray]]
    """The unfinished responses of an actor: numbers, and tokens of context (prompt and generated so far). Called only
    for actors that may be cut, since it costs more than the columns."""

    @property
    def alive(self) -> BoolArray:
        """bool[actors]: has unfinished responses. An actor without has ended and can take nothing."""
        alive: BoolArray = (self.running + self.waiting) > 0
        return alive


@dataclass(frozen=True, slots=True)
class Migration:
    """One response changes actor and goes on there where it stood."""

    response: int
    """Its number."""
    source: int
    """Actor that ends: every response that it has not finished moves in the same decision."""
    target: int
    """Actor that takes it into an open slot."""


class MigrationRule(Protocol):
    """A mid-step rule."""

    @property
    def spec(self) -> MigrationSpec:
        """Its name and parameter, as a plan carries them."""
        ...

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """Whether `decide` can be other than empty; columns int64[actors], unfinished = running + waiting."""
        ...

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """What moves now, in the order of decision. No response moves twice in one call."""
        ...


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
        room = _Room.of(view)
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
                cut = room.take(_leaving(view, source), targets[targets != source])
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
        leaving = [_leaving(view, actor) for actor in ranked.tolist()]
        context = np.array([sum(one.context_tokens for one in group) for group in leaving])
        slots = np.cumsum((view.open_slots + view.running)[ranked])
        headroom = np.cumsum(np.maximum(view.kv_headroom_tokens[ranked], 0))
        enough = (slots >= unfinished.sum()) & (headroom >= context.sum() - np.cumsum(context))
        for stay in (np.flatnonzero(enough) + 1).tolist():
            moves = _Room.of(view).take([one for group in leaving[stay:] for one in group], ranked[:stay])
            if moves:
                return tuple(moves)
        return ()


_RULES: dict[str, Callable[[float], MigrationRule]] = {
    CUT_AND_MIGRATE: CutAndMigrate,
    GLOBAL_CUT: lambda value: GlobalCut(_whole(value)),
}


def rule(spec: MigrationSpec) -> MigrationRule:
    """The rule that a plan names. Raises InputError for an unknown kind or a parameter out of range."""
    if spec.kind not in _RULES:
        raise InputError(f"unknown migration rule {spec.kind!r}: known are {', '.join(_RULES)}")
    return _RULES[spec.kind](spec.value)


def _whole(value: float) -> int:
    if not float(value).is_integer():
        raise InputError(f"{GLOBAL_CUT}: remaining {value} must be a whole number of responses")
    return int(value)


def _share(finished: IntArray, assigned: IntArray) -> FloatArray:
    # compared as a quotient, not with tau * assigned: 11 of 20 is exactly the float 0.55, while 0.55 * 20 is above 11
    share: FloatArray = finished / np.maximum(assigned, 1)
    return share


class _Leaving(NamedTuple):
    """A response that looks for another actor."""

    context_tokens: int
    response: int
    source: int


def _leaving(view: GenerationView, source: int) -> list[_Leaving]:
    responses, context = view.unfinished(source)
    return [_Leaving(*one, source) for one in zip(context.tolist(), responses.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What actors can still take in one decision; its columns change as responses are placed."""

    slots: npt.NDArray[np.int64]
    """int[actors]: open slots; 0 for actors that have ended or have no KV headroom."""
    headroom: npt.NDArray[np.int64]
    """int[actors]: tokens of KV."""

    @classmethod
    def of(cls, view: GenerationView) -> "_Room":
        usable = view.alive & (view.kv_headroom_tokens > 0)
        return cls(slots=np.where(usable, view.open_slots, 0), headroom=view.kv_headroom_tokens.copy())

    def take(self, leaving: list[_Leaving], targets: IntArray) -> list[Migration]:
        """Place all of `leaving` on `targets`, filling one after the other with the largest contexts that fit.

        None if one finds no room. O(responses x log responses + targets).
        """
        left = sorted(leaving, key=lambda one: (one.context_tokens, -one.response))  # the next to go stands last
        contexts = [one.context_tokens for one in left]
        headrooms = self.headroom[targets]
        if not left or contexts[-1] > headrooms.max(initial=0):
            return []
        if np.minimum(self.slots[targets], headrooms // contexts[0]).sum() < len(left):
            return []
        placed: list[Migration] = []
        room: list[tuple[int, int, int]] = []
        for target in targets[headrooms >= contexts[0]].tolist():
            slots, headroom = int(self.slots[target]), int(self.headroom[target])
            while slots and (fits := bisect_right(contexts, headroom)):
                one = left.pop(fits - 1)
                slots, headroom = slots - 1, headroom - contexts.pop(fits - 1)
                placed.append(Migration(one.response, one.source, target))
            room.append((target, slots, headroom))
            if not left:
                break
        if left:
            return []
        for target, slots, headroom in room:
            self.slots[target], self.headroom[target] = slots, headroom
        return placed
