"""What a mid-step rule sees and says (RLHFless §4.3): the view of a running step, the moves, room for what moves.

An executor calls `triggered` each time a response finishes, and `decide` where that holds. Rules have no memory and
see no true lengths.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
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
        usable = view.alive & (view.kv_headroom_tokens > 0)
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
