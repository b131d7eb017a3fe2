"""Run state in a folder and in Redis, one contract for both, and the private server that tests and local runs use."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends import redis_server
from backends.redis_server import RedisServer, check_url, connect, hide_password
from backends.state import MAX_KEY, FileStore, RedisStore, Store, open_store
from rlhfless.errors import InputError

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("redis") is None, reason="the package redis is not installed"
)
needs_server = pytest.mark.skipif(
    shutil.which("redis-server") is None or importlib.util.find_spec("redis") is None,
    reason="needs redis-server and the package redis",
)
WAIT_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(memory_bytes=64 << 20) as running:
        yield running


@pytest.fixture(params=["folder", pytest.param("redis", marks=needs_server)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "folder":
        where: str | Path = tmp_path / "new" / "state"
    else:
        where = request.getfixturevalue("server").url
        with connect(str(where)) as client:
            client.flushall()
    opened = open_store(where)
    yield opened
    opened.close()


# ---- the contract


def test_what_is_put_is_got(store: Store) -> None:
    assert store.get("a") is None
    store.put("a", b"\x00\xff one")
    store.put("empty", b"")
    assert store.get("a") == b"\x00\xff one"
    assert store.get("empty") == b""
    store.put("a", b"two")
    assert store.get("a") == b"two"


def test_delete_forgets_and_may_find_nothing(store: Store) -> None:
    store.put("a", b"1")
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None
    assert store.keys() == []


def test_keys_by_prefix_sorted_and_one_may_begin_another(store: Store) -> None:
    for key in ("run/2", "run", "run/10", "other", "run.2"):
        store.put(key, key.encode())
    assert store.keys() == ["other", "run", "run.2", "run/10", "run/2"]
    assert store.keys("run/") == ["run/10", "run/2"]
    assert store.keys("nothing") == []
    assert store.get("run") == b"run"


@pytest.mark.parametrize("key", ["", ".hidden", "../up", "/abs", "a b", "a\n", "a+b", "a*", "ä", "k" * (MAX_KEY + 1)])
def test_unsafe_keys_are_refused(store: Store, key: str) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put(key, b""), lambda: store.get(key), lambda: store.delete(key)
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InputError, match="state key"):
            call()
    assert store.keys() == []


def test_the_longest_key_works_and_dots_stay_inside(store: Store, tmp_path: Path) -> None:
    for key in ("k" + "/" * (MAX_KEY - 1), "a/../../b"):
        store.put(key, b"v")
        assert store.get(key) == b"v"
    assert not (tmp_path / "b").exists()


def test_a_reader_sees_whole_values_only(store: Store) -> None:
    values = [bytes([number]) * 200_000 for number in range(8)]
    store.put("a", values[0])
    seen: list[bytes | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(store.get("a"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for value in values * 5:
            store.put("a", value)
    finally:
        done.set()
        reader.join()
    assert seen
    assert set(seen) <= set(values)


def test_values_outlive_the_store_object(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store.put("a", b"1")
    store.close()
    again = store if isinstance(store, FileStore) else open_store(request.getfixturevalue("server").url)
    try:
        assert again.get("a") == b"1"
    finally:
        again.close()


# ---- the folder


def test_a_write_that_fails_leaves_the_old_value_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("a", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        store.put("a", b"new")
    assert store.get("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match="state at"):
        open_store(tmp_path / "file" / "below")


def test_foreign_files_are_not_keys(tmp_path: Path) -> None:
    (tmp_path / ".tmp").write_bytes(b"")
    (tmp_path / "with space").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert FileStore(tmp_path).keys() == []


# ---- addresses


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1", "must start with"),
        ("redis://", "needs a host"),
        ("redis://127.0.0.1:99999", "ort"),
        ("redis://127.0.0.1:port", "ort"),
        ("unix://", "path of a socket"),
        ("redis://10.0.0.7:6379", "needs a password"),
        ("redis://user@cache.example:6379/0", "needs a password"),
        ("rediss://cache.example:6379", "needs a password"),
        ("redis://127.0.0.1.example:6379", "needs a password"),
        ("redis://0.0.0.0:6379", "needs a password"),
    ],
)
def test_addresses_that_may_not_be_used(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_url(url)
    with pytest.raises(InputError, match=said):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379", "redis://localhost", "redis://[::1]:6379/2", "redis://:pw@10.0.0.7:6379",
        "rediss://user:pw@cache.example:6379", "unix:///run/redis.sock",
    ],
)  # fmt: skip
def test_addresses_that_may_be_used(url: str) -> None:
    assert check_url(url) == url


def test_messages_never_hold_the_password() -> None:
    assert hide_password("redis://user:secret@host:1/0") == "redis://***@host:1/0"
    for url in ("http://:secret@10.0.0.7", "redis://:secret@127.0.0.1:99999", "redis://:se@cret@127.0.0.1:x"):
        with pytest.raises(InputError) as caught:
            check_url(url)
        assert "cret" not in str(caught.value)


# ---- Redis


@needs_server
def test_stores_with_other_prefixes_do_not_meet(server: RedisServer) -> None:
    one, two = (open_store(server.url, prefix=prefix) for prefix in ("one", "two"))
    try:
        one.put("a", b"1")
        assert two.get("a") is None
        assert two.keys() == []
        with connect(server.url) as client:
            assert client.ttl("one:a") == -1, "run state does not run out"
    finally:
        one.close()
        two.close()


@needs_server
def test_wrong_password_and_none_are_one_clear_line(server: RedisServer) -> None:
    port = server.url.rpartition(":")[2]
    for url in (f"redis://:wrong@127.0.0.1:{port}", f"redis://127.0.0.1:{port}"):
        with pytest.raises(InputError, match="password is wrong or missing") as caught:
            open_store(url)
        assert "\n" not in str(caught.value)
        assert "wrong@" not in str(caught.value)


@needs_server
def test_a_server_that_goes_is_one_clear_line() -> None:
    with RedisServer() as running:
        store = open_store(running.url)
        password = running.url.partition(":")[2].partition("@")[0].strip("/:")
        assert len(password) >= 32
        assert password not in f"{store!r} {running!r}"
        store.put("a", b"1")
    with pytest.raises(InputError, match="cannot be reached") as caught:
        store.put("a", b"2")
    assert password not in str(caught.value)
    store.close()
    with pytest.raises(InputError, match="cannot be reached"):
        open_store(f"redis://127.0.0.1:{_unused_port()}")


@needs_server
def test_a_server_that_hangs_is_given_up(server: RedisServer) -> None:
    store = RedisStore(url=server.url, timeout_s=0.2)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(InputError, match="no answer in time"):
            store.get("a")
    finally:
        os.kill(server.pid, signal.SIGCONT)
        store.close()


@needs_server
def test_a_full_server_refuses_run_state() -> None:
    with RedisServer(memory_bytes=3 << 20) as small:
        store = open_store(small.url)
        try:
            with pytest.raises(InputError, match="maxmemory"):
                _put_many(store)
            assert store.get("k0") == bytes(100_000)
        finally:
            store.close()


# ---- the private server


@needs_server
def test_the_private_server_is_private() -> None:
    from redis.exceptions import AuthenticationError

    with RedisServer(memory_bytes=8 << 20) as running:
        pid = running.pid
        password = running.url.partition("://:")[2].partition("@")[0]
        assert password.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        with connect(running.url) as client:
            said = client.config_get("*")
            assert said["bind"] == "127.0.0.1"
            assert (said["save"], said["appendonly"]) == ("", "no")
            assert (said["maxmemory"], said["maxmemory-policy"]) == (str(8 << 20), "volatile-lru")
            folder = Path(said["dir"])
        stranger = connect(f"redis://127.0.0.1:{running.url.rpartition(':')[2]}")
        with stranger, pytest.raises(AuthenticationError):
            stranger.ping()
    assert not _runs(pid)
    assert not folder.exists()
    assert (running.url, running.pid) == ("", 0)


@needs_server
def test_it_ends_after_an_error_even_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "STOP_TIMEOUT_S", 0.2)
    pids: list[int] = []

    def failing() -> None:
        with RedisServer() as running:
            pids.append(running.pid)
            os.kill(running.pid, signal.SIGSTOP)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not _runs(pids[0])


@needs_server
def test_it_ends_when_its_owner_is_killed() -> None:
    code = (
        "import time\nfrom backends.redis_server import RedisServer\n"
        "with RedisServer() as server:\n"
        "    print(server.pid, server._folder, flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        number, folder = owner.stdout.readline().decode().split()
        pid = int(number)
        assert _runs(pid)
        owner.kill()
    until_s = time.monotonic() + WAIT_S
    while (_runs(pid) or Path(folder).exists()) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not _runs(pid)
    assert not Path(folder).exists()


@needs_package
def test_no_binary_is_an_input_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="redis-server is not on PATH"), RedisServer():
        pass


@needs_package
def test_a_binary_that_fails_is_an_input_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "redis-server"
    fake.write_text("#!/bin/sh\necho out of luck\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="did not start: out of luck"), RedisServer():
        pass


def test_too_little_memory_is_an_input_error() -> None:
    with pytest.raises(InputError, match="memory_bytes"), RedisServer(memory_bytes=10):
        pass


def _put_many(store: Store) -> None:
    for number in range(100):
        store.put(f"k{number}", bytes(100_000))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
