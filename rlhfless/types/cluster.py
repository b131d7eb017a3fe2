"""The cluster: GPU types, hosts, links, and what is free of it at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.types.arrays import IntArray, ints
from rlhfless.units import GB, GBIT, MIB, TERA


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU type, from its data sheet."""

    name: str
    """Key of the catalogue, spelt as aiconfigurator spells its systems."""
    memory_bytes: float
    """Device memory that its driver reports, which is less than the size in its name."""
    memory_bytes_per_s: float
    """Peak memory bandwidth."""
    flops: float
    """Peak dense bf16 tensor-core FLOP/s, without sparsity."""
    usd_per_hour: float
    """A list price for one GPU for one hour; only a default, every command lets the user set it."""
    local_bytes_per_s: float
    """One-way bandwidth between two GPUs of one host (NVLink, or PCIe where there is none)."""
    network_bytes_per_s: float
    """One-way network bandwidth of a host that carries eight of these."""
    source: str
    """Where the figures come from."""


def _gpu(
    name: str, mib: float, gb_per_s: float, tflops: float, usd: float, local: float, gbit: float, source: str
) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=mib * MIB,
        memory_bytes_per_s=gb_per_s * GB,
        flops=tflops * TERA,
        usd_per_hour=usd,
        local_bytes_per_s=local * GB,
        network_bytes_per_s=gbit * GBIT,
        source=source,
    )


_AIC = "system file of aiconfigurator-core 0.12.0"
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            # name, memory MiB, GB/s, dense bf16 TFLOP/s, list $/h (chosen, 2026), local GB/s, host network Gbit/s
            _gpu("h100_sxm", 81559, 3350, 989, 3.00, 450, 3200,
                 "NVIDIA H100 data sheet, SXM: 3.35 TB/s, 1979 TFLOP/s with sparsity, NVLink 900 GB/s both ways; DGX "
                 "H100 data sheet: 8 x 400 Gbit/s"),
            _gpu("h200_sxm", 143771, 4800, 989, 3.80, 450, 3200,
                 "NVIDIA H200 data sheet, SXM: 4.8 TB/s, 1979 TFLOP/s with sparsity, NVLink 900 GB/s both ways; DGX "
                 "H200 data sheet: 8 x 400 Gbit/s"),
            _gpu("a100_sxm", 81920, 2039, 312, 1.80, 300, 1600,
                 "NVIDIA A100 data sheet, 80GB SXM: 2039 GB/s, 312 TFLOP/s, NVLink 600 GB/s both ways; DGX A100 data "
                 "sheet: 8 x 200 Gbit/s"),
            _gpu("b200_sxm", 171661, 8000, 2250, 5.50, 900, 3200,
                 "NVIDIA DGX B200 data sheet, of 8: 1,440 GB, 64 TB/s, 36 PFLOP/s with sparsity, NVLink 14.4 TB/s both "
                 "ways, 8 x 400 Gbit/s"),
            _gpu("b300_sxm", 275040, 7750, 2250, 7.00, 900, 6400, f"{_AIC}; 8 x 800 Gbit/s"),
            _gpu("gb200", 189471, 8000, 2500, 6.50, 900, 57600, f"{_AIC}; hosts of one rack, over NVLink"),
            _gpu("gb300", 284208, 8000, 2500, 8.00, 900, 57600, f"{_AIC}; hosts of one rack, over NVLink"),
            _gpu("rtx_pro_6000_server", 97887, 1792, 467.8, 2.00, 64, 3200, f"{_AIC}; PCIe gen 5 x16, 8 x 400 Gbit/s"),
            _gpu("b60", 24576, 456, 98.3, 0.60, 28.4, 3200, f"{_AIC}, of Intel's Arc Pro B60; PCIe, 8 x 400 Gbit/s"),
            _gpu("l40s", 46068, 864, 362, 1.90, 32, 400,
                 "NVIDIA L40S data sheet: 864 GB/s, 362.05 TFLOP/s, PCIe gen 4 x16 64 GB/s both ways, no NVLink; AWS "
                 "g6e.48xlarge: 400 Gbit/s"),
            _gpu("l4", 23034, 300, 121, 0.80, 32, 100,
                 "NVIDIA L4 data sheet: 300 GB/s, 242 TFLOP/s with sparsity, PCIe gen 4 x16 64 GB/s both ways, no "
                 "NVLink; AWS g6.48xlarge: 100 Gbit/s"),
            _gpu("cpu", 4096, 20, 0.05, 0.05, 10, 10, "chosen: a core of a server, for testbeds that have no GPU"),
            _gpu("a10g", 23028, 600, 70, 1.00, 32, 100,
                 "NVIDIA A10G data sheet: 600 GB/s, 70 TFLOP/s, PCIe gen 4 x16 64 GB/s both ways, no NVLink; AWS "
                 "g5.48xlarge: 100 Gbit/s"),
        )
    }
)  # fmt: skip
"""GPU catalogue. Bandwidth and FLOP/s are the makers' figures; prices are chosen defaults. Memory is what nvidia-smi
prints (H100, A100, L40S, L4, A10G: github.com/modal-labs/modal-client/pull/2797; H200: read off one; B300, GB200,
GB300, RTX PRO 6000: aiconfigurator); B200's is the 180 GB of its data sheet and B60's the 24 GiB of its name, not read
off one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that serves one transfer after the other at its full bandwidth."""

    bytes_per_s: float
    """Bandwidth in one direction that a transfer sees."""
    latency_s: float
    """Time from sending to the first byte's arrival."""

    def transfer_s(self, size_bytes: float) -> float:
        """Seconds that `size_bytes` occupy an idle link, latency included."""
        return self.latency_s + size_bytes / self.bytes_per_s


BROADCAST_CHUNK_BYTES = float(64 << 20)
"""Piece in which a host passes weights on while it receives them (chosen: large enough to fill a link, small beside
weights)."""
LOCAL_LATENCY_S = 1e-5
"""Start of a transfer between GPUs of one host (chosen: the order of an NCCL send's launch)."""
NETWORK_LATENCY_S = 5e-5
"""Start of a transfer between hosts (chosen: launch plus a few microseconds of RDMA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of the cluster."""

    gpus: int
    """GPUs that it carries."""
    local: Link
    """Between two of its GPUs."""
    network: Link
    """From this host to any other, all its cards together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts that all carry the same GPU type; GPUs are numbered host by host from 0."""

    gpu: Gpu
    """The GPU type."""
    hosts: tuple[Host, ...]
    """The machines, in the order of their GPU numbers."""
    host_of: IntArray = field(init=False, repr=False, compare=False)
    """int[gpus]: the host that carries each GPU."""

    def __post_init__(self) -> None:
        sizes = [host.gpus for host in self.hosts]
        if not sizes or min(sizes) < 1:
            raise InputError(f"cluster: every host needs at least one GPU, got hosts of {sizes[:5]}")
        object.__setattr__(self, "host_of", ints(np.repeat(np.arange(len(sizes)), sizes)))

    @classmethod
    def uniform(cls, gpu: str, gpus: int, gpus_per_host: int = 8) -> "Cluster":
        """`gpus` GPUs on hosts of `gpus_per_host`; a last host carries the rest.

        Raises InputError for an unknown GPU or a count below 1.
        """
        if gpu not in GPUS:
            raise InputError(f"unknown GPU {gpu!r}: known are {', '.join(GPUS)}")
        if gpus < 1 or gpus_per_host < 1:
            raise InputError(f"cluster of {gpus} GPUs, {gpus_per_host} per host: both must be at least 1")
        kind = GPUS[gpu]
        local = Link(bytes_per_s=kind.local_bytes_per_s, latency_s=LOCAL_LATENCY_S)
        network = Link(bytes_per_s=kind.network_bytes_per_s, latency_s=NETWORK_LATENCY_S)
        full, rest = divmod(gpus, gpus_per_host)
        sizes = [gpus_per_host] * full + ([rest] if rest else [])
        return cls(gpu=kind, hosts=tuple(Host(gpus=size, local=local, network=network) for size in sizes))

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return int(self.host_of.size)

    def require(self, gpus: int, what: str) -> None:
        """Raise InfeasibleError unless the cluster has `gpus` GPUs for `what`."""
        if gpus > self.gpus:
            raise InfeasibleError(f"{what} needs {gpus} GPUs, the cluster has {self.gpus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """What an executor says of its cluster when a step is about to be planned."""

    time_s: float
    """Time since the run began."""
    free_gpus: IntArray
    """int[free]: numbers of the GPUs that a plan may use, ascending."""
