"""The trace: response lengths of a training run, one row a response, in one versioned format.

A trace says what happened (how long each response was, when and where it ran) or what a synthesiser made up; `source`
says which. In memory it is columns: what belongs to a prompt is kept once a prompt, what belongs to a response once a
row. Rows stand in canonical order: by (epoch, step), then prompts as they first stand in the step, then samples, so
that every n consecutive rows are one prompt's responses.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rlhfless.errors import InputError, SchemaError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, floats, ints
from rlhfless.types.codec import from_json, to_json
from rlhfless.types.workload import Algorithm
from traces import files
from traces.laws import row_name, settle

SCHEMA = 1
"""Version of the format below; a reader refuses every other one."""
LARGEST = 10_000_000
"""Most tokens of a cap and most responses to a prompt (chosen: beyond every model's context; sums stay in int64)."""

_REQUIRED = pa.schema(
    [
        ("epoch", pa.int64()),
        ("step", pa.int64()),
        ("prompt_id", pa.string()),
        ("sample", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("response_tokens", pa.int64()),
        ("finish_reason", pa.string()),
    ]
)
_NULLABLE = pa.schema(
    [
        ("reward", pa.float64()),
        ("start_s", pa.float64()),
        ("end_s", pa.float64()),
        ("actor", pa.int64()),
        ("reference_tokens", pa.int64()),
    ]
)
_TOKEN_IDS = pa.field("prompt_token_ids", pa.list_(pa.int64()))
"""Present only where token ids are known; filled in the first row of each prompt, null in its other rows."""
COLUMNS = pa.schema([*_REQUIRED, *_NULLABLE, _TOKEN_IDS])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """What holds for the whole run."""

    schema: int = SCHEMA
    """Version of the file format."""
    model: str
    """Policy that wrote the responses; for synthetic traces, the model that they imitate."""
    dataset: str
    """Where the prompts come from."""
    tokenizer: str
    """What counted the tokens."""
    algorithm: Algorithm
    """What learned from the responses: ppo or grpo."""
    responses_per_prompt: int
    """n: samples drawn for each prompt of a step."""
    max_prompt_tokens: int
    """Cap on a prompt's length."""
    max_response_tokens: int
    """Cap on a response's length; a longer one ends with finish_reason "length"."""
    source: str
    """Who made the trace, how, and under which licence."""
    seed: int | None = None
    """Seed of a synthetic trace; None where chance was not ours."""

    def __post_init__(self) -> None:
        if self.algorithm not in ("ppo", "grpo"):
            raise InputError(f"trace: unknown algorithm {self.algorithm!r}; known are ppo, grpo")
        for name in ("responses_per_prompt", "max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"trace: {name} is {getattr(self, name)}; it must be at least 1")
            if getattr(self, name) > LARGEST:
                raise InputError(f"trace: {name} is {getattr(self, name)}; it must be at most {LARGEST}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Responses of a run. Raises InputError where the columns break a law of the format; puts rows in order."""

    info: TraceInfo
    """What holds for the whole run."""
    prompt_ids: npt.NDArray[np.str_]
    """str[prompts]: name of each distinct prompt, the same in every epoch; in order of first appearance."""
    prompt_tokens: IntArray
    """int[prompts]: tokens of each prompt, at least 1."""
    reference_tokens: IntArray | None = None
    """int[prompts]: tokens of the data set's reference answer, 0 where unknown."""
    prompt_token_ids: tuple[IntArray, ...] | None = None
    """Token ids of each prompt."""
    epoch: IntArray
    """int[rows]: pass over the data, from 0."""
    step: IntArray
    """int[rows]: training step; counts through the run or starts again in each epoch."""
    prompt: IntArray
    """int[rows]: index into prompt_ids."""
    sample: IntArray
    """int[rows]: which of the prompt's n responses, 0..n-1."""
    response_tokens: IntArray
    """int[rows]: length of the response, 1..max_response_tokens."""
    truncated: BoolArray
    """bool[rows]: finish_reason is "length" (the cap ended it, so it is as long as the cap), not "stop"."""
    reward: FloatArray | None = None
    """float[rows]: score, NaN where unknown."""
    start_s: FloatArray | None = None
    """float[rows]: start of decoding in seconds on the run's clock, NaN where unknown."""
    end_s: FloatArray | None = None
    """float[rows]: end of decoding, NaN where unknown."""
    actor: IntArray | None = None
    """int[rows]: decode actor that ended the response, -1 where unknown."""

    def __post_init__(self) -> None:
        for name, column in settle(self).items():
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.prompt)

    def __eq__(self, other: object) -> bool:
        """The same run facts and the same columns; unknown equals unknown."""
        if not isinstance(other, Trace):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @property
    def n(self) -> int:
        """Responses per prompt."""
        return self.info.responses_per_prompt

    @property
    def lengths(self) -> IntArray:
        """int[rows / n, n]: response lengths, a prompt of a step in each row."""
        return self.response_tokens.reshape(-1, self.n)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The trace that `path` (.parquet or .jsonl) holds.

        Raises InputError for a missing file, an unknown suffix or rows that break a law of the format, SchemaError for
        content that is no trace of this version: not Parquet or JSON, another schema, a missing column, a wrong type.
        """
        path = Path(path)
        metadata, table = files.read(path, COLUMNS)
        try:
            info = from_json(metadata, TraceInfo, SCHEMA, "metadata")
            return cls(info=info, **_columns(table))
        except InputError as error:
            raise type(error)(f"{path}: {error}") from None

    def write(self, path: str | Path) -> None:
        """Write as Parquet or JSON Lines, as the suffix says; atomic, and byte-identical for equal traces."""
        files.write(Path(path), to_json(self.info), self._table())

    def _table(self) -> pa.Table:
        prompt = pa.array(self.prompt)

        def known(column: IntArray | FloatArray | None, kind: pa.DataType, mask: BoolArray | None) -> pa.Array:
            return pa.nulls(len(self), kind) if column is None else pa.array(column, kind, mask=mask)

        reference = None if self.reference_tokens is None else self.reference_tokens[self.prompt]
        columns = {
            "epoch": pa.array(self.epoch),
            "step": pa.array(self.step),
            "prompt_id": pa.array(self.prompt_ids.tolist(), pa.string()).take(prompt),
            "sample": pa.array(self.sample),
            "prompt_tokens": pa.array(self.prompt_tokens[self.prompt]),
            "response_tokens": pa.array(self.response_tokens),
            "finish_reason": pa.array(["stop", "length"]).take(pa.array(self.truncated.astype(np.int8))),
            "actor": known(self.actor, pa.int64(), None if self.actor is None else self.actor < 0),
            "reference_tokens": known(reference, pa.int64(), None if reference is None else reference == 0),
        }
        for name in ("reward", "start_s", "end_s"):
            column = getattr(self, name)
            columns[name] = known(column, pa.float64(), None if column is None else np.isnan(column))
        schema = pa.schema([*_REQUIRED, *_NULLABLE])
        if self.prompt_token_ids is not None:
            columns[_TOKEN_IDS.name] = self._token_id_column(self.prompt_token_ids)
            schema = COLUMNS
        return pa.table(columns, schema=schema)

    def _token_id_column(self, token_ids: tuple[IntArray, ...]) -> pa.Array:
        first = np.unique(self.prompt, return_index=True)[1]  # prompts are numbered as they appear: ascending rows
        size = np.zeros(len(self) + 1, dtype=np.int32)
        size[first + 1] = self.prompt_tokens
        null = np.ones(len(self), dtype=bool)
        null[first] = False
        offsets = pa.array(np.cumsum(size, dtype=np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(token_ids)), mask=pa.array(null))


def _same(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and a == b


def _columns(table: pa.Table) -> dict[str, Any]:
    """Columns of `Trace` from the rows of a file. Raises SchemaError for a missing column, type or value."""
    known = set(COLUMNS.names)
    if unknown := [name for name in table.column_names if name not in known]:
        raise SchemaError(f"unknown column {unknown[0]!r}; a trace has {', '.join(COLUMNS.names)}")
    for name in (*_REQUIRED.names, *_NULLABLE.names):
        if name not in table.column_names:
            raise SchemaError(f"no column {name!r}; a trace has {', '.join(COLUMNS.names)}")
    if twice := [name for name in COLUMNS.names if table.column_names.count(name) > 1]:
        raise SchemaError(f"column {twice[0]!r} stands twice; a trace has each of its columns once")
    if len(table) == 0:
        raise SchemaError("no responses; a trace has at least one row")
    required = {field.name: _required(table[field.name].combine_chunks(), field) for field in _REQUIRED}
    ids = required.pop("prompt_id").dictionary_encode()
    prompt = ids.indices.to_numpy().astype(np.int64)
    first = np.unique(prompt, return_index=True)[1]
    reason = required.pop("finish_reason")
    odd = pc.invert(pc.is_in(reason, value_set=pa.array(["stop", "length"])))
    if (row := _first(odd)) is not None:
        raise SchemaError(f"{row_name(row)} has finish_reason {reason[row].as_py()!r}; known are stop, length")
    columns: dict[str, Any] = {name: column.to_numpy() for name, column in required.items()}
    for field in _NULLABLE:
        columns[field.name] = _nullable(table[field.name].combine_chunks(), field)
    for name in ("prompt_tokens", "reference_tokens"):
        columns[name] = _one_each(name, columns[name], prompt, first, ids.dictionary)
    columns["prompt_token_ids"] = _token_ids(table, prompt, ids.dictionary)
    if (at := _first(pc.match_substring(ids.dictionary, "\0"))) is not None:
        raise SchemaError(f"prompt_id {ids.dictionary[at].as_py()!r} has a NUL character in it")
    columns["prompt_ids"] = np.array(ids.dictionary.to_pylist(), dtype=np.str_)
    columns["prompt"] = prompt
    columns["truncated"] = pc.equal(reason, "length").to_numpy(zero_copy_only=False)
    return columns


def _first(flags: pa.Array) -> int | None:
    """The first row where `flags` is true."""
    row = pc.index(flags, True).as_py()
    return None if row < 0 else row


def _typed(column: pa.Array, field: pa.Field) -> pa.Array:
    """`column` as the field's type; a wider or narrower type of the same kind will do, another kind will not."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    whole = pa.types.is_integer(kind)
    fits = {
        pa.int64(): whole,
        pa.float64(): whole or pa.types.is_floating(kind),
        pa.string(): pa.types.is_string(kind) or pa.types.is_large_string(kind),
    }[field.type]
    if not fits and not pa.types.is_null(kind):
        raise SchemaError(f"column {field.name!r} is of type {column.type}, not {field.type}")
    try:
        column = column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"column {field.name!r} is not {field.type} ({' '.join(str(error).split())})") from None
    try:
        column.validate(full=True)  # Parquet text may hold any bytes
    except pa.ArrowInvalid:
        raise SchemaError(f"column {field.name!r} holds text that is not UTF-8") from None
    return column


def _required(column: pa.Array, field: pa.Field) -> pa.Array:
    column = _typed(column, field)
    if column.null_count and (row := _first(column.is_null())) is not None:
        raise SchemaError(f"{row_name(row)} has no {field.name}; every response needs one")
    return column


def _nullable(column: pa.Array, field: pa.Field) -> IntArray | FloatArray | None:
    """Values with NaN (float), 0 (lengths) or -1 (actor) for unknown; None if all are unknown."""
    column = _typed(column, field)
    if column.null_count == len(column):
        return None
    if field.type == pa.float64():
        if (row := _first(pc.is_nan(column))) is not None:
            raise SchemaError(f"{row_name(row)} has NaN as {field.name}; leave it null where it is unknown")
        return floats(column.to_numpy(zero_copy_only=False))
    least = 0 if field.name == "actor" else 1
    if (row := _first(pc.less(column, least))) is not None:
        raise InputError(f"{row_name(row)} has {column[row].as_py()} as {field.name}; it must be at least {least}")
    return ints(column.fill_null(least - 1).to_numpy())


def _one_each(name: str, column: object, prompt: IntArray, first: IntArray, ids: pa.Array) -> IntArray | None:
    """What belongs to a prompt, once a prompt. Raises SchemaError when its rows disagree."""
    if not isinstance(column, np.ndarray):
        return None
    each: IntArray = column[first]
    if (odd := np.flatnonzero(column != each[prompt])).size:
        row = int(odd[0])
        raise SchemaError(
            f"{row_name(row)}: prompt {ids[int(prompt[row])].as_py()!r} has {name} {column[row]}, "
            f"an earlier row {each[prompt[row]]}"
        )
    return each


def _token_ids(table: pa.Table, prompt: IntArray, ids: pa.Array) -> tuple[IntArray, ...] | None:
    if _TOKEN_IDS.name not in table.column_names:
        return None
    column = table[_TOKEN_IDS.name].combine_chunks()
    if column.null_count == len(column):
        return None
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
        raise SchemaError(f"column {_TOKEN_IDS.name!r} is of type {kind}, not list<int64>")
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    named, at = np.unique(prompt[rows], return_index=True)
    if len(named) < len(ids):
        lacking = ids[int(np.setdiff1d(np.arange(len(ids)), named)[0])].as_py()
        raise SchemaError(f"prompt {lacking!r} has no {_TOKEN_IDS.name}; give them for every prompt or for none")
    given = column.take(pa.array(rows[at]))
    flat = given.flatten()
    if flat.null_count:
        raise SchemaError(f"column {_TOKEN_IDS.name!r} has a null inside a list")
    bounds = np.cumsum(pc.list_value_length(given).to_numpy())[:-1]
    return tuple(ints(part) for part in np.split(flat.cast(pa.int64()).to_numpy(), bounds))
