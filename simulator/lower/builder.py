"""Builder: appends ops to one rank class's program and keeps its ids. It knows streams and links, not models."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.collective_curves import LinkCurves
from simulator.collectives import bill, host_traffic, interference, link_capacities, renamed
from simulator.lower.work import Work
from simulator.mesh import GroupShape, Mesh
from simulator.nccl import Nccl
from simulator.offload import Transfers
from simulator.program import COMPUTE_STREAM, Bill, Collective, Compute, Program, ProgramOp
from simulator.stack import Stack
from simulator.topology import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def axis(self, role: str) -> str:
        """The mesh axis over which a role communicates: shard, reshard, replicate, cp or tp.

        reshard: the part of a shard group that blocks are gathered from again in the backward.

        Context-parallel ranks hold the same parameters as their peers, so gradients cross them too: with the shards
        where there are any, else with the replicas.
        """
        plan = self.mesh.plan
        # torch's ZeRO-1 shards the optimizer alone: DDP reduces whole gradients among all ranks
        everyone = plan.zero == 0 or plan.implementation == "zero_redundancy"
        return {
            "shard": "dp_shard_cp",
            "reshard": f"dp_shard_cp/{plan.reshard_ranks}" if plan.reshard_ranks else "dp_shard_cp",
            "replicate": "dp_cp" if everyone else "dp_replicate",
            "cp": "cp",
            "tp": "tp",
        }[role]

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
        return self.mesh.group_shape(self.axis(role))


class Builder:
    """One program under construction. Ids count up in host launch order; `after` lists may hold None (ignored).

    rank: None builds the program of the class of all ranks; a number that of one rank, on links of its own, meeting the
    other members of its groups.
    """

    def __init__(self, fabric: Fabric, rank: int | None = None) -> None:
        self._fabric, self._rank = fabric, rank
        self._ops: list[ProgramOp] = []
        self._last_collective: int | None = None
        self._last_compute: int | None = None
        self._held: list[int | None] = []
        self._pending_bytes = 0
        self._found: dict[tuple[str, str, int], int] = {}

    def combined(self, size_bytes: int, *, last: bool) -> int:
        """Bytes to all-reduce now: those of joined units, once they reach the stack's threshold; else 0."""
        self._pending_bytes += size_bytes
        if self._pending_bytes < self._fabric.stack.all_reduce_combine and not last:
            return 0
        ready, self._pending_bytes = self._pending_bytes, 0
        return ready

    def hold(self, op: int | None) -> None:
        """The next joining compute op waits for `op`, whatever else it waits for."""
        self._held.append(op)

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
        waiting_s = self._fabric.slowdown * work.duration_s
        op = Compute(
            id=len(self._ops),
            stream=COMPUTE_STREAM,
            after=_ids(after),
            label=label,
            duration_s=work.duration_s + waiting_s,
            parts=(*work.parts, ("stragglers", waiting_s)) if waiting_s else work.parts,
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
        shape = fabric.shape(role)
        if shape.num_ranks == 1 or size_bytes == 0:
            return None
        if not fabric.stack.overlap:
            after = (*after, self._last_compute)
        one = self._bill(kind, size_bytes // count, shape)
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
            interference=interference(
                kind, shape, fabric.cluster, fabric.curves, memory_weight=fabric.memory_weight, nccl=fabric.nccl
            ),
            blocking=fabric.synchronous,
        )
        self._ops.append(op)
        self._last_collective = op.id
        return op.id

    def _bill(self, kind: str, size_bytes: int, shape: GroupShape) -> Bill:
        """What one collective costs on this rank's links, and on those it shares with offload."""
        fabric = self._fabric
        found = bill(kind, size_bytes, shape, fabric.cluster, curves=fabric.curves, nccl=fabric.nccl)
        one = renamed(found, self._suffix)
        if fabric.transfers is None:
            return one
        more = host_traffic(kind, size_bytes, shape, fabric.cluster, fabric.curves, nccl=fabric.nccl)
        sizes = float(more.pcie_bytes), float(more.memory_bytes)
        return fabric.transfers.beside(one, *sizes, more.fastest_bytes_per_s, self._rank)

    @property
    def _suffix(self) -> str:
        return "" if self._rank is None else f":{self._rank}"

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
        num_ranks = self._fabric.mesh.plan.num_devices if self._rank is None else 1
        name = "rank" if self._rank is None else f"rank{self._rank}"
        return Program(name=name, num_ranks=num_ranks, ops=tuple(self._ops), links=links)


def _times(one: Bill, count: int) -> Bill:
    if count == 1:
        return one
    share = one.share_bytes and count * one.share_bytes
    link_bytes = {link: count * size for link, size in one.link_bytes.items()}
    return Bill(latency_s=count * one.latency_s, link_bytes=link_bytes, share_bytes=share)


def _ids(after: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(sorted({i for i in after if i is not None}))
