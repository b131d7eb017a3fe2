"""Who reads whose KV in a step, under kv nixl: which handle goes with which response (RLHFless §4.2).

KV is read from the memory of the engine that has computed it, by one other engine for each handle. So the prefill actor
makes a handle of a prefix for each decode actor that needs it: the first comes with the prefix's own computation, each
further one costs a token, the one beyond whole blocks that it must have computed to end. A decode actor in the prefill
actor's own process finds the prefix in its cache. Responses of a prompt share the handle of their actor.

A response that is cut brings the handle of its own KV. Where it goes, and with what, is decided when it is sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.engine_types import Finished, Partial, Request
from backends.ray_config import RayConfig
from rlhfless.types.plan import Plan

Gpus = tuple[int, ...]


class Handles:
    """Handles of one step, as they become known."""

    def __init__(self, plan: Plan, config: RayConfig) -> None:
        """Where KV goes another way, there are none."""
        self._nixl, self._block_tokens = config.kv == "nixl", config.block_size
        self._responses_per_prompt = plan.responses_per_prompt
        self._prefix_of: Sequence[int] = plan.prefill.prefix_of.tolist() if plan.prefill is not None else []
        self._readers: dict[int, list[int]] = {}
        for index, actor in enumerate(plan.actors):
            for prefix in dict.fromkeys(map(self._prefix, actor.responses.tolist())):
                if prefix is not None:
                    self._readers.setdefault(prefix, []).append(index)
        self._gpus = plan.placement.decode
        self._asked: dict[int, tuple[int, int]] = {}
        self._of_prefix: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._of_response: dict[int, Mapping[str, Any]] = {}

    def prefills(self, prefixes: Sequence[Request], gpus: Gpus) -> list[Request]:
        """What the replica of the prefill actor on `gpus` computes: `prefixes`, each once for every actor that reads
        it."""
        if not self._nixl:
            return list(prefixes)
        requests = []
        for prefix in prefixes:
            readers = [index for index in self._readers[prefix.response] if self._gpus[index] != gpus]
            requests.append(replace(prefix, hand_over=bool(readers)))
            if readers:
                self._asked[prefix.response] = (prefix.response, readers[0])
            whole = len(prefix.token_ids) // self._block_tokens * self._block_tokens
            for reader in readers[1:]:
                number = len(self._prefix_of) + len(self._asked)  # above all prefixes
                self._asked[number] = (prefix.response, reader)
                tokens = [*prefix.token_ids[:whole], prefix.token_ids[0]]
                requests.append(replace(prefix, response=number, token_ids=tokens, hand_over=True))
        return requests

    def prefilled(self, finished: Iterable[Finished]) -> None:
        """The prefill actor has computed these."""
        for one in finished:
            if one.done.kv is not None and one.response in self._asked:
                self._of_prefix[self._asked[one.response]] = one.done.kv

    def cut(self, partials: Mapping[int, Partial]) -> None:
        """These responses have left their place."""
        self._of_response |= {response: one.kv for response, one in partials.items() if one.kv is not None}

    def forget(self, actor: int) -> None:
        """Another process takes this actor's place; the one before may have read."""
        for prefix, reader in [each for each in self._of_prefix if each[1] == actor]:
            del self._of_prefix[prefix, reader]

    def sent(self, actor: int, requests: Iterable[Request]) -> list[Request]:
        """Responses as they are to be sent to a decode actor."""
        return [self._with_handle(actor, request) for request in requests]

    def _with_handle(self, actor: int, request: Request) -> Request:
        prefix = self._prefix(request.response)
        handle = self._of_response.pop(request.response, None)
        if handle is None and prefix is not None:
            handle = self._of_prefix.get((prefix, actor))
        return request if handle is None else replace(request, kv=handle)

    def _prefix(self, response: int) -> int | None:
        return self._prefix_of[response // self._responses_per_prompt] if self._prefix_of else None
