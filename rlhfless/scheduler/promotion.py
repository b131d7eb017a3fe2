"""Larger actors in reserve: when `elastic` asks for them, and when all that still runs moves there.

A larger actor is quicker at few responses and dearer at many. Let an iteration of A responses be priced at F(A)
GPU-seconds on the actors that run (see `rlhfless.scheduler.elastic`), as many of them as do best, and at F'(A) on the
reserve. Were lengths exponential and what remains of each R iterations in the mean, then A responses would run for
R / A iterations until one ends, so that being on the reserve until all have ended saves

    R C(A),    C(A) = D(1) / 1 + D(2) / 2 + ... + D(A) / A,    D(A) = F(A) - F'(A).

D is above 0 at few responses and may be below at many, so everything moves once no more run than the A at which C is
largest, if R C(A) exceeds what moving costs. Meanwhile A falls as exp(-iterations / R): the reserve is asked for when
no more than that will run by the time that it is ready, if what is saved then exceeds its start as well. None of this
needs to know which response is the last to end: all move together.
"""

from dataclasses import dataclass, field

import numpy as np

from rlhfless.scheduler.iteration import best_number, iteration_s, least_running, price_of_iteration
from rlhfless.scheduler.midstep import GenerationView, Migration, Room, Start, leaving_of
from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.plan import ElasticTerms, Speed

AHEAD = 8
"""Times as many responses as are to move that may run when the reserve is asked for (chosen: it bounds how often the
question is put; after a start as long as twice the mean of what remains, exp(-2) would run)."""


def gain_of(small: Speed, actors: int, large: Speed, reserve: int, price: float) -> FloatArray:
    """float[most + 1]: C(A) of the module's docstring for `actors` small ones and a `reserve` of large ones, up to as
    many responses as the reserve runs at once."""
    running = np.arange(1, reserve * int(large.batch[-1]) + 1)
    priced = []
    for speed, most in ((small, actors), (large, reserve)):
        number = best_number(least_running(speed, price, most), running)
        priced.append(price_of_iteration(speed, price, number, running))
    return np.concatenate([[0.0], np.cumsum((priced[0] - priced[1]) / running)])


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """Moves and starts of the reserve actors of a plan whose other actors are all of one size."""

    price: float
    """GPU-seconds that a second of the step is worth."""
    terms: ElasticTerms
    """Speeds, the reserve, the cost of moves and starts."""
    small: Speed = field(init=False)
    """Of the actors that begin."""
    large: Speed = field(init=False)
    """Of the reserve."""
    gain: FloatArray = field(init=False, repr=False)
    """See `gain_of`."""
    most: int = field(init=False)
    """Running responses at or below which they are to move; 0 where it never pays."""
    _least: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        terms, count = self.terms, self.terms.reserve.size
        begin = np.delete(terms.speed_of, terms.reserve)
        small, large = terms.speeds[int(begin[0])], terms.speeds[int(terms.speed_of[terms.reserve[0]])]
        gain = gain_of(small, begin.size, large, count, self.price)
        for name, value in (
            ("small", small),
            ("large", large),
            ("gain", gain),
            ("most", int(gain.argmax())),
            ("_least", least_running(large, self.price, count)),
        ):
            object.__setattr__(self, name, value)

    def triggered(self, unfinished: IntArray) -> bool:
        """Whether there can be anything to decide."""
        return bool(0 < unfinished.sum() - unfinished[self.terms.reserve].sum() <= AHEAD * self.most)

    def moves(self, view: GenerationView, unfinished: IntArray, room: Room, remaining: float) -> list[Migration]:
        """All responses to the reserve, as evenly as it goes, if it is ready and that pays; entered into the columns.

        `remaining`: iterations, mean over the running responses.
        """
        left, running = self._left(unfinished)
        idle = ints(np.flatnonzero(view.idle & (room.slots > 0)))
        if not 0 < running <= self.most or not idle.size or view.starting.any():
            return []
        if remaining * self.gain[running] <= self._moving(view, left, idle.size):
            return []
        leaving = [one for source in left.tolist() for one in leaving_of(view, source)]
        return room.spread(leaving, idle, unfinished)

    def starts(self, view: GenerationView, unfinished: IntArray, remaining: float) -> list[Start]:
        """The reserve actors to ask for now, as many as do best once they are ready."""
        left, running = self._left(unfinished)
        unasked = np.flatnonzero(view.unasked)
        if not 0 < running <= AHEAD * self.most or not unasked.size or view.starting.any() or view.idle.any():
            return []
        each_s = float(iteration_s(self.small, np.array([running / left.size]))[0])
        later = int(running * np.exp(-self.terms.start_s / (each_s * max(remaining, 1.0))))
        if not 0 < later <= self.most:
            return []
        asked = unasked[: int(best_number(self._least, ints([later]))[0])]
        held = asked.size * self.large.gpus * self.terms.start_s
        if remaining * self.gain[later] <= held + self._moving(view, left, asked.size) * later / running:
            return []
        return [Start(actor) for actor in asked.tolist()]

    def _left(self, unfinished: IntArray) -> tuple[IntArray, int]:
        """The actors at work that are not of the reserve, and their unfinished responses."""
        here = unfinished.copy()
        here[self.terms.reserve] = 0
        return ints(np.flatnonzero(here)), int(here.sum())

    def _moving(self, view: GenerationView, left: IntArray, targets: int) -> float:
        """GPU-seconds that moving everything costs: actors are held on both sides, and the step may wait for it."""
        gpus = left.size * self.small.gpus + targets * self.large.gpus
        return (self.price + gpus) * float(view.context_tokens[left].sum()) * self.terms.move_s_per_token
