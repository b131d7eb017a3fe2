"""How long each prompt's responses will be, as far as earlier epochs tell (RLHFless §4.3)."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError, SchemaError
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.codec import from_json, to_json
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload

SCHEMA = 1

DEFAULT_WINDOW = 1
"""Epochs that an estimate looks back on; 1 is the last epoch alone (RLHFless §6, the best of 1 to 4 in Fig. 15)."""

PromptIds = Sequence[Hashable] | npt.NDArray[np.generic]
"""What names each prompt across epochs: an array of int or str, or any hashable values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The JSON form of a `LengthHistory`."""

    schema: int
    """Version of this layout."""
    window: int
    """Epochs that are kept of each prompt."""
    epoch: int
    """Last epoch seen; -1 before any."""
    ids: tuple[int | str, ...]
    """Prompts, in the order in which they were first seen."""
    epochs: IntArray
    """int[prompts]: last epoch of each."""
    tokens: tuple[tuple[float, ...], ...]
    """Mean response lengths of each prompt's last epochs, at most `window`, oldest first."""


class LengthHistory:
    """Mean response length of every prompt over its last `window` epochs, and their moving average.

    The average is exponential with alpha = 2 / (window + 1), begun at the oldest epoch kept; a window of 1 repeats
    the last epoch. Epochs in which a prompt did not occur do not count.
    """

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        """Nothing seen yet. Raises InputError for a window below 1."""
        if window < 1:
            raise InputError(f"length history: window {window} must be at least 1 epoch")
        self.window = window
        self._row: dict[Hashable, int] = {}
        self._epoch = -1
        self._epochs = np.empty(0, dtype=np.int64)  # [room]: last epoch of each row; room grows by doubling
        self._tokens = np.empty((0, window), dtype=np.float64)  # [room, window]: newest last, NaN where not yet seen

    def __len__(self) -> int:
        """Prompts seen."""
        return len(self._row)

    def observe(self, epoch: int, prompt_ids: PromptIds, mean_lengths: npt.ArrayLike) -> None:
        """Take in the mean response length (tokens, float[prompts]) of prompts that were answered in `epoch`.

        A prompt seen before in the same epoch gets the later value. Raises InputError for an epoch before the last
        one, lengths that do not match the ids, or a length that is not a positive number.
        """
        ids = _listed(prompt_ids)
        means = _column("mean_lengths", mean_lengths, len(ids))
        bad = np.flatnonzero(~((means > 0) & np.isfinite(means)))
        if bad.size:
            raise InputError(
                f"length history: mean length {means[bad[0]]} of prompt {ids[bad[0]]!r} in epoch {epoch}; "
                "expected a positive number of tokens"
            )
        if epoch < max(self._epoch, 0):
            raise InputError(
                f"length history: epoch {epoch} after epoch {self._epoch}; epochs start at 0, never go back"
            )
        self._epoch = int(epoch)
        row = self._row
        rows = np.fromiter((row.setdefault(name, len(row)) for name in ids), dtype=np.int64, count=len(ids))
        self._make_room(len(row))
        fresh = rows[self._epochs[rows] < epoch]
        self._tokens[fresh, :-1] = self._tokens[fresh, 1:]
        self._tokens[rows, -1] = means
        self._epochs[rows] = epoch

    def estimate(
        self, prompt_ids: PromptIds, reference_lengths: npt.ArrayLike | None = None, cap: float | None = None
    ) -> FloatArray:
        """float[prompts]: expected mean response length of each prompt, tokens.

        A prompt that was never seen takes its reference answer's length (float[prompts], NaN where it has none), else
        the mean of all prompts' last lengths, else `cap`. Reference lengths stand in as they are: in the first epoch
        only the order of prompts matters, and answers need not be as long as responses. Raises InputError if nothing
        is known of a prompt, or reference lengths do not match the ids or are not positive.
        """
        ids = _listed(prompt_ids)
        rows = np.fromiter(map(self._row.get, ids, repeat(-1)), dtype=np.int64, count=len(ids))
        estimates = np.full(len(ids), np.nan)
        seen = rows >= 0
        estimates[seen] = self._averages(rows[seen])
        if reference_lengths is not None:
            references = _column("reference_lengths", reference_lengths, len(ids))
            if np.any((references <= 0) | np.isinf(references)):
                raise InputError("reference_lengths: every value must be a positive number of tokens, or NaN for none")
            estimates = np.where(seen, estimates, references)
        unknown = np.isnan(estimates)
        if unknown.any():
            if self._row:
                estimates[unknown] = self._tokens[: len(self._row), -1].mean()
            elif cap is not None:
                estimates[unknown] = cap
            else:
                first = ids[int(unknown.argmax())]
                raise InputError(f"nothing is known of prompt {first!r}: no history, no reference answer and no cap")
        return floats(estimates)

    def to_json(self) -> str:
        """The whole state. Raises InputError if a prompt id is neither a whole number nor text."""
        ids = [name.item() if isinstance(name, np.generic) else name for name in self._row]
        other = [name for name in ids if type(name) not in (int, str)]
        if other:
            raise InputError(f"length history: prompt id {other[0]!r} cannot be saved, only whole numbers and text can")
        kept = self._tokens[: len(ids)]
        state = _State(
            schema=SCHEMA,
            window=self.window,
            epoch=self._epoch,
            ids=tuple(ids),  # type: ignore[arg-type]  # checked above
            epochs=ints(self._epochs[: len(ids)]),
            tokens=tuple(tuple(row[n:]) for row, n in zip(kept.tolist(), np.isnan(kept).sum(axis=1), strict=True)),
        )
        return to_json(state)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "length history") -> "LengthHistory":
        """The history that `to_json` wrote. Raises SchemaError, naming `where`."""
        state = from_json(text, _State, SCHEMA, where)
        count = len(state.ids)
        if not count == len(set(state.ids)) == len(state.tokens) or state.epochs.shape != (count,):
            raise SchemaError(
                f"{where}: ids, epochs and tokens must have one entry for each prompt, ids without repeats"
            )
        if state.window < 1 or not all(1 <= len(kept) <= state.window for kept in state.tokens):
            raise SchemaError(f"{where}: each prompt must have 1 to window values, window {state.window} at least 1")
        if state.epoch < -1 or not np.all((state.epochs >= 0) & (state.epochs <= state.epoch)):
            raise SchemaError(f"{where}: epochs must lie in 0..{state.epoch}, the last epoch seen")
        made = cls(state.window)
        made._row = {name: row for row, name in enumerate(state.ids)}
        made._epoch = state.epoch
        made._epochs = state.epochs.copy()
        made._tokens = np.array(
            [(np.nan,) * (state.window - len(kept)) + kept for kept in state.tokens], dtype=np.float64
        )
        made._tokens = made._tokens.reshape(count, state.window)
        if not np.all(made._tokens[~np.isnan(made._tokens)] > 0):
            raise SchemaError(f"{where}: tokens must be positive")
        return made

    def _averages(self, rows: IntArray) -> FloatArray:
        alpha = 2 / (self.window + 1)
        kept = self._tokens[rows]
        average = kept[:, 0]
        for tokens in kept.T[1:]:
            average = np.where(np.isnan(average), tokens, alpha * tokens + (1 - alpha) * average)
        return average

    def _make_room(self, rows: int) -> None:
        room = len(self._epochs)
        if rows > room:
            more = max(rows, 2 * room) - room
            self._epochs = np.append(self._epochs, np.full(more, -1))
            self._tokens = np.vstack([self._tokens, np.full((more, self.window), np.nan)])


class LengthEstimator(Protocol):
    """What a planner asks for response lengths."""

    def estimate(self, workload: Workload) -> FloatArray:
        """float[prompts]: expected response length of each prompt, tokens, at least 1 and at most the step's cap."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a step that has been carried out."""
        ...


@dataclass(frozen=True, slots=True)
class HistoryEstimator:
    """The paper's estimator: a prompt's past epochs, its reference answer in the first (RLHFless §4.3)."""

    history: LengthHistory
    """What has been seen; grows with every report."""

    def estimate(self, workload: Workload) -> FloatArray:
        """See `LengthEstimator`; what nothing is known of counts as the cap."""
        cap = workload.max_response_tokens
        return floats(np.clip(self.history.estimate(workload.prompt_ids, workload.reference_tokens, cap), 1, cap))

    def observe(self, report: StepReport) -> None:
        """See `LengthEstimator`."""
        self.history.observe(report.epoch, report.prompt_ids, report.mean_lengths)


@dataclass(frozen=True, slots=True)
class NoEstimator:
    """No prediction: every prompt counts as half of the cap, the middle of what is possible (chosen)."""

    def estimate(self, workload: Workload) -> FloatArray:
        """See `LengthEstimator`."""
        return floats(np.full(workload.size, max(1.0, workload.max_response_tokens / 2)))

    def observe(self, report: StepReport) -> None:
        """Learns nothing."""


def _listed(prompt_ids: PromptIds) -> list[Hashable]:
    """Python values: a numpy 7 and the 7 of a JSON file are then the same prompt."""
    listed: Iterable[Hashable] = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else prompt_ids
    return list(listed)


def _column(name: str, values: npt.ArrayLike, count: int) -> FloatArray:
    try:
        column = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected one number for each prompt") from None
    if column.shape != (count,):
        raise InputError(f"{name} has shape {column.shape}, {count} prompts need ({count},)")
    return column
