"""One named random stream per subsystem, all from one seed."""

import zlib

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """A generator for the subsystem `names`, independent of every other one and of PYTHONHASHSEED.

    The same (seed, names) gives the same draws on every machine: the names enter by their CRC-32.
    """
    keys = [zlib.crc32(str(name).encode()) for name in names]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *keys])))
