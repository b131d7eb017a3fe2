"""JSON both ways for the frozen values of this package, with their numpy columns and a schema number.

`msgspec` checks every field's type on the way in and says where it is wrong (`$.actors[0].gpus`).
"""

from dataclasses import Field, fields
from typing import Any, ClassVar, Protocol, TypeVar, get_args

import msgspec
import numpy as np

from rlhfless.errors import SchemaError


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=_Dataclass)


def _to_builtin(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"no JSON form for {type(value).__name__}")


def _from_builtin(kind: Any, value: object) -> object:
    """Columns arrive as (nested) lists; the annotation `NDArray[dtype]` names the element type."""
    dtype = get_args(get_args(kind)[1])[0]
    try:
        column = np.array(value) if dtype is np.generic else np.array(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected a (nested) list of {np.dtype(dtype).name}: {error}") from None
    if column.dtype.kind == "i" and column.size and not np.array_equal(column, np.asarray(value, dtype=np.float64)):
        raise ValueError("expected whole numbers")
    column.flags.writeable = False
    return column


def to_json(value: object) -> str:
    """Canonical JSON: fields in their declared order, no spaces; the same value gives the same bytes."""
    return msgspec.json.encode(value, enc_hook=_to_builtin).decode()


def from_json(text: str | bytes, kind: type[T], schema: int, where: str) -> T:
    """The value of type `kind` that `text` holds.

    Raises SchemaError, naming `where`, when the text is not JSON, its `schema` is not the given one, or a field is
    missing, unknown (at the top level: msgspec passes over those of nested values) or of another type.
    """
    try:
        head = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"{where}: not JSON ({error})") from None
    found = head.get("schema") if isinstance(head, dict) else None
    if found != schema:
        raise SchemaError(f"{where}: schema {found!r} is not readable here; this version reads schema {schema}")
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in head if name not in known]:
        raise SchemaError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(known)}")
    try:
        return msgspec.convert(head, type=kind, dec_hook=_from_builtin)
    except msgspec.ValidationError as error:
        raise SchemaError(f"{where}: {error}") from None
