"""Which of Ray's nodes carries each host of the cluster, and how those that are not there yet are asked for.

Choosing is pure: records of nodes in, a node for each host out, or none where nothing fits. Asking is for clusters
whose workers start at zero (`backends/deploy`): Ray's autoscaler is told what every host needs, and keeps that much
until the request is withdrawn.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.environment import Device
from rlhfless.errors import InputError
from rlhfless.types.cluster import Cluster

TYPE = "accelerator_type:"
"""Begins the resource by which Ray tells GPU types apart; a node with GPUs that it knows has one."""
TYPE_LABEL = "ray.io/accelerator-type"
"""Ray's label for the same."""
TYPE_SHARE = 0.001
"""How much of that resource is asked for; a node has 1 (what Ray's own option `accelerator_type` asks for)."""
GRAIN = 1e-4
"""Ray counts resources in ten-thousandths; sums that differ by less are equal."""
LOOK_S = 1.0
"""Seconds between looks at a cluster that is coming up (chosen: beside the minutes that a machine takes)."""
TELL_S = 15.0
"""Seconds between lines of progress when nothing changes (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of Ray's nodes that is alive."""

    id: str
    """Ray's name for it."""
    cpus: float
    """CPUs that it offers; 0 for heads that are to run nothing."""
    gpus: float
    """GPUs that it offers."""
    gpu_type: str | None
    """Ray's name of their type, for instance L40S; None where Ray does not know."""

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPUs"]
        if self.gpus:
            parts.append(f"{self.gpus:g} GPUs{f' ({self.gpu_type})' if self.gpu_type else ''}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What hosts need of nodes."""

    resource: str
    """GPU or CPU, as Ray spells them."""
    amounts: tuple[float, ...]
    """How much of it each host needs."""
    gpu_type: str | None
    """Ray's name of the GPU type; None for engines on CPUs."""

    def room(self, node: Node) -> float:
        """What a node can give: nothing where its GPUs are known to be others."""
        if self.resource == "CPU":
            return node.cpus
        return node.gpus if node.gpu_type in (None, self.gpu_type) else 0.0

    def bundles(self) -> list[dict[str, float]]:
        """What the autoscaler is asked for, one a host: the right type, so that no other machine is paid for."""
        extra = {} if self.gpu_type is None else {f"{TYPE}{self.gpu_type}": TYPE_SHARE}
        return [{self.resource: amount, **extra} for amount in self.amounts]

    def __str__(self) -> str:
        kind = "" if self.gpu_type is None else f" ({self.gpu_type})"
        counts = Counter(self.amounts).items()
        return ", ".join(f"{count} x {amount:g} {self.resource}s{kind}" for amount, count in counts)


def needs_of(cluster: Cluster, device: Device, actor_cpus: float) -> Needs:
    """What the hosts of `cluster` need for an engine on each GPU; on CPUs an engine takes `actor_cpus`.

    Ray calls a GPU by the first part of its name in our catalogue, in capitals: l40s is L40S, h100_sxm is H100.
    """
    sizes = [host.gpus for host in cluster.hosts]
    if device == "cuda":
        kind = cluster.gpu.name.split("_")[0].upper()
        return Needs(resource="GPU", amounts=tuple(map(float, sizes)), gpu_type=kind)
    return Needs(resource="CPU", amounts=tuple(size * actor_cpus for size in sizes), gpu_type=None)


def choose(needs: Needs, nodes: Iterable[Node], kept: Sequence[str | None] = ()) -> tuple[str | None, ...]:
    """A node for each host, None for hosts that find none; `kept` are those that they have, and keep while it is there.

    The largest hosts choose first, each the smallest node that is big enough and has no host yet (ties: by id). Hosts
    that find none go where others have left room, which is also how an autoscaler counts: it starts nothing for what
    fits on a node that is there.
    """
    room = {node.id: needs.room(node) for node in sorted(nodes, key=lambda node: node.id)}
    chosen: list[str | None] = [node if node in room else None for node in kept] or [None] * len(needs.amounts)
    for host, node in enumerate(chosen):
        if node is not None:
            room[node] -= needs.amounts[host]
    own = set(room) - set(chosen)
    missing = [host for host, node in enumerate(chosen) if node is None]
    missing.sort(key=lambda host: -needs.amounts[host])
    for nodes_left in (own, set(room)):
        for host in missing:
            fits = [node for node in room if node in nodes_left and room[node] + GRAIN / 2 > needs.amounts[host]]
            if chosen[host] is None and fits:
                node = min(fits, key=lambda one: room[one])
                chosen[host] = node
                room[node] -= needs.amounts[host]
                own.discard(node)
    return tuple(chosen)


def records() -> list[Node]:
    """Ray's nodes that are alive."""
    import ray

    return [_node(each) for each in ray.nodes() if each["Alive"]]


def address(node: str) -> str:
    """Where Ray's other nodes reach the node with this id."""
    import ray

    return str(next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node))


def find(
    needs: Needs,
    *,
    timeout_s: float,
    look: Callable[[], list[Node]] = records,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[str, ...]:
    """A node for each host, waiting up to `timeout_s` for those that are not there yet, with progress on stderr.

    Raises InputError where some are missing at the end.
    """
    started_s = clock()
    told, told_s = "", started_s
    while True:
        nodes = look()
        chosen = choose(needs, nodes)
        found = tuple(node for node in chosen if node is not None)
        if len(found) == len(chosen):
            return found
        waited_s, there = clock() - started_s, _summary(nodes)
        if waited_s >= timeout_s:
            missing = [str(host) for host, node in enumerate(chosen) if node is None]
            raise InputError(
                f"the cluster's hosts need {needs}; Ray has {there}; missing: host {', '.join(missing)} "
                f"(after {waited_s:.0f} s)"
            )
        if there != told or clock() - told_s >= TELL_S:
            told, told_s = there, clock()
            print(
                f"waiting for {len(chosen) - len(found)} of {len(chosen)} hosts ({waited_s:.0f} of {timeout_s:g} s): "
                f"{needs}; Ray has {there}",
                file=sys.stderr,
            )
        sleep(min(LOOK_S, timeout_s - waited_s))


def ask(needs: Needs) -> None:
    """Tell Ray's autoscaler, where there is one, what the hosts need; it holds until `withdraw`. The request is the
    cluster's: that of another driver is replaced."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=needs.bundles())


def withdraw() -> None:
    """Ask for nothing any more: nodes without actors go when the autoscaler's idle time is over."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[])


def _node(record: Mapping[str, Any]) -> Node:
    resources: Mapping[str, float] = record["Resources"]
    types = [name.removeprefix(TYPE) for name in resources if name.startswith(TYPE)]
    label = record.get("Labels", {}).get(TYPE_LABEL)
    return Node(
        id=record["NodeID"],
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        gpu_type=label or (types[0] if types else None),
    )


def _summary(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "no nodes"
    return "; ".join(f"{count} x {what}" for what, count in Counter(map(str, nodes)).items())
