"""The files that bring the testbed to GPUs: valid for the programs that read them, true to the repository."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from backends.nodes import Node, choose, needs_of
from experiments.config import load

yaml = pytest.importorskip("yaml", reason="PyYAML comes with Ray: pip install 'rlhfless[cpu]'")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "backends" / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GPU_CONFIG = load(ROOT / "examples" / "g6e-qwen3b.toml")


def aws() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-aws.yaml").read_text())
    return content


def kubernetes() -> dict[str, dict[str, Any]]:
    """Kind -> object."""
    objects = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    return {each["kind"]: each for each in objects}


def docker_lines() -> list[tuple[str, str]]:
    """(instruction, its arguments), continuation lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


# ---- Dockerfile


def test_dockerfile_copies_what_there_is_and_all_of_it() -> None:
    copied = set()
    for name, arguments in docker_lines():
        if name == "COPY":
            *sources, _ = arguments.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                copied.add(source)
    packages = {name.split(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert packages | {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied
    assert "examples" in copied


def test_dockerfile_installs_an_extra_that_exists() -> None:
    (install,) = [arguments for name, arguments in docker_lines() if name == "RUN" and "pip install" in arguments]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", install)
    assert extras == "gpu"
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_dockerfile_meets_the_versions_of_the_project() -> None:
    arguments = dict(line.split("=", 1) for name, line in docker_lines() if name == "ARG")
    (base,) = [line for name, line in docker_lines() if name == "FROM"]
    assert base == "vllm/vllm-openai:${VLLM_VERSION}"
    (wanted,) = [each for each in PROJECT["project"]["optional-dependencies"]["gpu"] if each.startswith("vllm>=")]
    least = tuple(map(int, wanted.removeprefix("vllm>=").split(".")))
    assert tuple(map(int, arguments["VLLM_VERSION"].removeprefix("v").split("."))) >= least
    (install,) = [line for name, line in docker_lines() if name == "RUN" and "pip install" in line]
    (ray,) = re.findall(r"ray\[default\]==([\d.]+)", install)
    assert ray == kubernetes()["RayCluster"]["spec"]["rayVersion"]


def test_dockerfile_does_not_start_the_server_of_its_base() -> None:
    assert ("ENTRYPOINT", "[]") in docker_lines()


# ---- Ray's cluster launcher


def test_aws_file_passes_rays_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs Ray: pip install 'rlhfless[cpu]'")
    pytest.importorskip("jsonschema", reason="Ray checks cluster files with jsonschema: pip install 'ray[default]'")
    monkeypatch.setattr(util.logger, "handlers", [])
    whole = util.prepare_config(aws())
    util.validate_config(whole)
    broken = util.prepare_config({**aws(), "min_worker": 1})
    with pytest.raises(Exception, match="min_worker"):
        util.validate_config(broken)


def test_aws_workers_are_the_testbed_and_cost_nothing_while_idle() -> None:
    content = aws()
    workers = content["available_node_types"]["l40s"]
    assert workers["min_workers"] == 0
    assert workers["max_workers"] == content["max_workers"] == 2
    assert workers["node_config"]["InstanceType"] == "g6e.48xlarge"
    assert workers["resources"]["GPU"] == GPU_CONFIG.cluster.gpus_per_host
    assert workers["resources"]["GPU"] * workers["max_workers"] == GPU_CONFIG.cluster.gpus
    assert 0 < content["idle_timeout_minutes"] <= 10
    head = content["available_node_types"][content["head_node_type"]]
    assert head["resources"] == {"CPU": 0}
    assert "GPU" not in head["resources"]
    assert content["provider"]["cache_stopped_nodes"] is False


def test_aws_cluster_asks_for_a_token_and_shows_the_dashboard_to_nobody() -> None:
    content = aws()
    assert "--env RAY_AUTH_MODE=token" in content["docker"]["run_options"]
    assert "~/.ray/auth_token" in content["file_mounts"]
    (start,) = [each for each in content["head_start_ray_commands"] if "ray start" in each]
    assert "--dashboard-host=127.0.0.1" in start
    (redis,) = [each for each in content["head_start_ray_commands"] if "redis-server" in each]
    assert "requirepass %s" in redis


@pytest.mark.parametrize(
    "name", ["initialization_commands", "head_start_ray_commands", "worker_start_ray_commands", "setup_commands"]
)
def test_aws_commands_are_shell(name: str) -> None:
    for command in aws()[name]:
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True)


def test_aws_redis_refuses_whoever_has_no_password(tmp_path: Path) -> None:
    """The very command of the file, on a port and an address of this machine alone."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not on PATH")
    redis = pytest.importorskip("redis", reason="needs redis: pip install 'rlhfless[cpu]'")
    (command,) = [each for each in aws()["head_start_ray_commands"] if "redis-server" in each]
    settings = re.search(r"\((printf .*) \| redis-server -\)", command)
    assert settings is not None
    (tmp_path / ".rlhfless-redis").write_text("secret\n")
    printed = subprocess.run(
        ["bash", "-c", settings[1]], check=True, capture_output=True, text=True, env={"HOME": str(tmp_path)}
    ).stdout
    socket = tmp_path / "socket"
    here = {"port 6380": f"port 0\nunixsocket {socket}", "bind 0.0.0.0\n": "", "daemonize yes": "daemonize no"}
    for there, local in here.items():
        assert there in printed
        printed = printed.replace(there, local)
    server = subprocess.Popen(["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(printed.encode())
        server.stdin.close()
        for line in server.stdout:
            if b"eady to accept connections" in line:
                break
        with redis.Redis(unix_socket_path=str(socket)) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
        with redis.Redis(unix_socket_path=str(socket), password="secret") as client:
            assert client.config_get("maxmemory*")["maxmemory-policy"] == "volatile-lru"
            assert int(client.config_get("maxmemory")["maxmemory"]) == 8 << 30
    finally:
        server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


# ---- KubeRay

POD = {"containers", "volumes", "nodeSelector", "tolerations"}
"""Fields of a pod that the file may use; Kubernetes has more."""
CONTAINER = {"name", "image", "env", "command", "args", "ports", "resources", "volumeMounts"}
SPEC = {
    "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs",
}  # fmt: skip
"""Fields of a RayCluster (ray-operator/apis/ray/v1/raycluster_types.go of KubeRay 1.6) that the file may use."""
HEAD = {"serviceType", "rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
AUTOSCALER = {"upscalingMode", "idleTimeoutSeconds"}


def test_kuberay_has_the_fields_of_the_resource() -> None:
    cluster = kubernetes()["RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert set(spec) <= SPEC
    assert {"headGroupSpec", "workerGroupSpecs"} <= set(spec)
    assert set(spec["autoscalerOptions"]) <= AUTOSCALER
    assert spec["autoscalerOptions"]["upscalingMode"] in {"Default", "Aggressive", "Conservative"}
    assert set(spec["headGroupSpec"]) == HEAD
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for value in group["rayStartParams"].values():
            assert isinstance(value, str), "Ray's parameters are strings"
        pod = group["template"]["spec"]
        assert set(pod) <= POD
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {"name", "image", "resources"} <= set(container) <= CONTAINER
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for group in spec["workerGroupSpecs"]:
        assert set(group) == WORKERS


def test_kuberay_workers_are_the_testbed_and_cost_nothing_while_idle() -> None:
    spec = kubernetes()["RayCluster"]["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == 0
    (container,) = group["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == container["resources"]["requests"]["nvidia.com/gpu"] == GPU_CONFIG.cluster.gpus_per_host == 8
    assert gpus * group["maxReplicas"] == GPU_CONFIG.cluster.gpus
    assert spec["enableInTreeAutoscaling"] is True
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_kuberay_is_guarded_and_its_parts_find_each_other() -> None:
    objects = kubernetes()
    spec = objects["RayCluster"]["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    url = next(each["value"] for each in head["env"] if each["name"] == "RLHFLESS_REDIS_URL")
    service = objects["Service"]
    assert url == f"redis://:$(REDIS_PASSWORD)@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert GPU_CONFIG.kv.redis_url == "env:RLHFLESS_REDIS_URL"
    deployment = objects["Deployment"]["spec"]
    assert service["spec"]["selector"] == deployment["selector"]["matchLabels"]
    assert deployment["template"]["metadata"]["labels"] == deployment["selector"]["matchLabels"]
    (redis,) = deployment["template"]["spec"]["containers"]
    assert "requirepass %s" in redis["args"][0]
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        claims = [each.get("persistentVolumeClaim") for each in group["template"]["spec"]["volumes"]]
        assert {"claimName": claim["metadata"]["name"]} in claims


# ---- what a run asks for


def meet(resources: dict[str, float]) -> bool:
    """Whether every bundle that a run asks for fits on a fresh worker with these resources."""
    needs = needs_of(GPU_CONFIG.cluster.cluster, GPU_CONFIG.engine.device, GPU_CONFIG.ray.actor_cpus)
    return all(resources.get(name, 0) >= amount for bundle in needs.bundles() for name, amount in bundle.items())


def test_aws_autoscaler_knows_workers_that_are_what_a_run_asks_for() -> None:
    types = aws()["available_node_types"]
    assert meet(types["l40s"]["resources"])
    assert not meet(types["head"]["resources"])
    assert types["l40s"]["max_workers"] >= len(GPU_CONFIG.cluster.cluster.hosts)
    assert GPU_CONFIG.ray.node_timeout_s > 0
    assert GPU_CONFIG.ray.address == "auto"


def test_kuberay_autoscaler_knows_workers_that_are_what_a_run_asks_for() -> None:
    """By Ray's own reading of the resource, as the autoscaler beside the head does it."""
    config = pytest.importorskip(
        "ray.autoscaler._private.kuberay.autoscaling_config", reason="needs Ray: pip install 'rlhfless[cpu]'"
    )
    (group,) = kubernetes()["RayCluster"]["spec"]["workerGroupSpecs"]
    resources = config._get_ray_resources_from_group_spec(group, is_head=False)
    assert resources["GPU"] == GPU_CONFIG.cluster.gpus_per_host
    assert meet(resources)
    head = config._get_ray_resources_from_group_spec(kubernetes()["RayCluster"]["spec"]["headGroupSpec"], is_head=True)
    assert not meet(head)


def test_the_head_carries_no_host() -> None:
    cluster = GPU_CONFIG.cluster.cluster
    needs = needs_of(cluster, GPU_CONFIG.engine.device, GPU_CONFIG.ray.actor_cpus)
    head = Node(id="a-head", cpus=0, gpus=0, gpu_type=None)
    workers = [Node(id=name, cpus=180, gpus=8, gpu_type="L40S") for name in ("x", "y")]
    assert choose(needs, [head]) == (None, None)
    assert choose(needs, [head, *workers]) == ("x", "y")


def test_images_are_one() -> None:
    spec = kubernetes()["RayCluster"]["spec"]
    images = {
        each["image"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
        for each in group["template"]["spec"]["containers"]
    }
    assert images == {aws()["docker"]["image"]}
