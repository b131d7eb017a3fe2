"""Where the learner's ranks run: in this process, or one a GPU in Ray actors on the hosts that a plan names."""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from backends.environment import engine_env, require
from backends.learner import Learner
from backends.learner_types import LearnerConfig, LearnerError
from rlhfless.errors import RlhflessError

START_S = 600.0
"""Seconds in which ranks must be there, models loaded (chosen: as an engine of a large model may take)."""


class Ranks(Protocol):
    """Calls every rank with the same arguments."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank's `Learner.method` answers. Raises what they raise, LearnerError for one that has died."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class LocalRank:
    """One rank in this process."""

    def __init__(self, config: LearnerConfig) -> None:
        """Raises what `Learner` raises."""
        self._learner = Learner(config)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `Ranks`."""
        return [getattr(self._learner, method)(*arguments)]

    def close(self) -> None:
        """See `Ranks`."""
        self._learner.close()


class RankActor:
    """What runs in a Ray worker: one rank."""

    def address(self) -> str:
        """Where rank 0 would listen for the others."""
        import ray

        with socket.socket() as one:
            one.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{one.getsockname()[1]}"

    def build(self, config: LearnerConfig, rank: int, ranks: int, address: str) -> None:
        """Raises what `Learner` raises."""
        self._learner = Learner(config, rank, ranks, address)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """See `Ranks`."""
        return getattr(self._learner, method)(*arguments)


class RayRanks:
    """A rank in each of several Ray actors; Ray must have been joined or started."""

    def __init__(self, config: LearnerConfig, places: Sequence[tuple[str, int]], cpus: float = 0.0) -> None:
        """`places`: (Ray's node, number of the GPU there) of each rank; `cpus`: that each asks Ray for.

        GPUs are named to the process, not asked of Ray: engines and learner take turns on them, as plans say. Raises
        what `Learner` raises.
        """
        require("ray")
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._actors = []
        for node, gpu in places:
            env = engine_env(config.device)
            if config.device == "cuda":
                env |= {"CUDA_VISIBLE_DEVICES": str(gpu), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
            self._actors.append(
                ray.remote(RankActor)
                .options(
                    num_cpus=cpus,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    runtime_env={"env_vars": env},
                )
                .remote()
            )
        try:
            address = _get([self._actors[0].address.remote()])[0]
            ranks = len(self._actors)
            _get([actor.build.remote(config, rank, ranks, address) for rank, actor in enumerate(self._actors)], START_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """See `Ranks`."""
        return _get([actor.call.remote(method, arguments) for actor in self._actors])

    def close(self) -> None:
        """See `Ranks`."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []


def _get(calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return list(ray.get(list(calls), timeout=timeout_s))
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RlhflessError):
            raise cause from None
        raise
    except RayError as error:
        raise LearnerError(f"learner: a rank has died, {str(error).splitlines()[0]}") from error
