"""Mesh: rank ↔ coordinates over the plan's axes, the groups of an axis, and what a group looks like on the cluster.

Axes stand in torch DeviceMesh order, outermost first: pp, dp_replicate, dp_shard, cp, tp; neighbours in tp are
neighbouring ranks. Neighbouring axes (axes of size 1 aside) fuse by their joined names: `dp_shard_cp` is
where FSDP shards; `dp_shard_cp/8` are groups of 8 neighbours there. Every group of a (fused) axis is an arithmetic
progression of ranks, so nothing here builds all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Final, Protocol

from simulator.errors import Fault, PlanError
from simulator.experts import Experts
from simulator.pipeline import faults as pipeline_faults
from simulator.plan import Plan
from simulator.topology import Cluster

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

_FUSED: Final = {  # torchtitan's names for fused axes, beside the joined names
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "world": AXES,
}


class Heads(Protocol):
    """What of a model decides whether a plan can split it."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def d_ff(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def experts(self) -> Experts | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """How the groups of one axis lie on the nodes; where groups differ, the worst of each.

    num_ranks: ranks of a group. num_nodes: nodes it touches. ranks_per_node: its ranks on its fullest node.
    num_groups_per_node: groups of this axis that share one node, and its network cards, at the same time.
    spans_domain: a group reaches past one NVLink domain. local_stride: GPUs of a node from one rank of a group to the next.
    node_stride: nodes from one that a group touches to the next.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    num_groups_per_node: int
    spans_domain: bool
    local_stride: int = 1
    node_stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progression:
    """The groups of a fused axis: base, base + stride, …, `count` ranks each."""

    count: int
    stride: int

    @property
    def period(self) -> int:
        """Ranks after which the pattern of groups repeats."""
        return self.count * self.stride

    def base(self, rank: int) -> int:
        return rank // self.period * self.period + rank % self.stride

    def last(self, base: int) -> int:
        return base + (self.count - 1) * self.stride


class Mesh:
    """Placement of a plan's ranks on a cluster: rank r is GPU r. Raises PlanError if the degrees do not fill it."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        faults = _degree_faults(plan, cluster)
        if faults:
            raise PlanError(faults)
        self.plan = plan
        self.cluster = cluster
        self.axes: Mapping[str, int] = {axis: getattr(plan, axis) for axis in AXES}

    @property
    def num_ranks(self) -> int:
        return prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> index of a rank; the inverse of `rank`. Raises IndexError out of range."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(rank)
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.axes[axis])
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these indices (0 where an axis is not named). Raises IndexError out of range."""
        rank = 0
        for axis in AXES:
            index = coordinates.get(axis, 0)
            if not 0 <= index < self.axes[axis]:
                raise IndexError(f"{axis} = {index}")
            rank = rank * self.axes[axis] + index
        return rank

    def groups(self, axis: str) -> Iterator[range]:
        """The groups of an axis or fused axis, by first rank; each a range of ranks in the axis' order."""
        groups = self._progression(axis)
        for start in range(0, self.num_ranks, groups.period):
            for base in range(start, start + groups.stride):
                yield range(base, groups.last(base) + 1, groups.stride)

    def group_of(self, axis: str, rank: int) -> range:
        """The group of an axis or fused axis that `rank` is in."""
        groups = self._progression(axis)
        base = groups.base(rank)
        return range(base, groups.last(base) + 1, groups.stride)

    def group_shape(self, axis: str) -> GroupShape:
        """How the groups of an axis or fused axis lie on the nodes."""
        groups, gpus = self._progression(axis), self.cluster.gpus_per_node
        widest, fullest, most = 1, 1, 1
        for node in _different_nodes(groups, gpus, self.cluster.num_nodes):
            members = Counter(groups.base(rank) for rank in range(node * gpus, (node + 1) * gpus))
            most = max(most, len(members))
            fullest = max(fullest, *members.values())
            widest = max(widest, *(_num_nodes(groups, base, gpus) for base in members))
        return GroupShape(
            num_ranks=groups.count,
            num_nodes=widest,
            ranks_per_node=fullest,
            num_groups_per_node=most,
            spans_domain=_spans(groups, self.cluster.nvlink_domain_size, self.num_ranks),
            local_stride=groups.stride if fullest > 1 else 1,
            node_stride=max(1, groups.stride // gpus) if widest > 1 else 1,
        )

    def pair_shape(self, stage: int, other: int) -> GroupShape:
        """How two stages that talk to each other lie on the nodes: every rank of a stage has its peer in the other."""
        stride = self.num_ranks // self.axes["pp"]
        gpus, domain = self.cluster.gpus_per_node, self.cluster.nvlink_domain_size
        pairs = [(stage * stride + r, other * stride + r) for r in range(min(stride, max(gpus, domain)))]
        apart = [(a, b) for a, b in pairs if a // gpus != b // gpus]
        return GroupShape(
            num_ranks=2,
            num_nodes=2 if apart else 1,
            ranks_per_node=1 if apart else 2,
            num_groups_per_node=max(Counter(a // gpus for a, _ in apart or pairs).values()),
            spans_domain=any(a // domain != b // domain for a, b in pairs),
            node_stride=max(1, abs(other - stage) * stride // gpus) if apart else 1,
        )

    def _progression(self, axis: str) -> _Progression:
        name, _, part = axis.partition("/")
        groups = self._whole(name)
        if not part:
            return groups
        if not part.isdecimal() or not int(part) or groups.count % int(part):
            problem = f"{part!r} neighbours are no part of the {groups.count} ranks of {name!r}"
            raise PlanError(Fault(place="axis", problem=problem, remedy="a divisor of their number"))
        return _Progression(count=int(part), stride=groups.stride)

    def _whole(self, axis: str) -> _Progression:
        names = axis_names(axis)
        first, last = AXES.index(names[0]), AXES.index(names[-1])
        skipped = [f"{a} = {self.axes[a]}" for a in AXES[first:last] if a not in names and self.axes[a] > 1]
        if skipped:
            problem = f"{axis!r} skips {', '.join(skipped)}: its ranks are not evenly spaced"
            raise PlanError(Fault(place="axis", problem=problem, remedy="neighbouring axes"))
        return _Progression(
            count=prod(self.axes[a] for a in names), stride=prod(self.axes[a] for a in AXES[last + 1 :])
        )


def axis_names(axis: str) -> tuple[str, ...]:
    """The axes that a (fused) axis' name stands for. Raises PlanError with the legal names."""
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
        raise PlanError(Fault(place="axis", problem=problem, remedy=f"{legal}, or joined in this order as dp_shard_cp"))
    return tuple(names)


def check(plan: Plan, model: Heads, cluster: Cluster) -> None:
    """Raise PlanError with every way in which plan, model and cluster do not fit together.

    Ring attention splits the sequence (which the plan checks), never the heads; an all-to-all splits both.
    """
    faults = [
        *_degree_faults(plan, cluster),
        *_split_faults(plan, model),
        *_swap_faults(plan, model),
        *_expert_faults(plan, model),
    ]
    faults += pipeline_faults(
        plan.pipeline_schedule,
        model.num_layers,
        plan.pp,
        plan.num_micro_batches,
        plan.virtual_stages,
        split=plan.split,
    )
    if faults:
        raise PlanError(faults)


def _degree_faults(plan: Plan, cluster: Cluster) -> list[Fault]:
    if plan.num_devices == cluster.num_devices:
        return []
    equation = " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)
    layout = f"{cluster.num_nodes} × {cluster.gpus_per_node} of {cluster.name}"
    return [
        Fault(
            place="plan: degrees",
            problem=f"{equation} = {plan.num_devices}, the cluster has {cluster.num_devices} devices ({layout})",
            remedy=_nearest_degrees(plan, cluster),
        )
    ]


def _nearest_degrees(plan: Plan, cluster: Cluster) -> str:
    """The data-parallel degree that fills the cluster, else a number of nodes that the plan fills."""
    axis = "dp_shard" if plan.zero or plan.dp_shard > 1 else "dp_replicate"
    rest = plan.num_devices // getattr(plan, axis)
    remedies = []
    if cluster.num_devices % rest == 0:
        remedies.append(f"{axis} = {cluster.num_devices // rest}")
    else:
        near = max(cluster.num_devices // rest, 1)
        remedies.append(f"{axis} = {near} fills {near * rest} devices")
    if plan.num_devices % cluster.gpus_per_node == 0:
        remedies.append(f"num_nodes = {plan.num_devices // cluster.gpus_per_node}")
    return ", or ".join(remedies)


def _split_faults(plan: Plan, model: Heads) -> list[Fault]:
    heads = {"heads": model.num_heads, "key-value heads": model.num_kv_heads, "columns of the MLP": model.d_ff}
    return [
        Fault(
            place="plan: tp",
            problem=f"tp = {plan.tp} does not divide the model's {count} {name}",
            remedy=f"tp = {_nearest_divisor(gcd(*heads.values()), plan.tp)}",
        )
        for name, count in heads.items()
        if count % plan.tp
    ]


def _swap_faults(plan: Plan, model: Heads) -> Iterator[Fault]:
    if plan.cp_exchange != "all_to_all" or plan.cp == 1:
        return
    heads = {"heads": model.num_heads, "key-value heads": model.num_kv_heads}
    for name, count in heads.items():
        if count % (plan.cp * plan.tp):
            among = f"cp × tp = {plan.cp} × {plan.tp} ranks" if plan.tp > 1 else f"cp = {plan.cp} ranks"
            problem = f"an all-to-all deals the model's {count} {name} out to {among}, which does not come out even"
            yield Fault(place="plan: cp_exchange", problem=problem, remedy='cp_exchange = "ring", or a smaller cp')


def _expert_faults(plan: Plan, model: Heads) -> list[Fault]:
    experts = model.experts.num_experts if model.experts is not None else 0
    if plan.ep == 1 or (experts and experts % plan.ep == 0):
        return []
    problem = f"ep = {plan.ep} does not divide the model's {experts} experts" if experts else "the model has no experts"
    remedy = f"ep = {_nearest_divisor(experts, plan.ep)}" if experts else "ep = 1"
    return [Fault(place="plan: ep", problem=problem, remedy=remedy)]


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _different_nodes(groups: _Progression, gpus: int, num_nodes: int) -> range:
    """Nodes among which every pattern occurs: one where groups and nodes nest, else one period of both."""
    nested = groups.period % gpus == 0 and (gpus % groups.stride == 0 or groups.stride % gpus == 0)
    nested = nested or gpus % groups.period == 0
    return range(1 if nested else min(num_nodes, groups.period // gcd(groups.period, gpus)))


def _num_nodes(groups: _Progression, base: int, gpus: int) -> int:
    """Nodes that the group of `base` touches: strides of a node or more land on a new one each time."""
    if groups.stride >= gpus:
        return groups.count
    return groups.last(base) // gpus - base // gpus + 1


def _spans(groups: _Progression, domain: int, num_ranks: int) -> bool:
    """Whether some group has ranks in two NVLink domains."""
    if domain % groups.period == 0 or num_ranks <= domain:
        return False
    if groups.last(0) >= domain:
        return True
    # short groups on domains they do not nest in: look at one period of both
    starts = range(0, min(num_ranks, groups.period * domain // gcd(groups.period, domain)), groups.period)
    return any(b // domain != groups.last(b) // domain for s in starts for b in range(s, s + groups.stride))
