"""Redis as the backends use it: which addresses are allowed, one way to connect, and a private server.

Redis carries KV blocks and run state. Whoever can write to it can change what a model says, so a server that other
machines can reach must ask for a password, and nothing that comes from Redis is ever unpickled.
"""

import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from backends.environment import require
from rlhfless.errors import InputError
from rlhfless.units import GIB

SCHEMES = ("redis", "rediss", "unix")
"""Addresses that open a Redis: TCP, TCP with TLS, and a socket file."""
BINARY = "redis-server"
"""Name of the server's program on PATH."""
DEFAULT_TIMEOUT_S = 5.0
"""Seconds that run state waits for an answer (chosen: far above a healthy server's milliseconds)."""
START_TIMEOUT_S = 10.0
"""Seconds that a private server may take to answer (chosen; it takes about 0.1)."""
START_TRIES = 3
"""Ports tried: another process may take a free port between our look and the server's bind."""
STOP_TIMEOUT_S = 3.0
"""Seconds from the polite signal to the one that cannot be refused (chosen)."""
MIN_MEMORY_BYTES = 1 << 20
"""Smallest limit of a private server: below, Redis itself does not fit."""
EVICTION = "volatile-lru"
"""What a full server drops: the least recently used key that has a time to live. KV blocks have one, run state has
none, so KV never pushes out a checkpoint."""


def check_url(url: str) -> str:
    """`url`, if it may be used. Raises InputError for another scheme, a bad port, or an open server on a network."""
    try:
        parts = urlsplit(url)
        host, password, _ = parts.hostname, parts.password, parts.port
    except ValueError as error:
        raise InputError(f"Redis url {hide_password(url)!r}: {error}") from None
    if parts.scheme not in SCHEMES:
        raise InputError(f"Redis url {hide_password(url)!r}: must start with {', '.join(f'{s}://' for s in SCHEMES)}")
    if parts.scheme == "unix":
        if not parts.path:
            raise InputError(f"Redis url {hide_password(url)!r}: needs the path of a socket, unix:///run/redis.sock")
        return url
    if not host:
        raise InputError(f"Redis url {hide_password(url)!r}: needs a host, redis://:password@host:6379")
    if not (password or _is_loopback(unquote(host))):
        raise InputError(
            f"Redis url {hide_password(url)!r}: {host} is not this machine, and a Redis that others can reach needs "
            f"a password: redis://:password@{host}:6379"
        )
    return url


def hide_password(url: str) -> str:
    """`url` for messages: without its user and password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else url


def connect(url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """A `redis.Redis` for `url` that answers in bytes, gives up after `timeout_s` and never retries by itself.

    Nothing is sent yet. Raises InputError for a url that `check_url` refuses or where the package is missing.
    """
    check_url(url)
    require("redis")
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
    )


def describe(error: Exception, url: str) -> str:
    """One line for a user: what went wrong with the Redis at `url`. Never holds the password."""
    from redis import exceptions

    where = f"Redis at {hide_password(url)}"
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return f"{where}: the password is wrong or missing, give it in the url: redis://:password@host:port"
    if isinstance(error, exceptions.TimeoutError):
        return f"{where}: no answer in time, is the server up and the address right?"
    if isinstance(error, exceptions.ConnectionError | OSError):
        return f"{where}: cannot be reached, is the server up and the address right?"
    return f"{where}: {str(error) or type(error).__name__}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: whom it stands for can change


@dataclass(slots=True, kw_only=True)
class RedisServer:
    """A private redis-server for tests and runs on one machine: loopback, random password, nothing on disk.

    A context manager; `url` is there inside. The server ends with the block, and also when this process is killed: a
    small shell holds a pipe from it and kills the server when the pipe closes. Raises InputError where the program is
    missing or does not start.
    """

    memory_bytes: int = int(GIB)
    """Size limit; beyond it keys with a time to live go, least recently used first, and other writes are refused."""
    url: str = field(default="", init=False, repr=False)
    """redis://:password@127.0.0.1:port, empty outside the block."""
    pid: int = field(default=0, init=False)
    """Process id of the server, 0 outside the block."""
    _folder: Path | None = field(default=None, init=False, repr=False)
    _server: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)
    _watch: "subprocess.Popen[bytes] | None" = field(default=None, init=False, repr=False)
    _owner: int = field(default=0, init=False, repr=False)

    def __enter__(self) -> "RedisServer":
        if self.memory_bytes < MIN_MEMORY_BYTES:
            raise InputError(f"redis-server: memory_bytes {self.memory_bytes} must be at least {MIN_MEMORY_BYTES}")
        require("redis")
        binary = shutil.which(BINARY)
        if binary is None:
            raise InputError(f"{BINARY} is not on PATH: install Redis, or give the url of a server that runs")
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="rlhfless-redis-"))
        try:
            for _ in range(START_TRIES):
                if self._start(binary):
                    return self
                self._end_processes()
        except BaseException:
            self.stop()
            raise
        log = self._log()
        self.stop()
        raise InputError(f"{BINARY} did not start: {log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server, whatever state it is in, and remove its folder. May be called twice."""
        if self._owner != os.getpid():
            return  # a forked child has a copy of this object, but not the server
        self._end_processes()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, binary: str) -> bool:
        port, password = _free_port(), secrets.token_urlsafe(24)
        # settings go through standard input: a password on the command line could be read by every user in `ps`
        settings = (
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nprotected-mode yes\nsave ""\nappendonly no\n'
            f"maxmemory {self.memory_bytes}\nmaxmemory-policy {EVICTION}\ndaemonize no\n"
        )
        assert self._folder is not None
        with (self._folder / "log").open("wb") as log:
            self._server = subprocess.Popen(
                [binary, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=self._folder, process_group=0
            )
        pid = self._server.pid
        watch = ["/bin/sh", "-c", 'read _; kill -9 "$1"; rm -rf -- "$2"', "watch", str(pid), str(self._folder)]
        self._watch = subprocess.Popen(watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0)
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(settings.encode())
            self._server.stdin.close()
        except BrokenPipeError:
            return False
        url = f"redis://:{password}@127.0.0.1:{port}"
        if not self._answers(url):
            return False
        self.url, self.pid = url, pid
        return True

    def _answers(self, url: str) -> bool:
        from redis.exceptions import RedisError

        assert self._server is not None
        with connect(url, timeout_s=1.0) as client:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while time.monotonic() < deadline_s and self._server.poll() is None:
                try:
                    if client.ping():
                        return True
                except (RedisError, OSError):
                    time.sleep(0.02)
        return False

    def _end_processes(self) -> None:
        self.url, self.pid = "", 0
        # the watcher first: once the server is reaped, its number may belong to somebody else
        for process, kill_at_once in ((self._watch, True), (self._server, False)):
            if process is None:
                continue
            if kill_at_once:
                process.kill()
            else:
                process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # stopped by a signal, or busy
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._watch = self._server = None

    def _log(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "log").read_text(errors="replace").split("\n")
        return " / ".join(line for line in lines[-6:] if line.strip()) or "no output"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
