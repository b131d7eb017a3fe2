"""Which nodes carry the hosts of a cluster: by brute force, and on Ray clusters of several nodes that start at zero."""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import nodes
from backends.cluster import RayCluster, StepError
from backends.nodes import Needs, Node, choose, find, needs_of
from rlhfless.errors import InputError
from rlhfless.types.cluster import Cluster

ray_there = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'rlhfless[cpu]'")


def node(name: str, *, cpus: float = 8.0, gpus: float = 0.0, gpu_type: str | None = None) -> Node:
    return Node(id=name, cpus=cpus, gpus=gpus, gpu_type=gpu_type)


def gpu_needs(*sizes: float) -> Needs:
    return Needs(resource="GPU", amounts=sizes, gpu_type="L40S")


# ---- choosing


def test_heads_without_gpus_and_other_types_are_not_chosen() -> None:
    there = [
        node("a-head", cpus=64),
        node("b-h100", gpus=8, gpu_type="H100"),
        node("c-small", gpus=4, gpu_type="L40S"),
        node("d", gpus=8, gpu_type="L40S"),
        node("e-untyped", gpus=8),
    ]
    assert choose(gpu_needs(8.0, 8.0), there) == ("d", "e-untyped")
    assert choose(gpu_needs(8.0, 8.0, 8.0), there) == ("d", "e-untyped", None)
    assert choose(gpu_needs(4.0), there) == ("c-small",)
    assert choose(Needs(resource="CPU", amounts=(8.0,), gpu_type=None), [node("head", cpus=0), node("w")]) == ("w",)


def test_a_lost_node_is_replaced_and_the_others_stay() -> None:
    before = ("x", "y")
    there = [node(name, gpus=8, gpu_type="L40S") for name in ("a", "y")]
    assert choose(gpu_needs(8.0, 8.0), there, before) == ("a", "y")
    assert choose(gpu_needs(8.0, 8.0), there[1:], before) == (None, "y")
    assert choose(gpu_needs(8.0, 8.0), [*there, node("x", gpus=8)], before) == before


def test_one_large_node_carries_several_hosts_but_each_has_its_own_where_it_can() -> None:
    large = node("large", gpus=16, gpu_type="L40S")
    assert choose(gpu_needs(8.0, 8.0), [large]) == ("large", "large")
    assert choose(gpu_needs(8.0, 8.0, 8.0), [large]) == ("large", "large", None)
    assert set(choose(gpu_needs(8.0, 8.0), [large, node("small", gpus=8)])) == {"large", "small"}
    tenths = Needs(resource="CPU", amounts=(0.1, 0.1, 0.1), gpu_type=None)
    assert None not in choose(tenths, [node("n", cpus=0.3)])  # 0.3 - 0.1 - 0.1 is below 0.1


@settings(max_examples=300, deadline=None)
@given(
    full=st.integers(1, 8),
    hosts=st.integers(1, 3),
    rest=st.integers(0, 7),
    rooms=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_hosts_find_nodes_whenever_there_is_a_way(full: int, hosts: int, rest: int, rooms: list[int]) -> None:
    """Against every mapping, for hosts of one size and a last one that carries the rest, as clusters have them."""
    sizes = [float(full)] * hosts + ([float(rest)] if 0 < rest < full else [])
    there = [node(f"n{index}", gpus=room) for index, room in enumerate(rooms)]

    def holds(mapping: tuple[int, ...]) -> bool:
        return all(
            sum(size for size, at in zip(sizes, mapping, strict=True) if at == index) <= room
            for index, room in enumerate(rooms)
        )

    def most_nodes() -> int:
        fitting = [set(each) for each in itertools.product(range(len(rooms)), repeat=len(sizes)) if holds(each)]
        return max(map(len, fitting), default=0)

    chosen = choose(gpu_needs(*sizes), there)
    for index, room in enumerate(rooms):
        assert sum(size for size, at in zip(sizes, chosen, strict=True) if at == f"n{index}") <= room
    assert (None in chosen) == (most_nodes() == 0)
    if None not in chosen:
        assert len(set(chosen)) == most_nodes()


def test_needs_name_gpus_as_ray_does() -> None:
    assert needs_of(Cluster.uniform("l40s", 20, 8), "cuda", 1.0).bundles() == [
        {"GPU": size, "accelerator_type:L40S": 0.001} for size in (8.0, 8.0, 4.0)
    ]
    assert needs_of(Cluster.uniform("cpu", 3, 2), "cpu", 0.5).bundles() == [{"CPU": 1.0}, {"CPU": 0.5}]
    known = pytest.importorskip(
        "ray.util.accelerators.accelerators", reason="Ray's names need Ray: pip install 'rlhfless[cpu]'"
    )
    names = {value for name, value in vars(known).items() if name.startswith("NVIDIA_")}
    for gpu in ("h100_sxm", "h200_sxm", "a100_sxm", "b200_sxm", "l40s", "l4", "a10g"):
        assert needs_of(Cluster.uniform(gpu, 1), "cuda", 1.0).gpu_type in names


def test_gpus_have_numbers_of_their_node() -> None:
    cluster = object.__new__(RayCluster)
    cluster._cluster, cluster._nodes = Cluster.uniform("l40s", 10, 4), ("x", "y", "x")
    assert [cluster.place(gpu) for gpu in range(10)] == [
        *(("x", at) for at in range(4)), *(("y", at) for at in range(4)), ("x", 4), ("x", 5)
    ]  # fmt: skip
    cluster._nodes = ("x", None, "x")
    with pytest.raises(StepError, match="host 1 of the cluster is lost"):
        cluster.place(5)


# ---- waiting


class Coming:
    """A cluster to which nodes come, and its clock."""

    def __init__(self, *arrivals: tuple[float, Node]) -> None:
        self.now_s, self.arrivals = 0.0, arrivals

    def look(self) -> list[Node]:
        return [each for at_s, each in self.arrivals if at_s <= self.now_s]

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def find(self, needs: Needs, timeout_s: float) -> tuple[str, ...]:
        return find(needs, timeout_s=timeout_s, look=self.look, sleep=self.sleep, clock=lambda: self.now_s)


def test_nodes_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    world = Coming((0.0, node("head", cpus=0)), (40.0, node("a", gpus=8, gpu_type="L40S")), (70.0, node("b", gpus=8)))
    assert world.find(gpu_needs(8.0, 8.0), 100.0) == ("a", "b")
    assert 70.0 <= world.now_s <= 71.0
    out, err = capsys.readouterr()
    assert not out
    lines = err.splitlines()
    assert lines[0] == "waiting for 2 of 2 hosts (0 of 100 s): 2 x 8 GPUs (L40S); Ray has 1 x 0 CPUs"
    assert any(line.startswith("waiting for 1 of 2 hosts (40 of 100 s)") for line in lines)
    assert len(lines) < 10


def test_what_is_missing_in_the_end_is_named() -> None:
    world = Coming((0.0, node("head", cpus=4)), (0.0, node("a", gpus=8, gpu_type="L40S")), (99.0, node("b", gpus=8)))
    with pytest.raises(InputError) as error:
        world.find(gpu_needs(8.0, 8.0, 8.0), 30.0)
    assert str(error.value) == (
        "the cluster's hosts need 3 x 8 GPUs (L40S); Ray has 1 x 4 CPUs; 1 x 8 CPUs, 8 GPUs (L40S); "
        "missing: host 1, 2 (after 30 s)"
    )
    assert world.now_s == 30.0


# ---- Ray itself


ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
"""Loopback only, and a token of the test's own."""
STORE_BYTES = 80 << 20
HEAD = "f" * 51 + "00000"
"""Ray's fake machines have ids that count up from the head's."""


def run_driver(code: str, *arguments: str, env: dict[str, str]) -> Any:
    """What a process of its own prints as JSON in its last line: Ray reads the environment when it is imported."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


FIXED = """
import json, sys
from pathlib import Path
import ray._private.utils
ray._private.utils.write_ray_address = lambda *_, **__: None  # others on this machine must not find it
import ray
from ray.cluster_utils import Cluster as RayCluster_
from backends import cluster as module
from backends.cluster import RayCluster
from rlhfless.errors import InputError
from rlhfless.types.cluster import Cluster
from tests import ray_steps

store = int(sys.argv[2])
fake = RayCluster_(initialize_head=True, head_node_args={
    "num_cpus": 4, "include_dashboard": False, "object_store_memory": store, "temp_dir": sys.argv[3]})
def add(gpus, kind):
    return fake.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=store,
                         resources={"accelerator_type:" + kind: 1}, labels={"ray.io/accelerator-type": kind})
machines = {add(gpus, kind).node_id: (gpus, kind) for gpus, kind in ((8, "H100"), (8, "L40S"), (4, "L40S"))}
ray.init(address=fake.address, log_to_driver=False, logging_level="ERROR")
config = ray_steps.config(Path(sys.argv[1]), Path(sys.argv[1]))
object.__setattr__(config, "device", "cuda")
def hosts_of(cluster):
    return [machines.get(cluster.node(host)) for host in range(len(cluster._nodes))]
found = {}
class Engine:
    def __init__(self, config): ...
    def where(self):
        import os
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
module.VllmActor = Engine
cluster = RayCluster(Cluster.uniform("l40s", 12, 8), config)
found["chosen"] = hosts_of(cluster)
engine = config.engine(prefix_caching=True, kv_connector=None)
engines = [cluster.take(gpus, engine) for gpus in ((5, 2), (9, 10))]
where = ray.get([each.actor.where.remote() for each in engines])
found["engines"] = [[machines[each], numbers] for each, numbers in where]
cluster.end_all()
lost = cluster.node(1)
fake.remove_node(next(each for each in fake.worker_nodes if each.node_id == lost))
found["lost"] = cluster.alive_hosts()
machines[add(4, "L40S").node_id] = (4, "L40S")
found["replaced"] = cluster.alive_hosts(), hosts_of(cluster), cluster.node(1) != lost
cluster.close()
try:
    RayCluster(Cluster.uniform("l40s", 16, 8), config)
except InputError as error:
    found["refused"] = str(error)
ray.shutdown()
fake.shutdown()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of a model for a config: no engine is started here."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray's sockets need a short path."""
    folder = Path(tempfile.mkdtemp(prefix="rlhfless-test-", dir="/tmp"))
    try:
        yield folder
    finally:
        for pid in users_of(folder):  # Ray's fake machines survive their cluster by a minute
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def users_of(folder: Path) -> list[int]:
    """Processes that have a folder on their command line: Ray's own name it there."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if each.name.isdigit() and str(folder).encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@ray_there
@pytest.mark.slow
def test_hosts_are_found_lost_and_replaced_on_a_cluster_of_several_nodes(model: Path, short_folder: Path) -> None:
    env = ALONE | {"RAY_AUTH_TOKEN": os.urandom(32).hex()}
    found, _ = run_driver(FIXED, str(model), str(STORE_BYTES), str(short_folder), env=env)
    assert found["chosen"] == [[8, "L40S"], [4, "L40S"]]
    assert found["engines"] == [[[8, "L40S"], "5,2"], [[4, "L40S"], "1,2"]]
    assert found["lost"] == [True, False]
    assert found["replaced"] == [[True, True], [[8, "L40S"], [4, "L40S"]], True]
    assert found["refused"].startswith("the cluster's hosts need 2 x 8 GPUs (L40S); Ray has ")
    assert "1 x 1 CPUs, 8 GPUs (H100)" in found["refused"]
    assert found["refused"].endswith("missing: host 1 (after 0 s)")


STARTED = """
import json, sys
from pathlib import Path
import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
from backends import nodes
from backends.cluster import RayCluster
from rlhfless.types.cluster import Cluster
from tests import ray_steps

config = ray_steps.config(Path(sys.argv[1]), Path(sys.argv[1]), ray_address=sys.argv[2], node_timeout_s=120.0)
object.__setattr__(config, "device", "cuda")
cluster = RayCluster(Cluster.uniform("l40s", 16, 8), config)
there = {each.id: each for each in nodes.records()}
found = {"hosts": [[there[each].gpus, there[each].gpu_type] for each in cluster._nodes], "nodes": len(there)}
found["distinct"] = len(set(cluster._nodes))
found["asked"] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL))
cluster.close()
found["withdrawn"] = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL))
ray.shutdown()
print(json.dumps(found))
"""


@contextmanager
def machines_on_demand(folder: Path, types: dict[str, Any], env: dict[str, str]) -> Iterator[str]:
    """A Ray cluster on this machine whose autoscaler starts nodes in place of machines; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    content: dict[str, Any] = {
        "cluster_name": "fake",
        "max_workers": 4,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        "provider": {"type": "fake_multinode", "gcs_address": address, "head_node_id": HEAD, "launch_multiple": True},
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": head, **types},
        "file_mounts_sync_continuously": False,
    }
    commands = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
                "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude",
                "rsync_filter")  # fmt: skip
    content |= {key: [] for key in commands} | {"auth": {}, "docker": {}, "file_mounts": {}}
    file = folder / "cluster.json"
    file.write_text(json.dumps(content))
    env = os.environ | env | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                              "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD, "RAY_CLOUD_INSTANCE_ID": HEAD}  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
               f"--port={address.partition(':')[2]}", f"--temp-dir={folder}/ray", "--num-cpus=0", "--num-gpus=0",
               "--include-dashboard=false", f"--object-store-memory={STORE_BYTES}",
               f"--autoscaling-config={file}"]  # fmt: skip
    with (folder / "out").open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as ray:
        try:
            until_s = time.monotonic() + 60
            while "block forever" not in (folder / "out").read_text():
                assert ray.poll() is None, (folder / "out").read_text()[-3000:]
                assert time.monotonic() < until_s, "Ray does not come up"
                time.sleep(0.2)
            yield address
        finally:
            for pid in users_of(folder):
                os.kill(pid, signal.SIGKILL)


@ray_there
@pytest.mark.slow
def test_workers_that_start_at_zero_come_up(model: Path, short_folder: Path) -> None:
    """With the worker types of two clouds: those of the right GPU are started, and nothing else."""
    env = ALONE | {"RAY_AUTH_TOKEN": os.urandom(32).hex()}
    types = {
        kind: {
            "resources": {"CPU": 1, "GPU": 8, f"accelerator_type:{kind}": 1, "object_store_memory": STORE_BYTES},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 2,
        }
        for kind in ("H100", "L40S")
    }
    with machines_on_demand(short_folder, types, env) as address:
        found, progress = run_driver(STARTED, str(model), address, env=env)
    assert found["hosts"] == [[8, "L40S"], [8, "L40S"]]
    assert found["distinct"] == 2
    assert found["nodes"] == 3
    assert found["asked"] == [{"GPU": 8.0, "accelerator_type:L40S": 0.001}] * 2
    assert found["withdrawn"] == []
    assert "waiting for 2 of 2 hosts (0 of 120 s): 2 x 8 GPUs (L40S); Ray has 1 x 0 CPUs" in progress


def test_nodes_are_read_as_ray_describes_them() -> None:
    record = {"NodeID": "n", "Resources": {"CPU": 2.0, "GPU": 8.0, "accelerator_type:L40S": 1.0, "memory": 1e9}}
    assert nodes._node(record) == Node(id="n", cpus=2.0, gpus=8.0, gpu_type="L40S")
    assert nodes._node({**record, "Labels": {"ray.io/accelerator-type": "A100-40G"}}).gpu_type == "A100-40G"
    assert nodes._node({"NodeID": "h", "Resources": {"memory": 1.0}}) == Node(id="h", cpus=0, gpus=0, gpu_type=None)
