"""Bytes on disk: a metadata text and an Arrow table, as Parquet or JSON Lines, both ways.

Parquet keeps the metadata under one key of the file's schema. JSON Lines keeps it as the first line, then one object a
row. Neither holds a clock reading, so the same table gives the same bytes (for one version of pyarrow).
"""

import codecs
import json
import os
import tempfile
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from rlhfless.errors import InputError, SchemaError

METADATA_KEY = b"rlhfless.trace"
SUFFIXES = (".parquet", ".jsonl")
_ROWS_A_CHUNK = 1 << 16
"""Rows turned into JSON text at a time (chosen: bounds memory at some tens of MB)."""
_JSON_BLOCK_BYTES = 1 << 24
"""Bytes parsed at a time (chosen); one row with its prompt's token ids must fit."""


def _suffix(path: Path) -> str:
    if not path.name:
        raise InputError(f"the name of the trace file is empty; traces end in {' or '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; traces end in {' or '.join(SUFFIXES)}")
    return path.suffix


def read(path: Path, schema: pa.Schema) -> tuple[bytes, pa.Table]:
    """Metadata text and rows of `path`. JSON rows are parsed as `schema`; a key that a row lacks becomes null.

    Raises InputError when the file is missing or has another suffix, SchemaError when it is not what its suffix says.
    """
    suffix = _suffix(path)
    if not path.is_file():
        raise InputError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    try:
        return _read_parquet(path) if suffix == ".parquet" else _read_jsonl(path, schema)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise SchemaError(f"{path}: not Parquet ({' '.join(str(error).split())})") from None


def _read_parquet(path: Path) -> tuple[bytes, pa.Table]:
    with pq.ParquetFile(path) as file:
        metadata = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
        if metadata is None:
            raise SchemaError(f"{path}: Parquet, but not a trace: its schema has no {METADATA_KEY.decode()} metadata")
        return metadata, file.read()


def _read_jsonl(path: Path, schema: pa.Schema) -> tuple[bytes, pa.Table]:
    content = path.read_bytes()
    _require_utf8(path, content)
    metadata, _, rows = content.partition(b"\n")
    _require_object(path, metadata)
    if not rows.strip():
        raise SchemaError(f"{path}: no responses after the metadata of line 1")
    try:
        table = pj.read_json(
            pa.BufferReader(rows),
            read_options=pj.ReadOptions(block_size=_JSON_BLOCK_BYTES),
            parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer"),
        )
    except pa.ArrowInvalid as error:
        raise SchemaError(f"{path}: {_culprit(rows, schema) or ' '.join(str(error).split())}") from None
    return metadata, table


def _require_utf8(path: Path, content: bytes) -> None:
    if content.startswith(codecs.BOM_UTF8):
        raise SchemaError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SchemaError(f"{path}: line {line}: not UTF-8 ({error.reason})") from None


def _require_object(path: Path, metadata: bytes) -> None:
    """Raise SchemaError unless line 1 can be the metadata; what it holds is for the format to check."""
    try:
        head = msgspec.json.decode(metadata)
    except (msgspec.DecodeError, RecursionError) as error:
        fault = f"not JSON ({error})" if metadata.strip() else "empty"
    else:
        if isinstance(head, dict) and "schema" in head:
            return
        fault = "a JSON object without a schema" if isinstance(head, dict) else "not a JSON object"
    raise SchemaError(f'{path}: line 1 is {fault}; it must be the trace\'s metadata, as in {{"schema":1,"model":...}}')


def _culprit(rows: bytes, schema: pa.Schema) -> str | None:
    """The first line that is no row of `schema`. Arrow says that there is one, but not which."""
    for number, line in enumerate(rows.split(b"\n"), 2):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"line {number}: not JSON ({error})"
        if not isinstance(row, dict):
            return f"line {number}: not a JSON object"
        for field in schema:
            if not _fits(row.get(field.name), field.type):
                return f"line {number}: {field.name} is {row[field.name]!r}, not {field.type}"
        if json.loads(line, object_pairs_hook=len) > len(row):
            return f"line {number}: a key stands twice"
    return None


def _fits(value: object, kind: pa.DataType) -> bool:
    if value is None:
        return True
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_fits(part, kind.value_type) for part in value)
    if kind == pa.string():
        return isinstance(value, str)
    if kind == pa.int64():
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    return type(value) in (int, float)


def write(path: Path, metadata: str, table: pa.Table) -> None:
    """Write the whole file, or leave what stood at `path` as it was; a missing folder is made, with its parents.

    Raises InputError when that is not possible.
    """
    suffix = _suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path}: a file is in the way of its folder {str(path.parent)!r}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot make its folder ({error.strerror})") from None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        try:
            if suffix == ".parquet":
                pq.write_table(table.replace_schema_metadata({METADATA_KEY: metadata}), name, compression="zstd")
            else:
                _write_jsonl(Path(name), metadata, table)
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def _umask() -> int:
    """The process's file mask; a temporary file is private, a trace is as readable as any other output."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_jsonl(path: Path, metadata: str, table: pa.Table) -> None:
    names = table.column_names
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        file.write(metadata.encode() + b"\n")
        for chunk in table.to_batches(max_chunksize=_ROWS_A_CHUNK):
            columns = [column.to_pylist() for column in chunk.columns]
            file.write(encoder.encode_lines([_present(names, row) for row in zip(*columns, strict=True)]))


def _present(names: list[str], row: tuple[object, ...]) -> dict[str, object]:
    """The known values of one row; a key that is absent reads as null."""
    return {name: value for name, value in zip(names, row, strict=True) if value is not None}
