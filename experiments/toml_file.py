"""A TOML file as frozen, typed values: a section is a dataclass, a key a field; what is wrong is named in one line."""

import re
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from rlhfless.errors import InputError

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T:
    """The value of the dataclass `kind` that a file holds.

    Raises InputError, naming file and key: unreadable, no TOML, a key unknown, missing or of the wrong type, or a
    value that the dataclass refuses.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML ({error})") from None
    _check_keys(content, kind, path, "")
    try:
        return msgspec.convert(content, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {_plain(error)}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _check_keys(content: dict[str, Any], kind: type[Any], path: Path, above: str) -> None:
    """Raise InputError for a key that is unknown or missing; msgspec passes over the unknown ones of dataclasses."""
    known = {each.name: each for each in fields(kind)}
    for key in content:
        if key not in known:
            raise InputError(f"{path}: unknown key {above}{key}; known here are {', '.join(known)}")
    types = get_type_hints(kind)
    for name, each in known.items():
        if name not in content:
            if each.default is MISSING and each.default_factory is MISSING:
                raise InputError(f"{path}: {above}{name} is missing")
            continue
        values = [value for part in _parts(types[name]) if get_origin(part) is Literal for value in get_args(part)]
        if values and isinstance(content[name], str) and content[name] not in values:
            raise InputError(f"{path}: {above}{name}: {content[name]!r} is unknown; known are {', '.join(values)}")
        inner = next((part for part in _parts(types[name]) if is_dataclass(part)), None)
        if isinstance(inner, type) and isinstance(content[name], dict):
            _check_keys(content[name], inner, path, f"{above}{name}.")


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _plain(error: msgspec.ValidationError) -> str:
    """msgspec's `Expected X, got Y - at `$.a.b`` as `a.b: expected X, got Y`."""
    what, _, where = str(error).partition(" - at ")
    key = re.sub(r"^\$\.?", "", where.strip("`"))
    return f"{key}: {what[:1].lower()}{what[1:]}" if key else what
