"""How commands write: files whole or not at all, tables on stdout, progress on stderr; equal values, equal bytes."""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlhfless.errors import InputError

Cell = str | int | float | None
"""What a row of a table or a CSV file holds; None is an empty cell."""
DIGITS = 4
"""Significant digits of numbers in tables (chosen: more is noise to a reader; files hold every digit)."""
PLAIN_WIDTH = 10_000
"""Columns of a table that does not go to a terminal: wide enough never to wrap or cut."""


def out_folder(path: Path) -> Path:
    """The folder, made with its parents where it is missing. Raises InputError where it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{path}: a file is in the way; an output folder is needed") from None
    except OSError as error:
        raise InputError(f"{path}: cannot make the output folder ({error.strerror})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"{path}: no permission to write; choose another output folder")
    return path


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write `path` through: it appears under its name when the block ends well, and not at all otherwise.

    Raises InputError where its folder is missing or not writable.
    """
    try:
        file = NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False)  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{path}: cannot write ({error.strerror})") from None
    try:
        try:
            with file:
                yield file
        except OSError as error:  # a full disk, for instance
            raise InputError(f"{path}: cannot write ({error.strerror})") from None
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(file.name, 0o666 & ~mask)  # temporary files are private, results are not
        try:
            os.replace(file.name, path)
        except OSError as error:
            raise InputError(f"{path}: cannot write ({error.strerror})") from None
    except BaseException:
        os.unlink(file.name)
        raise


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, text as UTF-8. Raises InputError where it cannot be written."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def json_text(value: object) -> str:
    """Canonical JSON of dataclasses, dictionaries, sequences, numpy columns: sorted keys, indented, a last newline.

    Raises ValueError for a number that JSON does not have (NaN, infinity).
    """
    plain = msgspec.to_builtins(value, enc_hook=_to_builtin)
    return json.dumps(plain, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _to_builtin(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"no JSON form for {type(value).__name__}")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """CSV with a header; floats in the fewest digits that read back the same."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        assert len(row) == len(columns), f"{len(row)} cells in a row, {len(columns)} columns"
        writer.writerow([float(cell) if isinstance(cell, np.floating) else cell for cell in row])
    return text.getvalue()


def format_cell(cell: Cell) -> str:
    """A cell as tables show it: floats to `DIGITS` significant digits and never with an exponent below 1e15."""
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    if abs(cell) >= 10 ** (DIGITS - 1):
        return f"{cell:.0f}" if abs(cell) < 1e15 else f"{cell:.{DIGITS - 1}e}"
    return f"{cell:.{DIGITS}g}"


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """A table on stdout, numbers to the right. Away from a terminal: a plain ASCII table, never wrapped or cut."""
    rows = [list(row) for row in rows]
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    if not terminal:  # whatever COLUMNS or FORCE_COLOR say: the same bytes in every environment
        console = Console(
            file=sys.stdout, markup=False, emoji=False, highlight=False,
            width=PLAIN_WIDTH, color_system=None, force_terminal=False,
        )  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN)
    for number, column in enumerate(columns):
        numeric = any(isinstance(row[number], Real) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=not terminal)
    for row in rows:
        table.add_row(*(format_cell(cell) for cell in row))
    console.print(title)
    console.print(table)


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Progress of `total` pieces of work on stderr; the block calls what it is given with the pieces just done.

    A bar on a terminal; elsewhere one line at the start and one at the end.
    """
    if sys.stderr.isatty():
        style = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*style, console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda pieces: bar.advance(task, pieces)
        return
    done = 0

    def advance(pieces: int) -> None:
        nonlocal done
        done += pieces

    print(f"{label}: {total} to do", file=sys.stderr)
    try:
        yield advance
    finally:
        print(f"{label}: {done} of {total} done", file=sys.stderr)
