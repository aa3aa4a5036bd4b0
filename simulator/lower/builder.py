"""Builder: appends ops to one rank class's program and keeps its ids. It knows streams and links, not models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from simulator.collective_curves import LinkCurves
from simulator.collectives import bill, host_traffic, interference, link_capacities, renamed
from simulator.lower.work import NO_WORK, Phase, Segment, Work
from simulator.mesh import GroupShape, Mesh
from simulator.nccl import Nccl
from simulator.offload import Transfers
from simulator.ops import Exchange
from simulator.program import COMPUTE_STREAM, Bill, Collective, Compute, Number, Program, ProgramOp
from simulator.stack import Stack
from simulator.topology import Cluster


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What a collective's price depends on besides its size."""

    cluster: Cluster
    mesh: Mesh
    stack: Stack
    curves: LinkCurves
    memory_weight: float  # what compute loses of memory that a collective uses
    slowdown: float  # of the slowest GPU's compute, as a fraction
    transfers: Transfers | None = None  # between HBM and the tiers below, where the plan offloads
    nccl: Nccl = field(default_factory=Nccl)  # as the stack sets it up
    _shapes: dict[str, GroupShape] = field(default_factory=dict, compare=False, repr=False)
    _prices: dict[tuple[str, str, int], tuple[Bill, float]] = field(default_factory=dict, compare=False, repr=False)
    _messages: dict[tuple[tuple[int, int], int], Bill] = field(default_factory=dict, compare=False, repr=False)

    def axis(self, role: str) -> str:
        """The mesh axis over which a role communicates: shard, reshard, replicate, and the same of experts; or the axis.

        reshard: the part of a shard group that blocks are gathered from again in the backward. shard_near, shard_far: its
        ranks on one node, and those at one place of each node.

        Context-parallel ranks hold the same parameters as their peers, so gradients cross them too: with the shards
        where there are any, else with the replicas.
        """
        plan = self.mesh.plan
        # torch's ZeRO-1 shards the optimizer alone: DDP reduces whole gradients among all ranks
        everyone = plan.zero == 0 or plan.implementation == "zero_redundancy"
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
        return self.stack.host_blocking and self.sharded

    @property
    def sharded(self) -> bool:
        """Hooks around units of parameters issue the collectives."""
        return self.mesh.plan.implementation in ("fsdp1", "fsdp2")

    def shape(self, role: str) -> GroupShape:
        """How the groups of a role lie on the nodes."""
        if role not in self._shapes:
            self._shapes[role] = self.mesh.group_shape(self.axis(role))
        return self._shapes[role]

    def sent_bytes(self, exchange: Exchange) -> int:
        """Bytes of an exchange once copies of a token that go to the same place are sent once.

        k experts drawn evenly lie on n (1 - (1 - 1/n)^k) of n nodes, or of n ranks where a group stays in one node.
        """
        if exchange.copies == 1:
            return exchange.num_bytes
        shape = self.shape(exchange.axis)
        places = shape.num_ranks if shape.num_nodes == 1 or not shape.spans_domain else shape.num_nodes
        return round(exchange.num_bytes * places * (1 - (1 - 1 / places) ** exchange.copies) / exchange.copies)

    def price(self, kind: str, role: str, size_bytes: int) -> tuple[Bill, float]:
        """What one collective costs, and the share of compute it takes meanwhile."""
        found = self._prices.get((kind, role, size_bytes))
        if found is None:
            shape, cluster, curves = self.shape(role), self.cluster, self.curves
            found = (
                bill(kind, size_bytes, shape, cluster, curves=curves, nccl=self.nccl),
                float(interference(kind, shape, cluster, curves, memory_weight=self.memory_weight, nccl=self.nccl)),
            )
            self._prices[kind, role, size_bytes] = found
        return found

    def message(self, pair: tuple[int, int], size_bytes: int) -> Bill:
        """What one message between two pipeline stages costs."""
        found = self._messages.get((pair, size_bytes))
        if found is None:
            shape = self.mesh.pair_shape(*pair)
            found = bill("send_recv", size_bytes, shape, self.cluster, curves=self.curves, nccl=self.nccl)
            self._messages[pair, size_bytes] = found
        return found


class Builder:
    """One program under construction. Ids count up in host launch order; `after` lists may hold None (ignored).

    rank: None builds the program of the class of all ranks (of a pipeline stage, if given); a number that of one rank, on
    links of its own, meeting the other members of its groups.
    """

    def __init__(self, fabric: Fabric, rank: int | None = None, stage: int | None = None) -> None:
        self._fabric, self._rank, self._stage = fabric, rank, stage
        self._ops: list[ProgramOp] = []
        self._last_collective: int | None = None
        self._last_compute: int | None = None
        self._held: list[int | None] = []
        self._pending_bytes = 0
        self._found: dict[tuple[str, str, int], int] = {}
        self._pieces: dict[Hashable, Work] = {}
        self._exchanged: Counter[tuple[str, str, int]] = Counter()

    def combined(self, size_bytes: int, *, last: bool) -> int:
        """Bytes to all-reduce now: those of joined units, once they reach the stack's threshold; else 0."""
        self._pending_bytes += size_bytes
        if self._pending_bytes < self._fabric.stack.all_reduce_combine and not last:
            return 0
        ready, self._pending_bytes = self._pending_bytes, 0
        return ready

    def far_part(self, size_bytes: int) -> int:
        """What ranks at one place of each node gather among them of a shard group's `size_bytes`."""
        return size_bytes // self._fabric.near_ranks

    def hold(self, op: int | None) -> None:
        """The next joining compute op waits for `op`, whatever else it waits for."""
        self._held.append(op)

    def exchange(self, label: str, exchange: Exchange, *after: int | None) -> int | None:
        """Append a collective inside a block; None where its group is one rank."""
        return self.collective(label, exchange.kind, exchange.axis, self._fabric.sent_bytes(exchange), *after)

    @property
    def last_compute(self) -> int | None:
        """The compute op appended last."""
        return self._last_compute

    def remember(self, what: str, unit: str, index: int, op: int | None) -> None:
        """`op` is what happened to a unit in a micro-batch."""
        if op is not None:
            self._found[what, unit, index] = op

    def found(self, what: str, unit: str, index: int) -> int | None:
        """The op remembered, if any."""
        return self._found.get((what, unit, index))

    def transfer(self, label: str, kind: str, amount: int, *after: int | None) -> int | None:
        """Append a transfer between tiers of `amount` bytes (on the CPU: elements) to its kind's own stream.

        None where nothing moves. Where copies exclude compute, the next compute op waits for it.
        """
        transfers = self._fabric.transfers
        if transfers is None or amount == 0:
            return None
        op = Collective(
            id=len(self._ops),
            stream=kind,
            after=_ids(after),
            label=label,
            kind=kind,
            key=f"{kind}:{len(self._ops)}{self._suffix}",
            bill=transfers.bill(kind, amount, self._rank),
            size_bytes=amount,
            host_s=self._fabric.stack.host_launch_s,
        )
        self._ops.append(op)
        if transfers.exclusive and kind in ("h2d", "d2h"):
            self.hold(op.id)
        return op.id

    def compute(self, label: str, work: Work, *after: int | None, join: bool = True) -> int:
        """Append `work` to the compute stream. join=False leaves what is held to the op behind it."""
        if join:
            after, self._held = (*after, *self._held), []
        if not self._fabric.stack.overlap:
            after = (*after, self._last_collective)
        work = self._paced(work)
        op = Compute(
            id=len(self._ops),
            stream=COMPUTE_STREAM,
            after=_ids(after),
            label=label,
            duration_s=work.duration_s,
            parts=work.parts,
            host_s=work.host_s,
            blocking=self._fabric.stack.host_blocking,
        )
        self._ops.append(op)
        self._last_compute = op.id
        return op.id

    def collective(
        self, label: str, kind: str, role: str, size_bytes: int, *after: int | None, count: int = 1
    ) -> int | None:
        """Append a collective (`count` equal ones, back to back); None where the group is one rank or nothing moves.

        Collectives of one role share a communicator, and NCCL runs those one after another: one stream a role.
        """
        fabric = self._fabric
        if size_bytes == 0 or fabric.shape(role).num_ranks == 1:
            return None
        if not fabric.stack.overlap:
            after = (*after, self._last_compute)
        one, slows = fabric.price(kind, role, size_bytes // count)
        one = self._beside_offload(renamed(one, self._suffix), kind, size_bytes // count, fabric.shape(role))
        group, members = self._group(role)
        op = Collective(
            id=len(self._ops),
            stream=f"nccl:{role}",
            after=_ids(after),
            label=label,
            kind=kind,
            key=f"{role}:{len(self._ops)}{group}",
            members=members,
            bill=_times(one, count),
            size_bytes=size_bytes,
            host_s=count * fabric.stack.host_collective_s + (fabric.stack.host_unit_s if fabric.sharded else 0.0),
            interference=slows,
            blocking=fabric.synchronous,
        )
        self._ops.append(op)
        self._last_collective = op.id
        return op.id

    def _beside_offload(self, one: Bill, kind: str, size_bytes: int, shape: GroupShape) -> Bill:
        """A collective's bill with the bytes it has on links that it shares with offload's copies."""
        fabric = self._fabric
        if fabric.transfers is None:
            return one
        more = host_traffic(kind, size_bytes, shape, fabric.cluster, fabric.curves, nccl=fabric.nccl)
        sizes = float(more.pcie_bytes), float(more.memory_bytes)
        return fabric.transfers.beside(one, *sizes, more.fastest_bytes_per_s, self._rank)

    def once(self, kind: Hashable, make: Callable[[], Work]) -> Work:
        """The work of a kind of piece, made the first time that the program has one."""
        if kind not in self._pieces:
            self._pieces[kind] = make()
        return self._pieces[kind]

    def folded(self, *phases: Phase, synchronous: bool) -> Work:
        """Phases one after another as one op, on links that nobody else uses meanwhile.

        synchronous: the host waits for the device before and after, so its time counts where it is the longer one.
        A host that waits for every kernel adds all of its time.
        """
        total = NO_WORK
        for phase in phases:
            for segment in phase.segments:
                total += self._paced(segment.work) + self._beside(replace(segment, beside=self._paced(segment.beside)))
        blocking = self._fabric.stack.host_blocking
        if not synchronous and not blocking:
            return total
        spare_s = total.host_s if blocking else total.host_s - total.duration_s
        return Work(parts=(*total.parts, ("host", spare_s)) if spare_s > 0 else total.parts, host_s=0.0)

    def _paced(self, work: Work) -> Work:
        """Kernels at the pace of the slowest GPU, if they are not yet."""
        waiting_s = self._fabric.slowdown * work.duration_s
        if waiting_s == 0 or any(name == "stragglers" for name, _ in work.parts):
            return work
        return Work(parts=(*work.parts, ("stragglers", waiting_s)), host_s=work.host_s)

    def _beside(self, segment: Segment) -> Work:
        """A segment's collectives and the compute beside them, which they slow while their bytes move."""
        fabric, stack = self._fabric, self._fabric.stack
        end_s, lost_s = 0.0, 0.0
        left_s = segment.beside.duration_s if stack.overlap else 0.0  # without overlap it runs before or after
        beside_s, longest, host_s = left_s, "", segment.beside.host_s
        for exchange in segment.exchanges:
            if exchange.num_bytes == 0 or fabric.shape(exchange.axis).num_ranks == 1:
                continue
            one, slows = fabric.price(exchange.kind, exchange.axis, fabric.sent_bytes(exchange))
            self._exchanged[exchange.kind, exchange.axis, exchange.num_bytes] += 1
            moving_s = max((float(size / self._capacities[link]) for link, size in one.link_bytes.items()), default=0.0)
            free_s = max(end_s + float(one.latency_s) - (beside_s - left_s + lost_s), 0.0)
            left_s -= min(left_s, free_s)
            slowed_s = min(moving_s, left_s / (1 - slows))
            left_s, lost_s = left_s - slowed_s * (1 - slows), lost_s + slowed_s * slows
            end_s += float(one.latency_s) + moving_s
            longest = exchange.kind
            host_s += stack.host_collective_s
        exposed_s = max(end_s - beside_s - lost_s, 0.0)
        parts = [*segment.beside.parts]
        parts += [("interference", lost_s)] if lost_s else []
        parts += [(f"exposed:{longest}", exposed_s)] if exposed_s else []
        return Work(parts=tuple(parts), host_s=host_s)

    @cached_property
    def _capacities(self) -> dict[str, Number]:
        return dict(link_capacities(self._fabric.cluster, self._fabric.curves))

    def pass_on(self, label: str, message: str, size_bytes: int, pair: tuple[int, int], *after: int | None) -> int:
        """Append this stage's end of a message of `size_bytes` from stage pair[0] to pair[1]; both ends meet.

        message: what tells it from the others between the same ranks. The sender's links are loaded.
        """
        fabric, (source, target) = self._fabric, pair
        sends = self._stage == source
        one = fabric.message(pair, size_bytes)
        stream = f"nccl:pp {source} to {target}"
        mine = one if sends else Bill(latency_s=0.0, link_bytes={})
        return self._meet(label, stream, "send_recv", message, 2, mine, size_bytes, *after)

    def agree(self, label: str, message: str, size_bytes: int, stages: tuple[int, ...], *after: int | None) -> int:
        """Append this stage's part of an all-reduce among the ranks that stand at the same place in `stages`."""
        fabric = self._fabric
        shape = fabric.mesh.pair_shape(stages[0], stages[-1]) if len(stages) == 2 else fabric.mesh.group_shape("pp")
        one = bill("all_reduce", size_bytes, shape, fabric.cluster, curves=fabric.curves, nccl=fabric.nccl)
        return self._meet(label, "nccl:pp", "all_reduce", message, len(stages), one, size_bytes, *after)

    def _meet(
        self, label: str, stream: str, kind: str, message: str, members: int, one: Bill, size: int, *after: int | None
    ) -> int:
        op = Collective(
            id=len(self._ops),
            stream=stream,
            after=_ids(after),
            label=label,
            kind=kind,
            key=f"pp:{message}{self._column}",
            members=members,
            bill=renamed(one, self._suffix),
            size_bytes=size,
            host_s=self._fabric.stack.host_launch_s,
        )
        self._ops.append(op)
        return op.id

    @property
    def _column(self) -> str:
        """What a rank has in common with those at its place in the other stages."""
        if self._rank is None:
            return ""
        return f":{self._fabric.mesh.group_of('pp', self._rank)[0]}"

    @property
    def _suffix(self) -> str:
        if self._rank is not None:
            return f":{self._rank}"
        return "" if self._stage is None else f":stage{self._stage}"

    def _group(self, role: str) -> tuple[str, int]:
        """What tells a rank's group from the others of the role, and how many programs meet in it."""
        if self._rank is None:
            return "", 1
        ranks = self._fabric.mesh.group_of(self._fabric.axis(role), self._rank)
        return f":{ranks[0]}", len(ranks)

    def program(self) -> Program:
        """What was built so far."""
        links = dict(link_capacities(self._fabric.cluster, self._fabric.curves, suffix=self._suffix))
        if self._fabric.transfers is not None:
            links |= self._fabric.transfers.links(self._rank)
        plan = self._fabric.mesh.plan
        num_ranks = plan.num_devices // plan.pp if self._rank is None else 1
        if self._rank is not None:
            name = f"rank{self._rank}"
        else:
            name = "rank" if self._stage is None else f"stage{self._stage}"
        exchanges = tuple((*one, count) for one, count in self._exchanged.items())
        return Program(name=name, num_ranks=num_ranks, ops=tuple(self._ops), links=links, exchanges=exchanges)


def _times(one: Bill, count: int) -> Bill:
    if count == 1:
        return one
    share = one.share_bytes and count * one.share_bytes
    link_bytes = {link: count * size for link, size in one.link_bytes.items()}
    return Bill(latency_s=count * one.latency_s, link_bytes=link_bytes, share_bytes=share)


def _ids(after: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(sorted({i for i in after if i is not None}))
