"""One call as the cost model sees it: which links, which ranks of them, how NCCL is set up, and by which way bytes go."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from simulator.parallel.mesh import GroupShape
from simulator.spec.calibration.collective_curves import Transport, family_of
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import PATH_TYPES, NicPaths, NicRules, PathType, Pattern, reached
from simulator.spec.software.nccl import Nccl, efa
from simulator.work.collectives.ports import patterns_of, port_of, through_memory
from simulator.work.collectives.volumes import Kind

# NCCL's levels as the wiring has them: over PCIe, NVLink levels leave nothing
_PEER_LEVELS = {
    **dict.fromkeys(("LOC", "NVL", "NVB", "C2C"), "none"),
    "PIX": "PIX",
    "PXB": "PXB",
    "P2C": "PXB",
    "PXN": "PXB",
    "PHB": "PHB",
    "SYS": "SYS",
}
# The same for GPUDirect RDMA: how far a NIC may be from a GPU whose memory it reads and writes; below PIX, never
_NIC_LEVELS: dict[str, PathType | None] = {
    **dict.fromkeys(("LOC", "NVL", "NVB", "C2C"), None),
    "PIX": "PIX",
    "PXB": "PIX",
    "P2C": "P2C",
    "PXN": "P2C",
    "PHB": "PHB",
    "SYS": "SYS",
}
_PATTERNS: dict[str, Pattern] = {"all_to_all": "all_to_all", "send_recv": "send"}
_PXN_SINCE = (2, 12)
# generations whose memory NCCL lets NICs read without NVLink too
_READS_FROM = ("ampere", "ada", "hopper", "blackwell")
_FAR_LL128_FROM = ("hopper", "blackwell")  # NCCL sends LL128 by PXN and C2C from here on
_TWO_SOCKETS_FROM = 8  # GPUs of a PCIe node from which it has two sockets, half of the GPUs on each
_TCP = ("ethernet", "slingshot")  # kinds that NCCL reaches over TCP unless NICs or a plugin do RDMA
# Network software that cannot write GPU memory from the NIC, or NICs beyond the GPUs' switches as far as published
# machines go (ALCF Polaris and Sirius: NCCL_NET_GDR_LEVEL=PHB is needed): NCCL keeps LL128 inside the node there.
_FAR_NICS = ("sockets", "slingshot")


@dataclass(frozen=True, slots=True)
class Stated:
    """A measured call: the collective, its bytes and seconds, who took part, and the links as they saw them."""

    kind: Kind
    size_bytes: int
    time_s: float
    place: Placement
    links: Links


@dataclass(frozen=True, slots=True)
class Links:
    """Numbers of a cluster that costs use, hashable: part of the memo's key.

    port_link, port_kind, port_bytes_per_s, detour: the port that a group sees (ports.Port). in_memory: its bytes pass host
    memory. host_bytes_per_s: a GPU's link to the host. islands: GPUs that share one NVLink domain. rdma: NICs read and
    write GPU memory (topology.Inter.rdma). nics: what the group gets of its node's NICs by where they sit and what NCCL
    may do; None where each GPU has its even share. levels: of switches (topology.Fabric.levels). on_rails: the n-th NICs of all nodes share leaves of their own.
    amd: the host's CPUs are AMD's.
    off_rail: part of the group's traffic that changes rails whatever NCCL does, as nodes are cabled otherwise.
    stated: what the cluster was seen to give in collectives of the call's kind (stated.py). network_speed: Fabric.speed, times
    what NICs gain that compress. network_wait: Fabric.wait.
    """

    architecture: str
    port_kind: str
    port_bytes_per_s: float
    port_link: str
    detour: Fraction
    in_memory: bool
    host_bytes_per_s: float
    network_kind: str
    nic_bytes_per_s: float
    num_nics: int
    levels: tuple[tuple[int, int, float], ...]
    gpus_per_node: int
    islands: int
    rdma: bool = True
    nics: NicPaths | None = None
    on_rails: bool = False
    amd: bool = False
    off_rail: float = 0.0
    stated: tuple[Stated, ...] = ()
    network_speed: float = 1.0
    network_wait: float = 1.0
    in_network: bool | None = None

    @classmethod
    def of(
        cls, cluster: Cluster, shape: GroupShape | None = None, kind: str = "all_reduce", nccl: Nccl | None = None
    ) -> Links:
        """The links of `cluster` as `kind` in a group sees them; without a group, as one GPU does.

        Raises ClusterError where nodes differ: `spec.cluster.gpu_kinds.GpuKinds` makes clusters of equal nodes of them.
        """
        cluster.must_be_even("the price of a collective")
        port, network, fabric = port_of(cluster, shape, kind), cluster.inter, cluster.fabric
        return cls(
            cluster.device.architecture,
            port.kind,
            port.bytes_per_s,
            port.link,
            port.detour,
            shape is not None and through_memory(cluster, shape, kind) > 0,
            cluster.host.bytes_per_s if cluster.host else cluster.intra.bytes_per_s,
            network.kind if network else "",
            network.nic_bytes_per_s if network else 0.0,
            network.num_nics if network else 0,
            fabric.levels,
            cluster.gpus_per_node,
            max(cluster.nvlink_domain_size, cluster.gpus_per_node),
            network.rdma if network else True,
            None if shape is None else nic_paths(cluster, shape, kind, nccl or Nccl()),
            fabric.kind == "rail_optimised",
            _amd(cluster),
            0.0 if shape is None else shape.off_rail,
            network_speed=fabric.speed * _compression(cluster),
            network_wait=fabric.wait,
            in_network=fabric.in_network,
        )


def _compression(cluster: Cluster) -> float:
    """How many times as fast bytes leave where NICs compress them: at most as fast as PCIe brings them whole."""
    ratio, network, link = cluster.fabric.nic_compression, cluster.inter, cluster.host_link
    if ratio is None or network is None:
        return 1.0
    brought = cluster.gpus_per_node * link.bytes_per_s / cluster.node_bytes_per_s if link else ratio
    return max(1.0, min(ratio, brought))


def _amd(cluster: Cluster) -> bool:
    """As the cluster file or the cloud's instance says; else as most machines of the GPU have it: A100 with AMD's."""
    inter, stated = cluster.inter, cluster.pcie.cpu if cluster.pcie else "unknown"
    if stated != "unknown":
        return stated == "amd"
    if inter is not None and inter.kind == "efa":
        return efa.instance_of(cluster.device.architecture, inter.num_nics) in efa.AMD_HOSTS
    return cluster.device.architecture == "ampere"


@dataclass(frozen=True, slots=True)
class Placement:
    """A group in units that matter: ranks, the NVLink domains they lie in, and how many GPUs of each are busy.

    node_stride: nodes from one that the group touches to the next; others' groups lie between them.
    """

    num_ranks: int
    num_domains: int
    busy_per_domain: int
    node_stride: int = 1

    @classmethod
    def of(cls, shape: GroupShape, links: Links) -> Placement:
        """`shape` on `links`; a rack-wide NVLink domain is one place whatever its trays are called."""
        trays = max(1, links.islands // links.gpus_per_node)
        if shape.num_nodes == 1 or (trays > 1 and not shape.spans_domain):
            domains = 1
        else:
            domains = max(2, -(-shape.num_nodes // trays))
        ranks = -(-shape.num_ranks // domains)
        busy = min(links.islands, ranks * max(1, shape.num_groups_per_node))
        return cls(shape.num_ranks, domains, busy, max(1, shape.node_stride // trays))

    @property
    def ranks_per_domain(self) -> int:
        return -(-self.num_ranks // self.num_domains)


@dataclass(frozen=True, slots=True)
class Port:
    """The port that a call uses: its kind, the data sheet's speed one way, and how bytes get from GPU to GPU."""

    kind: str
    bytes_per_s: float
    way: Transport


@dataclass(frozen=True, slots=True)
class Call:
    """Everything a cost depends on but the curves: the memo's key."""

    kind: Kind
    size_bytes: int
    place: Placement
    links: Links
    nccl: Nccl = field(default_factory=Nccl)

    @property
    def port(self) -> Port:
        """NVLink or PCIe, or both PCIe links and the host's memory between them where NCCL may not go directly."""
        links = self.links
        transport = transport_of(links, self.place, self.nccl)
        if transport != "direct" and family_of(links.port_kind) == "nvlink":
            return Port("pcie4", links.host_bytes_per_s, transport)
        return Port(links.port_kind, links.port_bytes_per_s, transport)

    @property
    def network(self) -> str:
        """The kind of network that carries the call between nodes, as calibrations name it."""
        return "sockets" if self.nccl.environment.sockets else network_of(self.links)

    @property
    def far_nics(self) -> bool:
        """The NICs are beyond what NCCL lets LL128 cross: PXB before Hopper, PXN since, and nothing staged."""
        nics, links = self.links.nics, self.links
        if nics is None:
            return self.network in _FAR_NICS
        c2c = self.nccl.environment.ll128_c2c and links.architecture in _FAR_LL128_FROM
        return self.network == "sockets" or PATH_TYPES.index(nics.word) > PATH_TYPES.index("PXN" if c2c else "PIX")

    @property
    def traits(self) -> frozenset[str]:
        """Settings that distinguish calibrated networks of one kind."""
        environment = self.nccl.environment
        found = {f"NCCL_CROSS_NIC={environment.cross_nic}"}
        if self.network == "efa":
            found.add(f"efa={efa.instance_of(self.links.architecture, self.links.num_nics)}")
        return environment.transport | found


def network_of(links: Links) -> str:
    """The kind of network, as calibrations name it: TCP where neither NICs nor a plugin do RDMA."""
    return "sockets" if links.network_kind in _TCP and not links.rdma else links.network_kind


def transport_of(links: Links, place: Placement, nccl: Nccl) -> Transport:
    """How NCCL moves bytes inside a node: GPU to GPU where it may, else through the memory of one socket or of both.

    The wiring says whether peers reach each other (simulator/spec/cluster/wiring.py); published PCIe nodes with four GPUs of
    eight stay on one socket.
    """
    r = place.ranks_per_domain
    if r == 1 or family_of(links.port_kind) == "host":
        return "direct"
    if not links.in_memory and not nccl.environment.no_peers:
        return "direct"
    return "sockets" if links.gpus_per_node >= _TWO_SOCKETS_FROM and 2 * r > links.gpus_per_node else "host"


def with_peer_access(cluster: Cluster, nccl: Nccl) -> Cluster:
    """The cluster with the peer access that NCCL_P2P_LEVEL and NCCL_P2P_DISABLE leave over PCIe."""
    environment, pcie = nccl.environment, cluster.pcie
    level = "none" if environment.no_peers else _PEER_LEVELS.get(environment.p2p_level)
    if pcie is None or level is None or pcie.p2p == level:
        return cluster
    return cluster.model_copy(update={"pcie": pcie.model_copy(update={"p2p": level})})


def nic_paths(cluster: Cluster, shape: GroupShape, kind: str, nccl: Nccl) -> NicPaths | None:
    """What `kind` in a group gets of the NICs of a node; None: its even share.

    So where nothing says where NICs sit or what NCCL may not do, and on racks of trays, whose groups span several.
    """
    inter, environment = cluster.inter, nccl.environment
    if inter is None or shape.num_nodes == 1 or cluster.nvlink_domain_size > cluster.gpus_per_node:
        return None
    level = _NIC_LEVELS.get(environment.gdr_level, "P2C")
    settled = environment.pxn_disable or environment.gdr_read == 0 or level is None
    by_rdma = inter.rdma and not environment.sockets  # what TCP takes is calibrated as it is
    if not inter.cards and not (by_rdma and settled):
        return None
    rules = nic_rules(cluster, shape, nccl)
    pattern = _PATTERNS.get(kind, "ring")
    found = (reached(cluster, groups, rules, pattern) for groups in patterns_of(shape, cluster.gpus_per_node))
    return min(found, key=lambda one: one.bytes_per_s)


def nic_rules(cluster: Cluster, shape: GroupShape, nccl: Nccl) -> NicRules:
    """What NCCL may do between GPUs and NICs (src/graph/paths.cc: ncclTopoCheckGdr, ncclTopoComputePaths)."""
    environment, rdma = (
        nccl.environment,
        cluster.inter is not None and cluster.inter.rdma and not nccl.environment.sockets,
    )
    direct = _NIC_LEVELS.get(environment.gdr_level, "P2C") if rdma else None
    on_nvlink = cluster.intra.shape != "pcie" or shape.ranks_per_node == 1
    reads = environment.gdr_read
    if reads is None:
        reads = int(on_nvlink or cluster.device.architecture in _READS_FROM)
    return NicRules(
        direct=direct,
        direct_reads=bool(reads),
        pxn=not environment.pxn_disable and nccl.release >= _PXN_SINCE,
        cross=environment.cross_nic != 0,
        same_nic=environment.cross_nic == 0,
    )


def nic_share(links: Links) -> Fraction:
    """One GPU's even share of its node's NICs, data sheet."""
    return Fraction(links.nic_bytes_per_s) * links.num_nics / links.gpus_per_node


def nic_part(call: Call) -> Fraction:
    """One rank's part of its domain's NIC traffic, weighted to bytes over a GPU's even share of the NICs.

    A node with idle GPUs leaves their share to the busy ones, but a GPU cannot use more than the NICs on its side
    (one at least): with one busy GPU of eight and eight NICs it has its own share only. Where the place of the NICs
    counts (Links.cards), it is what the group reaches.
    """
    links, place = call.links, call.place
    if not links.num_nics:
        return Fraction(0)
    if links.nics is not None:
        return nic_share(links) / Fraction(links.nics.bytes_per_s)
    even = Fraction(links.num_nics, links.gpus_per_node)
    usable = min(even * links.islands / place.busy_per_domain, max(Fraction(1), even))
    return even / max(usable, even) / place.ranks_per_domain


def spine(algorithm: str, call: Call) -> Fraction:
    """Slowdown by uplinks that are slower than the NICs below them, of the worst level of switches.

    A switch of n nodes sends up n/taper nodes' worth. Of its k nodes that are the cluster's, a ring (or a tree over
    consecutive nodes) leaves it once, with one node's traffic; groups whose nodes lie s apart share it s deep, and leave it
    with min(s, k). Of an all-to-all's traffic (N − k/s)/(N − 1) leaves the switch of its sender.
    """
    links, nodes, stride, nics = call.links, call.place.num_domains, call.place.node_stride, call.links.nics
    own_rail = algorithm.startswith(("nvls", "collnet"))  # every head of these has one NIC for both ways
    if links.on_rails and nics is not None and nics.off_rail and not own_rail:  # another rail is another leaf
        used, size, taper = links.levels[0]
        return max(Fraction(1), Fraction(taper * nics.off_rail * used / size).limit_denominator(1024))
    worst = Fraction(1)
    if links.on_rails and links.off_rail:
        used, size, taper = links.levels[0]
        worst = max(worst, Fraction(taper * links.off_rail * min(used, nodes * stride) / size).limit_denominator(1024))
    for used, size, taper in links.levels:
        if (nodes - 1) * stride < used:
            break
        crossing = Fraction(min(stride, used), size)
        if algorithm == "p2p":
            crossing = Fraction(nodes - max(1, used // stride), nodes - 1) * Fraction(used, size)
        worst = max(worst, Fraction(taper) * crossing)
    return worst
