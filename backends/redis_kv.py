"""vLLM's side of KV over Redis: a connector that finds blocks by their hash. See `backends.kv_transfer`.

vLLM (V1, written against 0.32) makes two: one beside the scheduler, which asks Redis and decides, and one beside the
model, which copies. Blocks are fetched and checked when a request is matched, before the scheduler counts on them, and
the bytes travel to the model's side with the step. So a block can neither vanish nor turn out corrupt between promise
and use, and vLLM's own repair (`get_block_ids_with_load_errors`) has nothing to do: it would leave wrong KV in the
prefix cache of a request that is aborted before it is repaired, and let the step that has met it save what it computes.
The price: the step that admits a request waits for its KV, at most `budget_s` and a timeout, and the KV is held twice
in memory for that step. Where the scheduler cannot admit the request yet, the bytes wait with it.

With tensor parallelism there is a model's side in each rank, in a process of its own. Each saves its parts of a block,
its KV heads, under keys of their own; a block counts as there when every part has come back whole, and each rank copies
its own. Ranks tell the scheduler's side what they have saved, so that counters are whole there. All parts go to all
ranks, through vLLM's queue in shared memory. Where ranks are more than heads, several hold the same one, and the first
of them saves it. A backend that does not store a head's KV in one place (vLLM's `num_head_slots`) has a rank's whole
share as its part, and engines of other sizes do not find it.

One full-attention cache group, and no other parallelism. Never two engines with a connector in one process, since vLLM
keeps the model's side in a global.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from backends.kv_block import layout_digest
from backends.kv_transfer import (
    BlockStore,
    KVCounters,
    RedisBlocks,
    RedisSettings,
    count,
    counters,
    current_version,
    side_by_side,
    since,
)
from rlhfless.errors import InputError


@dataclass(slots=True)
class Copies(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not looked into
    """What the model's side copies in one step."""

    version: str
    """Weights that the step computes with."""
    loads: list[int]
    """Blocks that KV goes into before the forward pass."""
    kv: list[PickleBuffer]
    """Each rank's part of it, block after block; in one piece, so that it is pickled without a copy."""
    saves: list[tuple[int, bytes]] = field(default_factory=list)
    """Block that is full after the forward pass, and vLLM's hash of it."""


@dataclass(slots=True)
class Saved(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM is not looked into
    """What ranks have saved in one step."""

    counts: KVCounters

    def aggregate(self, other: "Saved") -> "Saved":
        return Saved(side_by_side(self.counts, other.counts))


@dataclass(slots=True)
class _Request:
    """A request that the scheduler has admitted."""

    request: Any
    """vLLM's own: tokens, block hashes, tokens computed."""
    version: str
    """Weight version when it was last admitted."""
    saved: int = 0
    """Blocks from the left that need no saving: found in a cache, or saved already."""


class RedisKVConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not looked into
    """Named in `redis_config`; vLLM makes it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel = vllm_config.parallel_config
        _check_parallel(parallel)
        self._rank, self._ranks = parallel.rank, parallel.world_size
        self._settings = RedisSettings(**self._kv_transfer_config.kv_connector_extra_config)
        self._layers, spec = _only_group(kv_cache_config)
        self._block_tokens: int = spec.block_size
        self._rank_bytes = spec.page_size_bytes * len(self._layers)
        self._parts = _parts(vllm_config.model_config.get_total_num_kv_heads(), self._ranks, spec)
        self._own = self._parts[self._rank]
        self._all = 1 + max(part for own in self._parts for part in own)
        self._store: BlockStore = RedisBlocks(
            self._settings,
            layout=_layout(vllm_config, self._layers, spec, len(self._own)),
            part_bytes=self._rank_bytes // len(self._own),
            parts=self._all if role is KVConnectorRole.SCHEDULER else len(self._own),
        )
        self._requests: dict[str, _Request] = {}
        self._fetched: dict[str, tuple[int, list[bytes], list[memoryview]]] = {}
        self._loads: list[tuple[int, list[memoryview]]] = []
        self._told = counters()
        self._caches: list[torch.Tensor] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nobody waits for what we save, so a request that is preempted may finish as it is."""
        return False

    # ---- beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that Redis holds beyond those computed; their KV is fetched, and kept while the request waits."""
        if request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._block_tokens
        end = (request.num_tokens - 1) // self._block_tokens  # one token at least is left to compute
        keys = self._keys(request, first, min(end, len(request.block_hashes)))
        held = self._fetched.get(request.request_id)
        if held is None or held[:2] != (first, keys):
            held = (first, keys, self._store.fetch(keys) if keys else [])
            self._fetched[request.request_id] = held
        return len(held[2]) // self._all * self._block_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted: `num_external_tokens` of what was fetched go into its blocks in this step."""
        first, _, found = self._fetched.pop(request.request_id, (0, [], []))
        known = self._requests.get(request.request_id)
        version = current_version(self._settings.version)
        if known is None or known.version != version:
            self._requests[request.request_id] = _Request(request=request, version=version)
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            for at in range(num_external_tokens // self._block_tokens):
                self._loads.append((ids[first + at], found[at * self._all : (at + 1) * self._all]))

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """What this step loads, and which blocks it fills: those are saved at its end."""
        version = current_version(self._settings.version)
        loads, self._loads = self._loads, []
        kv = [PickleBuffer(b"".join(parts[part] for _, parts in loads for part in own)) for own in self._parts]
        copies = Copies(version, [block for block, _ in loads], kv)
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            one = self._requests.get(name)
            if one is None or one.version != version:
                continue
            request = one.request
            one.saved = max(one.saved, request.num_computed_tokens // self._block_tokens)
            # a block has a hash once all its tokens are known; with tokens still on their way, it is saved a step later
            full = min((request.num_computed_tokens + tokens) // self._block_tokens, len(request.block_hashes))
            if full > one.saved:
                (ids,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
                copies.saves += zip(
                    ids[one.saved : full], map(bytes, request.block_hashes[one.saved : full]), strict=True
                )
                one.saved = full
        return copies

    def update_connector_output(self, connector_output: Any) -> None:
        """The step is over; ranks in processes of their own tell what they have saved."""
        saved = connector_output.kv_connector_worker_meta
        if saved is not None:
            count(saved.counts)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Finished or aborted: its blocks are saved already and may be freed at once."""
        self._requests.pop(request.request_id, None)
        self._fetched.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Forget what was fetched for requests that still wait. Redis keeps its blocks: `set_namespace` hides them."""
        self._fetched.clear()
        return True

    def _keys(self, request: Any, first: int, end: int) -> list[bytes]:
        version = current_version(self._settings.version)
        return [
            self._settings.key(version, bytes(each), part=part, parts=self._all)
            for each in request.block_hashes[first:end]
            for part in range(self._all)
        ]

    # ---- beside the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The rank's caches, layer by layer: [blocks, heads, tokens, content] each."""
        self._caches = [kv_caches[layer] for layer in self._layers]
        block_bytes = sum(cache[0].numel() * cache.element_size() for cache in self._caches)
        one_shape = len({(cache.shape, cache.dtype) for cache in self._caches}) == 1
        if block_bytes != self._rank_bytes or not one_shape:
            raise InputError(
                "KV over Redis: the layers' caches differ or hold more than KV, which needs another connector"
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy this step's loads into the caches."""
        step = self._step()
        if not step.loads:
            return
        cache = self._caches[0]
        kv = torch.frombuffer(bytearray(step.kv[self._rank]), dtype=torch.uint8).to(cache.device)
        kv = kv.view(cache.dtype).view(len(step.loads), len(self._own), len(self._caches), -1, *cache.shape[2:])
        index = torch.tensor(step.loads, device=cache.device)
        for layer, cache in enumerate(self._caches):
            cache[index] = kv[:, :, layer].flatten(1, 2)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: `start_load_kv` has loaded all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: `wait_for_save` saves all layers at once, so that a block is one value."""

    def wait_for_save(self) -> None:
        """Save the rank's part of the blocks that this step has filled."""
        saves = self._saves()
        if saves:
            blocks, own = [block for block, _ in saves], len(self._own)
            keys = [
                self._settings.key(self._step().version, each, part=part, parts=self._all)
                for _, each in saves
                for part in self._own
            ]
            self._store.save(keys, lambda first, end: self._rows(blocks[first // own : end // own]))

    def build_connector_worker_meta(self) -> Saved | None:
        """What this step's saving has come to; None where the scheduler's side counts it by itself, being beside us."""
        if self._ranks == 1 or not self._saves():
            return None
        gained, self._told = since(self._told), counters()
        return Saved(gained)

    def shutdown(self) -> None:
        """Close the connection."""
        self._store.close()

    def _saves(self) -> list[tuple[int, bytes]]:
        """What the step has for this rank to save: nothing where a rank before it holds the same heads."""
        return self._step().saves if self._parts.index(self._own) == self._rank else []

    def _rows(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """uint8[blocks * own parts, part bytes]: the rank's KV of `blocks`, part after part, layer after layer in each.

        A part is a slice of the heads, which come second in a cache.
        """
        index, count = torch.tensor(blocks, device=self._caches[0].device), len(blocks) * len(self._own)
        kv = torch.stack([cache[index].unflatten(1, (len(self._own), -1)) for cache in self._caches], dim=2)
        rows: npt.NDArray[np.uint8] = kv.contiguous().view(count, -1).view(torch.uint8).cpu().numpy()
        return rows

    def _step(self) -> Copies:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Copies)
        return metadata


def _check_parallel(parallel: Any) -> None:
    # decode context parallel ranks are tensor parallel ones as well, but share a block's tokens out among them
    others = parallel.decode_context_parallel_size * parallel.data_parallel_size
    if parallel.world_size != parallel.tensor_parallel_size or others != 1:
        raise InputError(
            "KV over Redis: engines may be tensor parallel, not pipeline, context or data parallel; use kv none"
        )


def _only_group(kv_cache_config: Any) -> tuple[list[str], Any]:
    """Names of the layers in order, and the kind of cache that they all have."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        raise InputError("KV over Redis: needs a model whose layers all have full attention; use kv none for others")
    return sorted(groups[0].layer_names, key=_natural), groups[0].kv_cache_spec


def _parts(heads: int, ranks: int, spec: Any) -> list[range]:
    """The parts of a block that each rank holds, of all that there are: KV heads, or its share in one piece."""
    if spec.num_heads != spec.num_kv_heads:
        return [range(rank, rank + 1) for rank in range(ranks)]
    return [range(rank * heads // ranks, rank * heads // ranks + spec.num_kv_heads) for rank in range(ranks)]


def _natural(layer: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")]


def _layout(vllm_config: Any, layers: Sequence[str], spec: Any, parts: int) -> bytes:
    """Digest of all that the bytes of one of a rank's `parts` of a block, and its key, depend on, besides tokens and
    weights."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if algorithm.startswith("xxhash") and seed is None:
        raise InputError(
            f"KV over Redis: prefix_caching_hash_algo {algorithm} gives every process other hashes: use sha256, or set "
            "PYTHONHASHSEED to the same number for all engines"
        )
    device = current_platform.device_type
    # CPU attention packs its cache as the processor's instructions like it
    packing = (platform.machine(), torch.backends.cpu.get_cpu_capability()) if device == "cpu" else ()
    return layout_digest(
        vllm_version, device, packing, algorithm, seed, tuple(layers), spec.block_size, spec.num_heads // parts,
        spec.head_size, spec.head_size_v, str(spec.dtype), spec.page_size_bytes // parts,
    )  # fmt: skip
