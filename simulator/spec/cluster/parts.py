"""The parts of a cluster file: the links inside a node, the node's NICs, and the fabric between nodes."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from simulator.base.schema import Strict
from simulator.base.units import BytesPerS, Seconds
from simulator.spec.cluster.measured import Bandwidth, read_measured

HostKind = Literal["pcie3", "pcie4", "pcie5", "c2c"]
IntraKind = Literal["nvlink2", "nvlink3", "nvlink4", "nvlink5", "xgmi", "pcie3", "pcie4", "pcie5", "loopback"]
Shape = Literal["switch", "mesh", "cube_mesh", "pairs", "pcie"]
CpuVendor = Literal["intel", "amd", "arm", "power", "unknown"]
P2pLevel = Literal["none", "PIX", "PXB", "PHB", "NODE", "SYS"]
Gpus = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
MAX_NODES: Final = 65536

InterKind = Literal["infiniband", "roce", "efa", "ethernet", "tcpx", "tcpxo", "omnipath", "slingshot"]


class Edge(Strict):
    """A connection between two GPUs of a node, by local index; both ways unless `both_ways` is false."""

    src: int = Field(ge=0)
    dst: int = Field(ge=0)
    bytes_per_s: BytesPerS = Field(gt=0)
    both_ways: bool = True


class Intra(Strict):
    """What joins the GPUs of a node.

    bytes_per_s: one way, all links of one GPU together.
    shape: switch: each GPU reaches each other at full speed; mesh: a cable for each pair (equal shares, unless `edges`
           says otherwise); cube_mesh, pairs: `edges` says who is joined to whom; pcie: through the host only.
    """

    kind: IntraKind
    shape: Shape
    bytes_per_s: BytesPerS = Field(gt=0)
    latency_s: Seconds = Field(ge=0, default=0.0)
    edges: Annotated[tuple[Edge, ...], Field(strict=False)] = ()


class Host(Strict):
    """A GPU's link to its host, one way: the route to CPU memory and to the NICs."""

    kind: HostKind
    bytes_per_s: BytesPerS = Field(gt=0)
    latency_s: Seconds = Field(ge=0, default=0.0)


class Pcie(Strict):
    """The tree between the GPUs of a node and its CPUs, by local index, and what NCCL does over it.

    sockets: GPUs of each CPU (NUMA domain); none: all on one. switches: GPUs behind one PCIe switch; the others have a
    root port each. switch_bytes_per_s: a switch's own link to its CPU, one GPU's unless stated. socket_bytes_per_s: one
    CPU to another; the usual one of the host link's generation unless stated. host_bytes_per_s: all that GPUs exchange
    through host memory, together; half of the memory's rate unless stated (each byte is written and read).
    cpu: its vendor. p2p: the furthest path on which GPUs reach each other directly; NCCL's rule unless stated.
    """

    cpu: CpuVendor = "unknown"
    sockets: Annotated[tuple[Gpus, ...], Field(strict=False)] = ()
    switches: Annotated[tuple[Gpus, ...], Field(strict=False)] = ()
    switch_bytes_per_s: BytesPerS | None = Field(gt=0, default=None)
    socket_bytes_per_s: BytesPerS | None = Field(gt=0, default=None)
    host_bytes_per_s: BytesPerS | None = Field(gt=0, default=None)
    p2p: P2pLevel | None = None


class NicPlace(Strict):
    """Where a NIC sits: behind the PCIe switch of some `gpus`, by local index, or on a `socket`, beside no GPU."""

    gpus: Gpus = ()
    socket: int | None = Field(ge=0, default=None)


class Inter(Strict):
    """A node's network: `num_nics` NICs of `nic_bytes_per_s` one way each.

    latency_s: one message, NIC to NIC. rdma: the NICs read and write GPU memory without the host's help.
    cards: where each NIC sits; none: spread evenly beside the GPUs.
    """

    kind: InterKind
    num_nics: int = Field(gt=0, le=1024)
    nic_bytes_per_s: BytesPerS = Field(gt=0)
    latency_s: Seconds = Field(ge=0, default=0.0)
    rdma: bool = True
    cards: Annotated[tuple[NicPlace, ...], Field(strict=False)] = ()


class FabricLevel(Strict):
    """Switches above the leaves: nodes below one of them, and its downlinks over its uplinks."""

    nodes: int = Field(ge=1, le=MAX_NODES)
    oversubscription: float = Field(ge=1, default=1.0)


def _measured(given: object, info: ValidationInfo) -> object:
    """The numbers of any form. Where the cluster's own reader names the faults (structure.py), only the good ones."""
    found, faults = read_measured(given, "measured")
    if faults and not (info.context or {}).get("structure_checked"):
        raise ValueError("; ".join(map(str, faults)))
    return found


class Fabric(Strict):
    """What joins the nodes: leaf switches and a spine, with levels between them where there are any.

    rail_optimised: the n-th NICs of `nodes_per_leaf` nodes share a leaf; fat_tree: whole nodes do.
    oversubscription: a leaf's downlinks over its uplinks; 1 = no loss across the spine.
    nodes_used_per_leaf: how many nodes of each leaf are this cluster's; all unless stated. above: levels, lowest first.
    measured: bus bandwidths that the cluster was seen to give, inside its nodes (nodes = 1) and between them; collectives
    follow them. speed: a what-if: bytes between nodes flow as many times as fast as they otherwise would; wait: what calls between
    nodes take beside their bytes is so many times as long.
    confirmed: published sweeps, or runs over several nodes that calibrated a stack, found such a machine's network as its data sheet
    says; else, and where nothing is `measured`, intervals know the network by its sheet alone.
    in_network: the switches sum what crosses them (SHARP), and NCCL is set up for it; false: they cannot; unless stated,
    InfiniBand's can where NCCL_COLLNET_ENABLE asks for it.
    nic_collectives: NICs with processors of their own (DPUs) run what groups of one GPU a node exchange, and leave the SMs to compute; unless
    stated, none do.
    nic_compression: ratio to which NICs compress what they send; it reaches and leaves them whole; unless stated, they do not.
    call_rank_s: what the host waits for each rank of a group on another node before it issues a collective, and in parts for those of
    its own, as torch's checks of every call do (TORCH_DISTRIBUTED_DEBUG=DETAIL, some 0.3 ms); unless stated, what `measured` shows.
    """

    kind: Literal["rail_optimised", "fat_tree"] = "rail_optimised"
    oversubscription: float = Field(ge=1, default=1.0)
    nodes_per_leaf: int = Field(ge=1, default=32)
    nodes_used_per_leaf: int | None = Field(ge=1, default=None)
    above: Annotated[tuple[FabricLevel, ...], Field(strict=False)] = ()
    measured: Annotated[tuple[Bandwidth, ...], BeforeValidator(_measured)] = ()
    confirmed: bool = False
    speed: float = Field(ge=1e-6, le=1e6, default=1.0)
    wait: float = Field(ge=1e-6, le=1e6, default=1.0)
    in_network: bool | None = None
    nic_collectives: bool | None = None
    nic_compression: float | None = Field(ge=1, le=100, default=None)
    call_rank_s: Seconds | None = Field(ge=0, le=1, default=None)

    @property
    def used_per_leaf(self) -> int:
        """This cluster's nodes below one leaf."""
        return self.nodes_used_per_leaf or self.nodes_per_leaf

    @property
    def levels(self) -> tuple[tuple[int, int, float], ...]:
        """(this cluster's nodes, all nodes) below one switch of each level, and the taper from there to the nodes."""
        found, taper = [(self.used_per_leaf, self.nodes_per_leaf, self.oversubscription)], self.oversubscription
        for level in self.above:
            taper *= level.oversubscription
            used = max(1, self.used_per_leaf * level.nodes // self.nodes_per_leaf)
            found.append((used, level.nodes, taper))
        return tuple(found)
