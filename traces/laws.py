"""What every trace obeys, wherever it comes from, and the canonical order of its rows."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray, ints

if TYPE_CHECKING:
    from traces.format import Trace

_ROW_COLUMNS = {"epoch": 0, "step": 0, "prompt": 0, "sample": 0, "response_tokens": 1}
"""Whole-number columns of the rows and the least value of each."""


def row_name(row: int, of: str = "row") -> str:
    """What messages call the row (or prompt) at index `row`."""
    return f"{of} {row + 1} (counted from 1)"


def settle(trace: "Trace") -> dict[str, Any]:
    """Every column of `trace`, checked, read-only and in canonical order. Raises InputError, naming the row.

    Rows are named as they were given, counted from 1.
    """
    rows = len(trace.prompt)
    if rows == 0:
        raise InputError("trace: no responses; a trace has at least one row")
    columns: dict[str, Any] = {}
    for name, least in _ROW_COLUMNS.items():
        columns[name] = _whole(name, getattr(trace, name), rows, least)
    columns["truncated"] = _shaped("truncated", trace.truncated, rows, "b")
    for name in ("reward", "start_s", "end_s"):
        columns[name] = _real(name, getattr(trace, name), rows)
    if (columns["start_s"] is None) != (columns["end_s"] is None) or _backwards(columns["start_s"], columns["end_s"]):
        raise InputError("trace: every response needs start_s and end_s, start_s first, or neither")
    columns["actor"] = None if trace.actor is None else _whole("actor", trace.actor, rows, -1)
    if columns["actor"] is not None and columns["actor"].max() < 0:
        columns["actor"] = None
    cap = trace.info.max_response_tokens
    _each("response_tokens", columns["response_tokens"], columns["response_tokens"] > cap, f"at most {cap}, the cap")
    early = columns["truncated"] & (columns["response_tokens"] < cap)
    if early.any():
        row = int(np.argmax(early))
        raise InputError(
            f"trace: {row_name(row)} has finish_reason 'length' at {columns['response_tokens'][row]} tokens; "
            f"only a response of {cap} tokens, the cap, ends so"
        )

    prompts = _prompts(trace, columns["prompt"])
    order, prompt_order = _order(trace, columns, prompts["prompt_ids"])
    if order is not None:
        columns = {name: None if column is None else column[order] for name, column in columns.items()}
    if prompt_order is not None:
        renumbered = np.empty_like(prompt_order)
        renumbered[prompt_order] = np.arange(len(prompt_order))
        columns["prompt"] = renumbered[columns["prompt"]]
        for name in ("prompt_ids", "prompt_tokens", "reference_tokens"):
            prompts[name] = None if prompts[name] is None else prompts[name][prompt_order]
        if prompts["prompt_token_ids"] is not None:
            prompts["prompt_token_ids"] = tuple(prompts["prompt_token_ids"][i] for i in prompt_order)
    columns |= prompts
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return columns


def _shaped(name: str, column: npt.ArrayLike, count: int, kinds: str) -> npt.NDArray[Any]:
    array = np.array(column)
    if array.shape != (count,):
        raise InputError(f"trace: {name} has shape {array.shape}, not ({count},)")
    if array.dtype.kind not in kinds:
        raise InputError(f"trace: {name} is of type {array.dtype}, another kind than its column")
    return array


def _each(name: str, column: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], right: str, of: str = "row") -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(f"trace: {row_name(row, of)} has {column[row]} as {name}; it must be {right}")


def _whole(name: str, column: npt.ArrayLike, count: int, least: int, of: str = "row") -> IntArray:
    array = _shaped(name, column, count, "iu").astype(np.int64)
    _each(name, array, array < least, f"at least {least}", of)
    return array


def _real(name: str, column: FloatArray | None, count: int) -> FloatArray | None:
    """The column, or None when no value is known."""
    if column is None:
        return None
    array = _shaped(name, column, count, "fiu").astype(np.float64)
    _each(name, array, np.isinf(array), "finite")
    return None if np.isnan(array).all() else array


def _backwards(start_s: FloatArray | None, end_s: FloatArray | None) -> bool:
    if start_s is None or end_s is None:
        return False
    known = ~np.isnan(start_s)
    return not np.array_equal(known, ~np.isnan(end_s)) or bool((end_s[known] < start_s[known]).any())


def _prompts(trace: "Trace", prompt: IntArray) -> dict[str, Any]:
    """The columns of the prompts, checked against each other and against the rows."""
    ids = np.array(trace.prompt_ids, dtype=np.str_)
    count = len(ids)
    if ids.shape != (count,) or len(np.unique(ids)) < count or not np.char.str_len(ids).all():
        raise InputError("trace: prompt_ids must be distinct names, none of them empty")
    if not np.array_equal(np.unique(prompt), np.arange(count)):
        raise InputError(f"trace: {count} prompts, but the rows name others or leave some out")
    tokens = _whole("prompt_tokens", trace.prompt_tokens, count, 1, "prompt")
    cap = trace.info.max_prompt_tokens
    if tokens.max() > cap:
        at = int(np.argmax(tokens))
        raise InputError(f"trace: prompt {str(ids[at])!r} has {tokens[at]} tokens; max_prompt_tokens is {cap}")
    reference = None
    if trace.reference_tokens is not None and np.any(trace.reference_tokens):
        reference = _whole("reference_tokens", trace.reference_tokens, count, 0, "prompt")
    token_ids = None
    if trace.prompt_token_ids is not None:
        token_ids = tuple(ints(part) for part in trace.prompt_token_ids)
        if [len(part) for part in token_ids] != tokens.tolist():
            raise InputError("trace: prompt_tokens must be the lengths of the lists in prompt_token_ids")
        if min(part.min() for part in token_ids) < 0:
            raise InputError("trace: prompt_token_ids has a negative token id")
    return {
        "prompt_ids": ids,
        "prompt_tokens": tokens,
        "reference_tokens": reference,
        "prompt_token_ids": token_ids,
    }


def _order(
    trace: "Trace", columns: dict[str, IntArray], ids: npt.NDArray[np.str_]
) -> tuple[IntArray | None, IntArray | None]:
    """Rows in canonical order and prompts as they first appear in it; None where they already stand so.

    Raises InputError for a response given twice and for a prompt without all n responses in a step.
    """
    n = trace.info.responses_per_prompt
    epochs, epoch_rank = np.unique(columns["epoch"], return_inverse=True)
    steps, step_rank = np.unique(columns["step"], return_inverse=True)
    code = (epoch_rank * len(steps) + step_rank) * len(ids) + columns["prompt"]
    assert len(epochs) * len(steps) * len(ids) < 1 << 62, "ranks overflow"
    _, first, group = np.unique(code, return_index=True, return_inverse=True)
    order = np.lexsort((columns["sample"], first[group], columns["step"], columns["epoch"]))
    code, sample = code[order], columns["sample"][order]

    def name(row: int) -> str:
        epoch, step, prompt = (columns[key][order[row]] for key in ("epoch", "step", "prompt"))
        return f"epoch {epoch}, step {step}, prompt {str(ids[prompt])!r}"

    twice = (code[1:] == code[:-1]) & (sample[1:] == sample[:-1])
    if twice.any():
        row = int(np.argmax(twice))
        raise InputError(f"trace: {name(row)}, sample {sample[row]} stands twice")
    starts = np.flatnonzero(np.diff(code, prepend=code[0] - 1))
    counts = np.diff(starts, append=len(code))
    wrong = (counts != n) | (np.maximum.reduceat(sample, starts) != n - 1)
    if wrong.any():
        row = int(starts[np.argmax(wrong)])
        held = sample[row : row + int(counts[np.argmax(wrong)])][:8].tolist()
        raise InputError(f"trace: {name(row)} is incomplete: it has samples {held}, not 0 to {n - 1}")

    prompt = columns["prompt"][order][::n]
    _, appears = np.unique(prompt, return_index=True)
    prompt_order = np.argsort(appears)
    in_order = np.array_equal(order, np.arange(len(order)))
    return (
        None if in_order else order,
        None if np.array_equal(prompt_order, np.arange(len(ids))) else prompt_order,
    )
