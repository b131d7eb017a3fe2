"""Run state: length history, checkpoints, traces, any bytes under a key, kept in a folder or in Redis (RLHFless §5).

`open_store` takes a folder, which needs nothing else and is right for one machine, or a Redis url, which every machine
of a cluster can reach. Both keep the same contract: a reader sees a whole old value or a whole new one, never a part.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from backends.redis_server import DEFAULT_TIMEOUT_S, check_url, connect, describe
from rlhfless.errors import InputError
from rlhfless.units import MIB

MAX_KEY = 200
"""Characters in a key: with its folder's name a file name stays below the 255 bytes that file systems allow."""
MAX_REDIS_BYTES = int(512 * MIB)
"""Largest value that Redis stores (its limit for a string)."""
DEFAULT_PREFIX = "rlhfless"
"""What keys in Redis start with, so that runs can share a server with others."""
_KEY = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._/-]{{0,{MAX_KEY - 1}}}")
_SLASH = "+"
"""Stands for / in file names, since no key holds it: a key may be the beginning of another ("run", "run/3")."""


class Store(Protocol):
    """Bytes under keys such as "run-7/lengths.json": letters, digits, `.`, `_`, `-` and `/`, at most MAX_KEY.

    Every method raises InputError for another key, and where the folder or the server cannot be used.
    """

    def put(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`, replacing what was there in one step."""
        ...

    def get(self, key: str) -> bytes | None:
        """The value under `key`; None where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Forget `key`; nothing happens where it is not there."""
        ...

    def keys(self, prefix: str = "") -> list[str]:
        """Every key that starts with `prefix`, sorted."""
        ...

    def close(self) -> None:
        """Let go of connections. What was put stays."""
        ...


def open_store(where: str | Path, *, prefix: str = DEFAULT_PREFIX) -> Store:
    """The store at `where`: a Redis url (keys start with `prefix` there) or a folder, made if missing."""
    if isinstance(where, str) and "://" in where:
        return RedisStore(url=check_url(where), prefix=prefix)
    return FileStore(Path(where))


@dataclass(frozen=True, slots=True)
class FileStore:
    """A folder with one file a key."""

    folder: Path
    """Made if missing."""

    def __post_init__(self) -> None:
        with _as_input_error(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        """See `Store`. On disk when it returns: a checkpoint must outlive a machine that loses power."""
        path = self._path(key)
        with _as_input_error(path):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".")  # no key starts with a dot
            try:
                with open(handle, "wb") as file:
                    file.write(value)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        path = self._path(key)
        with _as_input_error(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def delete(self, key: str) -> None:
        """See `Store`."""
        path = self._path(key)
        with _as_input_error(path):
            path.unlink(missing_ok=True)

    def keys(self, prefix: str = "") -> list[str]:
        """See `Store`."""
        with _as_input_error(self.folder):
            found = [entry.name.replace(_SLASH, "/") for entry in os.scandir(self.folder) if entry.is_file()]
        return sorted(key for key in found if key.startswith(prefix) and _KEY.fullmatch(key))

    def close(self) -> None:
        """See `Store`."""

    def _path(self, key: str) -> Path:
        return self.folder / _checked(key).replace("/", _SLASH)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisStore:
    """A Redis server, of which the keys that start with `prefix` are used. They have no time to live."""

    url: str = field(repr=False)
    """Address with the password, see `backends.redis_server.check_url`."""
    prefix: str = DEFAULT_PREFIX
    """Set before every key, with a colon between."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds to wait for an answer."""
    _client: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _checked(self.prefix)
        object.__setattr__(self, "_client", connect(self.url, timeout_s=self.timeout_s))
        self._ask("ping")

    def put(self, key: str, value: bytes) -> None:
        """See `Store`. Raises InputError for more than MAX_REDIS_BYTES or a full server."""
        if len(value) > MAX_REDIS_BYTES:
            raise InputError(
                f"{key}: {len(value)} bytes are more than Redis takes in a value ({MAX_REDIS_BYTES}): use a folder"
            )
        self._ask("set", self._name(key), bytes(value))

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        value = self._ask("get", self._name(key))
        return None if value is None else bytes(value)

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._ask("delete", self._name(key))

    def keys(self, prefix: str = "") -> list[str]:
        """See `Store`. Walks all keys of the server in small steps, so others are not held up."""
        names = self._ask("scan_iter", match=f"{self.prefix}:*", count=1000, collect=True)
        found = {name[len(self.prefix) + 1 :].decode(errors="replace") for name in names}  # a scan may name one twice
        return sorted(key for key in found if key.startswith(prefix) and _KEY.fullmatch(key))

    def close(self) -> None:
        """See `Store`."""
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self.prefix}:{_checked(key)}"

    def _ask(self, command: str, *arguments: object, collect: bool = False, **options: object) -> Any:
        from redis.exceptions import RedisError

        try:
            answer = getattr(self._client, command)(*arguments, **options)
            return list(answer) if collect else answer
        except (RedisError, OSError) as error:
            raise InputError(describe(error, self.url)) from None


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InputError(
            f"state key {key[:MAX_KEY]!r}: must be 1 to {MAX_KEY} letters, digits, '.', '_', '-' or '/', "
            "the first a letter, digit or '_'"
        )
    return key


@contextlib.contextmanager
def _as_input_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"state at {path}: {error.strerror or error}") from None
