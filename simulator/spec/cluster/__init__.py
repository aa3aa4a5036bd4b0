"""Clusters: devices, directed links, tiers; presets in `topologies/`, and the usual host of a GPU."""

from simulator.spec.cluster.cluster import Cluster, cluster_names
from simulator.spec.cluster.parts import Edge, Fabric, FabricLevel, Host, Inter, Intra, NicPlace, Pcie

__all__ = [
    "Cluster", "Edge", "Fabric", "FabricLevel", "Host", "Inter", "Intra", "NicPlace", "Pcie", "cluster_names",
]  # fmt: skip
