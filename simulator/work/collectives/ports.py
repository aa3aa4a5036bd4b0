"""The port that a group sees in its nodes: which class of link bounds it, and how much longer its bytes take there.

Where every GPU reaches each other alike (a switch), that is the GPU's own port. On a mesh, a cube mesh, bridges or a PCIe
tree it is what NCCL's routes leave, with all groups of the axis busy at once (simulator/spec/cluster/wiring.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import prod

from simulator.parallel.lattice import Lattice
from simulator.parallel.mesh import GroupShape
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.wiring import Found, Group, Wiring

INTRA, PCIE = "intra", "pcie"  # names of links: a GPU's own port, and its link to the host where it has both


@dataclass(frozen=True, slots=True)
class Port:
    """link: the name under which bytes are counted; kind, bytes_per_s: its data sheet, one way.

    detour: bytes on the link for each byte that the collective's closed form puts on a port.
    """

    link: str
    kind: str
    bytes_per_s: float
    detour: Fraction

    @property
    def reached_bytes_per_s(self) -> float:
        """What the group's rings find, data sheet."""
        return float(self.bytes_per_s / self.detour)


def port_of(cluster: Cluster, shape: GroupShape | None = None, kind: str = "all_reduce") -> Port:
    """What `kind` finds on the ports of a group; without a group, a GPU's own port."""
    wiring, intra = Wiring.of(cluster), cluster.intra
    own = Port(INTRA, intra.kind, intra.bytes_per_s, Fraction(1))
    if shape is None or shape.ranks_per_node == 1 or wiring.is_even:
        return own
    found, host = _slowest(wiring, shape, kind), wiring.host
    if found.on_pcie and host is not None and intra.shape != "pcie":
        own = Port(PCIE, host.kind, host.bytes_per_s, Fraction(1))
    detour = Fraction(own.bytes_per_s) / Fraction(found.bytes_per_s)
    return Port(own.link, own.kind, own.bytes_per_s, max(Fraction(1), detour))


def ports_of(cluster: Cluster) -> tuple[Port, ...]:
    """Every class of port that groups of the cluster may be bound by."""
    wiring = Wiring.of(cluster)
    own = port_of(cluster)
    if wiring.is_even or wiring.host is None or cluster.intra.shape == "pcie":
        return (own,)
    return own, Port(PCIE, wiring.host.kind, wiring.host.bytes_per_s, Fraction(1))


def through_memory(cluster: Cluster, shape: GroupShape, kind: str) -> Fraction:
    """Which part of what a group puts on PCIe passes host memory, for want of peer access."""
    wiring = Wiring.of(cluster)
    if shape.ranks_per_node == 1 or wiring.is_even:
        return Fraction(0)
    found = _slowest(wiring, shape, kind)
    return Fraction(found.in_memory).limit_denominator(1024)


def loads_of(cluster: Cluster, shape: GroupShape, kind: str, members: Collection[int]) -> Mapping[str, float]:
    """Bytes on each link of a node, by its name there, for each byte that `kind` puts on every port of its groups.

    Of the groups that `members` are in, on a node of the first pattern. Ports of a switch are `port0`, …; the others are
    the wiring's.
    """
    wiring, every = Wiring.of(cluster), patterns_of(shape, cluster.gpus_per_node)[0]
    groups = tuple(group for group in every if len(group) > 1 and not set(group).isdisjoint(members))
    if shape.ranks_per_node == 1 or not groups:
        return {}
    if cluster.intra.shape == "switch":
        return {f"port{gpu}": 1.0 for group in groups for gpu in group}
    found: Mapping[str, float] = getattr(wiring, _pattern(kind))(groups).loads
    return found


def patterns_of(shape: GroupShape, num_gpus: int) -> tuple[tuple[Group, ...], ...]:
    """The GPUs of each group of a shape on a node, for each way that nodes look."""
    return shape.patterns or (local_groups(shape, num_gpus),)


def local_groups(shape: GroupShape, num_gpus: int) -> tuple[Group, ...]:
    """The GPUs of each group of a shape on one node, by local index: `local_stride` apart, side by side."""
    if shape.local_blocks:
        return _in_blocks(shape, num_gpus)[: max(1, shape.num_groups_per_node)]
    count, stride = min(shape.ranks_per_node, num_gpus), shape.local_stride
    if count * stride > num_gpus:  # a pattern that wraps: as if its ranks stood next to each other
        stride = 1
    period = count * stride
    firsts = (start + offset for start in range(0, num_gpus - period + 1, period) for offset in range(stride))
    groups = tuple(tuple(range(first, first + period, stride)) for first in firsts)
    return groups[: max(1, shape.num_groups_per_node)]


def _in_blocks(shape: GroupShape, num_gpus: int) -> tuple[Group, ...]:
    """The same for a group's GPUs in blocks; patterns that do not fit a node are treated as adjacent GPUs."""
    blocks, count = shape.local_blocks, min(shape.ranks_per_node, num_gpus)
    run = count // prod(size for size, _ in blocks)
    lattice = Lattice.of(((run, shape.local_stride), *blocks))
    if lattice.count != count or num_gpus % lattice.period:
        lattice = Lattice.of([(count, 1)])
    firsts = (gpu for gpu in range(num_gpus) if lattice.base(gpu) == gpu)
    return tuple(tuple(lattice.ranks(first)) for first in firsts if first + lattice.reach < num_gpus)


def _slowest(wiring: Wiring, shape: GroupShape, kind: str) -> Found:
    """What the groups find on the nodes where they find least. A ring's order is NCCL's, a chain's that of the ranks."""
    pattern = _pattern(kind)
    every = [[group for group in groups if len(group) > 1] for groups in patterns_of(shape, wiring.num_gpus)]
    if pattern != "neighbours":
        every = [[tuple(sorted(group)) for group in groups] for groups in every]
    return min((_found(wiring, tuple(groups), pattern) for groups in every if groups), key=lambda one: one.bytes_per_s)


def _pattern(kind: str) -> str:
    return {"all_to_all": "all_pairs", "send_recv": "neighbours"}.get(kind, "rings")


@lru_cache(maxsize=4096)
def _found(wiring: Wiring, groups: tuple[Group, ...], pattern: str) -> Found:
    found: Found = getattr(wiring, pattern)(groups)
    # a linear programme's last digits mean nothing
    return replace(found, bytes_per_s=float(f"{found.bytes_per_s:.9g}"))
