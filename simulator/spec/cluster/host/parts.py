"""What a host is made of. Names are the source's own: `GPU0`, `mlx5_3`, a PCI bus id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

# Closer first (NCCL's order, nvidia-smi's words): NVLink or xGMI; NVLink to the CPU; one PCIe switch; several; by C2C to a
# NIC of the GPU's own CPU; a host bridge; several host bridges of a NUMA node; between sockets.
PATHS: Final = ("NV", "XGMI", "C2C", "PIX", "PXB", "P2C", "PHB", "NODE", "SYS")
DIRECT: Final = ("NV", "XGMI")


@dataclass(frozen=True, slots=True)
class Path:
    """How two devices of a host reach each other. count: links side by side of an NVLink or xGMI path, else 0."""

    kind: str
    count: int = 0

    @property
    def rank(self) -> int:
        return PATHS.index(self.kind)

    @property
    def is_direct(self) -> bool:
        """NVLink or xGMI, without PCIe."""
        return self.kind in DIRECT

    def __str__(self) -> str:
        return f"{self.kind}{self.count}" if self.count else self.kind


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A PCIe link as its ends negotiate it at best: transfer rate in GT/s (8, 16, 32, …) and lanes."""

    gt_per_s: float
    lanes: int

    def __str__(self) -> str:
        return f"{self.gt_per_s:g} GT/s × {self.lanes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. numa: its NUMA nodes as the source writes them ("0", "0-3"), "" where it does not say.

    pcie: its PCIe link, None where unknown. uplink: that of the outermost switch above it.
    """

    name: str
    pci: str = ""
    numa: str = ""
    cpus: str = ""
    model: str = ""
    pcie: PcieLink | None = None
    uplink: PcieLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One NIC, or one port of it. alias: the other name that the source gives.

    bytes_per_s: its port, one way; pcie: its PCIe link; None where unknown.
    """

    name: str
    alias: str = ""
    pci: str = ""
    numa: str = ""
    bytes_per_s: float | None = None
    pcie: PcieLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A connection between two points of the host whose speed is known: bytes/s each way."""

    a: str
    b: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Host:
    """One host; equal to itself alone, so that what is found of its pairs of GPUs is found once.

    paths: by (name, name) in the order of `names`; a pair that the source leaves open is absent.
    switched: the source shows an NVSwitch. Where it cannot (nvidia-smi), link counts decide.
    cables: what the source says of speeds, for cuts; empty where it says nothing. speeds: where those numbers stand.
    links_listed: the source shows NVLinks where there are any. numbered: it states CUDA's numbers of the GPUs.
    cpu: its vendor (intel, amd, arm, power), "" where unknown. missing: what the source does not say, in words.
    """

    source: str
    format: str
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...] = ()
    paths: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    switched: bool = False
    cables: tuple[Cable, ...] = ()
    speeds: str = ""
    links_listed: bool = True
    numbered: bool = True
    cpu: str = ""
    missing: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*(g.name for g in self.gpus), *(c.name for c in self.nics))

    def path(self, a: str, b: str) -> Path | None:
        """The path between two devices, whichever is named first; None where the source leaves it open."""
        return self.paths.get((a, b)) or self.paths.get((b, a))

    def gpu_pairs(self) -> Iterator[tuple[int, int, Path | None]]:
        """Every pair of GPUs by index, with its path."""
        for (i, a), (j, b) in combinations(enumerate(gpu.name for gpu in self.gpus), 2):
            yield i, j, self.path(a, b)


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
