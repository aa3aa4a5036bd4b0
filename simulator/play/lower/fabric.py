"""Fabric: links of collectives, the mesh groups of each role, and the cost of each call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from simulator.parallel.mesh import GroupShape, Mesh
from simulator.play.lower.rank_classes import GroupKinds, RankClasses
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.spec.software.stack import Stack
from simulator.work.collectives import collective_cost, copies, interference, rank_wait_s, ranks_heard
from simulator.work.offload import Transfers
from simulator.work.ops import Exchange
from simulator.work.program import CollectiveCost
from simulator.work.script.instructions import Communicate

# Roles and axes over which ranks meet, pipelines aside: what folding refines over where GPUs differ
ROLES = ("shard", "reshard", "replicate", "cp", "tp")
NORM = "dp_shard_cp_tp"  # ranks of a stage whose gradients are parts of one whole
EXPERT_ROLES = ("expert_shard", "expert_replicate", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class MeshFabric:
    """All that a collective's cost depends on besides its size."""

    cluster: Cluster
    mesh: Mesh
    stack: Stack
    curves: LinkCurves
    memory_weight: float  # what compute loses of memory that a collective uses
    slowdown: float  # of the slowest GPU's compute, as a fraction
    transfers: Transfers | None = None  # between HBM and the tiers below, where the plan offloads
    nccl: Nccl = field(default_factory=Nccl)  # as the stack sets it up
    agrees: bool = True  # the step ends with replicas agreeing, where they take steps alone
    rank_classes: RankClasses | None = None  # where GPUs of the cluster differ
    _shapes: dict[str, GroupShape] = field(default_factory=dict, compare=False, repr=False)
    _prices: dict[tuple[str, str, int, GroupKinds | None], tuple[CollectiveCost, float]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _slows: dict[tuple[str, str, GroupKinds | None], float] = field(default_factory=dict, compare=False, repr=False)
    _messages: dict[tuple[tuple[int, int], int, GroupKinds | None], CollectiveCost] = field(
        default_factory=dict, compare=False, repr=False
    )

    def axis(self, role: str) -> str:
        """The mesh axis over which a role communicates: shard, reshard, replicate, and the same of experts; or the axis.

        reshard: the part of a shard group that blocks are gathered from again in the backward. shard_near, shard_far: its
        ranks on one node, and those at one place of each node.

        Context-parallel ranks hold the same parameters as their peers, so gradients cross them too: with the shards
        where there are any, else with the replicas.
        """
        plan = self.mesh.plan
        # torch's ZeRO-1 shards the optimizer alone: DDP reduces whole gradients among all ranks
        everyone = plan.zero == 0 or plan.traits.reduces_among_all
        return {
            "shard": "dp_shard_cp",
            "reshard": f"dp_shard_cp/{plan.reshard_ranks}" if plan.reshard_ranks else "dp_shard_cp",
            "shard_near": f"dp_shard_cp/{self.near_ranks}",
            "shard_far": f"dp_shard_cp%{self.near_ranks}",
            "replicate": "dp_cp" if everyone else "dp_replicate",
            "expert_shard": "expert_dp",
            "expert_replicate": "expert_dp" if plan.zero == 0 else "dp_replicate",
        }.get(role, role)

    @cached_property
    def near_ranks(self) -> int:
        """Ranks of a shard group on one node."""
        return self.mesh.group_shape("dp_shard_cp").ranks_per_node

    @property
    def synchronous(self) -> bool:
        """The host waits for each collective, so that nothing runs beside it.

        FSDP issues its collectives synchronously and leaves overlap to the device's streams (torch 2.13
        `_fsdp_param_group.py`: unshard_async_op is False). Where the host is the device there are none, and each call
        returns when the collective is over. DDP's buckets and ZeRO-1's broadcasts are asynchronous everywhere.
        """
        return self.stack.host.blocking and self.sharded

    @property
    def sharded(self) -> bool:
        """Hooks around units of parameters issue the collectives."""
        return self.mesh.plan.traits.hooks_modules

    def shape(self, role: str) -> GroupShape:
        """How the groups of a role lie on the nodes."""
        if role not in self._shapes:
            self._shapes[role] = self.mesh.group_shape(self.axis(role))
        return self._shapes[role]

    @cached_property
    def rank_wait_s(self) -> float:
        return rank_wait_s(self.cluster, self.nccl)

    def issue_s(self, role: str, count: int = 1) -> float:
        """Host time to issue so many collectives of a role, and to hear of every rank where each call waits for that."""
        shape = self.shape(role)
        waits_s = self.rank_wait_s and self.rank_wait_s * ranks_heard(shape.num_ranks, shape.ranks_per_node)
        return count * (self.stack.host.collective_s + waits_s)

    def sent_bytes(self, exchange: Exchange) -> int:
        """Bytes of an exchange once copies of a token that go to the same place are sent once."""
        return exchange.num_bytes if exchange.copies == 1 else bytes_sent_once(exchange, self.shape(exchange.axis))

    def on(self, group_kinds: GroupKinds | None) -> Cluster:
        """The uniform cluster on which a group of these kinds of GPUs runs as it does here; None: all are equal."""
        return self.cluster if group_kinds is None or self.rank_classes is None else self.rank_classes.on(group_kinds)

    def price(
        self, kind: str, role: str, size_bytes: int, group_kinds: GroupKinds | None = None
    ) -> tuple[CollectiveCost, float]:
        """The cost of one collective, and the share of compute that it takes while it runs."""
        found = self._prices.get((kind, role, size_bytes, group_kinds))
        if found is None:
            shape, cluster, curves = self.shape(role), self.on(group_kinds), self.curves
            weight = (
                self.memory_weight
                if group_kinds is None or self.rank_classes is None
                else self.rank_classes.memory_weight(group_kinds)
            )
            slows = self._slows.get((kind, role, group_kinds))
            if slows is None:  # the same for calls of any size
                slows = float(interference(kind, shape, cluster, curves, memory_weight=weight, nccl=self.nccl))
                self._slows[kind, role, group_kinds] = slows
            found = collective_cost(kind, size_bytes, shape, cluster, curves=curves, nccl=self.nccl), slows
            self._prices[kind, role, size_bytes, group_kinds] = found
        return found

    def exchanged(self, exchange: Exchange, group_kinds: GroupKinds | None = None) -> tuple[CollectiveCost, float]:
        """The same of a collective inside a block. Copy engines reach the ranks of one NVLink domain; else NCCL carries it."""
        size, shape = self.sent_bytes(exchange), self.shape(exchange.axis)
        if not exchange.copied or shape.spans_domain:
            return self._awaited(exchange.kind, exchange.axis, size, group_kinds)
        key = f"copied {exchange.kind}", exchange.axis, size, group_kinds
        if key not in self._prices:
            weight = (
                self.memory_weight
                if group_kinds is None or self.rank_classes is None
                else self.rank_classes.memory_weight(group_kinds)
            )
            self._prices[key] = copies(
                exchange.kind, size, shape, self.on(group_kinds), self.curves, memory_weight=weight
            )
        return self._prices[key]

    def _awaited(
        self, kind: str, role: str, size_bytes: int, group_kinds: GroupKinds | None
    ) -> tuple[CollectiveCost, float]:
        """The cost of a collective inside a block, whose ranks arrive at different times."""
        one, slows = self.price(kind, role, size_bytes, group_kinds)
        wait_s = self.stack.fitted.collective_wait_s
        return (replace(one, latency_s=one.latency_s + wait_s), slows) if wait_s else (one, slows)

    def message(self, pair: tuple[int, int], size_bytes: int, group_kinds: GroupKinds | None = None) -> CollectiveCost:
        """The cost of one message between two pipeline stages."""
        found = self._messages.get((pair, size_bytes, group_kinds))
        if found is None:
            shape = self.mesh.pair_shape(*pair)
            found = collective_cost(
                "send_recv", size_bytes, shape, self.on(group_kinds), curves=self.curves, nccl=self.nccl
            )
            self._messages[pair, size_bytes, group_kinds] = found
        return found


def bytes_sent_once(exchange: Exchange, shape: GroupShape) -> int:
    """Bytes of an exchange of copies among a group of this shape.

    k experts drawn evenly lie on n (1 - (1 - 1/n)^k) of n nodes, or of n ranks where a group stays in one node.
    """
    if exchange.copies == 1:
        return exchange.num_bytes
    places = shape.num_ranks if shape.num_nodes == 1 or not shape.spans_domain else shape.num_nodes
    return round(exchange.num_bytes * places * (1 - (1 - 1 / places) ** exchange.copies) / exchange.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`count` equal collectives, back to back. slows: the share of compute that each takes while it runs.

    stream: where it is not the role's. meets: what it is called among several programs, and how many of them meet.
    """

    label: str
    kind: str
    role: str
    size_bytes: int
    cost: CollectiveCost
    slows: float
    host_s: float
    count: int = 1
    waits: bool = False
    stream: str = ""
    meets: tuple[str, int] | None = None


def captured_call(one: Communicate, fabric: MeshFabric) -> Call:
    """A captured collective, or one end of a message, whose sender pays."""
    cost, slows = fabric.price(one.kind, one.role, one.size_bytes)
    return Call(
        label=one.label,
        kind=one.kind,
        role=one.role,
        size_bytes=one.size_bytes,
        cost=cost if one.sends else CollectiveCost(latency_s=0.0, link_bytes={}),
        slows=0.0 if one.lane else slows,
        host_s=fabric.issue_s(one.role) + (fabric.stack.host.unit_s if one.hooked else 0.0),
        waits=one.waits,
        stream=one.lane,
        meets=(one.meets, one.members) if one.meets else None,
    )


def issued_s(exchange: Exchange, fabric: MeshFabric) -> float:
    """Host time to issue it; of copies, each and its signal; none inside a CUDA graph."""
    stack = fabric.stack
    if exchange.captured:
        return 0.0
    if exchange.copied:
        return 2 * exchange.pieces * stack.further_kernel_s()
    return fabric.issue_s(exchange.axis) + (stack.host.redistribute_s if exchange.axis == "tp" else 0.0)


def times(one: CollectiveCost, count: int) -> CollectiveCost:
    """The cost of as many, back to back."""
    if count == 1:
        return one
    share = one.share_bytes and count * one.share_bytes
    link_bytes = {link: count * size for link, size in one.link_bytes.items()}
    return CollectiveCost(latency_s=count * one.latency_s, link_bytes=link_bytes, share_bytes=share)


def ids(after: tuple[int | None, ...]) -> tuple[int, ...]:
    """Ids of an op's dependencies, each once."""
    return tuple(sorted({i for i in after if i is not None}))
