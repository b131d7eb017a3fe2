"""What goes into an engine and what comes out of it: plain values, without vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from backends.environment import Device
from rlhfless.errors import InfeasibleError, InputError, RlhflessError

FinishReason = Literal["stop", "length"]
"""stop: the model ended the response. length: its budget is used up."""


class EngineError(RlhflessError):
    """The engine has failed or is closed; the message says what happened to which model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine is built. Raises InputError for values that cannot be."""

    model: str
    """Hugging Face folder; on GPU hosts also a name that the local cache holds."""
    dtype: str
    """float32, bfloat16, ..."""
    device: Device
    """cpu or cuda; must match the installed vLLM."""
    tp: int = 1
    """GPUs of the engine."""
    max_model_len: int
    """Longest context, tokens."""
    max_slots: int
    """Responses that it runs at once."""
    kv_cache_bytes: int | None
    """Memory for KV on each GPU; None leaves the size to vLLM, which only measures it well on GPUs."""
    block_size: int
    """Tokens of a KV block. On CPUs a multiple of 32 is fastest."""
    max_batched_tokens: int
    """Tokens that one iteration computes at most; longer prompts are prefilled in pieces."""
    prefix_caching: bool
    """Whether KV of finished responses and shared prompts is kept for others."""
    seed: int = 0
    """vLLM's own seed. Responses are drawn from their own seeds, so nothing depends on it but randomly made weights."""
    kv_connector: Mapping[str, Any] | None = None
    """Arguments of vLLM's KVTransferConfig: where KV is fetched from and stored to."""
    sleep_mode: bool = False
    """Whether the engine can give the memory of its GPUs away while it rests, for `StepEngine.sleep`; not on CPUs."""
    weight_transfer: Mapping[str, Any] | None = None
    """Arguments of vLLM's WeightTransferConfig (`backends.weight_sync.transfer_config`): how a trainer sends weights to
    the engine's GPUs. None: weights come as files."""
    worker_extension: str | None = None
    """Dotted name of a class whose methods the workers get, for `StepEngine.collective`."""

    def __post_init__(self) -> None:
        for name in ("tp", "max_model_len", "max_slots", "block_size", "max_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"engine: {name} {getattr(self, name)} must be at least 1")
        if self.max_batched_tokens < self.max_slots:
            raise InputError(
                f"engine: max_batched_tokens {self.max_batched_tokens} must be at least max_slots {self.max_slots}, "
                "one token of each response"
            )
        if self.device == "cpu" and self.kv_cache_bytes is None:
            raise InputError("engine: kv_cache_bytes must be given on CPUs")
        if self.device == "cpu" and self.sleep_mode:
            raise InputError("engine: sleep_mode is for GPUs; on CPUs it would free nothing")
        if self.device == "cpu" and not (Path(self.model) / "config.json").is_file():
            raise InputError(f"engine: {self.model} is not a folder with a Hugging Face model (no config.json)")

    def on(self, gpus: int) -> "EngineConfig":
        """The same engine on so many GPUs."""
        return self if gpus == self.tp else replace(self, tp=gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A response to be generated, or to be continued where another engine left it."""

    response: int
    """Its number; not to be submitted again before it has finished or been aborted."""
    token_ids: Sequence[int]
    """Prompt and everything generated so far."""
    generated: int = 0
    """How many tokens at the end of token_ids were generated."""
    max_tokens: int
    """Rest of the budget, at least 1."""
    temperature: float
    """0: greedy. Above: sampled from softmax(logits / temperature)."""
    seed: int = 0
    """The response's own random stream. With the same seed a continued response equals an uninterrupted one."""
    force_length: bool = False
    """Generate exactly max_tokens, whether or not the model would end earlier."""
    kv: Mapping[str, Any] | None = None
    """Where KV of its first tokens can be read: the handle of a `Partial` of another engine, under kv nixl."""
    hand_over: bool = False
    """Whether its KV is kept for another engine to read when it ends by its length, under kv nixl."""

    def check(self, config: EngineConfig) -> None:
        """Raise InputError where the request is malformed, InfeasibleError where it may outgrow max_model_len."""
        name, tokens, most = f"response {self.response}", len(self.token_ids), config.max_model_len
        if tokens < 1 or self.max_tokens < 1:
            raise InputError(f"{name}: {tokens} token_ids and max_tokens {self.max_tokens}, both must be at least 1")
        if not 0 <= self.generated < tokens:
            raise InputError(f"{name}: generated {self.generated} must be at least 0 and below {tokens}, its token_ids")
        if not self.temperature >= 0:
            raise InputError(f"{name}: temperature {self.temperature} must be at least 0")
        if tokens + self.max_tokens > most:
            raise InfeasibleError(
                f"{name}: {tokens} token_ids and max_tokens {self.max_tokens} exceed max_model_len {most}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """What this engine has generated of a response, in full or up to now. Times are time.monotonic()."""

    tokens: tuple[int, ...]
    """Tokens generated here, in order."""
    logprobs: tuple[float, ...]
    """Their log-probabilities under the model itself, without temperature: what a forward pass gives."""
    cached_tokens: int
    """Of token_ids, those whose KV was not computed when the response was first admitted: found in the prefix cache or
    fetched by the KV connector. 0 while it has no token."""
    admitted_s: float | None
    """When it first got a slot; None while it has no token."""
    first_token_s: float | None
    """When its first token here was there; None while it has none."""
    last_token_s: float | None
    """When its last token so far was there; None while it has none."""
    kv: Mapping[str, Any] | None = None
    """Handle of its KV, once it has ended or been aborted here, for one other engine; None where none is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A response that has ended here."""

    response: int
    """Its number."""
    finish_reason: FinishReason
    """Why it ended. The token that ended it by `stop` is the last of its tokens."""
    weight_version: str
    """Weights that generated it."""
    done: Partial
    """All that was generated here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Totals since the engine was built, as vLLM's scheduler counts them, at the end of the last iteration."""

    iterations: int = 0
    """Model executions."""
    prompt_tokens: int = 0
    """Tokens with which the responses came that have their first token, cached or computed."""
    cached_tokens: int = 0
    """Of prompt_tokens, found in this engine's prefix cache."""
    external_tokens: int = 0
    """Of prompt_tokens, fetched by the KV connector."""
    computed_tokens: int = 0
    """Tokens computed before first tokens. prompt_tokens = cached + external + computed, but that computed also holds
    what has been computed for responses that are in mid-prefill, or were aborted there."""
    continued_tokens: int = 0
    """Of computed_tokens, those of responses that came with tokens generated elsewhere: work that was done before."""
    recomputed_tokens: int = 0
    """Tokens computed again because their response was preempted."""
    generated_tokens: int = 0
    """Tokens generated."""
    moved_kv_bytes: float = 0.0
    """KV that the connector has fetched for responses that came with tokens generated elsewhere."""
    preemptions: int = 0
    """Times a response lost its KV because it ran out (counted when the response goes on)."""
    running: int = 0
    """Responses in slots."""
    waiting: int = 0
    """Responses without."""
    kv_blocks: int = 0
    """KV blocks there are."""
    kv_blocks_used: int = 0
    """KV blocks that unfinished responses hold. Blocks that are merely cached count as free."""
    block_tokens: int = 0
    """Tokens of a KV block."""

    @property
    def headroom_tokens(self) -> int:
        """KV that nothing in a slot uses."""
        return (self.kv_blocks - self.kv_blocks_used) * self.block_tokens
