"""Topology: what a cluster is made of, and what follows from that alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from simulator.base.schema import Strict
from simulator.spec.cluster.device import Device
from simulator.spec.cluster.exceptions import Deviation, device_of
from simulator.spec.cluster.parts import MAX_NODES, Fabric, Host, Inter, Intra, Pcie
from simulator.spec.cluster.rank_mapping import gpu_at, rank_on
from simulator.spec.cluster.tiers import HostTier


class Topology(Strict):
    """`num_nodes` equal nodes of `gpus_per_node` equal devices. Rank r is GPU r mod gpus_per_node of node r div it.

    seats: the rank mapping, if rank r is not GPU r: the GPUs of one node's ranks (all nodes alike) or of all ranks.

    nvlink_domain_size: GPUs (consecutive ranks) that one NVLink switch joins; gpus_per_node unless stated.
    idle_gpus: of each node beside gpus_per_node, on the same NVLink: they compute nothing and lend their memory.
    tier: a node's memory and drives below HBM; what is left out is the usual host's behind a link of its kind.
    host_factor: time that Python takes on its CPUs over DGX H100's Xeon; not stated: the device's own.
    exceptions: nodes and GPUs that differ from the rest.
    sources: where each number stands.
    """

    name: str
    device: Annotated[Device, BeforeValidator(device_of)]
    num_nodes: int = Field(ge=1, le=MAX_NODES, default=1)
    gpus_per_node: int = Field(ge=1, le=1024)
    nvlink_domain_size: int = Field(ge=1)
    idle_gpus: int = Field(ge=0, le=1024, default=0)
    intra: Intra
    host: Host | None = None
    pcie: Pcie | None = None
    tier: HostTier | None = None
    host_factor: float | None = Field(gt=0, le=100, default=None)
    inter: Inter | None = None
    fabric: Fabric = Fabric()
    exceptions: Annotated[tuple[Deviation, ...], Field(strict=False)] = ()
    seats: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    sources: dict[str, str] = {}

    def gpu_of(self, rank: int) -> int:
        """The GPU of a rank, counted over the nodes."""
        return gpu_at(self.seats, rank)

    def rank_on(self, gpu: int) -> int:
        """The rank on a GPU, counted over the nodes."""
        return rank_on(self.seats, gpu)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def node_bytes_per_s(self) -> float:
        """What all NICs of a node send together, one way; 0 without a network."""
        return self.inter.num_nics * self.inter.nic_bytes_per_s if self.inter else 0.0

    @property
    def host_link(self) -> Host | None:
        """A GPU's link to its host: the stated one, or the PCIe that joins the GPUs."""
        if self.host is None and self.intra.shape == "pcie":
            return Host(kind=self.intra.kind, bytes_per_s=self.intra.bytes_per_s, latency_s=self.intra.latency_s)  # type: ignore[arg-type]
        return self.host

    @property
    def host_tier(self) -> HostTier | None:
        """What lies below HBM: the stated tier, or the usual one behind the host link, at most as fast as that link."""
        link = self.host_link
        tier = self.tier or (HostTier.of_kind(link.kind) if link is not None else None)
        return tier if tier is None or link is None else tier.capped(link.bytes_per_s)
