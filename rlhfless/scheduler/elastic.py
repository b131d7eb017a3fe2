"""`elastic`: start wide, and release actors as responses finish.

Why fewer actors as fewer responses run. Let A responses run on N actors of g GPUs each, spread evenly, and an
iteration of b responses take l(b) seconds. While each response gets one more token, the step grows by l(A / N) seconds
and its cost by g N l(A / N) GPU-seconds. With p the GPU-seconds that a second of the step is worth, the price of an
iteration is

    F(N, A) = (p + g N) l(A / N).

For l(b) = t0 + k b this is p t0 + g k A + g t0 N + p k A / N, least at N = sqrt(p k A / (g t0)): the best number of
actors falls with the *square root* of the responses that still run. Between two neighbours, N beats N - 1 while
A > N (N - 1) g t0 / (p k). For the l of a real profile, with slots and KV that bound how many run at once, the rule
finds for every N the least A at which F(N, A) < F(N - 1, A), once, by bisection, and compares with it whenever a
response finishes. No response length is predicted: which is the last to end is unknown, so every one of them may be,
and that is why they are kept spread evenly, where the slowest actor is as quick as it can be.
"""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler.midstep import GenerationView, Leaving, Migration, Room, leaving_of
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, ints
from rlhfless.types.plan import ElasticTerms, MigrationSpec, Speed

ELASTIC = "elastic"

MOST_LOOKS = 2
"""Actors, those with the fewest unfinished responses, that a decision tries to release before it gives up (chosen: it
bounds the work of a decision; where two do not fit for want of KV, larger ones rarely do)."""
EULER = 0.5772
"""Euler's constant: the longest of n exponential lives is ln n + EULER mean lives long, for n of more than a few."""


def iteration_s(speed: Speed, batch: FloatArray) -> FloatArray:
    """Seconds in which each of `batch` responses on an actor gets one more token, elementwise.

    Linear between points, flat below one response; beyond the most that run at once they take turns.
    """
    most = int(speed.batch[-1])
    at_once_s = np.interp(np.minimum(batch, most), speed.batch, speed.iteration_s)
    return np.asarray(np.maximum(batch / most, 1.0) * at_once_s)


def price_of_iteration(speed: Speed, price: float, actors: IntArray, running: IntArray) -> FloatArray:
    """F(N, A) of the module's docstring, GPU-seconds, elementwise."""
    return np.asarray((price + speed.gpus * actors) * iteration_s(speed, running / actors))


def least_running(speed: Speed, price: float, actors: int) -> IntArray:
    """int[actors + 1]: for each number of actors, the fewest running responses at which one fewer would not do better.

    0 for one actor and for none; it never falls as actors grow. Where even full actors do no better, more responses
    than can run.
    """
    count = np.arange(2, actors + 1)
    low, high = np.ones_like(count), (count + 1) * int(speed.batch[-1])
    while (low < high).any():
        middle = (low + high) // 2
        wide = price_of_iteration(speed, price, count, middle) < price_of_iteration(speed, price, count - 1, middle)
        low, high = np.where(wide, low, np.minimum(middle + 1, high)), np.where(wide, middle, high)
    return ints(np.maximum.accumulate(np.concatenate([[0, 0], low])))


@dataclass(frozen=True, slots=True, eq=False)
class Elastic:
    """Release the actor with the fewest unfinished responses whenever one fewer does better (see the module).

    Its responses go, largest context first, each to the actor of the same size with the fewest (ties: the lowest
    index) that has an open slot and KV headroom; all of them find room, or it goes on. What the release saves, for as
    long as its longest response may last, must exceed what moving costs: while KV is sent or computed again, the
    actor is held and the step may wait for it. How long responses last is read off the step so far as if lengths were
    exponential: tokens generated over responses finished is then the mean of what remains of any of them. An actor that
    took responses is not released in the same decision.
    """

    price: float
    """GPU-seconds that a second of the step is worth."""
    terms: ElasticTerms
    """Speeds and the cost of moves."""
    _least: tuple[IntArray, ...] = field(init=False, repr=False)
    """For each speed, `least_running`."""
    _of_speed: tuple[IntArray, ...] = field(init=False, repr=False)
    """For each speed, its actors; empty where all have the same."""

    def __post_init__(self) -> None:
        _check(self.price, self.terms)
        count = len(self.terms.speeds)
        sizes = np.bincount(self.terms.speed_of, minlength=count).tolist()
        least = [least_running(one, self.price, size) for one, size in zip(self.terms.speeds, sizes, strict=True)]
        object.__setattr__(self, "_least", tuple(least))
        of_speed = [ints(np.flatnonzero(self.terms.speed_of == row)) for row in range(count)]
        object.__setattr__(self, "_of_speed", tuple(of_speed) if count > 1 else ())

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=ELASTIC, value=float(self.price), terms=self.terms)

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: of some size of actor, more are at work than do best."""
        if not self._of_speed:
            return bool(unfinished.sum() < self._least[0][np.count_nonzero(unfinished)])
        return any(self._too_many(unfinished, row) for row in range(len(self._of_speed)))

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        """See `MigrationRule`."""
        unfinished = view.running + view.waiting
        if not self.triggered(view.assigned, view.finished, unfinished):
            return ()
        room, took = Room.of(view), np.zeros(unfinished.size, dtype=np.bool_)
        remaining = float(view.tokens_generated.sum() / max(view.finished.sum(), 1))
        decided: list[Migration] = []
        for row in range(len(self.terms.speeds)):
            while self._too_many(unfinished, row):
                moves = self._release(view, row, unfinished, room, took, remaining)
                if not moves:
                    break
                decided += moves
        return tuple(decided)

    def _too_many(self, unfinished: IntArray, row: int) -> bool:
        own = unfinished[self._of_speed[row]] if self._of_speed else unfinished
        return bool(own.sum() < self._least[row][np.count_nonzero(own)])

    def _release(
        self, view: GenerationView, row: int, unfinished: IntArray, room: Room, took: BoolArray, remaining: float
    ) -> list[Migration]:
        """The moves that release one actor, entered into the columns; none if it does not pay or nothing fits."""
        members = self._of_speed[row] if self._of_speed else np.arange(unfinished.size)
        alive = members[unfinished[members] > 0]
        may_go = alive[~took[alive]]
        saved = self._saved(row, alive.size, int(unfinished[alive].sum()))
        for source in may_go[np.lexsort((-may_go, unfinished[may_go]))][:MOST_LOOKS].tolist():
            count = int(unfinished[source])
            others = alive[(alive != source) & (room.slots[alive] > 0)]
            fits = room.slots[others].sum() >= count
            if not fits or np.maximum(room.headroom[others], 0).sum() < view.context_tokens[source]:
                continue
            leaving = leaving_of(view, source)
            context_tokens = sum(one.context_tokens for one in leaving)
            move_s = context_tokens * self.terms.move_s_per_token
            lasts = remaining * (np.log(count) + EULER if count > 1 else 1.0)
            if saved * lasts <= (self.price + self.terms.speeds[row].gpus) * move_s:
                continue
            if moves := _spread(leaving, others, unfinished, room):
                unfinished[source] = room.slots[source] = 0
                took[[move.target for move in moves]] = True
                return moves
        return []

    def _saved(self, row: int, actors: int, running: int) -> float:
        """GPU-seconds that an iteration costs less with one actor fewer."""
        count, speed = np.array([actors, actors - 1]), self.terms.speeds[row]
        now, then = price_of_iteration(speed, self.price, count, np.array([running, running])).tolist()
        return float(now - then)


def _spread(leaving: list[Leaving], others: IntArray, unfinished: IntArray, room: Room) -> list[Migration]:
    """Place all of `leaving`, largest context first, each on the actor with the fewest unfinished that has room.

    Enters what it places into the columns; nothing if one finds no room. At most twice as many actors as responses are
    looked at, those with the fewest: as many would do where KV is plenty.
    """
    looked_at = min(others.size, 2 * len(leaving))
    rank = unfinished[others] * unfinished.size + others
    fewest = others[np.argpartition(rank, looked_at - 1)[:looked_at]]
    heap = [(int(unfinished[target]), target) for target in fewest.tolist()]
    heapify(heap)
    slots = {target: int(room.slots[target]) for _, target in heap}
    headroom = {target: int(room.headroom[target]) for _, target in heap}
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
        room.slots[target], room.headroom[target] = left, headroom[target]
    return placed


def _check(price: float, terms: ElasticTerms) -> None:
    """Raise InputError unless the rule can decide with these."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"{ELASTIC}: {what}")

    require(
        bool(np.isfinite(price)) and price >= 0, f"price {price} must be a finite number of GPU-seconds, at least 0"
    )
    finite = bool(np.isfinite(terms.move_s_per_token)) and terms.move_s_per_token >= 0
    require(finite, f"move_s_per_token {terms.move_s_per_token} must be a finite number of seconds, at least 0")
    require(len(terms.speeds) > 0, "no speeds")
    known = terms.speed_of.ndim == 1 and np.isin(terms.speed_of, np.arange(len(terms.speeds))).all()
    require(bool(known), f"speed_of must name one of {len(terms.speeds)} speeds for each actor")
    for speed in terms.speeds:
        require(speed.gpus >= 1, f"an actor of {speed.gpus} GPUs; it needs at least 1")
        shaped = speed.batch.ndim == 1 and speed.batch.size >= 1 and speed.batch.shape == speed.iteration_s.shape
        require(shaped, "a speed needs as many iteration_s as batch points, at least one")
        require(bool(speed.batch[0] == 1 and (np.diff(speed.batch) > 0).all()), "batch must ascend from 1")
        good = np.isfinite(speed.iteration_s).all() and (speed.iteration_s > 0).all()
        require(bool(good and (np.diff(speed.iteration_s) >= 0).all()), "iteration_s must be above 0 s and not fall")
