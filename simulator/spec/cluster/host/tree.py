"""The switches above the nodes, as SLURM describes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A leaf switch with its nodes, or one above others. level: 0 for a leaf. link_speed: as SLURM holds it, unused."""

    name: str
    level: int
    nodes: tuple[str, ...]
    switches: tuple[str, ...]
    num_nodes: int
    link_speed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTree:
    """What joins the nodes. kind: tree, block (racks of one NVLink domain, usually) or flat.

    roots: switches below no other. block_sizes: nodes of the base block, then of groups of them.
    """

    source: str
    kind: str
    switches: tuple[Switch, ...]
    roots: tuple[str, ...]
    num_nodes: int
    block_sizes: tuple[int, ...] = ()

    @property
    def nodes_per_leaf(self) -> tuple[int, int]:
        """Fewest and most nodes below one leaf or in one block."""
        sizes = [len(switch.nodes) for switch in self.switches if switch.level == 0]
        return (min(sizes), max(sizes)) if sizes else (0, 0)

    @property
    def num_levels(self) -> int:
        return max((switch.level + 1 for switch in self.switches), default=0)
