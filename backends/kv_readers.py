"""KV that an engine keeps for others to read, and reads of theirs, under kv nixl; otherwise there is none of either."""

import time
from collections.abc import Sequence
from typing import Any

from backends.engine_types import EngineConfig, EngineError
from backends.engine_vllm import response_of, scheduler_of
from backends.kv_transfer import NIXL

LOOK_S = 0.002
"""Seconds between steps that have only KV to wait for, its own or others' (chosen: reading takes some 10 ms)."""
RELEASE_S = 10.0
"""Seconds in which KV that nobody reads any more must be free (chosen: it takes a step or two)."""


class KVReaders:
    """The side of one engine. All but `kept` is for the thread that steps the engine."""

    def __init__(self, engine: Any, config: EngineConfig) -> None:
        """`engine`: vLLM's."""
        self._engine = engine
        nixl = config.kv_connector is not None and config.kv_connector["kv_connector"] == NIXL
        self._hand_over = scheduler_of(engine).connector.connector_scheduler if nixl else None
        self.token_bytes: float = self._hand_over.token_bytes if self._hand_over is not None else 0.0
        """Bytes of a token's KV that is read."""

    @property
    def kept(self) -> int:
        """Requests that are over and whose KV waits for another engine to read it."""
        return 0 if self._hand_over is None else int(self._hand_over.kept)

    @property
    def waits(self) -> bool:
        """Whether KV waits to be read, or still comes for a response that has been aborted, where no response runs."""
        return self._hand_over is not None and bool(scheduler_of(self._engine).has_requests())

    def look(self) -> None:
        """Look whether it has been read, or has come."""
        self._engine.step()
        time.sleep(LOOK_S)

    def release(self) -> None:
        """Free what nobody reads any more. Raises EngineError where it is still being read."""
        if self.waits:
            assert self._hand_over is not None
            self._hand_over.release()
            until_s = time.monotonic() + RELEASE_S
            while self.waits:
                if time.monotonic() > until_s:
                    raise EngineError(f"KV is still being read or on its way after {RELEASE_S:g} s")
                self.look()

    def abort(self, responses: Sequence[int]) -> dict[int, Any]:
        """Abort responses; handles of their KV, where there is some to hand over."""
        names = [str(response) for response in responses]
        if self._hand_over is None:
            self._engine.abort_request(names)
            return {}
        self._hand_over.parting = True
        try:
            self._engine.abort_request(names)
        finally:
            self._hand_over.parting = False
        return {response_of(name): handle for name, handle in self._hand_over.take_parted().items()}
