"""Columns: read-only numpy arrays, the form in which hot data travels."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def ints(values: npt.ArrayLike | Iterable[int]) -> IntArray:
    """A read-only int64 copy of `values`."""
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column


def seen(values: IntArray) -> IntArray:
    """A read-only view of `values`, without a copy: it shows what they are while it is looked at."""
    view = values.view()
    view.flags.writeable = False
    return view


def floats(values: npt.ArrayLike | Sequence[float]) -> FloatArray:
    """A read-only float64 copy of `values`."""
    column = np.array(values, dtype=np.float64)
    column.flags.writeable = False
    return column
