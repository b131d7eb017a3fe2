"""What a planner has learned from a run's steps, besides the lengths of prompts: a value that outlives its process."""

from dataclasses import dataclass

import numpy as np

from rlhfless.errors import SchemaError
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.codec import from_json, to_json

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """All that a planner of the same run needs to go on where another stopped."""

    schema: int
    """Version of this layout."""
    shortest_s: dict[str, float]
    """Phase -> its shortest in any step, which says when functions are asked for (RLHFless §5)."""
    kept: dict[str, IntArray]
    """Size of actor (JSON has text for keys) -> int[]: first GPUs of those whose process is kept, ascending."""
    equal: dict[str, IntArray]
    """The same under the paper's rule, which elastic and frontier plans are compared with."""
    prefilled: bool
    """Whether a prefill actor's process is kept."""
    first_epoch: FloatArray
    """float[2, responses]: log estimate and log length of the latest responses of the first epoch."""
    later_epochs: FloatArray
    """The same of later epochs."""

    def to_json(self) -> str:
        """As canonical JSON; every number reads back the same."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "what was learned") -> "Learned":
        """Read what `to_json` wrote. Raises SchemaError, naming `where`."""
        found = from_json(text, cls, SCHEMA, where)
        for name in ("first_epoch", "later_epochs"):
            pairs = getattr(found, name)
            if pairs.ndim != 2 or pairs.shape[0] != 2 or not np.isfinite(pairs).all():
                raise SchemaError(f"{where}: {name} must be two rows of finite numbers")
        if not all(seconds >= 0 for seconds in found.shortest_s.values()):
            raise SchemaError(f"{where}: shortest_s must be at least 0")
        for name in ("kept", "equal"):
            for tp, gpus in getattr(found, name).items():
                if not tp.isdecimal() or gpus.ndim != 1 or (gpus < 0).any():
                    raise SchemaError(f"{where}: {name} must give numbers of GPUs for each size of actor")
        return found
