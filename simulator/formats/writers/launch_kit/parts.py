"""What a launch kit is made from: a job on a cluster, the hosts' names, and which GPU each rank gets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator.base.errors import Fault, PlanError
from simulator.base.schema import more_than_once
from simulator.base.units import counted
from simulator.formats.writers.plans import Job
from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.host import Host

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, order=True)
class GpuSlot:
    """A GPU: the index of its node among the hosts, and its local index in the cluster's numbering."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """hosts: a name a node. host: how a node looks inside, where a source states it. seats: the GPU of each rank."""

    job: Job
    cluster: Cluster
    hosts: tuple[str, ...]
    named: bool
    host: Host | None
    seats: tuple[GpuSlot, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        counts = [0] * self.num_nodes
        for slot in self.seats:
            counts[slot.node] += 1
        return max(counts)

    @property
    def in_blocks(self) -> bool:
        """Each node has its own block of consecutive ranks, in the order of the nodes: what torchrun can start."""
        each = self.per_node
        full = len(self.seats) == each * self.num_nodes
        return full and all(slot.node == rank // each for rank, slot in enumerate(self.seats))

    def cuda_index(self, gpu: int) -> int:
        """CUDA's number of a GPU under CUDA_DEVICE_ORDER=PCI_BUS_ID: its place among the bus ids."""
        ids = self.bus_ids
        return sorted(ids).index(ids[gpu]) if ids else gpu

    @property
    def bus_ids(self) -> tuple[str, ...]:
        """PCI bus ids of a node's GPUs, as the source states them; empty where it does not."""
        found = tuple(gpu.pci for gpu in self.host.gpus) if self.host is not None else ()
        return found if found and all(found) and len(set(found)) == len(found) else ()

    def mesh(self) -> Mesh:
        return Mesh(self.job.plan, self.cluster)


def make_kit(job: Job, cluster: Cluster, *, hosts: Sequence[str] = (), host: Host | None = None) -> Kit:
    """The kit of a job. Without seats ranks sit as the cluster has them.

    Raises PlanError with every fault: hosts that are too few or stand twice, a node that looks otherwise, ranks without
    a GPU of their own.
    """
    each = cluster.gpus_per_node
    alone = ("localhost",) if cluster.num_nodes == 1 else tuple(f"node{number}" for number in range(cluster.num_nodes))
    named = tuple(hosts) or alone
    seats = tuple(GpuSlot(*divmod(cluster.gpu_of(rank), each)) for rank in range(job.plan.num_devices))
    faults = _host_faults(named, cluster)
    if host is not None and len(host.gpus) != each:
        problem = f"{host.source} has {len(host.gpus)} GPUs, a node of {cluster.name} {each}"
        faults.append(Fault("--topology", problem, "the topology of one of the job's nodes"))
    PlanError.raise_for(faults)
    return Kit(job=job, cluster=cluster, hosts=named, named=bool(hosts), host=host, seats=seats)


def _host_faults(hosts: Sequence[str], cluster: Cluster) -> list[Fault]:
    place = "--hosts"
    faults = []
    if len(hosts) != cluster.num_nodes:
        problem = f"{counted(len(hosts), 'host')} for {counted(cluster.num_nodes, 'node')}"
        faults.append(Fault(place, problem, f"{counted(cluster.num_nodes, 'host')}, or --nodes {len(hosts)}"))
    if twice := sorted(more_than_once(hosts)):
        faults.append(Fault(place, f"{', '.join(twice[:3])} appears twice", "each host once"))
    if wrong := [host for host in hosts if _NAME.fullmatch(host) is None]:
        faults.append(Fault(place, f"{wrong[0]!r} is not a host's name", "letters, digits, dots and dashes"))
    return faults
