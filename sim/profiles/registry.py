"""Finds and reads profiles, shipped ones by name and any other by its path.

Shipped profiles are `shipped/<model>_<gpu>_tp<k>.json`. `models/` holds the fields of each model's public Hugging Face
config.json that profiles depend on; `_source` in each file is the address it was taken from.
"""

import os
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from rlhfless.errors import InputError
from rlhfless.types.profile import Profile
from sim.profiles.model import ModelShape, parse_shape

_PACKAGE = "sim.profiles"
_SUFFIX = ".json"


def _stems(folder: str) -> tuple[str, ...]:
    found = (entry.name for entry in files(_PACKAGE).joinpath(folder).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def names() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    return _stems("shipped")


def load(name_or_path: str) -> Profile:
    """The shipped profile of that name, or the profile in that file.

    Raises InputError for an empty or unknown name or a missing file, SchemaError or InputError for a file with bad
    content.
    """
    if not name_or_path:
        raise InputError(f"the name of the profile is empty: known are {', '.join(names())}; or give a .json file")
    known = names()
    if name_or_path in known:
        text = files(_PACKAGE).joinpath("shipped", name_or_path + _SUFFIX).read_bytes()
        return Profile.from_json(text, f"shipped profile {name_or_path}")
    path = Path(name_or_path)
    if path.suffix == _SUFFIX or path.name != name_or_path or path.exists():
        return Profile.read(path)
    raise InputError(
        f"unknown profile {name_or_path!r}: known are {', '.join(known)}; or give the path of a .json file"
    )


def models() -> tuple[str, ...]:
    """Keys of the shipped model configs, sorted."""
    return _stems("models")


def model_shape(key: str) -> ModelShape:
    """The shipped model of that key. Raises InputError for an unknown one."""
    if key not in models():
        raise InputError(f"unknown model {key!r}: known are {', '.join(models())}")
    return parse_shape(model_config(key), key, f"model {key}")


def model_config(key: str) -> bytes:
    """Text of the shipped config of model `key`."""
    return files(_PACKAGE).joinpath("models", key + _SUFFIX).read_bytes()


def require_folder(folder: Path) -> None:
    """Raise InputError where `folder` is not a folder and cannot become one, because a file is in the way."""
    nearest = next(part for part in (folder, *folder.parents) if os.path.exists(part) or part == part.parent)
    if not nearest.is_dir():
        raise InputError(f"{nearest}: a file is in the way; an output folder is needed")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile file in one step, so that a reader finds the old one or the new one; makes a missing folder.

    Raises InputError where that is not possible.
    """
    if not path.name:
        raise InputError("the name of the profile file to write is empty")
    require_folder(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(profile.to_json() + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise InputError(f"{path}: cannot write the profile ({error.strerror})") from None
