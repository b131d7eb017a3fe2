"""Checkpoints of a run: a folder each, whole or not there, and what it must have been made with.

A checkpoint is written beside its place and renamed into it once everything is on disk, so a process that is killed at
any moment leaves the last one as it was. Random numbers need no state: every draw comes from a stream named by the
run's seed and the step.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless.errors import InputError, SchemaError

SCHEMA = 2
"""Version of the layout; 2 has what the planner has learned."""
ABOUT, LEARNER = "checkpoint.json", "learner.pt"
"""Files of every checkpoint: what it is; weights and optimizers."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    """Where it is."""
    steps: int
    """Steps that had been learned from."""

    @property
    def learner(self) -> Path:
        """Its weights and optimizers."""
        return self.folder / LEARNER

    def text(self, name: str) -> str:
        """Another of its files. Raises SchemaError where it is missing."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"{self.folder}: cannot read {name} ({error})") from None


def write(
    root: Path, steps: int, about: Mapping[str, Any], save: Callable[[Path], None], texts: Mapping[str, str], keep: int
) -> Checkpoint:
    """Make the checkpoint of a run after `steps` steps; of older ones, the `keep` - 1 newest stay.

    `about`: what a run must share to go on from it, JSON values; `save` writes weights and optimizers to the path that
    it is given; `texts`: further files by name. Raises InputError where the folder cannot be written.
    """
    where = root / f"step-{steps:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=root, prefix="."))
        try:
            save(part / LEARNER)
            for name, text in texts.items():
                (part / name).write_text(text, encoding="utf-8")
            told = {"schema": SCHEMA, "steps": steps, "about": dict(about)}
            (part / ABOUT).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            for path in [*part.iterdir(), part]:
                _sync(path)
            if where.exists():  # of a run that went on from an older one
                shutil.rmtree(where)
            part.chmod(0o755)
            part.rename(where)
            _sync(root)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for _, old in _found(root)[: -max(keep, 1)]:
            doomed = old.rename(root / f".{old.name}")
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError as error:
        raise InputError(f"checkpoint {where}: cannot write ({error.strerror or error})") from error
    return Checkpoint(folder=where, steps=steps)


def newest(root: Path) -> Path | None:
    """Folder of the newest checkpoint of a run; None where there is none."""
    found = _found(root)
    return found[-1][1] if found else None


def read(folder: Path, about: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint that a run like `about` can go on from.

    Raises SchemaError where it is none of this version, InputError for one that was made with something else: the
    message names the first difference.
    """
    try:
        told = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        schema, steps, then = told["schema"], int(told["steps"]), dict(told["about"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{folder}: no checkpoint ({error})") from None
    if schema != SCHEMA:
        raise SchemaError(f"{folder}: a checkpoint of schema {schema}, this program reads {SCHEMA}")
    now = json.loads(json.dumps(dict(about)))
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            raise InputError(
                f"{folder}: a checkpoint of another run: {name} was {then.get(name)!r}, here it is {now.get(name)!r}"
            )
    return Checkpoint(folder=folder, steps=steps)


def digest(model: Path) -> str:
    """SHA-256 over a model's config and weights; some 1 s a GB."""
    total = hashlib.sha256()
    for path in sorted([*model.glob("*.safetensors"), model / "config.json"]):
        with path.open("rb") as file:
            total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _found(root: Path) -> list[tuple[int, Path]]:
    matches = [(_NAME.fullmatch(path.name), path) for path in root.glob("step-*")]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
