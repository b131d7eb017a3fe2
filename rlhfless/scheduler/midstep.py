"""What a mid-step rule sees and says (RLHFless §4.3): the view of a running step, the moves, room for what moves.

An executor calls `triggered` each time a response finishes or a reserve actor is ready, and `decide` where that holds.
Rules have no memory and see no true lengths.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.types.arrays import BoolArray, IntArray
from rlhfless.types.plan import MigrationSpec


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
    unasked: BoolArray
    """bool[actors]: reserve actors that can be asked for (`Start`)."""
    starting: BoolArray
    """bool[actors]: reserve actors that have been asked for and are not ready yet."""
    idle: BoolArray
    """bool[actors]: reserve actors that are ready and have had no responses yet: they can take some."""
    unfinished: Callable[[int], tuple[IntArray, IntArray]]
    """The unfinished responses of an actor: numbers, and tokens of context (prompt and generated so far). Called only
    for actors that may be cut, since it costs more than the columns."""
    queue: Callable[[int], tuple[IntArray, IntArray]]
    """The responses of an actor that wait for a slot, in order of admission: numbers, and tokens of context; those on
    their way to it are not among them."""
    ended: Callable[[], IntArray]
    """int[responses]: context at which each response has ended, 0 for those that have not."""

    @property
    def alive(self) -> BoolArray:
        """bool[actors]: has unfinished responses. One without can take nothing, unless it is idle: it has ended."""
        alive: BoolArray = (self.running + self.waiting) > 0
        return alive


@dataclass(frozen=True, slots=True)
class Migration:
    """One response changes actor and goes on there where it stood."""

    response: int
    """Its number."""
    source: int
    """Actor that it leaves, which ends where it keeps no unfinished response. Most rules move all or none."""
    target: int
    """Actor that takes it into an open slot; the source itself, where it waits, puts it at the head of its queue."""


@dataclass(frozen=True, slots=True)
class Start:
    """A reserve actor is to start: from now on it holds its GPUs. The rule is asked again when it is ready."""

    actor: int
    """One that is unasked."""


class MigrationRule(Protocol):
    """A mid-step rule."""

    @property
    def spec(self) -> MigrationSpec:
        """Its name and parameter, as a plan carries them."""
        ...

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """Whether `decide` can be other than empty; columns int64[actors], unfinished = running + waiting."""
        ...

    def decide(self, view: GenerationView) -> tuple[Migration | Start, ...]:
        """What moves and what starts now, in the order of decision. No response moves twice in one call."""
        ...


class Leaving(NamedTuple):
    """A response that looks for another actor."""

    context_tokens: int
    response: int
    source: int


def leaving_of(view: GenerationView, source: int) -> list[Leaving]:
    """The unfinished responses of an actor."""
    responses, context = view.unfinished(source)
    return [Leaving(*one, source) for one in zip(context.tolist(), responses.tolist(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What actors can still take in one decision; its columns change as responses are placed."""

    slots: npt.NDArray[np.int64]
    """int[actors]: open slots; 0 for actors that have ended or have no KV headroom."""
    headroom: npt.NDArray[np.int64]
    """int[actors]: tokens of KV."""

    @classmethod
    def of(cls, view: GenerationView) -> "Room":
        usable = (view.alive | view.idle) & (view.kv_headroom_tokens > 0)
        return cls(slots=np.where(usable, view.open_slots, 0), headroom=view.kv_headroom_tokens.copy())

    def take(self, leaving: list[Leaving], targets: IntArray) -> list[Migration]:
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

    def spread(self, leaving: list[Leaving], others: IntArray, unfinished: IntArray) -> list[Migration]:
        """Place all of `leaving`, largest context first, each on the one of `others` with the fewest unfinished that
        has room. All `others` have open slots.

        Enters what it places into the columns; nothing if one finds no room. At most twice as many actors as responses
        are looked at, those with the fewest: as many would do where KV is plenty.
        """
        looked_at = min(others.size, 2 * len(leaving))
        rank = unfinished[others] * unfinished.size + others
        fewest = others[np.argpartition(rank, looked_at - 1)[:looked_at]]
        heap = [(int(unfinished[target]), target) for target in fewest.tolist()]
        heapify(heap)
        slots = {target: int(self.slots[target]) for _, target in heap}
        headroom = {target: int(self.headroom[target]) for _, target in heap}
        placed: list[Migration] = []
        for one in sorted(leaving, key=lambda one: (-one.context_tokens, one.response)):
            aside = []
            while heap and headroom[heap[0][1]] < one.context_tokens:
                aside.append(heappop(heap))  # of the rest, smaller ones may fit
            if not heap:
                return []
            load, target = heap[0]
            slots[target], headroom[target] = slots[target] - 1, headroom[target] - one.context_tokens
            placed.append(Migration(one.response, one.source, target))
            if slots[target]:
                heapreplace(heap, (load + 1, target))
            else:
                heappop(heap)
            if aside:
                heap += aside
                heapify(heap)
        for move in placed:
            unfinished[move.target] += 1
        for target, left in slots.items():
            self.slots[target], self.headroom[target] = left, headroom[target]
        return placed
