"""Rank ↔ coordinates over the plan's axes, the groups of an axis, and what a group looks like on the cluster.

Axes follow the plan's rank order; by default that of torch's DeviceMesh, outermost first: pp, dp_replicate, dp_shard,
cp, tp, so that neighbours in tp are neighbouring ranks. Joined names fuse axes: FSDP shards over `dp_shard_cp`;
`dp_shard_cp/8` are groups of 8 neighbours there, `dp_shard_cp%8` groups of every eighth. Groups are lattices of ranks
(`simulator.parallel.lattice`), so nothing here builds all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm, prod
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from simulator.base.errors import PlanError
from simulator.base.units import whole as whole_number
from simulator.parallel.group_layout import Pattern, layout, pairs_layout
from simulator.parallel.lattice import Digit, Lattice
from simulator.parallel.legality.degrees import FILLS
from simulator.parallel.legality.rule import OnCluster
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.wiring import Wiring
from simulator.spec.plan import AXES, Plan

# Among the ranks of a stage (of a shard group, where states are sharded): an expert's slices, a layer's experts, replicas
EXPERT_AXES: Final = ("etp", "ep", "expert_dp")

_FUSED: Final = {  # torchtitan's names for fused axes, and all ranks of a pipeline stage, beside the joined names
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "world": AXES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """How the groups of one axis lie on the nodes; where groups differ, the worst of each.

    num_ranks: ranks of a group. num_nodes: nodes it touches. ranks_per_node: its ranks on its fullest node.
    num_groups_per_node: groups of this axis that share one node, and its NICs, at the same time.
    spans_domain: a group reaches past one NVLink domain. local_stride: GPUs of a node from one rank of a group to the next.
    node_stride: nodes from one that a group touches to the next.
    local_blocks: where a group's ranks on a node have further strides: (how many blocks, GPUs from one to the next).
    patterns: the GPUs of each group on a node, where strides do not say them: one for each way that nodes look.
    off_rail: part of what a group sends between nodes that changes rails, as their NICs are cabled otherwise.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    num_groups_per_node: int
    spans_domain: bool
    local_stride: int = 1
    node_stride: int = 1
    local_blocks: tuple[Digit, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    off_rail: float = 0.0

    @classmethod
    def of_neighbours(cls, cluster: Cluster, num_ranks: int, num_groups_per_node: int = 1) -> Self:
        """So many GPUs one behind another, node by node."""
        gpus = cluster.gpus_per_node
        return cls(
            num_ranks=num_ranks,
            num_nodes=-(-num_ranks // gpus),
            ranks_per_node=min(num_ranks, gpus),
            num_groups_per_node=num_groups_per_node,
            spans_domain=num_ranks > cluster.nvlink_domain_size,
        )

    @classmethod
    def dealt(cls, cluster: Cluster, num_ranks: int, num_nodes: int, num_groups_per_node: int = 1) -> Self:
        """Ranks dealt evenly to so many nodes, whose other GPUs are idle or in other groups."""
        return cls(
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            ranks_per_node=-(-num_ranks // num_nodes),
            num_groups_per_node=num_groups_per_node,
            spans_domain=num_nodes * cluster.gpus_per_node > cluster.nvlink_domain_size,
        )


class Mesh:
    """Placement of a plan's ranks on a cluster: rank r is GPU r, or as the cluster's rank mapping (`seats`) says.

    Raises PlanError if the degrees do not fill it.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        both = OnCluster(plan, cluster)
        if FILLS.broken(both):
            raise PlanError(FILLS.fault(both))
        self.plan = plan
        self.cluster = cluster
        self.axes: Mapping[str, int] = {axis: getattr(plan, axis) for axis in AXES}
        self._strides: dict[str, int] = {}  # by axis, innermost first
        stride = 1
        for axis in reversed(plan.axis_order):
            self._strides[axis] = stride
            stride *= self.axes[axis]

    @property
    def num_ranks(self) -> int:
        return prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> index of a rank; the inverse of `rank`. Raises IndexError out of range."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(rank)
        return {axis: rank // self._strides[axis] % self.axes[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these indices (0 where an axis is not named). Raises IndexError out of range."""
        rank = 0
        for axis in AXES:
            index = coordinates.get(axis, 0)
            if not 0 <= index < self.axes[axis]:
                raise IndexError(f"{axis} = {index}")
            rank += index * self._strides[axis]
        return rank

    def stride(self, axis: str) -> int:
        """Ranks from one index of an axis to the next."""
        return self._strides[axis]

    def groups(self, axis: str) -> Iterator[Sequence[int]]:
        """The groups of an axis or fused axis, by first rank; the ranks of each ascending."""
        lattice = self._lattice(axis)
        return map(lattice.ranks, lattice.firsts(self.num_ranks))

    def group_of(self, axis: str, rank: int) -> Sequence[int]:
        """The group of an axis or fused axis that `rank` is in."""
        lattice = self._lattice(axis)
        return lattice.ranks(lattice.base(rank))

    def partition(self, axis: str) -> NDArray[np.int64]:
        """Of every rank the first rank of its group of an axis or fused axis."""
        return self._lattice(axis).bases(np.arange(self.num_ranks, dtype=np.int64))

    def group_shape(self, axis: str) -> GroupShape:
        """How the groups of an axis or fused axis lie on the nodes."""
        if axis.startswith("#"):
            return self._message_shape(axis)
        if self.cluster.seats or self.cluster.rails:
            return GroupShape(**layout(self.cluster, list(self.groups(axis))))
        lattice, gpus = self._lattice(axis), self.cluster.gpus_per_node
        on_node = lattice.on_each(gpus)
        if on_node is None:
            widest, fullest, most, apart = _ragged(lattice, gpus, self.cluster.num_nodes)
        else:
            widest, fullest, most = lattice.count // on_node, on_node, gpus // on_node
            apart = next((max(1, stride // gpus) for count, stride in lattice.digits if count * stride > gpus), 1)
        (_, first), *blocks = lattice.within(gpus) if fullest > 1 else ((1, 1),)
        return GroupShape(
            num_ranks=lattice.count,
            num_nodes=widest,
            ranks_per_node=fullest,
            num_groups_per_node=most,
            spans_domain=_spans(lattice, self.cluster.nvlink_domain_size, self.num_ranks),
            local_stride=first,
            local_blocks=tuple(blocks),
            node_stride=apart,
        )

    def pair_shape(self, stage: int, other: int) -> GroupShape:
        """How two communicating stages are spread over nodes: every rank of a stage has one peer in the other."""
        gpus, domain = self.cluster.gpus_per_node, self.cluster.nvlink_domain_size
        away, width = (other - stage) * self.stride("pp"), self.num_ranks // self.axes["pp"]
        placed = self.cluster.seats or self.cluster.rails
        ranks = self._of_stage(stage, width if placed else min(width, max(gpus, domain)))
        return self._pairs_shape([(rank, rank + away) for rank in ranks])

    def _message_shape(self, role: str) -> GroupShape:
        """The same of two ranks of a captured program: "#3>5@4:1" is from 3 to 5, where each 4 neighbours do likewise."""
        ends, _, digits = role.removeprefix("#").partition("@")
        source, target = map(int, ends.split(">"))
        lattice, widest = self._lattice(f"@{digits}"), max(self.cluster.gpus_per_node, self.cluster.nvlink_domain_size)
        own = source - lattice.base(source)
        near = source // widest * widest
        others = range(self.num_ranks if not self._by_count else min(near + widest, self.num_ranks))
        senders = [rank for rank in others if rank - lattice.base(rank) == own and (rank >= near or not self._by_count)]
        pairs = [(rank, rank + target - source) for rank in senders]
        return self._pairs_shape([pair for pair in pairs if 0 <= pair[1] < self.num_ranks] or [(source, target)])

    def _pairs_shape(self, pairs: list[tuple[int, int]]) -> GroupShape:
        gpus, domain, away = self.cluster.gpus_per_node, self.cluster.nvlink_domain_size, pairs[0][1] - pairs[0][0]
        if not self._by_count:
            return GroupShape(**pairs_layout(self.cluster, pairs))
        apart = [(a, b) for a, b in pairs if a // gpus != b // gpus]
        return GroupShape(
            num_ranks=2,
            num_nodes=2 if apart else 1,
            ranks_per_node=1 if apart else 2,
            num_groups_per_node=max(Counter(a // gpus for a, _ in apart or pairs).values()),
            spans_domain=any(a // domain != b // domain for a, b in pairs),
            local_stride=1 if apart else abs(away),
            node_stride=max(1, abs(away) // gpus) if apart else 1,
        )

    @property
    def _by_count(self) -> bool:
        """Whether only the number of a stage's GPUs on a node matters, not which ones."""
        inter = self.cluster.inter
        placed = self.cluster.seats or self.cluster.rails or (inter is not None and inter.cards)
        return Wiring.of(self.cluster).is_even and not placed

    def _of_stage(self, stage: int, count: int) -> list[int]:
        """The first `count` ranks of a pipeline stage."""
        inner = self.stride("pp")
        outer = inner * self.axes["pp"]
        return [index // inner * outer + stage * inner + index % inner for index in range(count)]

    def _of_experts(self, axis: str) -> Lattice:
        """Groups of experts: a stage's ranks in order are cut into etp, those into ep, and equal places are replicas.

        Megatron-LM's order for experts is etp, ep, expert data parallelism, pp (core/parallel_state.py, decoder and expert
        rank generators); torchtitan takes ep out of the inner dp_shard, cp and tp (distributed/parallel_dims.py).
        """
        plan = self.plan
        axes = ("dp_shard", "cp", "tp") if plan.zero else ("dp_replicate", "dp_shard", "cp", "tp")
        lattice, group = Lattice.of((self.axes[a], self._strides[a]) for a in axes), plan.ep * plan.experts.etp
        count, skip = {
            "etp": (plan.experts.etp, 1),
            "ep": (plan.ep, plan.experts.etp),
            "expert_dp": (plan.num_expert_ranks // group, group),
        }[axis]
        found = lattice.part(count, skip)
        if found is None:
            problem = f"ep × etp = {plan.ep} × {plan.experts.etp} cuts the ranks of {' × '.join(axes)} unevenly"
            raise PlanError.at("plan: ep", problem, "degrees that divide one another")
        return found

    def _lattice(self, axis: str) -> Lattice:
        if axis.startswith("@"):  # a captured program's own group: its digits, innermost first
            pairs = (one.split(":") for one in axis[1:].split(","))
            return Lattice.of((int(count), int(stride)) for count, stride in pairs)
        if axis in EXPERT_AXES:
            return self._of_experts(axis)
        name, mark, part = axis.partition("%" if "%" in axis else "/")
        lattice = Lattice.of((self.axes[a], self._strides[a]) for a in axis_names(name))
        if not part:
            return lattice
        size = whole_number(part) or 0
        count, skip = (lattice.count // max(size, 1), size) if mark == "%" else (size, 1)
        found = lattice.part(count, skip) if size and count else None
        if found is None:
            problem = f"{part!r} neighbours are not part of the {lattice.count} ranks of {name!r}"
            raise PlanError.at("axis", problem, "a divisor of their number")
        return found


def axis_names(axis: str) -> tuple[str, ...]:
    """The axes of a (fused) axis' name. Raises PlanError with the legal names."""
    if axis in _FUSED:
        return _FUSED[axis]
    names, rest = [], f"{axis}_"
    for name in AXES:
        if rest.startswith(f"{name}_"):
            names.append(name)
            rest = rest.removeprefix(f"{name}_")
    if rest:
        problem = f"no axis, and no axes joined in order, are called {axis!r}"
        legal = ", ".join((*AXES, *_FUSED))
        raise PlanError.at("axis", problem, f"{legal}, or joined in this order as dp_shard_cp")
    return tuple(names)


def _ragged(lattice: Lattice, gpus: int, num_nodes: int) -> tuple[int, int, int, int]:
    """Where nodes differ: (nodes a group touches, its ranks on its fullest node, groups that share a node) at most.

    The last is how many nodes apart those that a group touches are at least.
    """
    touched: dict[int, list[int]] = {}  # by a first rank's place on its node
    fullest, most = 1, 1
    for node in range(min(num_nodes, lattice.period // gcd(lattice.period, gpus))):
        members = Counter(lattice.base(rank) for rank in range(node * gpus, (node + 1) * gpus))
        most, fullest = max(most, len(members)), max(fullest, *members.values())
        for base in members:
            place = base % gpus
            if place not in touched:
                touched[place] = sorted({rank // gpus for rank in lattice.ranks(place)})
    widest = max(map(len, touched.values()))
    return widest, fullest, most, min((b - a for nodes in touched.values() for a, b in pairwise(nodes)), default=1)


def _spans(lattice: Lattice, domain: int, num_ranks: int) -> bool:
    """Whether some group has ranks in two NVLink domains."""
    if domain % lattice.period == 0 or num_ranks <= domain:
        return False
    if lattice.reach >= domain:
        return True
    # short groups on domains they do not nest in: look at one period of both
    ranks = range(min(num_ranks, lcm(lattice.period, domain)))
    return any(rank % domain + lattice.reach >= domain for rank in ranks if lattice.base(rank) == rank)
