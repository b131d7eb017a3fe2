"""One row of evidence: the simulator against something that is not it, how far apart they are, and what that covers."""

from dataclasses import dataclass

import numpy as np

from experiments.output import Cell
from rlhfless.types.arrays import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A comparison, or why there is none."""

    against: str
    """What the simulator is compared with."""
    predictor: str = "simulator"
    """What predicts: the simulator, or a baseline that a sceptic would ask for."""
    quantity: str = ""
    """What is compared, for instance generation time of a step."""
    n: int = 0
    """Comparisons that the errors are over."""
    median: float | None = None
    """Median size of the relative errors, predicted over measured less 1."""
    mean: float | None = None
    """Mean size (MAPE)."""
    p90: float | None = None
    """90th percentile of the sizes."""
    r: float | None = None
    """Pearson correlation of predicted and measured; None where one of them does not vary."""
    agree: int | None = None
    """Pairs of policies that both put in the same order; None where there is one policy."""
    pairs: int | None = None
    """Pairs of policies that were measured to differ."""
    scope: str = ""
    """What was measured and what the figure covers."""
    skipped: str | None = None
    """Why the comparison was not made."""

    def cells(self) -> dict[str, Cell]:
        """The row of the result files."""
        return {name: getattr(self, name) for name in self.__slots__}


def compared(
    predicted: FloatArray,
    measured: FloatArray,
    *,
    against: str,
    quantity: str,
    scope: str,
    predictor: str = "simulator",
    agree: int | None = None,
    pairs: int | None = None,
) -> Evidence:
    """The row of predictions against measurements above 0, elementwise."""
    sizes = np.abs(predicted / measured - 1)
    varied = sizes.size > 1 and bool(np.ptp(predicted) > 0 and np.ptp(measured) > 0)
    return Evidence(
        against=against,
        predictor=predictor,
        quantity=quantity,
        n=int(sizes.size),
        median=float(np.median(sizes)),
        mean=float(sizes.mean()),
        p90=float(np.quantile(sizes, 0.9)),
        r=float(np.corrcoef(predicted, measured)[0, 1]) if varied else None,
        agree=agree,
        pairs=pairs,
        scope=scope,
    )
