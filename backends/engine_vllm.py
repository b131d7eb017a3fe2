"""What is asked of vLLM beyond stepping: building an engine, queueing a request, counting. vLLM is imported on use."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from backends.engine_types import EngineConfig, EngineCounters, EngineError, Partial, Request
from backends.environment import keep_on_loopback, prepare, require
from backends.kv_transfer import NIXL
from rlhfless.errors import InputError

NOISE_PROCESSOR = "backends.sampling:PositionNoise"
"""What vLLM loads into its workers, so that sampling does not depend on where a response is decoded."""


class Live:
    """An unfinished response."""

    __slots__ = ("cached_tokens", "kv", "logprobs", "request", "stats", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.cached_tokens = 0
        self.kv: Mapping[str, Any] | None = None
        self.stats: Any = None  # vLLM's record of the request, which it keeps up to date; None before the first token

    @property
    def context_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.tokens)

    def partial(self) -> Partial:
        stats = self.stats
        return Partial(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            cached_tokens=self.cached_tokens,
            admitted_s=stats and stats.scheduled_ts,
            first_token_s=stats and stats.first_token_ts,
            last_token_s=stats and stats.last_token_ts,
            kv=self.kv,
        )


class Tally:
    """Adds up what vLLM reports of each iteration; a stat logger to vLLM, which calls it within a step."""

    def __init__(self) -> None:
        self._iterations = self._prompt = self._cached = self._external = 0
        self._computed = self._decoded = self._generated = self._begun = self._preemptions = 0
        self._running, self._kv_usage = 0, 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        if scheduler_stats is not None:
            self._running, self._kv_usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            if (details := scheduler_stats.iteration_details) is not None:
                self._iterations += 1
                self._computed += details.num_ctx_tokens
                self._decoded += details.num_generation_tokens
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            self._prompt += prompts.total
            self._cached += prompts.local_cache_hit
            self._external += prompts.external_kv_transfer
            self._generated += iteration_stats.num_generation_tokens
            self._begun += len(iteration_stats.time_to_first_tokens_iter)
            self._preemptions += iteration_stats.num_preempted_reqs

    def log(self) -> None:
        """Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """Nothing is printed."""

    def counters(self, cache_config: Any) -> EngineCounters:
        blocks = cache_config.num_gpu_blocks - 1  # vLLM keeps one for padding
        return EngineCounters(
            iterations=self._iterations,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            external_tokens=self._external,
            computed_tokens=self._computed,
            # an iteration feeds each response its last token to get the next; what it feeds beyond was fed before
            recomputed_tokens=self._decoded - (self._generated - self._begun),
            generated_tokens=self._generated,
            preemptions=self._preemptions,
            running=self._running,
            kv_blocks=blocks,
            kv_blocks_used=round(self._kv_usage * blocks),
            block_tokens=cache_config.block_size,
        )


def build(config: EngineConfig, tally: Tally) -> Any:
    """A vLLM LLMEngine."""
    prepare(config.device)
    require("vllm")
    from tqdm import tqdm
    from vllm.config import KVTransferConfig, WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    if current_platform.is_cpu() != (config.device == "cpu"):
        raise InputError(
            f"engine: device {config.device}, but the installed vLLM runs on {current_platform.device_type}"
        )
    if config.tp > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # its ranks are on one host, and need not be heard beyond
    tqdm.monitor_interval = 0  # the watcher thread of a progress bar would outlive the engine
    if config.kv_connector is not None and config.kv_connector["kv_connector"] == NIXL:
        require("nixl")
        keep_on_loopback()
    extras: dict[str, Any] = {}
    if config.worker_extension is not None:
        extras["worker_extension_cls"] = config.worker_extension
    try:
        if config.kv_connector is not None:
            extras["kv_transfer_config"] = KVTransferConfig(**config.kv_connector)
        if config.weight_transfer is not None:
            extras["weight_transfer_config"] = WeightTransferConfig(**config.weight_transfer)
        arguments = EngineArgs(
            model=config.model,
            dtype=config.dtype,
            tensor_parallel_size=config.tp,
            # several ranks: a child each, which ends when this process does; vLLM's own choice would be Ray in a Ray
            # actor with a placement group
            distributed_executor_backend="mp" if config.tp > 1 else None,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_slots,
            kv_cache_memory_bytes=config.kv_cache_bytes,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_batched_tokens,
            enable_prefix_caching=config.prefix_caching,
            seed=config.seed,
            enforce_eager=config.device == "cpu",
            enable_sleep_mode=config.sleep_mode,
            async_scheduling=False,  # an abort must know every token that has been computed
            logits_processors=[NOISE_PROCESSOR],
            enable_logging_iteration_details=True,  # the tokens that each iteration computes, for the tally
            **extras,
        )
        return LLMEngine.from_vllm_config(arguments.create_engine_config(), stat_loggers=[lambda *_: tally])
    except Exception as error:  # vLLM has no class of its own for what a configuration cannot do
        raise EngineError(f"engine of {config.model} cannot be built: {one_line(error)}") from error


def add(engine: Any, request: Request, *, salt: str, recompute: bool = False) -> None:
    """Queue a request; KV is shared only among those of one `salt`, and with `recompute` this one looks for none.

    Raises InputError for what vLLM refuses.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from backends.sampling import noise_args

    extra = noise_args(request.seed, request.temperature) if request.temperature else {}
    if request.kv is not None:
        # a copy, since vLLM crosses it off; what was found in the other engine's cache was not found in this one's
        extra["kv_transfer_params"] = {**request.kv, "remote_prefill_cached_tokens": None}
    elif request.hand_over:
        extra["kv_transfer_params"] = {"do_remote_decode": True}
    parameters = SamplingParams(
        temperature=0.0,  # argmax; the noise, where there is any, does the sampling
        extra_args=extra or None,
        max_tokens=request.max_tokens,
        ignore_eos=request.force_length,
        logprobs=0,  # that of the token itself
        detokenize=False,
        skip_reading_prefix_cache=recompute,
        output_kind=RequestOutputKind.DELTA,
    )
    try:
        engine.add_request(str(request.response), tokens_input(list(request.token_ids), cache_salt=salt), parameters)
    except (ValueError, VLLMValidationError) as error:
        raise InputError(f"response {request.response}: {one_line(error)}") from error


def scheduler_of(engine: Any) -> Any:
    """Its scheduler, which is in this process."""
    return engine.engine_core.engine_core.scheduler


def queue_of(engine: Any) -> list[int]:
    """Responses that wait for a slot or for room, in order of admission."""
    return [response_of(request.request_id) for request in scheduler_of(engine).waiting]


def hasten(engine: Any, responses: Iterable[int]) -> None:
    """Each of `responses` that is in the queue goes to its head, one after the other."""
    waiting = scheduler_of(engine).waiting
    queued = {response_of(request.request_id): request for request in waiting}
    for request in [queued[response] for response in responses if response in queued]:
        waiting.remove_request(request)
        waiting.prepend_request(request)


def response_of(name: str) -> int:
    """The response that vLLM calls `name`: it adds a suffix to our names."""
    return int(name.partition("-")[0])


def one_line(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
