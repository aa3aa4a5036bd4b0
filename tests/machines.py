"""Machines that several tests of placement share."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.spec.cluster import Cluster, Edge, Host, Intra, Pcie

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
