"""One host as it was read: GPUs, NICs, the paths between them; islands, nearest NICs, cuts, what looks wrong.

A `Host` is a machine by its own description; a `Cluster` is written by a person. Host readers: nvidia_smi, nccl_xml.
"""

from simulator.spec.cluster.host.cuts import cuts, rated
from simulator.spec.cluster.host.findings import Finding, findings
from simulator.spec.cluster.host.parts import Cable, Gpu, Host, Nic, NodeTree, Path, PcieLink, Switch
from simulator.spec.cluster.host.structure import (
    Island,
    domains,
    gpu_paths,
    idle_nics,
    islands,
    nearest_nics,
    pcie_groups,
)

__all__ = [
    "Cable", "Finding", "Gpu", "Host", "Island", "Nic", "NodeTree", "Path", "PcieLink", "Switch", "cuts", "domains",
    "findings", "gpu_paths", "idle_nics", "islands", "nearest_nics", "pcie_groups", "rated",
]  # fmt: skip
