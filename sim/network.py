"""The cluster's links, with contention.

A link serves one transfer after the other at its full bandwidth, in the order of asking; so does the planner believe,
except that it does not queue KV behind weights. A transfer inside a host occupies that host's fabric (NVLink or PCIe);
one between hosts occupies the sender's network, all its cards together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlhfless.types.cluster import BROADCAST_CHUNK_BYTES, Cluster, Link


@dataclass(slots=True, kw_only=True)
class Links:
    """Every link of a cluster during one step."""

    cluster: Cluster
    """Shape and bandwidths."""
    efficiency: float = 1.0
    """Share of the rated bandwidth that transfers reach."""
    _free_s: dict[tuple[bool, int], float] = field(default_factory=dict)

    def _link(self, source: int, target: int) -> tuple[Link, tuple[bool, int]]:
        host = self.cluster.hosts[source]
        return (host.local, (True, source)) if source == target else (host.network, (False, source))

    def quote(self, source: int, target: int, size_bytes: float, at_s: float) -> float:
        """When `size_bytes`, ready at `at_s` on host `source`, would have arrived on host `target`."""
        link, key = self._link(source, target)
        sent_s = max(at_s, self._free_s.get(key, at_s)) + size_bytes / (link.bytes_per_s * self.efficiency)
        return sent_s + link.latency_s

    def send(self, source: int, target: int, size_bytes: float, at_s: float) -> float:
        """The same, and the link is busy until then."""
        arrival_s = self.quote(source, target, size_bytes, at_s)
        link, key = self._link(source, target)
        self._free_s[key] = arrival_s - link.latency_s
        return arrival_s

    def gather(self, owners: Sequence[int], size_bytes: float, at_s: float) -> float:
        """Bring the shards of `owners` together on each of them, around a ring; when all is there."""
        if len(owners) == 1:
            return at_s
        share_bytes = size_bytes * (len(owners) - 1) / len(owners)
        ring = zip(owners, [*owners[1:], owners[0]], strict=True)
        return max(self.send(source, target, share_bytes, at_s) for source, target in ring)

    def broadcast(
        self, owners: Sequence[int], hosts: Iterable[int], size_bytes: float, at_s: float
    ) -> dict[int, float]:
        """Bring a copy to each of `hosts` by a pipelined chain from the first of `owners`; host -> arrival.

        Each host forwards chunks as they come, so that host number h has everything after one full transfer and h
        hops of one chunk. Owners have it at once.
        """
        arrivals = dict.fromkeys(owners, at_s)
        source, begun_s = owners[0], at_s
        for host in hosts:
            if host in arrivals:
                continue
            arrivals[host] = self.send(source, host, size_bytes, begun_s)
            link = self.cluster.hosts[source].network
            chunk_s = min(size_bytes, BROADCAST_CHUNK_BYTES) / (link.bytes_per_s * self.efficiency) + link.latency_s
            source, begun_s = host, arrivals[host] - size_bytes / (link.bytes_per_s * self.efficiency) + chunk_s
        return arrivals
