"""What must be true of a process before vLLM or transformers is imported in it."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

from rlhfless.errors import InputError

Device = Literal["cpu", "cuda"]
"""Where an engine computes."""

COMMON_ENV: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the process that steps it
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer runner loads logits processors through another interface
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent anywhere
    "PYTHONHASHSEED": "0",  # block hashes, by which engines share KV, start from it
}
"""Set for every engine. vLLM reads them when it is imported or when an engine is built."""

ENGINE_ENV: dict[str, str] = {
    **COMMON_ENV,
    "HF_HUB_OFFLINE": "1",  # models are folders; without it each start waits for a name look-up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine of a machine to the same cores
    "OMP_NUM_THREADS": "1",  # an engine is one core; several run side by side
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than a small model ever saves
    "GLOO_SOCKET_IFNAME": "lo",  # the process group of a single worker must not listen beyond the machine
}
"""Set for engines on CPUs, in process (measured with vllm-cpu 0.32: start in 11 s instead of 47)."""

LOG_LEVEL = ("VLLM_LOGGING_LEVEL", "WARNING")
"""Set unless the operator has chosen: an engine's start prints some hundred lines at INFO."""

NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""vLLM's variable for the address at which other engines find one that hands KV over by NIXL; unset: loopback."""
UCX_DEVICES = "UCX_NET_DEVICES"
"""UCX's variable for the network devices that it uses, and listens on: all that there are, where it is unset."""

BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Installed along with vllm-cpu, not needed by a text model, and in some builds not importable beside a CPU torch: then
transformers fails as well, since it imports those that it finds."""

EXTRAS = {
    "vllm": ("cpu", "gpu"),
    "ray": ("cpu", "gpu"),
    "redis": ("cpu", "gpu"),
    "transformers": ("cpu", "gpu"),
    "trl": ("trl",),
    "nixl": ("nixl",),
}
"""Optional packages, and the extras of rlhfless that install them."""


def engine_env(device: Device) -> dict[str, str]:
    """The variables of an engine on `device`, for a process that is yet to be started (a Ray runtime environment)."""
    return {**(ENGINE_ENV if device == "cpu" else COMMON_ENV), LOG_LEVEL[0]: os.environ.get(*LOG_LEVEL)}


def prepare(device: Device) -> None:
    """Make this process ready for `import vllm`. Call it first; calling it again changes nothing."""
    os.environ.update(engine_env(device))
    if device == "cpu":
        for package in BROKEN_ON_CPU:
            _stub_if_broken(package)
        broken = [package for package in BROKEN_ON_CPU if sys.modules.get(package, ...) is None]
        if broken:
            _hide_from_children(broken)


def keep_on_loopback() -> None:
    """Have UCX, which carries KV for NIXL, listen on loopback alone, where engines find each other there."""
    if os.environ.get(NIXL_HOST, "localhost") in ("localhost", "127.0.0.1", "::1"):
        os.environ.setdefault(UCX_DEVICES, "lo")


def require(package: str) -> None:
    """Raise InputError, naming the extra that brings it, unless `package` is installed."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # in sys.modules without a specification: something has put it there on purpose
        found = sys.modules.get(package) is not None
    if not found:
        extras = EXTRAS.get(package, ())
        names = " or ".join(f"'rlhfless[{extra}]'" for extra in extras) or package
        hint = " (gpu on hosts with NVIDIA GPUs)" if "gpu" in extras else ""
        raise InputError(f"the Python package {package} is not installed: pip install {names}{hint}")


def _hide_from_children(packages: list[str]) -> None:
    """Have new interpreters that this process starts, such as the ranks of an engine, do without `packages` too."""
    os.environ["RLHFLESS_BROKEN_PACKAGES"] = ",".join(packages)
    folder, path = str(Path(__file__).parent / "children"), os.environ.get("PYTHONPATH", "")
    if folder not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{path}" if path else folder


def _stub_if_broken(package: str) -> None:
    if package in sys.modules or importlib.util.find_spec(package) is None:
        return
    try:
        importlib.import_module(package)
    except Exception:  # whatever a foreign package raises, the cure is the same: whoever asks is told it is not there
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]
