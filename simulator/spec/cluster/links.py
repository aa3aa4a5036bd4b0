"""The links of a cluster, made on demand: of one node, and of the few hops between two. Never of all pairs.

Names: `node2.gpu5`, `node2.nvswitch` (`domain0.nvswitch` where a switch joins nodes), `node2.host`, `node2.nic5`,
`leaf0.5` (pod 0, rail 5), `leaf0`, `spine`. All NICs that serve one GPU are one `nic`: transfers are striped over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from simulator.base.errors import ClusterError
from simulator.spec.cluster.nics import places_of
from simulator.spec.cluster.parts import Inter
from simulator.spec.cluster.routing import Link, components, shortest_route
from simulator.spec.cluster.topology import Topology

if TYPE_CHECKING:
    import networkx as nx


def route(cluster: Topology, src_rank: int, dst_rank: int) -> tuple[Link, ...]:
    """The directed links between two ranks: NVLink where it reaches, else the host, else the network."""
    for rank in (src_rank, dst_rank):
        if not 0 <= rank < cluster.num_devices:
            problem = f"rank {rank} is not one of the {cluster.num_devices} of {cluster.name}"
            raise ClusterError.at("rank", problem, f"0 to {cluster.num_devices - 1}")
    (src_node, _), (dst_node, _) = ends = [divmod(r, cluster.gpus_per_node) for r in (src_rank, dst_rank)]
    src, dst = (f"node{node}.gpu{gpu}" for node, gpu in ends)
    if src == dst:
        return ()
    size = cluster.nvlink_domain_size
    if src_node == dst_node:
        near = _inside(cluster, src_node)
    elif size > cluster.gpus_per_node and src_rank // size == dst_rank // size:
        near = [*_inside(cluster, src_node), *_inside(cluster, dst_node)]
    else:
        peer = _pxn_peer(cluster, src_rank, dst_rank)
        if peer is not None:
            return (*route(cluster, src_rank, peer), *route(cluster, peer, dst_rank))
        near = [*_across(cluster, src_node, dst_node), *_to_nics(cluster, src_node), *_to_nics(cluster, dst_node)]
    found = shortest_route(near, src, dst)
    if found is None:  # one-way edges can leave a direction without a route
        raise ClusterError.at(cluster.name, f"no path from rank {src_rank} to rank {dst_rank}")
    return found


def _pxn_peer(cluster: Topology, src_rank: int, dst_rank: int) -> int | None:
    """The GPU beside the sender's NIC on the receiver's rail, if NVLink joins it to the sender (NCCL's PXN).

    So rails are not left for the spine, and a sender without a NIC beside it avoids its CPU. Receivers take from their
    own NIC.
    """
    gpus, rails = cluster.gpus_per_node, _rails(cluster)
    if not rails or cluster.intra.shape == "pcie":
        return None
    (node, src), (_, dst) = divmod(src_rank, gpus), divmod(dst_rank, gpus)
    own, target = (next((rail for rail in rails if gpu in rail.gpus), None) for gpu in (src, dst))
    if own is not None and (cluster.fabric.kind != "rail_optimised" or target in (own, None)):
        return None
    gates = target.gpus if target is not None else tuple(gpu for rail in rails for gpu in rail.gpus)
    if cluster.intra.shape != "switch":
        joined = {(a, b) for a, b, _ in _edges(cluster)}
        gates = tuple(gpu for gpu in gates if (src, gpu) in joined)
    return node * gpus + gates[0] if gates else None


def islands(cluster: Topology) -> tuple[Sequence[int], ...]:
    """Ranks joined by NVLink or xGMI."""
    shape, gpus = cluster.intra.shape, cluster.gpus_per_node
    if shape == "switch":
        size = cluster.nvlink_domain_size
        starts = range(0, cluster.num_devices, size)
        return tuple(range(start, min(start + size, cluster.num_devices)) for start in starts)
    pairs = [] if shape == "pcie" else [(src, dst) for src, dst, _ in _edges(cluster)]
    local = components(gpus, pairs)
    return tuple(tuple(node * gpus + gpu for gpu in part) for node in range(cluster.num_nodes) for part in local)


def graph(cluster: Topology) -> nx.DiGraph[str]:
    """Node 0 as a directed graph."""
    import networkx as nx

    made: nx.DiGraph[str] = nx.DiGraph(name=cluster.name)
    for link in [*_inside(cluster, 0), *_nics(cluster, 0)]:
        made.add_edge(link.src, link.dst, kind=link.kind, bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
    return made


def _inside(cluster: Topology, node: int) -> list[Link]:
    """What carries traffic between the GPUs of a node."""
    return [*_intra(cluster, node), *_host(cluster, node)]


def _intra(cluster: Topology, node: int) -> Iterator[Link]:
    intra, gpus = cluster.intra, range(cluster.gpus_per_node)
    if intra.shape == "switch":
        size = cluster.nvlink_domain_size
        first = node * cluster.gpus_per_node
        for gpu in gpus:
            owner = f"domain{(first + gpu) // size}" if size != cluster.gpus_per_node else f"node{node}"
            yield from _cable(
                intra.kind, f"node{node}.gpu{gpu}", f"{owner}.nvswitch", intra.bytes_per_s, intra.latency_s / 2
            )
    elif intra.shape != "pcie":
        for src, dst, rate in _edges(cluster):
            ends = {"src": f"node{node}.gpu{src}", "dst": f"node{node}.gpu{dst}"}
            yield Link(kind=intra.kind, **ends, bytes_per_s=rate, latency_s=intra.latency_s)


def _edges(cluster: Topology) -> Iterator[tuple[int, int, float]]:
    """Directed (src, dst, bytes/s) of a mesh: as written, or a full mesh in equal shares."""
    intra, gpus = cluster.intra, cluster.gpus_per_node
    if not intra.edges:
        yield from ((src, dst, intra.bytes_per_s / (gpus - 1)) for src, dst in permutations(range(gpus), 2))
    for edge in intra.edges:
        yield edge.src, edge.dst, edge.bytes_per_s
        if edge.both_ways:
            yield edge.dst, edge.src, edge.bytes_per_s


def _host(cluster: Topology, node: int) -> Iterator[Link]:
    host = cluster.host_link
    for gpu in range(cluster.gpus_per_node if host else 0):
        assert host is not None
        yield from _cable(host.kind, f"node{node}.gpu{gpu}", f"node{node}.host", host.bytes_per_s, host.latency_s / 2)


@dataclass(frozen=True, slots=True)
class _Rail:
    """NICs side by side: transfers are striped over them. gpus: those beside them; none: the NICs hang on a CPU."""

    gpus: tuple[int, ...]
    bytes_per_s: float


def _rails(cluster: Topology) -> tuple[_Rail, ...]:
    """The NICs of a node by where they sit; in even parts where that is not stated."""
    if cluster.inter is None:
        return ()
    counted = Counter(place.gpus for place in places_of(cluster))
    if not cluster.inter.cards:
        return tuple(_Rail(gpus, cluster.node_bytes_per_s / len(counted)) for gpus in counted)
    return tuple(_Rail(gpus, count * cluster.inter.nic_bytes_per_s) for gpus, count in counted.items())


def _nics(cluster: Topology, node: int) -> Iterator[Link]:
    """GPU and the NICs beside it, over PCIe; NICs that no GPU is beside hang on the host."""
    host = cluster.host_link
    for number, rail in enumerate(_rails(cluster)):
        kind, rate = (host.kind, host.bytes_per_s) if host else ("pcie5", rail.bytes_per_s)
        for gpu in rail.gpus:
            yield from _cable(kind, f"node{node}.gpu{gpu}", f"node{node}.nic{number}", rate, 0.0)
        if not rail.gpus or (cluster.inter is not None and cluster.inter.cards):
            yield from _cable(kind, f"node{node}.host", f"node{node}.nic{number}", rail.bytes_per_s, 0.0)


def _to_nics(cluster: Topology, node: int) -> Iterator[Link]:
    """What joins GPUs and NICs, the host too where it is stated which NICs hang on it."""
    yield from _nics(cluster, node)
    if cluster.inter is not None and cluster.inter.cards:
        yield from _host(cluster, node)


def _across(cluster: Topology, src_node: int, dst_node: int) -> Iterator[Link]:
    """NICs of two nodes, their leaves and the spine."""
    inter = cluster.inter
    assert inter is not None  # the structure of a cluster of several nodes has been checked
    rails, fabric = _rails(cluster), cluster.fabric
    is_rail = fabric.kind == "rail_optimised"
    uplinks: set[tuple[str, str]] = set()
    uppers = [*((f"level{n}.", used) for n, (used, _, _) in enumerate(fabric.levels[1:], 1)), ("spine", 0)]
    for node in (src_node, dst_node):
        for number, rail in enumerate(rails):
            below = f"leaf{node // fabric.used_per_leaf}" + (f".{number}" if is_rail else "")
            yield from _nic_cable(inter, f"node{node}.nic{number}", below, rail.bytes_per_s)
            for (_, nodes, taper), (above, used) in zip(fabric.levels, uppers, strict=True):
                switch = f"{above}{node // used}" if used else above
                if (below, switch) not in uplinks:
                    uplinks.add((below, switch))
                    down = nodes * (
                        rail.bytes_per_s if below.startswith("leaf") and is_rail else cluster.node_bytes_per_s
                    )
                    yield from _cable(inter.kind, below, switch, down / taper, 0.0)
                below = switch


def _nic_cable(inter: Inter, nic: str, leaf: str, rate: float) -> Iterator[Link]:
    """A NIC's message waits `latency_s` once, on its way in."""
    yield Link(kind=inter.kind, src=nic, dst=leaf, bytes_per_s=rate, latency_s=inter.latency_s)
    yield Link(kind=inter.kind, src=leaf, dst=nic, bytes_per_s=rate)


def _cable(kind: str, a: str, b: str, bytes_per_s: float, latency_s: float) -> Iterator[Link]:
    yield Link(kind=kind, src=a, dst=b, bytes_per_s=bytes_per_s, latency_s=latency_s)
    yield Link(kind=kind, src=b, dst=a, bytes_per_s=bytes_per_s, latency_s=latency_s)
