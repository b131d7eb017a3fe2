"""vLLM's own NIXL connector, taught what a step needs: KV straight from one engine's memory into another's.

vLLM (V1, written against 0.32) hands over a request that has ended by its own `max_tokens`: its blocks stay where they
are, and a handle (`kv_transfer_params`) tells one other engine where to read them. This adds, all on the scheduler's
side:

- A handle may cover less than the request that comes with it: a shared prefix, or a response's context so far. Whole
  blocks are read, and at least one token is left to compute.
- Responses of one prompt come with the same handle. The first to be admitted reads; the others wait for it, and find
  the blocks in the engine's own prefix cache. So each handle has one reader, and blocks are freed once it has read.
- A response that is cut hands over what it has (`parting`), as if it had ended by itself.
- A handle is read only under the salt, which names the weights, that its KV was computed under, and on processors that
  lay KV out alike.
- Blocks are kept until they are read or `release` is called, never for a time: a reader that came after the end of a
  lease would read whatever is there by then. `MOST_KEPT` keeps room for the engine's own work.

Whatever cannot be read is computed again: vLLM's policy for failed loads, in which an engine that is gone is found out
by its name. Blocks that are being read are not in the prefix cache before they have come.
"""

import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from rlhfless.errors import InputError

MOST_KEPT = 0.5
"""Share of an engine's KV blocks that wait for readers at most (chosen: as much is left to compute with); what ends
beyond is not handed over. What is cut is handed over all the same: it is read as soon as its new place has room."""

_Handle = tuple[str, str]
"""The engine that keeps blocks, and its name for the request that has filled them."""


class NixlKVConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not looked into
    """What vLLM loads by `kv_transfer.nixl_config`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
            raise InputError("KV over NIXL: needs a model whose layers all have full attention; use kv none for others")
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = HandOver(vllm_config, self.engine_id, kv_cache_config)


class HandOver(NixlPullConnectorScheduler):  # type: ignore[misc]  # vLLM is not looked into
    """The scheduler's side."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.side_channel_port = _free_port(self.side_channel_host)
        self.parting = False
        """Whether requests that are aborted now hand over what they have."""
        self._parted: dict[str, dict[str, Any]] = {}
        self._blocks = kv_cache_config.num_blocks
        kv_bytes = vllm_config.parallel_config.tensor_parallel_size * sum(
            tensor.size for tensor in kv_cache_config.kv_cache_tensors
        )
        self.token_bytes = kv_bytes / (self._blocks * self.block_size)
        """Bytes of a token's KV, on all ranks."""
        self._kept: dict[str, set[int]] = {}
        self._users: dict[_Handle, set[str]] = {}
        self._reader: dict[_Handle, str] = {}
        self._closed: set[_Handle] = set()

    def on_new_request(self, request: Any) -> None:
        """It may come with a handle, or be one to hand over."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            if params["made_by"] != _made_by(request) or _handle(params) in self._closed:
                request.kv_transfer_params = None
                return
            self._users.setdefault(_handle(params), set()).add(request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to be read beyond those computed; None while another request reads the same ones."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        handle = _handle(params)
        if handle in self._closed:
            params["do_remote_prefill"] = False
            return 0, False
        if self._reader.get(handle, request.request_id) != request.request_id:
            return None, False
        blocks = min(params["remote_num_tokens"], request.num_tokens - 1) // self.block_size
        params["remote_block_ids"] = tuple(list(group)[:blocks] for group in params["remote_block_ids"])
        wanted = blocks * self.block_size - num_computed_tokens
        return max(0, wanted), wanted > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted, or waits for what it reads."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            handle = _handle(params)
            if num_external_tokens:
                self._reader[handle] = request.request_id
            else:  # all of it is here: the other side is told so
                self._close(handle)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        """The step is over: what has been read is here or is computed again, what others have read is free."""
        super().update_connector_output(connector_output)
        came = connector_output.finished_recving or ()
        for handle in [handle for handle, reader in self._reader.items() if reader in came]:
            self._close(handle)
        for name in connector_output.finished_sending or ():
            self._kept.pop(name, None)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are kept for a reader, and their handle."""
        params, name = request.kv_transfer_params, request.request_id
        reads = name in self._reader.values()
        if params and "remote_request_id" in params:
            users = self._users.get(_handle(params), set())
            users.discard(name)
            if params.get("do_remote_prefill"):
                if users:  # the next of them reads
                    params["do_remote_prefill"] = False
                else:  # nobody does: the other side is told so
                    self._close(_handle(params))
        parts = self.parting and request.status == RequestStatus.FINISHED_ABORTED
        if parts and not reads and request.num_computed_tokens >= self.block_size:
            self._stop_heartbeat(name)
            params = request.kv_transfer_params = {"do_remote_decode": True}
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._reqs_in_batch.add(name)
        elif params and params.get("do_remote_decode") and self._crowded(block_ids):
            request.kv_transfer_params = None
            self._reqs_not_processed.add(name)
        keeps, handle = super().request_finished(request, block_ids)
        if handle is not None and keeps:
            self._kept[name] = {block for group in block_ids for block in group}
            handle["made_by"] = _made_by(request)
            if parts:
                self._parted[name] = handle
        return keeps, handle

    @property
    def kept(self) -> int:
        """Requests whose blocks wait for readers."""
        return len(self._kept)

    def take_parted(self) -> dict[str, dict[str, Any]]:
        """Handles of the requests that have parted, by vLLM's name of them; each once."""
        parted, self._parted = self._parted, {}
        return parted

    def release(self) -> None:
        """Nobody will read any more: what is kept is freed in the next step, and no handle known so far is read."""
        for name in self._kept:
            self._reqs_need_send[name] = 0.0  # a lease that has long ended
        self._closed.clear()

    def _crowded(self, block_ids: Sequence[Sequence[int]]) -> bool:
        kept = set().union(*self._kept.values(), *block_ids)
        return bool(len(kept) > MOST_KEPT * self._blocks)

    def _close(self, handle: _Handle) -> None:
        """It has been read, or will not be."""
        self._closed.add(handle)
        self._reader.pop(handle, None)
        self._users.pop(handle, None)


def _handle(params: Mapping[str, Any]) -> _Handle:
    return params["remote_engine_id"], params["remote_request_id"]


def _made_by(request: Any) -> list[Any]:
    """What KV depends on besides tokens, and vLLM's own check does not see."""
    device = current_platform.device_type
    # CPU attention packs its cache as the processor's instructions like it
    packing = [platform.machine(), torch.backends.cpu.get_cpu_capability()] if device == "cpu" else []
    return [request.cache_salt, device, *packing]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
