"""One host as it was read: GPUs, network cards, the paths between them; islands, nearest cards, cuts, what looks wrong.

A `Host` is what a machine says of itself; a `Cluster` is what a person states. Readers make hosts: nvidia_smi, nccl_xml.
"""

from simulator.host.cuts import Cut, cuts, rated
from simulator.host.findings import Finding, findings
from simulator.host.parts import PATHS, Cable, Card, Gpu, Host, Path, PcieLink
from simulator.host.structure import Island, Nearest, domains, idle_cards, islands, nearest_cards, pcie_groups, roads
from simulator.host.tree import NodeTree, Switch

__all__ = [
    "PATHS",
    "Cable",
    "Card",
    "Cut",
    "Finding",
    "Gpu",
    "Host",
    "Island",
    "Nearest",
    "NodeTree",
    "Path",
    "PcieLink",
    "Switch",
    "cuts",
    "domains",
    "findings",
    "idle_cards",
    "islands",
    "nearest_cards",
    "pcie_groups",
    "rated",
    "roads",
]
