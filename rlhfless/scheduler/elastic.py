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

Where the plan has larger actors in reserve, the last responses move to them: see `rlhfless.scheduler.promotion`.
"""

from dataclasses import dataclass, field

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler.iteration import least_running, price_of_iteration
from rlhfless.scheduler.midstep import GenerationView, Migration, Room, Start, leaving_of
from rlhfless.scheduler.promotion import Promotion
from rlhfless.types.arrays import BoolArray, IntArray, ints
from rlhfless.types.plan import ElasticTerms, MigrationSpec

ELASTIC = "elastic"

MOST_LOOKS = 2
"""Actors, those with the fewest unfinished responses, that a decision tries to release before it gives up (chosen: it
bounds the work of a decision; where two do not fit for want of KV, larger ones rarely do)."""
EULER = 0.5772
"""Euler's constant: the longest of n exponential lives is ln n + EULER mean lives long, for n of more than a few."""


@dataclass(frozen=True, slots=True, eq=False)
class Elastic:
    """Release the actor with the fewest unfinished responses whenever one fewer does better (see the module).

    Its responses go, largest context first, each to the actor of the same size with the fewest (ties: the lowest
    index) that has an open slot and KV headroom; all of them find room, or it goes on. What the release saves, for as
    long as its longest response may last, must exceed what moving costs: while KV is sent or computed again, the
    actor is held and the step may wait for it. How long responses last is read off the step so far as if lengths were
    exponential: tokens generated over responses finished is the likeliest mean of what then remains of any of them,
    those that still run counted for what they have lived. Little hangs on it (measured on every shipped preset and
    profile: no more than what the cap leaves moves neither time nor cost by 0.1 %; half of it, cost by 1 % in the mean
    and twice of it by 0.2 %). An actor that took responses is not released in the same decision.
    """

    price: float
    """GPU-seconds that a second of the step is worth."""
    terms: ElasticTerms
    """Speeds and the cost of moves."""
    _least: tuple[IntArray, ...] = field(init=False, repr=False)
    """For each speed, `least_running`."""
    _of_speed: tuple[IntArray, ...] = field(init=False, repr=False)
    """For each speed, its actors; empty where all have the same."""
    _promotion: Promotion | None = field(init=False, repr=False)
    """What the reserve is for; None without one."""

    def __post_init__(self) -> None:
        _check(self.price, self.terms)
        count = len(self.terms.speeds)
        sizes = np.bincount(self.terms.speed_of, minlength=count).tolist()
        least = [least_running(one, self.price, size) for one, size in zip(self.terms.speeds, sizes, strict=True)]
        object.__setattr__(self, "_least", tuple(least))
        of_speed = [ints(np.flatnonzero(self.terms.speed_of == row)) for row in range(count)]
        object.__setattr__(self, "_of_speed", tuple(of_speed) if count > 1 else ())
        promotion = Promotion(self.price, self.terms) if self.terms.reserve.size else None
        object.__setattr__(self, "_promotion", promotion)

    @property
    def spec(self) -> MigrationSpec:
        """See `MigrationRule`."""
        return MigrationSpec(kind=ELASTIC, value=float(self.price), terms=self.terms)

    def triggered(self, assigned: IntArray, finished: IntArray, unfinished: IntArray) -> bool:
        """See `MigrationRule`: of some size of actor, more are at work than do best, or the reserve may be wanted."""
        if not self._of_speed:
            return bool(unfinished.sum() < self._least[0][np.count_nonzero(unfinished)])
        if self._promotion is not None and self._promotion.triggered(unfinished):
            return True
        return any(self._too_many(unfinished, row) for row in range(len(self._of_speed)))

    def decide(self, view: GenerationView) -> tuple[Migration | Start, ...]:
        """See `MigrationRule`."""
        unfinished = view.running + view.waiting
        if not self.triggered(view.assigned, view.finished, unfinished):
            return ()
        room, took = Room.of(view), np.zeros(unfinished.size, dtype=np.bool_)
        remaining = float(view.tokens_generated.sum() / max(view.finished.sum(), 1))
        decided: list[Migration | Start] = []
        if self._promotion is not None:
            decided += self._promotion.moves(view, unfinished, room, remaining)
            if decided:
                return tuple(decided)
            decided += self._promotion.starts(view, unfinished, remaining)
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
            if moves := room.spread(leaving, others, unfinished):
                unfinished[source] = room.slots[source] = 0
                took[[move.target for move in moves]] = True
                return moves
        return []

    def _saved(self, row: int, actors: int, running: int) -> float:
        """GPU-seconds that an iteration costs less with one actor fewer."""
        count, speed = np.array([actors, actors - 1]), self.terms.speeds[row]
        now, then = price_of_iteration(speed, self.price, count, np.array([running, running])).tolist()
        return float(now - then)


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
    begin = np.delete(terms.speed_of, terms.reserve) if _are_actors(terms) else ints([])
    require(terms.reserve.size == 0 or begin.size > 0, "a reserve must name some, not all, of the actors, each once")
    one = np.unique(begin).size <= 1 and np.unique(terms.speed_of[terms.reserve]).size <= 1
    require(terms.reserve.size == 0 or one, "a reserve must be of one size, and all other actors too")
    started = bool(np.isfinite(terms.start_s)) and terms.start_s >= 0
    require(started, f"start_s {terms.start_s} must be a finite number of seconds, at least 0")
    for speed in terms.speeds:
        require(speed.gpus >= 1, f"an actor of {speed.gpus} GPUs; it needs at least 1")
        shaped = speed.batch.ndim == 1 and speed.batch.size >= 1 and speed.batch.shape == speed.iteration_s.shape
        require(shaped, "a speed needs as many iteration_s as batch points, at least one")
        require(bool(speed.batch[0] == 1 and (np.diff(speed.batch) > 0).all()), "batch must ascend from 1")
        good = np.isfinite(speed.iteration_s).all() and (speed.iteration_s > 0).all()
        require(bool(good and (np.diff(speed.iteration_s) >= 0).all()), "iteration_s must be above 0 s and not fall")


def _are_actors(terms: ElasticTerms) -> bool:
    """Whether the reserve names actors, each once."""
    reserve = terms.reserve
    return bool(np.isin(reserve, np.arange(terms.speed_of.size)).all() and np.unique(reserve).size == reserve.size)
