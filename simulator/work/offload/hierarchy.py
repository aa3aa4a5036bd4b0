"""The memory hierarchy of one GPU, fastest first, and where objects go if the hottest come first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.base.errors import ClusterError
from simulator.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Room for one rank, and how fast the rank's kernels get at it: bytes/s, one way."""

    name: str
    num_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """Something to keep: what a step reads and writes of it decides how hot it is."""

    name: str
    num_bytes: int
    read_bytes: int
    write_bytes: int

    @property
    def heat(self) -> float:
        """Times that a step touches each of its bytes."""
        return (self.read_bytes + self.write_bytes) / self.num_bytes


def hierarchy(cluster: Cluster, num_ranks: int) -> tuple[Tier, ...]:
    """HBM, idle peers over NVLink, the host, NVMe: one rank's part where `num_ranks` are busy.

    Peers are the GPUs of the node that no rank uses. What a node's ranks share, memory, drives and what these can
    deliver, is divided among them. Raises ClusterError where the cluster has no host.
    """
    tier = cluster.host_tier
    if tier is None:
        raise ClusterError.at(cluster.name, "has no [host], so nothing below HBM")
    device = cluster.device
    busy = min(num_ranks, cluster.gpus_per_node)
    own = device.usable_bytes - device.hypervisor_bytes
    unused = (cluster.gpus_per_node - busy) * own if cluster.intra.shape != "pcie" else 0
    idle = (unused + cluster.lent_bytes) // busy
    memory, link = tier.memory_bytes_per_s / busy, cluster.intra.bytes_per_s
    read, write = min(tier.h2d_bytes_per_s, memory), min(tier.d2h_bytes_per_s, memory)
    swap = (min(read, tier.nvme_read_bytes_per_s / busy), min(write, tier.nvme_write_bytes_per_s / busy))
    hbm = device.memory_bytes_per_s
    return (
        Tier(name="hbm", num_bytes=own, read_bytes_per_s=hbm, write_bytes_per_s=hbm),
        Tier(name="peer", num_bytes=idle, read_bytes_per_s=link, write_bytes_per_s=link),
        Tier(name="host", num_bytes=tier.memory_bytes // busy, read_bytes_per_s=read, write_bytes_per_s=write),
        Tier(name="nvme", num_bytes=tier.nvme_bytes // busy, read_bytes_per_s=swap[0], write_bytes_per_s=swap[1]),
    )


def place(objects: Iterable[Object], tiers: Sequence[Tier]) -> tuple[dict[str, dict[str, int]], float]:
    """(object -> tier -> bytes, seconds a step spends on transfers): the hottest objects take the fastest tiers.

    The fastest tier costs nothing: its traffic is the kernels' own. Objects may be split; transfers come one after
    another, so the seconds are what a schedule without overlap pays. Raises ClusterError where the last tier is full.
    """
    room = [tier.num_bytes for tier in tiers]
    found: dict[str, dict[str, int]] = {}
    seconds = 0.0
    for item in sorted(objects, key=lambda one: -one.heat):
        left = item.num_bytes
        parts = found.setdefault(item.name, {})
        for index, tier in enumerate(tiers):
            size = min(left, room[index])
            if size == 0:
                continue
            room[index] -= size
            left -= size
            parts[tier.name] = size
            if index:
                moved = size / item.num_bytes
                seconds += moved * (item.read_bytes / tier.read_bytes_per_s + item.write_bytes / tier.write_bytes_per_s)
        if left:
            problem = f"{item.name}: {left} bytes are left over when every tier is full"
            raise ClusterError.at("memory hierarchy", problem, "more nodes, or larger tiers")
    return found, seconds
