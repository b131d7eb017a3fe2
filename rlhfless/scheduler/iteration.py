"""What an iteration costs on actors of one size, and how many of them do best (see `rlhfless.scheduler.elastic`)."""

import numpy as np

from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.plan import Speed


def iteration_s(speed: Speed, batch: FloatArray) -> FloatArray:
    """Seconds in which each of `batch` responses on an actor gets one more token, elementwise.

    Linear between points, flat below one response; beyond the most that run at once they take turns.
    """
    most = int(speed.batch[-1])
    at_once_s = np.interp(np.minimum(batch, most), speed.batch, speed.iteration_s)
    return np.asarray(np.maximum(batch / most, 1.0) * at_once_s)


def price_of_iteration(speed: Speed, price: float | FloatArray, actors: IntArray, running: IntArray) -> FloatArray:
    """F(N, A) of the module's docstring, GPU-seconds, elementwise."""
    return np.asarray((price + speed.gpus * actors) * iteration_s(speed, running / actors))


def least_running(speed: Speed, price: float | FloatArray, actors: int) -> IntArray:
    """int[..., actors + 1]: for each number of actors, the fewest running responses at which one fewer would not do
    better; for every one of the prices, float[..., 1].

    0 for one actor and for none; it never falls as actors grow. Where even full actors do no better, more responses
    than can run.
    """
    count = np.arange(2, actors + 1)
    shape = np.broadcast_shapes(np.shape(price), count.shape)
    low, high = np.ones(shape, dtype=np.int64), np.broadcast_to((count + 1) * int(speed.batch[-1]), shape)
    while (low < high).any():
        middle = (low + high) // 2
        wide = price_of_iteration(speed, price, count, middle) < price_of_iteration(speed, price, count - 1, middle)
        low, high = np.where(wide, low, np.minimum(middle + 1, high)), np.where(wide, middle, high)
    least = np.concatenate([np.zeros((*shape[:-1], 2), dtype=np.int64), low], axis=-1)
    return ints(np.maximum.accumulate(least, axis=-1))


def best_number(least: IntArray, running: IntArray) -> IntArray:
    """int[points]: of the numbers of actors that `least` (of `least_running`) is for, the one that does best."""
    return ints(np.maximum(np.searchsorted(least, running, side="right") - 1, 1))
