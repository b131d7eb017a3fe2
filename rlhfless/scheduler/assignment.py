"""Who decodes what: each rule deals a step's responses to the decode actors.

Responses are numbered prompt * n + sample. All but `least_in_flight` keep the n responses of a prompt on one actor,
where they share the prompt's KV.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.arrays import IntArray

Assignment = tuple[IntArray, ...]
"""One int[assigned] of response numbers for each actor, read-only, in order of admission."""


def sorted_even(estimates: npt.ArrayLike, n: int, actors: int) -> Assignment:
    """Prompts by falling length estimate, dealt in contiguous equal groups (RLHFless §4.3).

    `estimates`: float[prompts], tokens; equal ones keep the order of prompts. Actor 0 gets the longest, and each actor
    admits its longest first: where responses queue for slots, starting a long one late would end the step late. Groups
    differ by one prompt at most, the larger ones last, where responses are shortest. Raises InputError for an estimate
    that is not a finite number, InfeasibleError for more actors than prompts.
    """
    return _deal(_by_length(estimates), n, actors)


def dealt(estimates: npt.ArrayLike, n: int, actors: int) -> Assignment:
    """Prompts by falling length estimate, dealt like cards, there and back: every actor gets the same mix of lengths.

    `estimates` and errors as for `sorted_even`. Each admits its longest first; actors differ by one prompt at most.
    """
    order = _by_length(estimates)
    _check(order.size, n, actors, order.size, "prompts")
    turn, seat = np.divmod(np.arange(order.size), actors)
    seat = np.where(turn % 2, actors - 1 - seat, seat)
    return tuple(_read_only(_responses(order[seat == actor], n)) for actor in range(actors))


def shuffled_even(prompts: int, n: int, actors: int, rng: np.random.Generator) -> Assignment:
    """Prompts in random order, dealt in contiguous equal groups: verl's data-parallel split of a shuffled data set.

    Groups differ by one prompt at most, the larger ones last. Raises InfeasibleError for more actors than prompts.
    """
    return _deal(rng.permutation(max(prompts, 0)), n, actors)


def least_in_flight(prompts: int, n: int, actors: int) -> Assignment:
    """Each response, in order, to the actor with the fewest in flight, ties to the lowest: verl's asynchronous server.

    A step sends all its requests before the first one ends, so responses in flight are responses given out, and the
    fewest are always at the actor whose turn it is. Raises InfeasibleError for more actors than responses.
    """
    _check(prompts, n, actors, prompts * n, "responses")
    return tuple(_read_only(np.arange(actor, prompts * n, actors)) for actor in range(actors))


def group_sticky(prompts: int, n: int, actors: int) -> Assignment:
    """Each prompt's n responses together, in order, to the actor with the fewest in flight, ties to the lowest.

    As in `least_in_flight`, nothing ends while a step's requests are sent. Raises InfeasibleError for more actors than
    prompts.
    """
    _check(prompts, n, actors, prompts, "prompts")
    return tuple(_read_only(_responses(np.arange(actor, prompts, actors), n)) for actor in range(actors))


def _by_length(estimates: npt.ArrayLike) -> IntArray:
    """int[prompts]: prompts by falling estimate."""
    keys = np.asarray(estimates, dtype=np.float64)
    if keys.ndim != 1 or not np.isfinite(keys).all():
        raise InputError("estimates: expected one finite number for each prompt")
    return np.argsort(-keys, kind="stable")


def _deal(order: IntArray, n: int, actors: int) -> Assignment:
    _check(order.size, n, actors, order.size, "prompts")
    size, larger = divmod(order.size, actors)
    sizes = np.full(actors, size)
    sizes[actors - larger :] += 1
    responses = _read_only(_responses(order, n))
    ends = np.append(0, np.cumsum(sizes * n)).tolist()
    return tuple(responses[begin:end] for begin, end in pairwise(ends))


def _responses(prompts: IntArray, n: int) -> IntArray:
    """int[prompts * n]: the responses of these prompts, those of one prompt side by side."""
    return (prompts[:, None] * n + np.arange(n)).ravel()


def _read_only(column: npt.NDArray[np.int64]) -> IntArray:
    column.flags.writeable = False
    return column


def _check(prompts: int, n: int, actors: int, most: int, what: str) -> None:
    if prompts < 1 or n < 1 or actors < 1:
        raise InputError(f"assignment: {prompts} prompts, {n} responses each, {actors} actors; each must be at least 1")
    if actors > most:
        raise InfeasibleError(f"assignment: {actors} actors for {most} {what}; each actor needs at least one")
