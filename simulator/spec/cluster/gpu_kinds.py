"""The kinds of GPUs that a cluster's exceptions make.

A cluster stays a description of equal nodes with a few exceptions, so that nothing here grows with the cluster: kinds of
GPUs are few, and only the GPUs that an exception names are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from simulator.base.units import format_bytes
from simulator.spec.cluster.cluster import Cluster
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.exceptions import OF_A_KIND, OLDEST_FIRST, Deviation, numbers_of, shown
from simulator.spec.cluster.hosts import usual_links
from simulator.spec.cluster.measured import scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """A GPU and its connections. device: its name in `GpuKinds.devices`. free_bytes: 0 if all its memory is free."""

    device: str
    speed: float
    intra_kind: str
    intra_bytes_per_s: float
    num_nics: int
    nic_bytes_per_s: float
    free_bytes: int = 0

    @property
    def holder(self) -> str:
        """The device, and how much of it is free where that is not all: GPUs of one holder hold equally much."""
        return f"{self.device} with {format_bytes(self.free_bytes)} free" if self.free_bytes else self.device

    def unlike(self, usual: GpuKind) -> str:
        """The difference from the usual kind, as text; "all others" for the usual one."""
        differing = [name for name in OF_A_KIND if getattr(self, name) != getattr(usual, name)]
        return ", ".join(f"{name} = {shown(name, getattr(self, name))}" for name in differing) or "all others"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKinds:
    """The kinds of GPUs of a cluster, its own first, and which ranks are of another."""

    kinds: tuple[GpuKind, ...]
    devices: Mapping[str, Device]
    of_rank: Mapping[int, int]  # of the others: rank -> index in kinds

    @classmethod
    def of(cls, cluster: Cluster) -> GpuKinds:
        """Every kind that the cluster's exceptions make."""
        inter, intra = cluster.inter, cluster.intra
        usual = GpuKind(
            device=cluster.device.name,
            speed=1.0,
            intra_kind=intra.kind,
            intra_bytes_per_s=intra.bytes_per_s,
            num_nics=inter.num_nics if inter else 0,
            nic_bytes_per_s=inter.nic_bytes_per_s if inter else 0.0,
        )
        found: dict[int, GpuKind] = {}
        for one in cluster.exceptions:
            for gpu in _gpus(one, cluster.gpus_per_node):
                found[gpu] = replace(found.get(gpu, usual), **_changes(one, cluster))
        numbers = {usual: 0}
        with_rank_mapping = {cluster.rank_on(gpu): kind for gpu, kind in found.items()}
        of_rank = {rank: numbers.setdefault(kind, len(numbers)) for rank, kind in sorted(with_rank_mapping.items())}
        devices = {one.device.name: one.device for one in cluster.exceptions if one.device is not None}
        return cls(
            kinds=tuple(numbers),
            devices={cluster.device.name: cluster.device} | devices,
            of_rank={rank: number for rank, number in of_rank.items() if number},
        )

    def number(self, rank: int) -> int:
        """Which kind a rank's GPU is of."""
        return self.of_rank.get(rank, 0)

    def memory_of(self, kind: GpuKind) -> Device:
        """The device of a kind, with no more memory than is free."""
        device = self.devices[kind.device]
        taken = max(device.hypervisor_bytes, device.usable_bytes - kind.free_bytes) if kind.free_bytes else 0
        return device.model_copy(update={"hypervisor_bytes": taken}) if taken else device

    def slowest(self, cluster: Cluster, members: Iterable[int], own: int) -> Cluster:
        """A uniform cluster on which a group of these kinds runs as it does here, for one of kind `own`.

        NCCL takes the least of all ranks for every property that it chooses and builds rings by (src/init.cc,
        initTransportsRank), and a ring runs at the pace of its slowest link.
        """
        kinds = [self.kinds[number] for number in sorted(set(members))]
        near = min(kinds, key=lambda kind: kind.intra_bytes_per_s)
        oldest = min(
            (self.devices[kind.device].architecture for kind in kinds),
            key=lambda name: OLDEST_FIRST.index(name) if name in OLDEST_FIRST else -1,
        )
        far = min(kinds, key=lambda kind: kind.num_nics * kind.nic_bytes_per_s)
        device = self.devices[self.kinds[own].device].model_copy(update={"architecture": oldest})
        intra = {"kind": near.intra_kind, "bytes_per_s": near.intra_bytes_per_s}
        changed: dict[str, Any] = {"device": device, "exceptions": (), "intra": cluster.intra.model_copy(update=intra)}
        if cluster.inter is not None:
            nics = {"num_nics": far.num_nics, "nic_bytes_per_s": far.nic_bytes_per_s}
            changed["inter"] = cluster.inter.model_copy(update=nics)
        if cluster.fabric.measured:  # of the usual nodes: slower links give as much less
            inside = near.intra_bytes_per_s / cluster.intra.bytes_per_s
            between = far.num_nics * far.nic_bytes_per_s / cluster.node_bytes_per_s if cluster.inter else 1.0
            rate = partial(scaled, near=min(1.0, inside), far=min(1.0, between))
            measured = tuple(
                rate(one, domain=cluster.nvlink_domain_size // cluster.gpus_per_node) for one in cluster.fabric.measured
            )
            changed["fabric"] = cluster.fabric.model_copy(update={"measured": measured})
        return cluster.model_copy(update=changed)


def _changes(one: Deviation, cluster: Cluster) -> dict[str, Any]:
    """The fields of a kind that an exception states; another device brings the links of its usual machine."""
    changes = {name: getattr(one, name) for name in OF_A_KIND if getattr(one, name) is not None}
    if one.device is not None:
        changes["device"] = one.device.name
        links = usual_links(one.device.name)
        if cluster.intra.shape == "switch" and links is not None and links != usual_links(cluster.device.name):
            changes = {"intra_kind": links[0], "intra_bytes_per_s": links[1]} | changes
    return changes


def _gpus(one: Deviation, gpus_per_node: int) -> Iterator[int]:
    gpus = numbers_of(one.gpus) if one.gpus is not None else range(gpus_per_node)
    return (node * gpus_per_node + gpu for node in numbers_of(one.nodes) for gpu in gpus)
