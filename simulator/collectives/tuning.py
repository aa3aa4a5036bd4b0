"""The algorithm and protocol that NCCL picks: its own cost model, with its own constants.

Read in NVIDIA/nccl 2.30.7 (commit 5067397c2676), src/graph/tuning.cc and topo.h. These are NCCL's *assumptions*; what a
call really takes is calibrated in `collective_curves`. Units here are NCCL's: GB/s and microseconds.

Legend: LL, LL128, Simple are protocols: 8 bytes of data per 16-byte line, 120 per 128, and whole chunks with flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from simulator.collectives.volumes import POINT_TO_POINT, Algorithm, Kind, volume

Protocol = Literal["ll", "ll128", "simple"]
PROTOCOLS: tuple[Protocol, ...] = ("ll", "ll128", "simple")

_BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0), "nvlstree": (0, 0, 0)}
_LOCAL_US = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25.0), "nvlstree": (0, 0, 25.0)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7), "nvls": (0, 0, 0), "nvlstree": (0, 0, 0)},
}
_NETWORK_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls": (0, 0, 18.0), "nvlstree": (0, 0, 20.9)}

# One row a generation (compute capability below 8, 8, 9, 10 and up), one column for 1, 2 and more nodes.
_LL_GB = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
_TREE_CHANNEL_GB = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLSTREE_CHANNEL_GB = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
_NVLS_EFFICIENCY = (0.0, 0.0, 0.85, 0.74)
_GENERATIONS = {"volta": 0, "ampere": 1, "ada": 1, "hopper": 2, "blackwell": 3}

# What the graph search finds of a port's data sheet, one way: 12 channels × 20 of 300 GB/s (A100), 12 × 30 of 450
# (H100; NVLS 8 × 40), as printed by NCCL_DEBUG (NVIDIA/nccl issue 1197); PCIe 4 x16 is 24 of 31.5 (topo.h).
_GRAPH_SHARE = {"nvlink": 0.8, "pcie": 0.76}
_NVLS_SHARE = 32 / 45
_NVLS_CHANNEL_GB = (0.0, 0.0, 60.0, 90.0)  # fastest channel the search tries; one channel a GPU of the node
_NVLS_MORE_THAN = 2  # NCCL sets NVLS up for more than two GPUs of a node only (src/transport/nvls.cc)

# Share of the bandwidth that a tree reaches by log2(bytes / 64), from 64 B to 256 MB
_TREE_SHARE: dict[Protocol, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "simple": (
        *(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9,
    ),
}  # fmt: skip
_P2P_LL_BYTES = 16384  # a send of up to this many bytes goes by LL


@dataclass(frozen=True, slots=True)
class Fabric:
    """What NCCL's search sees: port speed of the data sheet and the NIC speed of a node (0 if alone), both GB/s."""

    family: str
    architecture: str
    port_gb_per_s: float
    nic_gb_per_s: float


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


def pick(
    kind: Kind, size_bytes: int, group: Group, fabric: Fabric, allowed: tuple[str, ...] = ()
) -> tuple[Algorithm, Protocol]:
    """The cheapest pair by NCCL's own formula; `allowed` restricts it, as NCCL_ALGO and NCCL_PROTO do."""
    if kind in POINT_TO_POINT:
        per_peer = size_bytes // group.num_ranks if kind == "all_to_all" else size_bytes
        return POINT_TO_POINT[kind], "ll" if per_peer <= _P2P_LL_BYTES else "simple"
    costs = [
        (_time_us(latency_us, gb_per_s, algorithm, protocol, size_bytes), algorithm, protocol)
        for algorithm, protocol, latency_us, gb_per_s in _table(kind, group, fabric)
        if not allowed or algorithm in allowed or protocol in allowed
    ]
    if not costs:
        return "ring", "simple"
    _, algorithm, protocol = min(costs)
    return algorithm, protocol


def _time_us(latency_us: float, gb_per_s: float, algorithm: str, protocol: Protocol, size_bytes: int) -> float:
    if algorithm == "tree":
        index = (size_bytes // 64).bit_length() - 1
        share = _TREE_SHARE[protocol]
        gb_per_s *= share[index] if 0 <= index < len(share) else 1.0
    return latency_us + size_bytes / (1000 * gb_per_s)


@lru_cache(maxsize=1024)
def _table(kind: Kind, group: Group, fabric: Fabric) -> tuple[tuple[Algorithm, Protocol, float, float], ...]:
    """(algorithm, protocol, latency in us, GB/s of the full tensor) of every pair that exists here."""
    algorithms: tuple[Algorithm, ...] = ("ring",)
    if kind == "all_reduce":
        algorithms = ("ring", "tree", "nvls" if group.num_nodes == 1 else "nvlstree")
    rows = []
    for algorithm in algorithms:
        for protocol in PROTOCOLS:
            bandwidth = _bandwidth(kind, algorithm, protocol, group, fabric)
            if bandwidth > 0:
                rows.append((algorithm, protocol, _latency(kind, algorithm, protocol, group, fabric), bandwidth))
    return tuple(rows)


def _bandwidth(kind: Kind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> float:
    """GB/s of the full tensor, 0 where the pair does not exist."""
    if protocol == "ll128" and fabric.family != "nvlink":
        return 0.0
    if algorithm in ("nvls", "nvlstree"):
        return _nvls_bandwidth(algorithm, protocol, group, fabric)
    n, generation = group.num_ranks, _GENERATIONS.get(fabric.architecture, 1)
    bus = _bus(fabric, algorithm, group.num_nodes)
    low = min(_LL_GB[generation][group.column], bus * 0.5)
    if algorithm == "ring":
        reached = {"ll": low, "ll128": bus * 0.92, "simple": bus}[protocol]
        steps = {"all_reduce": 2 * (n - 1), "all_gather": n - 1, "reduce_scatter": n - 1}.get(kind, n)
        return reached * n / steps
    channels = max(1.0, bus / 24)
    capped = min(bus * 0.92, channels * _TREE_CHANNEL_GB[generation][group.column])
    wide = capped * (7 / 9 if group.num_nodes == 1 else 120 / 128)
    return 0.5 * {"ll": min(capped / 3.8, low), "ll128": wide, "simple": capped}[protocol]


def _bus(fabric: Fabric, algorithm: Algorithm, num_nodes: int) -> float:
    """Bus bandwidth of the search; a tree over two nodes loads the NICs with half of what a ring does."""
    port = fabric.port_gb_per_s * _GRAPH_SHARE.get(fabric.family, 0.76)
    if num_nodes == 1:
        return port
    return min(port, fabric.nic_gb_per_s * (2 if algorithm == "tree" and num_nodes == 2 else 1))


def _nvls_bandwidth(algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> float:
    generation, n = _GENERATIONS.get(fabric.architecture, 1), group.num_ranks
    if protocol != "simple" or fabric.family != "nvlink" or group.ranks_per_node <= _NVLS_MORE_THAN:
        return 0.0
    heads = group.ranks_per_node
    channel = min(_NVLS_CHANNEL_GB[generation], fabric.port_gb_per_s * _NVLS_SHARE / heads)
    port = heads * channel * _NVLS_EFFICIENCY[generation] * 2 * (heads - 1) / heads
    if algorithm == "nvlstree":
        nic = fabric.nic_gb_per_s * (2 if group.num_nodes == 2 else 1)
        port = min(port, nic, heads * _NVLSTREE_CHANNEL_GB[generation][group.column])
    return port * n / (2 * (n - 1))


def _latency(kind: Kind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> float:
    """Microseconds before the bytes: base plus steps."""
    p = PROTOCOLS.index(protocol)
    local = _LOCAL_US["nvlink" if fabric.family == "nvlink" else "pcie"][algorithm][p]
    network = _NETWORK_US["tree" if group.ranks_per_node == 1 and algorithm == "ring" else algorithm][p]
    form = volume(kind, algorithm, group.num_ranks, group.num_nodes)
    if algorithm == "ring" and group.num_nodes > 1:
        local = max(local, 3.0 if protocol == "simple" else 1.0)  # NCCL_NET_OVERHEAD on x86
    latency = _BASE_US[algorithm][p] + form.local_steps * local + form.network_steps * network
    plateau = algorithm == "ring" and protocol == "simple" and kind == "all_reduce" and group.num_nodes > 1
    return latency * 1.4 if plateau else latency
