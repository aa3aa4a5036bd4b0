"""Machines that several tests share: one island, nodes on rails or on a fat tree, nodes given by their edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.spec.cluster import Cluster, Edge, Fabric, Host, Inter, Intra, Pcie
from simulator.spec.cluster.device import Device

GB = 1e9


def bridged(num_gpus: int, pairs: Sequence[tuple[int, int]], **pcie: object) -> Cluster:
    """GPUs behind PCIe 4, some joined by NVLink bridges. pcie: the tree's fields, as sockets or switches."""
    edges = tuple(Edge(src=a, dst=b, bytes_per_s=300 * GB) for a, b in pairs)
    return Cluster(
        name="bridged",
        device="a100-pcie-80gb",
        gpus_per_node=num_gpus,
        intra=Intra(kind="nvlink3", shape="pairs", bytes_per_s=300 * GB, edges=edges),
        host=Host(kind="pcie4", bytes_per_s=31 * GB),
        pcie=Pcie.model_validate({"host_bytes_per_s": 40 * GB, **pcie}),
    )


def island(device: Device | str, num_devices: int, bytes_per_s: float, latency_s: float = 0.0) -> Cluster:
    """One node whose GPUs a switch joins, `bytes_per_s` one way each."""
    return Cluster(
        name="island",
        device=_device(device),
        gpus_per_node=num_devices,
        nvlink_domain_size=num_devices,
        intra=Intra(kind="nvlink4", shape="switch", bytes_per_s=bytes_per_s, latency_s=latency_s),
    )


def rail(
    node: Cluster, num_nodes: int, inter: Inter, nodes_per_leaf: int = 32, oversubscription: float = 1.0
) -> Cluster:
    """Copies of `node` on a rail-optimised fabric: the n-th NICs of `nodes_per_leaf` nodes share a leaf."""
    fabric = Fabric(kind="rail_optimised", nodes_per_leaf=nodes_per_leaf, oversubscription=oversubscription)
    return _nodes(node, num_nodes, inter, fabric)


def fat_tree(
    node: Cluster, num_nodes: int, inter: Inter, nodes_per_leaf: int = 32, oversubscription: float = 1.0
) -> Cluster:
    """Copies of `node` on two tiers: `nodes_per_leaf` whole nodes share a leaf; uplinks are oversubscribed."""
    fabric = Fabric(kind="fat_tree", nodes_per_leaf=nodes_per_leaf, oversubscription=oversubscription)
    return _nodes(node, num_nodes, inter, fabric)


def from_edges(
    device: Device | str,
    edges: Iterable[tuple[int, int, float]],
    gpus_per_node: int | None = None,
    host: Host | None = None,
) -> Cluster:
    """One node given by directed (src, dst, bytes/s). Raises ClusterError: src = dst, islands that nothing joins, …"""
    links = tuple(Edge(src=src, dst=dst, bytes_per_s=rate, both_ways=False) for src, dst, rate in edges)
    gpus = gpus_per_node or max((max(link.src, link.dst) for link in links), default=0) + 1
    leaving = [sum(link.bytes_per_s for link in links if link.src == gpu) for gpu in range(gpus)]
    return Cluster(
        name="edges",
        device=_device(device),
        gpus_per_node=gpus,
        nvlink_domain_size=gpus,
        intra=Intra(kind="nvlink3", shape="mesh", bytes_per_s=max(leaving), edges=links),
        host=host,
    )


def _nodes(node: Cluster, num_nodes: int, inter: Inter, fabric: Fabric) -> Cluster:
    data = {field: getattr(node, field) for field in Cluster.model_fields}
    return Cluster(**{**data, "num_nodes": num_nodes, "inter": inter, "fabric": fabric})


def _device(device: Device | str) -> Device:
    return Device.load(device) if isinstance(device, str) else device
