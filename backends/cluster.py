"""Processes on a Ray cluster: where engines run, how they start, stay warm and end.

A process is one Ray actor with one engine on the GPUs that a plan names. It outlives an invocation where the plan wants
warm starts: a warm pool is processes kept alive. On CPUs it holds its memory between steps; on GPUs its engine sleeps,
so that a learner finds them free. At most one process is on a GPU; one whose GPUs are wanted otherwise is ended.
Placement is by host (`backends.nodes`), an actor at a time: a group of all of them would wait for the last and hold the
rest.

A private Ray ends with the process that has started it, also with one that is killed: its engines and servers within
seconds, two small agents of Ray's own after a minute.
"""

import contextlib
import os
import select
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends import nodes
from backends.engine_types import EngineConfig
from backends.environment import NIXL_HOST, engine_env, require
from backends.ray_config import RayConfig
from backends.vllm_actor import VllmActor
from rlhfless.errors import InfeasibleError, InputError, RlhflessError
from rlhfless.types.cluster import Cluster

OBJECT_STORE_BYTES = 80 << 20
"""Shared memory of a private Ray (chosen, near its least): only reports go through it, and small ones do not."""
THREADS = 4
"""Calls that an actor answers at once: a poll that waits, one of an earlier turn, a drain that waits, and others."""
END_S = 8.0
"""Seconds that ended processes may take to vanish, before they are killed again (chosen: Ray asks for 5)."""
LOOPBACK = "127.0.0.1"
_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's own variable: 0 makes every part of a private Ray listen on loopback alone, as it does by default on laptops;
on Linux its services would otherwise listen to everybody, and they ask for no password (seen with Ray 2.60)."""


class StepError(RlhflessError):
    """A step has failed as a whole. Nothing of it is left running, and it can be executed again."""


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One Ray actor with an engine."""

    actor: Any
    """Ray's handle of a `VllmActor`."""
    gpus: tuple[int, ...]
    """GPUs of the cluster that it holds."""
    engine: EngineConfig
    """What it was built as."""
    node: str
    """Ray's node that it is on."""
    here: bool
    """Whether that is this machine."""
    asked_s: float
    """When it was asked for, by our clock."""
    ahead_s: float | None = None
    """When it was started or woken for a step that was yet to come; None once it is used."""
    asleep: bool = False
    """Whether its engine has given its memory away."""
    turn: int = 0
    """Invocations that it has served."""
    last_step: int = -1
    """Execution in which it was last used."""
    pid: int = 0
    """Process id on its host; 0 until it has answered."""
    pidfd: int = -1
    """Handle of the process on this machine: unlike its id it can never come to mean another."""

    def fits(self, gpus: tuple[int, ...], engine: EngineConfig) -> bool:
        """Whether it is such an engine on these GPUs."""
        return self.gpus == gpus and self.engine == engine.on(len(gpus))

    def answered(self, pid: int) -> None:
        """It lives, under this id."""
        if self.pidfd < 0 and self.here:
            with contextlib.suppress(OSError):  # died since
                self.pidfd = os.pidfd_open(pid)
        self.pid = pid

    def kill(self) -> None:
        """The signal that cannot be refused, where it can be sent."""
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class RayCluster:
    """The processes of a run. At most one on a GPU.

    Configs of engines say what they are but not on how many GPUs: that is by the GPUs that are named with them.
    """

    def __init__(self, cluster: Cluster, config: RayConfig) -> None:
        """Join or start Ray. Raises InputError where it is missing or cannot be reached, or has no nodes that are what
        the cluster's hosts are said to be."""
        require("ray")
        self._cluster, self._config = cluster, config
        self._needs = nodes.needs_of(cluster, config.device, config.actor_cpus)
        self._startups_s: list[float] = []
        self._folder: Path | None = None
        self._pool: dict[tuple[int, ...], Process] = {}
        self._used: set[Process] = set()
        self._ending: list[Process] = []
        self._asking = False
        self._join()
        timeout_s = 0.0 if self._folder is not None else config.node_timeout_s
        try:
            if timeout_s:
                self._asking = True
                nodes.ask(self._needs)
            self._nodes: tuple[str | None, ...] = nodes.find(self._needs, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def startup_s(self) -> float | None:
        """Median seconds from asking for a process to its engine being there, over those of this run; None before."""
        return statistics.median(self._startups_s) if self._startups_s else None

    def started_up(self, process: Process, up_s: float) -> None:
        """A new process was up at `up_s`, by our clock."""
        self._startups_s.append(max(0.0, up_s - process.asked_s))

    def node(self, host: int) -> str:
        """Ray's node of a host. Raises StepError while there is none."""
        node = self._nodes[host]
        if node is None:
            raise StepError(f"host {host} of the cluster is lost, and Ray has no other node like it")
        return node

    def place(self, gpu: int) -> tuple[str, int]:
        """Ray's node of a GPU, and its number there: hosts that share a node have its GPUs one after the other."""
        host = int(self._cluster.host_of[gpu])
        node, before = self.node(host), np.flatnonzero(self._cluster.host_of[:gpu] == host).size
        shared = zip(self._cluster.hosts[:host], self._nodes, strict=False)
        return node, int(before) + sum(other.gpus for other, its in shared if its == node)

    def take(self, gpus: tuple[int, ...], engine: EngineConfig) -> Process:
        """A process on `gpus`: that of the pool if it fits, else a new one, which is then still starting."""
        for process in [each for each in self._pool.values() if not set(gpus).isdisjoint(each.gpus)]:
            del self._pool[process.gpus]
            if process.fits(gpus, engine):
                self._used.add(process)
                return process
            self.end(process)
        process = self._start(gpus, engine)
        self._used.add(process)
        return process

    def keep(self, process: Process) -> None:
        """An idle process goes back to the pool."""
        self._used.discard(process)
        self._pool[process.gpus] = process

    def ahead(self, gpus: tuple[int, ...], engine: EngineConfig, *, new: bool) -> None:
        """For a step to come: wake the process of the pool that sleeps on `gpus`, or start one there with `new`.

        Nothing happens where other processes are on them.
        """
        on_them = [each for each in (*self._pool.values(), *self._used) if not set(gpus).isdisjoint(each.gpus)]
        if not on_them and new:
            process = self._start(gpus, engine)
            process.ahead_s = process.asked_s
            self._pool[gpus] = process
        for process in on_them:
            if process.fits(gpus, engine) and process.asleep:
                process.ahead_s, process.asleep = time.monotonic(), False
                process.actor.wake.remote()

    def untaken(self, wanted: set[tuple[int, ...]], engine: EngineConfig) -> list[Process]:
        """Processes that were asked for ahead and that a step with `engine` on the GPUs `wanted` has no use for, out of
        the pool: the caller ends them."""
        found = [
            each
            for each in self._pool.values()
            if each.ahead_s is not None and not (each.gpus in wanted and each.fits(each.gpus, engine))
        ]
        for process in found:
            del self._pool[process.gpus]
            self._used.add(process)
        return found

    def rest(self) -> None:
        """Have the engines of the pool give their GPUs' memory away, where they can; returns when they have."""
        import ray
        from ray.exceptions import RayError

        lying_down = [each for each in self._pool.values() if each.engine.sleep_mode and not each.asleep]
        for process, call in [(process, process.actor.sleep.remote()) for process in lying_down]:
            try:
                ray.get(call, timeout=self._config.hang_timeout_s)
                process.asleep = True
            except (RayError, RlhflessError):  # its memory is free once it is dead, too
                del self._pool[process.gpus]
                self.end(process, hangs=True)

    def end(self, process: Process, *, hangs: bool = False) -> None:
        """Kill a process. Ray asks it first and waits 5 s, which is of no use with one that `hangs`."""
        import ray

        self._used.discard(process)
        if hangs:
            process.kill()
        with contextlib.suppress(Exception):  # of a Ray that is gone itself, which takes its actors with it
            ray.kill(process.actor, no_restart=True)
        if process.pidfd >= 0:
            self._ending.append(process)

    def end_used(self) -> None:
        """Kill what has been taken and not been given back: what a step that failed leaves."""
        for process in list(self._used):
            self.end(process)
        self._await_ends()

    def end_all(self) -> None:
        """Kill every process and wait until those of this machine are gone."""
        for process in [*self._used, *self._pool.values()]:
            self.end(process)
        self._pool.clear()
        self._await_ends()

    def pids(self) -> list[int]:
        """Process ids of all that live and have answered."""
        return [process.pid for process in [*self._used, *self._pool.values()] if process.pid]

    def alive_hosts(self) -> list[bool]:
        """Whether each host of the cluster has a node. One that Ray has lost is replaced by another of the same kind as
        soon as there is one."""
        self._nodes = nodes.choose(self._needs, nodes.records(), self._nodes)
        for process in [each for each in self._pool.values() if each.node not in self._nodes]:
            del self._pool[process.gpus]
            self.end(process)
        return [node is not None for node in self._nodes]

    def close(self) -> None:
        """End everything that was started here, and ask for no nodes any more. May be called twice."""
        import ray

        self.end_all()
        if self._asking:
            self._asking = False
            with contextlib.suppress(Exception):  # of a Ray that is gone itself, and its autoscaler with it
                nodes.withdraw()
        if self._folder is not None:
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ---- inside

    def _join(self) -> None:
        if self._config.ray_address is None:
            os.environ.setdefault(_LOOPBACK_SWITCH, "0")  # read when ray is imported
        import ray

        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self._config.ray_address is not None:
                ray.init(address=self._config.ray_address, **quiet)
            else:
                self._start_ray(quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self.close()
            raise InputError(f"Ray at {self._config.ray_address or 'this machine'}: {_first_line(error)}") from error

    def _start_ray(self, quiet: dict[str, Any]) -> None:
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ[_LOOPBACK_SWITCH] != "0"  # if imported before
        self._folder = Path(tempfile.mkdtemp(prefix="rlhfless-ray-", dir="/tmp"))  # sockets need a short path
        cpus = self._cluster.gpus * self._config.actor_cpus if self._config.device == "cpu" else 1
        ray.init(
            num_cpus=self._config.ray_cpus or max(1, int(-(-cpus // 1))),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(self._folder),
            **quiet,
        )
        address = ray.nodes()[0]["NodeManagerAddress"]
        if address != LOOPBACK:
            raise InputError(f"a private Ray would listen on {address}: unset {_LOOPBACK_SWITCH}")

    def _start(self, gpus: tuple[int, ...], engine: EngineConfig) -> Process:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        hosts = {int(self._cluster.host_of[gpu]) for gpu in gpus}
        if len(hosts) > 1:
            raise InfeasibleError(f"an engine on GPUs {list(gpus)}: they are of several hosts")
        node, engine = self.node(hosts.pop()), engine.on(len(gpus))
        needs: dict[str, Any] = {"num_cpus": self._config.actor_cpus * len(gpus)}
        env = engine_env(self._config.device)
        if self._config.kv == "nixl":
            env[NIXL_HOST] = nodes.address(node)
        if self._config.device == "cuda":
            needs = {"num_cpus": 0, "num_gpus": len(gpus)}
            # Ray would give it any that are free; the learner's are named by number as well
            numbers = ",".join(str(self.place(gpu)[1]) for gpu in gpus)
            env |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": numbers}
        asked_s = time.monotonic()
        actor = (
            ray.remote(VllmActor)
            .options(
                **needs,
                max_concurrency=THREADS,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": env},
            )
            .remote(engine)
        )
        here = bool(node == ray.get_runtime_context().get_node_id())
        return Process(actor=actor, gpus=gpus, engine=engine, node=node, here=here, asked_s=asked_s)

    def _await_ends(self) -> None:
        until_s = time.monotonic() + END_S
        for process in self._ending:
            if not select.select([process.pidfd], [], [], max(0.0, until_s - time.monotonic()))[0]:
                process.kill()
            os.close(process.pidfd)
            process.pidfd = -1
        self._ending.clear()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
