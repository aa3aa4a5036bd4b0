"""The algorithm and protocol that NCCL picks: its own cost model, with the constants of its release.

Read in NVIDIA/nccl 2.30.7 (commit 5067397c2676), src/graph/tuning.cc, topo.h and src/enqueue.cc. These are NCCL's
*assumptions*; what a call really takes is calibrated in `collective_curves`. Units here are NCCL's: GB/s, microseconds.

Legend: LL, LL128, Simple are protocols: 8 bytes of data per 16-byte line, 120 per 128, and whole chunks with flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from simulator.base.errors import Fault, PlanError
from simulator.spec.software.nccl import Nccl, efa
from simulator.work.collectives.channels import GRAPH_SHARE, Channels, between, inside
from simulator.work.collectives.constants import GENERATIONS, NVLS_EFFICIENCY, Constants, constants_of
from simulator.work.collectives.volumes import POINT_TO_POINT, Algorithm, Kind, volume

Protocol = Literal["ll", "ll128", "simple", "tcp"]  # tcp: gloo
PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")

# of a port: 8 channels × 40 of 450 GB/s on H100, as printed by NCCL_DEBUG (NVIDIA/nccl issue 1197)
_NVLS_SHARE = 32 / 45
_NVLS_CHANNEL_GB = (0.0, 0.0, 60.0, 90.0)  # fastest channel the search tries; one channel a GPU of the node
_NVLS_MORE_THAN = 2  # NCCL sets NVLS up for more than two GPUs of a node only (src/transport/nvls.cc)
# First releases that have an algorithm: NVLink SHARP 2.17, its tree over nodes 2.18, PAT 2.23
_SINCE = {"nvls": (2, 17), "nvlstree": (2, 18), "pat": (2, 23)}
_NO_FALLBACK_SINCE = (2, 24)  # an NCCL_ALGO that leaves nothing is an error; before, rings ran all the same
# A 2.5.6 on two DGX-1 ran rings at 22.9 of 25 GB/s (NVIDIA/deepops): its search saw no faster trees
_TREE_ON_TWO_SINCE = (2, 7)
_DIRECT_SERIAL_US = 0.4  # CollNet direct: a step more for each GPU of the node
_LL128_SM = ("volta", "ampere", "hopper", "blackwell")

# Share of the bandwidth that a tree reaches by log2(bytes / 64), from 64 B to 256 MB
_TREE_SHARE: dict[Protocol, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "simple": (
        *(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9,
    ),
}  # fmt: skip
_P2P_LL_BYTES = 16384  # a send of up to this many bytes goes by LL
# From so many bytes a channel and rank (before 2.18: a rank) a ring over nodes with whole chunks is thought later
_PLATEAU_BYTES, _OLD_PLATEAU_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class NcclFabric:
    """What NCCL's search sees: port speed of the data sheet and the NIC speed of a node (0 if alone), both GB/s.

    far_nics: the NICs are beyond the GPUs' PCIe switches (PHB, SYS), or nobody reads GPU memory but the GPU: no LL128
    over nodes. sharp: the network's switches reduce (InfiniBand), and NCCL was asked to use them. efa: the AWS
    instance whose plugin has a tuner of its own, and reports a latency. num_nics: that the NIC speed is of.
    host_gb_per_s: a GPU's PCIe link, data sheet; 0: no limit. amd: the host's CPUs are AMD's.
    """

    family: str
    architecture: str
    port_gb_per_s: float
    nic_gb_per_s: float
    far_nics: bool = False
    sharp: bool = False
    efa: efa.Instance | None = None
    num_nics: int = 8
    host_gb_per_s: float = 0.0
    amd: bool = False

    def channels(self, algorithm: str, group: Group, release: tuple[int, ...]) -> Channels:
        """What the search finds for rings (PAT and network reductions too) or trees."""
        if group.num_nodes == 1:
            return inside(self.family, self.architecture, self.port_gb_per_s)
        return between(
            self.architecture,
            self.port_gb_per_s * GRAPH_SHARE.get(self.family, GRAPH_SHARE["pcie"]),
            self.nic_gb_per_s / self.num_nics,
            self.num_nics,
            tree=algorithm != "ring" and release >= _TREE_ON_TWO_SINCE,
            num_ranks_on_node=group.ranks_per_node,
            host=self.host_gb_per_s,
        )

    def plugin_us(self, network_us: float, protocol: str, *, adds: bool) -> float:
        """A network step with the plugin's latency; whole chunks also wait for a flush."""
        reported = efa.LATENCY_US[self.efa] if self.efa else 0.0
        if not adds:
            return reported or network_us
        return network_us + reported * (2 if protocol == "simple" else 1)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks and nodes of one communicator."""

    num_ranks: int
    num_nodes: int

    @property
    def ranks_per_node(self) -> int:
        return -(-self.num_ranks // self.num_nodes)

    @property
    def column(self) -> int:
        """Column of NCCL's tables: 1, 2 or more nodes."""
        return min(self.num_nodes, 3) - 1


@dataclass(frozen=True, slots=True)
class Pick:
    """What runs. channels: as a tuner asked, None for NCCL's own number."""

    algorithm: Algorithm
    protocol: Protocol
    channels: int | None = None


def pick(kind: Kind, size_bytes: int, group: Group, fabric: NcclFabric, nccl: Nccl) -> Pick:
    """A tuner's rule if one matches and can run; the plugin's tuner; else the cheapest pair by NCCL's own formula.

    Raises PlanError where NCCL_ALGO and NCCL_PROTO leave nothing that could run.
    """
    if kind in POINT_TO_POINT:
        per_peer = size_bytes // group.num_ranks if kind == "all_to_all" else size_bytes
        return Pick(POINT_TO_POINT[kind], "ll" if per_peer <= _P2P_LL_BYTES else "simple")
    left = _left(kind, _table(kind, group, fabric, nccl), nccl)
    pairs: dict[tuple[str, str] | None, Row] = {(row[0], row[1]): row for row in left}
    for rule in nccl.tuner:
        found = pairs.get((rule.algorithm, rule.protocol))
        if found and rule.matches(kind, size_bytes, group.num_nodes, group.num_ranks):
            return Pick(found[0], found[1], rule.channels)
    if fabric.efa and not nccl.environment.tuner_plugin:
        wanted = efa.choice(fabric.efa, kind, size_bytes, group.num_ranks, group.num_nodes)
        found = pairs.get(wanted)
        if found:
            return Pick(found[0], found[1])
    times = ((_time_us(row, kind, size_bytes, group, nccl, fabric), row[0], row[1]) for row in left)
    _, algorithm, protocol = min(times)
    return Pick(algorithm, protocol)


Row = tuple[Algorithm, Protocol, float, float]  # latency in us, GB/s of the full tensor


def _left(kind: Kind, rows: tuple[Row, ...], nccl: Nccl) -> list[Row]:
    """What NCCL_ALGO and NCCL_PROTO leave."""
    left = [row for row in rows if nccl.environment.allows(kind, row[0], row[1])]
    if not left and nccl.release >= _NO_FALLBACK_SINCE:
        names = ", ".join(f"{algorithm}/{protocol}" for algorithm, protocol, _, _ in rows)
        problem = f"NCCL_ALGO and NCCL_PROTO leave nothing that could run {kind} here"
        raise PlanError(Fault(place=f"nccl: {kind}", problem=problem, remedy=f"one of {names}"))
    return left or [row for row in rows if row[0] == "ring"]


def _time_us(row: Row, kind: Kind, size_bytes: int, group: Group, nccl: Nccl, fabric: NcclFabric) -> float:
    algorithm, protocol, latency_us, gb_per_s = row
    if algorithm == "tree" and kind == "all_reduce":
        index = (size_bytes // 64).bit_length() - 1
        share = _TREE_SHARE[protocol]
        gb_per_s *= share[index] if 0 <= index < len(share) else 1.0
    if algorithm == "ring" and protocol == "simple" and kind == "all_reduce" and group.num_nodes > 1:
        latency_us *= _plateau(size_bytes, group, nccl, fabric)
    return latency_us + size_bytes / (1000 * gb_per_s)


def _plateau(size_bytes: int, group: Group, nccl: Nccl, fabric: NcclFabric) -> float:
    """How much later than its steps NCCL thinks such a ring is."""
    generation = GENERATIONS.get(fabric.architecture, 1)
    if not constants_of(nccl.release).plateau_by_channel:
        late = 1.9 if generation < GENERATIONS["hopper"] else 1.5
        return late if size_bytes >= group.num_ranks * _OLD_PLATEAU_BYTES else 1.0
    channels = 2 * fabric.channels("ring", group, nccl.release).count  # each is made twice for the two trees
    late = 1.9 if generation < GENERATIONS["ampere"] else 1.4
    return late if size_bytes // (channels * group.num_ranks) >= _PLATEAU_BYTES else 1.0


def _algorithms(kind: Kind, group: Group, fabric: NcclFabric, nccl: Nccl) -> Iterator[Algorithm]:
    """What this release has for the collective, and the environment sets up."""
    yield "ring"
    environment = nccl.environment
    several = group.num_nodes > 1
    collnet = several and fabric.sharp
    if kind == "all_reduce":
        yield "tree"
        if environment.nvls and nccl.release >= _SINCE["nvls"]:
            if not several or collnet:
                yield "nvls"
            if several and nccl.release >= _SINCE["nvlstree"]:
                yield "nvlstree"
        if collnet:
            yield "collnetdirect"
            yield "collnetchain"
    # by default for one GPU a node; NCCL_PAT_ENABLE=1 has it everywhere (src/graph/tuning.cc, ncclPatEnable)
    wanted = environment.pat == 1 or (environment.pat and several and group.ranks_per_node == 1)
    if wanted and kind in ("all_gather", "reduce_scatter") and nccl.release >= _SINCE["pat"]:
        yield "pat"


@lru_cache(maxsize=4096)
def _table(kind: Kind, group: Group, fabric: NcclFabric, nccl: Nccl) -> tuple[Row, ...]:
    """Every pair that exists here."""
    rows: list[Row] = []
    for algorithm in _algorithms(kind, group, fabric, nccl):
        for protocol in PROTOCOLS:
            bandwidth = _bandwidth(kind, algorithm, protocol, group, fabric, nccl)
            if bandwidth > 0:
                latency_us = _latency_us(kind, algorithm, protocol, group, fabric, nccl)
                rows.append((algorithm, protocol, latency_us, bandwidth))
    return tuple(rows)


def _bandwidth(
    kind: Kind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: NcclFabric, nccl: Nccl
) -> float:
    """GB/s of the full tensor, 0 where the pair does not exist."""
    if protocol == "ll128" and not _has_ll128(group, fabric, nccl):
        return 0.0
    if algorithm in ("nvls", "nvlstree"):
        return _nvls_bandwidth(algorithm, protocol, group, fabric, nccl)
    if algorithm in ("pat", "collnetdirect", "collnetchain"):
        return _switched_bandwidth(algorithm, protocol, group, fabric, nccl)
    n, constants = group.num_ranks, constants_of(nccl.release)
    generation = GENERATIONS.get(fabric.architecture, 1)
    channels = fabric.channels(algorithm, group, nccl.release)
    bus = channels.bus(group.num_nodes)
    # on one node the GPU's row; on several the CPU's
    low = constants.ll[generation if group.num_nodes == 1 else int(fabric.amd)][group.column]
    if algorithm == "ring":
        alone = group.num_nodes == 1 and kind in ("all_gather", "reduce_scatter")
        wide = 0.92 if group.ranks_per_node > 1 else constants.lone_ll128_share
        reached = {
            "ll": min(low, bus * constants.ring_ll_share[0 if alone else 1]),
            "ll128": min(bus * wide, channels.count * constants.ring_ll128_channel[generation][group.column]),
            "simple": bus,
        }[protocol]
        steps = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(kind, n)
        return reached * n / steps
    capped = min(bus * 0.92, channels.count * constants.tree_channel[generation][group.column])
    wide = capped * (7 / 9 if group.num_nodes == 1 else 120 / 128)
    wide = min(wide, channels.count * constants.tree_ll128_channel[generation][group.column])
    return 0.5 * {"ll": min(capped / 3.8, low), "ll128": wide, "simple": capped}[protocol]


def _has_ll128(group: Group, fabric: NcclFabric, nccl: Nccl) -> bool:
    """By default: NVLink inside the node; over nodes, NICs near the GPUs. NCCL_PROTO that names it turns it on."""
    if any("ll128" in names and len(names) == 1 for _, names in nccl.environment.protocols):
        return True
    near = group.num_nodes == 1 or not fabric.far_nics
    return fabric.family == "nvlink" and near and fabric.architecture in _LL128_SM


def _nvls_bandwidth(algorithm: Algorithm, protocol: Protocol, group: Group, fabric: NcclFabric, nccl: Nccl) -> float:
    """A channel for each GPU of the node. What crosses the NICs is all of them together, twice between two nodes."""
    generation, n, nodes = GENERATIONS.get(fabric.architecture, 1), group.num_ranks, group.num_nodes
    if protocol != "simple" or fabric.family != "nvlink" or group.ranks_per_node <= _NVLS_MORE_THAN:
        return 0.0
    heads, constants = group.ranks_per_node, constants_of(nccl.release)
    channel = min(_NVLS_CHANNEL_GB[generation], fabric.port_gb_per_s * _NVLS_SHARE / heads)
    tree = algorithm == "nvlstree"
    if constants.nvls != "heads":
        return _old_nvls(constants, tree=tree, heads=heads, channel=channel, group=group, nic=fabric.nic_gb_per_s)
    port = heads * channel * NVLS_EFFICIENCY[generation] * 2 * (heads - 1) / heads
    if tree:
        nic = fabric.nic_gb_per_s * (2 if nodes == 2 else 1)
        port = min(port, nic, heads * constants.nvlstree_channel[generation][group.column])
    elif nodes > 1:
        port = min(port, fabric.nic_gb_per_s)
    return port * n / (2 * (n - 1))


def _old_nvls(constants: Constants, *, tree: bool, heads: int, channel: float, group: Group, nic: float) -> float:
    """Before 2.28: fixed shares of the slower of a node's inside and its NICs."""
    nodes, near = group.num_nodes, heads * channel
    if constants.nvls == "inside":
        bus = near if nodes <= 2 else min(2 * near, nic)
        return bus * (0.7 * nodes / (2 * (nodes - 1)) if tree else 5 / 6)
    far = min(2 * near, nic) if nodes > 1 else near
    return min(near, far / 2 if tree and nodes > 2 else far) * 5 / 6


def _switched_bandwidth(
    algorithm: Algorithm, protocol: Protocol, group: Group, fabric: NcclFabric, nccl: Nccl
) -> float:
    """PAT, and all-reduce in the network's switches (SHARP); whole chunks only."""
    if protocol != "simple":
        return 0.0
    channels = fabric.channels(algorithm, group, nccl.release)
    if algorithm == "pat":
        return constants_of(nccl.release).pat_share * channels.bus(group.num_nodes)
    bus = channels.bus(1)
    if algorithm == "collnetdirect":
        if fabric.family != "nvlink":
            return 0.0
        bus *= 0.85 if GENERATIONS.get(fabric.architecture, 1) >= GENERATIONS["hopper"] else 1.0
    return 0.5 * bus


def _latency_us(
    kind: Kind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: NcclFabric, nccl: Nccl
) -> float:
    """Microseconds before the bytes: base plus steps."""
    constants, p = constants_of(nccl.release), PROTOCOLS.index(protocol)
    inside_us = constants.nvlink_us if fabric.family == "nvlink" else constants.pcie_us
    local = inside_us[algorithm][p]
    as_tree = group.ranks_per_node == 1 and constants.lone_waits_as_tree
    network = constants.network_us["tree" if as_tree else algorithm][p]
    network = fabric.plugin_us(network, protocol, adds=constants.adds_plugin_latency)
    base, r = constants.base_us[algorithm][p], group.ranks_per_node
    if protocol == "ll" and group.num_nodes > 1:
        local *= constants.near_ll_factor
    if algorithm == "collnetdirect":
        return base + 2 * (min(1, r - 1) * local + (r - 1) * _DIRECT_SERIAL_US) + network
    if algorithm == "collnetchain":
        return base + 2 * (r - 1) * local + network
    if algorithm == "pat":
        return base + (group.num_nodes.bit_length() - 1) * network / 3.5 + 2.8 * group.num_ranks
    if algorithm == "nvlstree" and constants.nvls == "inside":
        return base + 2 * (group.num_nodes - 1) * network
    form = volume(kind, algorithm, group.num_ranks, group.num_nodes)
    far_steps = form.network_steps
    if algorithm == "ring" and group.num_nodes > 1:
        local = max(local, constants.overhead_us[int(fabric.amd)] * (3 if protocol == "simple" else 1))
        far_steps += constants.extra_network_steps if kind == "all_reduce" else 0
    return base + (form.local_steps + form.network_steps - far_steps) * local + far_steps * network
