"""How real engines of a run are built: one configuration for all, of whatever size an actor is."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backends.engine_types import EngineConfig
from backends.environment import Device
from backends.redis_server import check_url
from rlhfless.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """How a `RayExecutor` runs engines. Raises InputError for values that cannot be."""

    model: str
    """Folder with a Hugging Face model: config, tokenizer and safetensors."""
    run_folder: Path
    """Where weights are published; every host of the cluster must see it."""
    device: Device = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """Type of the weights in the engines."""
    max_model_len: int
    """Longest context, tokens."""
    max_slots: int
    """Responses that an engine runs at once, at most; a plan may ask for fewer."""
    kv_cache_bytes: int | None
    """KV memory of an engine on each of its GPUs; None leaves it to vLLM, on GPUs only."""
    block_size: int = 32
    """Tokens of a KV block."""
    max_batched_tokens: int = 2048
    """Tokens that an iteration computes at most."""
    kv: Literal["redis", "nixl", "none"] = "redis"
    """How KV goes from one actor to another: over Redis, or by NIXL from one engine's memory into the other's. With
    none, plans with a prefill actor are refused, and what moves is computed again."""
    redis_url: str | None = field(default=None, repr=False)
    """Redis for KV; None starts a private one."""
    ray_address: str | None = None
    """Cluster to join; None uses the Ray that this process has joined, or starts a private one on loopback."""
    ray_cpus: int | None = None
    """CPUs of a private Ray; None for as many as the engines of all GPUs of the cluster ask for."""
    actor_cpus: float = 1.0
    """CPUs that an engine on CPUs asks Ray for. One on GPUs asks for the GPUs of its plan."""
    temperature: float = 0.0
    """0: greedy. Above: responses are sampled, each from its own seed."""
    seed: int = 0
    """Seed of the responses' seeds."""
    node_timeout_s: float = 0.0
    """Seconds that machines of a cluster that starts them on demand may take to come up; Ray's autoscaler is asked for
    them then, until `close`. 0: they must be there."""
    start_timeout_s: float = 300.0
    """Seconds from asking for a process to its first sign of life, weights included."""
    hang_timeout_s: float = 120.0
    """Seconds without an iteration after which an actor that has work counts as dead."""

    def __post_init__(self) -> None:
        if not (Path(self.model) / "config.json").is_file():
            raise InputError(f"model {self.model} is not a folder with a Hugging Face model (no config.json)")
        if self.kv not in ("redis", "nixl", "none"):
            raise InputError(f"kv {self.kv!r}: known are redis, nixl, none")
        if self.redis_url is not None:
            check_url(self.redis_url)
        for name in ("actor_cpus", "start_timeout_s", "hang_timeout_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} {getattr(self, name)} must be above 0")
        for name in ("temperature", "node_timeout_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} {getattr(self, name)} must be at least 0")
        self.engine(prefix_caching=True, kv_connector=None)

    def engine(
        self, *, prefix_caching: bool, kv_connector: dict[str, Any] | None, sleeps: bool = False
    ) -> EngineConfig:
        """Config of an engine on one GPU; on several it is `EngineConfig.on` them. `sleeps`: it is kept between steps,
        and gives its GPUs' memory away meanwhile."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            max_slots=self.max_slots,
            kv_cache_bytes=self.kv_cache_bytes,
            block_size=self.block_size,
            max_batched_tokens=self.max_batched_tokens,
            prefix_caching=prefix_caching,
            kv_connector=kv_connector,
            sleep_mode=sleeps and self.device == "cuda",
        )
