"""The configuration of a real run: a TOML file as frozen, typed values, wrong ones refused in one line.

A section of the file is a class here, a key a field with the same name. Every error names the file and the key.
"""

import os
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Literal

from experiments import toml_file
from rlhfless.errors import InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.lengths import DEFAULT_WINDOW
from rlhfless.scheduler.policies import policy
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import Start
from rlhfless.types.workload import Algorithm

TINY = "tiny"
"""As `model.path`: the small random model that the project makes itself, in the run folder."""
WARM = "warm"
"""As `model.path`: a small model that the project makes in the run folder and teaches sums by example."""
MEASURE = "measure"
"""As `profile.source`: the engine of this machine is measured first, by `backends.measure`."""
ENV = "env:"
"""Begins the value of `kv.redis_url` that names an environment variable, so that no file holds a password."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """[model]: the policy that writes the responses."""

    path: str
    """Hugging Face folder; `tiny`, `warm`: made by the project in the run folder."""
    seed: int = 0
    """Seed of such a model."""
    warm_updates: int = 800
    """Updates of the warm start, of 32 examples each (chosen: one and a half minutes of a core)."""

    def __post_init__(self) -> None:
        _at_least_one(self, "model", "warm_updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """[cluster]: what plans may use."""

    gpu: str
    """GPU type of the catalogue; `cpu` counts cores."""
    gpus: int
    """GPUs (cores) in all."""
    gpus_per_host: int
    """GPUs (cores) of one host."""
    usd_per_gpu_hour: float | None = None
    """Price; absent: the catalogue's list price."""

    def __post_init__(self) -> None:
        _at_least_one(self, "cluster", "gpus", "gpus_per_host")
        if self.usd_per_gpu_hour is not None and not 0 <= self.usd_per_gpu_hour < float("inf"):
            raise InputError(f"cluster.usd_per_gpu_hour: {self.usd_per_gpu_hour} must be finite and at least 0")

    @property
    def cluster(self) -> Cluster:
        """The cluster. Raises InputError for an unknown GPU type."""
        return Cluster.uniform(self.gpu, self.gpus, self.gpus_per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """[engine]: the vLLM engine of each decode actor."""

    device: Literal["cpu", "cuda"]
    """Where it computes."""
    dtype: str
    """float32, bfloat16, ..."""
    max_model_len: int
    """Longest context in tokens."""
    max_slots: int
    """Responses that it runs at once."""
    max_batched_tokens: int
    """Tokens of one iteration."""
    block_size: int
    """Tokens of a KV block."""
    kv_cache_bytes: int | None = None
    """Memory for KV on each of its GPUs; absent (GPUs only): vLLM's choice."""

    def __post_init__(self) -> None:
        _at_least_one(self, "engine", "max_model_len", "max_slots", "max_batched_tokens", "block_size")
        if self.kv_cache_bytes is None and self.device == "cpu":
            raise InputError("engine.kv_cache_bytes is missing; engines on CPUs need it")
        if self.kv_cache_bytes is not None:
            _at_least_one(self, "engine", "kv_cache_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """[ray]: the cluster software."""

    actor_cpus: float
    """Cores that an engine on CPUs asks Ray for; one on GPUs asks for the GPUs of its plan."""
    start_timeout_s: float
    """Seconds that an actor may take to be ready."""
    hang_timeout_s: float
    """Seconds without any progress after which an actor counts as dead."""
    address: str | None = None
    """A Ray cluster that runs: `auto` on one of its machines, or host:port. Absent: a private Ray, for this run."""
    node_timeout_s: float = 0.0
    """Seconds that machines which the cluster starts on demand may take to come up; 0: they must be there."""

    def __post_init__(self) -> None:
        _above_zero(self, "ray", "actor_cpus", "start_timeout_s", "hang_timeout_s")
        if not 0 <= self.node_timeout_s < float("inf"):
            raise InputError(f"ray.node_timeout_s: {self.node_timeout_s} must be at least 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """[kv]: how KV goes from one engine to another."""

    transport: Literal["redis", "nixl", "none"]
    """redis: blocks in a Redis server. nixl: from one engine's memory into the other's. none: it is computed again, and
    policies with a prefill actor are refused."""
    redis_url: str | None = None
    """Server, or `env:NAME` for a variable that holds its address. Absent: a private server on this machine."""

    def __post_init__(self) -> None:
        if self.redis_url is not None and "@" in self.redis_url:  # results repeat the configuration
            raise InputError(
                "kv.redis_url: a password does not belong in a file; give env:NAME, a variable with the address"
            )

    @property
    def url(self) -> str | None:
        """The address, looked up. Raises InputError for a variable that is not set."""
        if self.redis_url is None or not self.redis_url.startswith(ENV):
            return self.redis_url
        name = self.redis_url.removeprefix(ENV)
        if not (url := os.environ.get(name)):
            raise InputError(f"kv.redis_url: the environment variable {name} is not set")
        return url


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """[profile]: latencies that the planner reads."""

    source: str
    """`measure`, the name of a shipped profile, or a profile file."""
    others: tuple[str, ...] = ()
    """Names or files of profiles of the same model at other tensor-parallel sizes, for policies that mix them; not with
    `measure`."""
    sizes: tuple[int, ...] | None = None
    """Tensor-parallel sizes that are measured, the first for all but policies that mix them; absent: 1. This and the
    next three are for `measure` alone."""
    batches: tuple[int, ...] | None = None
    """Batches at which decoding is measured, the last `engine.max_slots`; absent: the default of `backends.measure`."""
    contexts: tuple[int, ...] | None = None
    """Contexts at which decoding is measured, in tokens."""
    limit_s: float | None = None
    """Seconds after which measuring begins no point any more."""

    def __post_init__(self) -> None:
        given = [name for name in ("sizes", "batches", "contexts", "limit_s") if getattr(self, name) is not None]
        if given and self.source != MEASURE:
            raise InputError(f'profile.{given[0]}: only for source = "{MEASURE}", not {self.source!r}')
        if self.others and self.source == MEASURE:
            raise InputError(f'profile.others: not for source = "{MEASURE}"; sizes says which are measured')
        if self.sizes is not None and not (
            self.sizes and min(self.sizes) >= 1 and len(set(self.sizes)) == len(self.sizes)
        ):
            raise InputError(f"profile.sizes: {list(self.sizes)} must be different whole numbers, each at least 1")
        for name in ("batches", "contexts"):
            grid = getattr(self, name)
            if grid is not None and (not grid or min(grid) < 1 or list(grid) != sorted(set(grid))):
                raise InputError(f"profile.{name}: {list(grid)} must be ascending whole numbers, each at least 1")
        if self.limit_s is not None:
            _above_zero(self, "profile", "limit_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """[workload]: what is generated in each step."""

    algorithm: Algorithm
    """ppo or grpo."""
    prompts_per_step: int
    """Prompts of a step."""
    responses_per_prompt: int
    """n."""
    max_prompt_tokens: int
    """Longer prompts are left out."""
    max_response_tokens: int
    """Cap on a response."""
    temperature: float
    """0: greedy."""
    steps: int
    """Steps of the run."""
    steps_per_epoch: int
    """Steps after which the same prompts come again."""
    prompts: str | None = None
    """GSM8K-like jsonl file with `question` and `answer`; absent: arithmetic prompts that the project makes."""
    instruction: str = ""
    """Put after every question of that file, in training."""

    def __post_init__(self) -> None:
        counts = ("prompts_per_step", "responses_per_prompt", "max_prompt_tokens", "max_response_tokens", "steps")
        _at_least_one(self, "workload", *counts, "steps_per_epoch")
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"workload.temperature: {self.temperature} must be finite and at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """[planner]: the numbers of a policy. An empty section takes the paper's."""

    policy: str = "rlhfless"
    """A policy of `rlhfless.scheduler.policies`."""
    actors: int | None = None
    """Static number of decode actors of policies that do not scale; absent: all that fit."""
    weight: float = scaling.WEIGHT
    """lambda: weight of time against cost."""
    tau: float = migration.DEFAULT_TAU
    """Share of an actor's responses done before it may be cut."""
    window: int = DEFAULT_WINDOW
    """Epochs that length estimates look back on."""
    learner_gpus: int | None = None
    """GPUs of the learner; absent: the fewest that hold its training state."""
    start: Start | None = None
    """How functions start; absent: the policy's own way."""

    def __post_init__(self) -> None:
        try:
            if policy(self.policy).oracle:
                raise InputError(f"{self.policy!r} knows the true lengths, which nobody does before a real step")
        except InputError as error:
            raise InputError(f"planner.policy: {error}") from None
        if not 0 <= self.weight <= 1:
            raise InputError(f"planner.weight: {self.weight} must lie in 0..1")
        if not 0 < self.tau <= 1:
            raise InputError(f"planner.tau: {self.tau} must be above 0 and at most 1")
        _at_least_one(self, "planner", "window")
        for name in ("actors", "learner_gpus"):
            if getattr(self, name) is not None:
                _at_least_one(self, "planner", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """[validate]: lengths that both sides decode in `python -m experiments.validate`."""

    preset: str
    """Length preset of `traces.synthesize`, stretched to the workload's cap."""
    steps: int
    """Steps that are compared; one more comes before, unscored, in which everything starts."""

    def __post_init__(self) -> None:
        _at_least_one(self, "validate", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """[learner]: how `python -m experiments.train` learns."""

    reward: str
    """A rule of `backends.rewards`, `module:function`, or the folder of a reward model."""
    learning_rate: float
    """Of the policy."""
    critic_learning_rate: float | None = None
    """Of the critic; absent: the policy's."""
    weight_decay: float = 0.0
    """Of AdamW."""
    warmup_steps: int = 0
    """Updates over which learning rates rise from 0."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    minibatches: int = 1
    """Updates of one pass over a step's responses."""
    epochs: int = 1
    """Passes over a step's responses."""
    tokens_per_microbatch: int
    """Tokens, padding included, of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Whether activations are computed again for the backward pass."""
    old_logprobs: Literal["learner", "engine"] = "learner"
    """Whose stand for the policy that has drawn the responses; the learner's are computed again."""
    grpo: dict[str, bool | float | str] = field(default_factory=dict)
    """Numbers of `backends.grpo.GrpoOptions`; `tis_cap = "none"` for none."""
    ppo: dict[str, bool | float | str] = field(default_factory=dict)
    """Numbers of `backends.ppo.PpoOptions`, likewise."""

    def __post_init__(self) -> None:
        _at_least_one(self, "learner", "minibatches", "epochs", "tokens_per_microbatch")
        _above_zero(self, "learner", "learning_rate", "max_grad_norm")
        if self.critic_learning_rate is not None:
            _above_zero(self, "learner", "critic_learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """[train]: what is looked at and kept on the way."""

    held_out_prompts: int
    """Prompts that nothing is learned from."""
    held_out_responses: int = 1
    """Responses to each of them."""
    held_out_every: int
    """Steps between looks at them; the first and the last step's weights are always looked at."""
    checkpoint_every: int = 1
    """Steps between checkpoints; the last step always makes one. A run that is killed loses what comes after one."""
    checkpoints: int = 2
    """How many are kept."""

    def __post_init__(self) -> None:
        _at_least_one(self, "train", *(each.name for each in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole file."""

    name: str
    """What results call the run."""
    seed: int
    """Seed of everything that is drawn."""
    model: ModelConfig
    cluster: ClusterConfig
    engine: EngineConfig
    ray: RayConfig
    kv: KVConfig
    profile: ProfileConfig
    workload: WorkloadConfig
    planner: PlannerConfig
    validate: ValidateConfig | None = None
    learner: LearnerConfig | None = None
    train: TrainConfig | None = None

    def __post_init__(self) -> None:
        longest = self.workload.max_prompt_tokens + self.workload.max_response_tokens
        if longest > self.engine.max_model_len:
            raise InputError(
                f"engine.max_model_len: {self.engine.max_model_len} is below workload.max_prompt_tokens + "
                f"max_response_tokens = {longest}"
            )
        if (self.cluster.gpu == "cpu") != (self.engine.device == "cpu"):
            raise InputError(f'engine.device: {self.engine.device!r} does not go with cluster.gpu "{self.cluster.gpu}"')
        if self.seed < 0:
            raise InputError(f"seed: {self.seed} must be at least 0")
        if self.learner is not None:
            self._check_learner(self.learner, longest)

    def _check_learner(self, learner: LearnerConfig, longest: int) -> None:
        if learner.tokens_per_microbatch < longest:
            raise InputError(
                f"learner.tokens_per_microbatch: {learner.tokens_per_microbatch} is below workload.max_prompt_tokens + "
                f"max_response_tokens = {longest}"
            )
        responses = self.workload.prompts_per_step * self.workload.responses_per_prompt
        if responses % learner.minibatches:
            raise InputError(
                f"learner.minibatches: {responses} responses of a step (workload.prompts_per_step x "
                f"responses_per_prompt) cannot be divided into {learner.minibatches} equal parts"
            )
        if self.workload.algorithm == "grpo" and self.workload.responses_per_prompt == 1:
            raise InputError("workload.responses_per_prompt: 1 response is no group for grpo; at least 2 are needed")


def load(path: Path) -> Config:
    """The configuration that a TOML file holds. Raises InputError, naming file and key, for whatever is wrong in it."""
    return toml_file.read(path, Config)


def _at_least_one(value: object, section: str, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 1:
            raise InputError(f"{section}.{name}: {getattr(value, name)} must be at least 1")


def _above_zero(value: object, section: str, *names: str) -> None:
    for name in names:
        if not 0 < getattr(value, name) < float("inf"):
            raise InputError(f"{section}.{name}: {getattr(value, name)} must be above 0 and finite")
