"""Where functions run, and what their transfers cost: locality-aware placement (RLHFless §4.5).

A position is room for one decode actor: tp free GPUs of one host. Positions are numbered by distance from the learner.
Where all actors are of one size, actor i goes to position i, the longest work first.
"""

from dataclasses import dataclass

import numpy as np

from rlhfless.errors import InfeasibleError
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.cluster import BROADCAST_CHUNK_BYTES, Cluster, Link
from rlhfless.types.plan import Hosting, Placement
from rlhfless.types.profile import ProfileData
from rlhfless.types.workload import Algorithm

STATE_BYTES_PER_PARAMETER = 16
"""Training state with Adam in mixed precision: bf16 weights and gradients, fp32 master weights and both moments
(Rajbhandari et al. 2020, ZeRO, section 3.1)."""
TRAINED_MODELS: dict[Algorithm, int] = {"ppo": 2, "grpo": 1}
"""Models in training: PPO's critic is taken to be as large as the actor."""
PREPARATION: dict[Algorithm, tuple[str, ...]] = {
    "ppo": ("reward", "reference", "critic"),
    "grpo": ("reward", "reference"),
}
"""Functions that score the responses before learning."""
USABLE_MEMORY = 0.9
"""Share of GPU memory for training state (chosen: vLLM's default share; activations are recomputed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Room for decode actors, nearest to the learner first."""

    gpus: IntArray
    """int[positions, tp]: GPUs of each."""
    host: IntArray
    """int[positions]: their host."""
    offset: IntArray
    """int[positions]: how many usable GPUs come before it, nearest first; the same count for actors of every size."""
    left_over: int
    """Free GPUs that make no whole actor on their host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """How weights and KV reach the positions; the same for every number of actors."""

    weights_s: FloatArray
    """float[positions]: arrival of the weights after the learner has finished."""
    shared: bool
    """Whether position 0 is on the learner's GPUs, so that its actor needs no transfer."""
    prefill_s: float
    """When every replica of the prefill actor, on the learner's GPUs, has its copy of the weights."""
    kv_link: IntArray
    """int[positions]: number of the link by which KV comes: the host's own fabric beside the learner, else the network
    of one of the learner's hosts, which take turns."""
    kv_latency_s: FloatArray
    """float[positions]: latency of that link."""
    kv_byte_s: FloatArray
    """float[positions]: its seconds for one byte."""


def learner_gpus(profile: ProfileData, cluster: Cluster, algorithm: Algorithm, free: int) -> tuple[int, bool]:
    """(GPUs of the learner, whether they hold its training state without offloading), by default.

    The fewest whose usable memory holds the training state of all trained models: a multiple of tp within one host,
    whole hosts beyond. Never more than `free`; what does not fit is then assumed to be kept in host memory.
    """
    state_bytes = STATE_BYTES_PER_PARAMETER * profile.parameters * TRAINED_MODELS[algorithm]
    need = int(np.ceil(state_bytes / (cluster.gpu.memory_bytes * USABLE_MEMORY)))
    hosts = np.cumsum([host.gpus for host in cluster.hosts])
    if need <= hosts[0]:
        need = min(-(-need // profile.tp) * profile.tp, int(hosts[0]))
        return min(need, free), need <= free
    whole = int(hosts[min(int(np.searchsorted(hosts, need)), hosts.size - 1)])
    return min(whole, free), need <= min(whole, free)


def positions(cluster: Cluster, free_gpus: IntArray, tp: int, learner: IntArray, exclusive: bool) -> Positions:
    """Room for actors of `tp` GPUs among the free GPUs; without those of the learner if `exclusive`.

    Order: the learner's own GPUs, which have their memory back while generation runs; the rest of the learner's hosts;
    the other hosts by number. Raises InfeasibleError if no host has room for an actor.
    """
    largest = max(host.gpus for host in cluster.hosts)
    if tp > largest:
        raise InfeasibleError(
            f"an actor of {tp} GPUs fits on no host: the largest has {largest}, and actors do not span hosts"
        )
    gpus = np.setdiff1d(free_gpus, learner) if exclusive else free_gpus
    host = cluster.host_of[gpus]
    far = ~np.isin(host, cluster.host_of[learner])
    order = np.lexsort((gpus, ~np.isin(gpus, learner), host, far))
    gpus, host = gpus[order], host[order]
    first = np.flatnonzero(np.diff(host, prepend=-1))
    sizes = np.diff(first, append=gpus.size)
    rank = np.arange(gpus.size) - np.repeat(first, sizes)
    kept = rank < np.repeat(sizes // tp * tp, sizes)
    if not kept.any():
        held = f" beside the learner's {learner.size}" if exclusive else ""
        raise InfeasibleError(f"no host has {tp} GPUs free for a decode actor{held}; {gpus.size} are free in all")
    return Positions(
        gpus=gpus[kept].reshape(-1, tp),
        host=host[kept][::tp].copy(),
        offset=np.flatnonzero(kept)[::tp].copy(),
        left_over=int(gpus.size - kept.sum()),
    )


def routes(cluster: Cluster, at: Positions, learner: IntArray, weight_bytes: float) -> Routes:
    """`routes_to` every position, with replicas of the prefill actor of the same size."""
    shared = bool(np.isin(at.gpus[0], learner).any())
    return routes_to(cluster, at.host, shared, learner, weight_bytes, at.gpus.shape[1])


def routes_to(
    cluster: Cluster, host: IntArray, shared: bool, learner: IntArray, weight_bytes: float, prefill_tp: int
) -> Routes:
    """Arrival of the weights at actors (L_model of RLHFless §4.5), and the links that KV takes.

    `host` int[actors], nearest first, those of one host side by side; `shared`: the first is on the learner's GPUs.
    A link serves one transfer after the other. A learner that spans H hosts first gathers its shards: each of them
    sends (H - 1) / H of the weights over its network. Then its hosts hold a copy, and the actors there are served by
    the host's local link, one by one. The other hosts form a chain over the network, in which each passes chunks on as
    they come; the copy arrives at the host's first actor and goes to its others by the local link.
    """
    count = host.size
    owners = np.unique(cluster.host_of[learner])
    near = np.isin(host, owners)
    first = np.flatnonzero(np.diff(host, prepend=-1))
    sizes = np.diff(first, append=count)
    hosts = [cluster.hosts[number] for number in host[first]]
    copy_s = np.array([each.local.transfer_s(weight_bytes) for each in hosts])
    per_byte = np.array([1.0 / each.network.bytes_per_s for each in hosts])
    latency_s = np.array([each.network.latency_s for each in hosts])
    away = ~near[first]
    gathered_s = gather_s(cluster, owners, weight_bytes)
    hops_s = np.cumsum(np.where(away, BROADCAST_CHUNK_BYTES * per_byte + latency_s, 0.0))
    slowest = np.maximum.accumulate(np.where(away, per_byte, 0.0))
    arrival_s = gathered_s + np.where(away, weight_bytes * slowest + hops_s, 0.0)
    # Where a copy is on the host without a transfer, the first actor too is served by the local link.
    rank = np.arange(count) - np.repeat(first, sizes) + near
    if shared:
        rank[host == host[0]] -= 1
    turn = np.cumsum(~near) - 1
    sender = np.where(near, host, owners[turn % owners.size])
    local, network = (_link_columns([getattr(cluster.hosts[h], kind) for h in sender]) for kind in ("local", "network"))
    return Routes(
        weights_s=np.repeat(arrival_s, sizes) + rank * np.repeat(copy_s, sizes),
        shared=shared,
        prefill_s=gathered_s + max(_copies_s(cluster, learner, prefill_tp, weight_bytes)),
        kv_link=2 * np.searchsorted(owners, sender) + near,
        kv_latency_s=np.where(near, local[0], network[0]),
        kv_byte_s=np.where(near, local[1], network[1]),
    )


def _copies_s(cluster: Cluster, learner: IntArray, tp: int, weight_bytes: float) -> list[float]:
    """Seconds in which each host of the learner copies the weights to its replicas of the prefill actor, one by one."""
    hosts, gpus = np.unique(cluster.host_of[learner], return_counts=True)
    copies = np.maximum(gpus // tp, 1).tolist()
    return [count * cluster.hosts[h].local.transfer_s(weight_bytes) for h, count in zip(hosts, copies, strict=True)]


def _link_columns(links: list[Link]) -> tuple[FloatArray, FloatArray]:
    return np.array([link.latency_s for link in links]), np.array([1.0 / link.bytes_per_s for link in links])


def gather_s(cluster: Cluster, owners: IntArray, weight_bytes: float) -> float:
    """Seconds in which the learner's hosts gather the weights from each other; 0 for a single host."""
    if owners.size == 1:
        return 0.0
    share_bytes = weight_bytes * (owners.size - 1) / owners.size
    return float(max(cluster.hosts[host].network.transfer_s(share_bytes) for host in owners))


def kv_s(routes: Routes, kv_bytes: FloatArray, position: IntArray) -> FloatArray:
    """float[actors]: end of each actor's KV transfer after prefill (L_kv of RLHFless §4.5).

    Actors of one or more candidates follow each other, each candidate from position 0 up. Each link serves its actors
    one after the other. The actor on the learner's own GPUs finds its KV there.
    """
    sent = routes.kv_latency_s[position] + kv_bytes * routes.kv_byte_s[position]
    sent[(position == 0) & routes.shared] = 0.0
    link = routes.kv_link[position]
    queue = (np.cumsum(position == 0) - 1) * (int(routes.kv_link.max()) + 1) + link
    order = np.argsort(queue, kind="stable")
    done = np.cumsum(sent[order])
    first = np.flatnonzero(np.diff(queue[order], prepend=-1))
    done -= np.repeat(done[first] - sent[order[first]], np.diff(first, append=order.size))
    arrived = np.empty_like(done)
    arrived[order] = done
    return arrived


def hiding_slack_s(
    prefill_s: float, weights_s: FloatArray, kv_s: FloatArray, decode_s: FloatArray, position: IntArray
) -> FloatArray:
    """float[candidates]: least (L_prefill + L_decode(1)) - (L_model(i) + L_kv(i) + L_decode(i)) over actors i >= 2.

    Actors of the candidates follow each other, each candidate from position 0 up. 0 for a single actor.
    """
    first = np.flatnonzero(position == 0)
    sizes = np.diff(first, append=position.size)
    slack = prefill_s + np.repeat(decode_s[first], sizes) - (weights_s[position] + kv_s + decode_s)
    slack[first] = np.inf
    least = np.minimum.reduceat(slack, first)
    return np.where(sizes > 1, least, 0.0)


def place(decode: tuple[tuple[int, ...], ...], learner: IntArray, algorithm: Algorithm, hosting: Hosting) -> Placement:
    """GPUs of every function: those of each decode actor are given.

    Preparation functions take turns on the learner's GPUs, which generation has left. Where everything is colocated,
    learner and preparation use all GPUs that are reserved: the actors', and as many more as the learner needs.
    """
    used = [gpu for actor in decode for gpu in actor]
    trainer = np.union1d(learner, used) if hosting == "colocated" else learner
    gpus = tuple(trainer.tolist())
    return Placement(learner=gpus, decode=decode, preparation=tuple((name, gpus) for name in PREPARATION[algorithm]))
