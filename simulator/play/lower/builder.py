"""Builder: appends ops to one rank class's program and keeps its ids. It knows streams and links, not models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import Any

from typing_extensions import override

from simulator.parallel.mesh import GroupShape
from simulator.play.lower.fabric import Call, MeshFabric, captured_call, ids, issued_s, times
from simulator.play.lower.folder import Folder
from simulator.play.lower.peers import Peers
from simulator.play.lower.rank_classes import RankClass
from simulator.play.lower.work import Work
from simulator.spec.software.records import HostTimes
from simulator.work.captured.capture import CPU
from simulator.work.collectives import collective_cost, host_traffic, renamed
from simulator.work.ops import Exchange
from simulator.work.program import (
    COMPUTE_STREAM,
    HOST_STREAM,
    Chain,
    Collective,
    CollectiveCost,
    Compute,
    Kernels,
    Ops,
    Program,
    ProgramOp,
)
from simulator.work.script.instructions import Communicate


class Builder(Folder):
    """One program under construction. Ids count up in host launch order; `after` lists may hold None (ignored).

    rank: None builds that of the class of all ranks (of a pipeline stage, if given); a number that of one rank, on its own links,
    which meets the others of its groups. rank_class: of ranks with equal GPUs, where GPUs differ; it meets the other classes.
    """

    def __init__(
        self, fabric: MeshFabric, rank: int | None = None, stage: int | None = None, rank_class: RankClass | None = None
    ) -> None:
        super().__init__(fabric, Peers(fabric, rank, stage, rank_class))
        self._rank, self._stage = rank, stage
        self._ops: list[Chain | ProgramOp] = []
        self._next = 0  # id
        self._last_collective: int | None = None
        self._last_compute: int | None = None
        self._held, self._pending_bytes = list[int | None](), 0
        self._found: dict[tuple[str, str, int], int] = {}
        self._paces: dict[int, tuple[Work, Work, float]] = {}  # by id of the work
        self._chains: dict[tuple[int, ...], Kernels] = {}  # by ids of their works
        self._messages: dict[Hashable, tuple[str, CollectiveCost]] = {}  # kind -> its stream and its cost

    def combined(self, size_bytes: int, *, last: bool) -> int:
        """Bytes to all-reduce now: those of joined units, once they reach the stack's threshold; else 0."""
        self._pending_bytes += size_bytes
        if self._pending_bytes < self._fabric.stack.overlap.all_reduce_combine and not last:
            return 0
        ready, self._pending_bytes = self._pending_bytes, 0
        return ready

    def far_part(self, size_bytes: int) -> int:
        """Bytes of a shard group's `size_bytes` that ranks at one position of each node gather among them."""
        return size_bytes // self._fabric.near_ranks

    @property
    def host(self) -> HostTimes:
        """What the host's work takes, and what it waits for."""
        return self._fabric.stack.host

    @property
    def agrees(self) -> bool:
        """Whether replicas that take local steps synchronise at the end of this step."""
        return self._fabric.agrees

    def hold(self, op: int | None) -> None:
        """The next joining compute op waits for `op`, whatever else it waits for."""
        self._held.append(op)

    def exchange(self, label: str, exchange: Exchange, *after: int | None, waits: bool = False) -> int | None:
        """Append a collective inside a block; None where its group is one rank. waits: so does the host, for its end."""
        fabric, size, axis = self._fabric, self._fabric.sent_bytes(exchange), exchange.axis
        if size == 0 or fabric.shape(axis).num_ranks == 1:
            return None
        price = fabric.exchanged(exchange, self._peers.group_kinds(axis))
        hooks_s = fabric.stack.host.unit_s if fabric.sharded and not exchange.copied and not exchange.captured else 0.0
        host_s = issued_s(exchange, fabric) + hooks_s
        named: dict[str, Any] = {"label": label, "kind": exchange.kind, "role": axis, "size_bytes": size}
        return self._append(Call(**named, cost=price[0], slows=price[1], host_s=host_s, waits=waits), *after)

    def _joined(self, after: tuple[int | None, ...], *, join: bool = True) -> tuple[int, ...]:
        """Dependencies of compute: with join also the held ones, and without overlap the last collective."""
        if join:
            after, self._held = (*after, *self._held), []
        if not self._fabric.stack.overlap.communication:
            after = (*after, self._last_collective)
        return ids(after) if after else ()

    def _add(self, op: Chain | ProgramOp) -> int:
        self._ops.append(op)
        self._next += len(op.labels) if isinstance(op, Chain) else 1
        return op.id

    @property
    def last_compute(self) -> int | None:
        """The compute op appended last."""
        return self._last_compute

    def remember(self, action: str, unit: str, index: int, op: int | None) -> None:
        """Record the op of an action on a unit in a micro-batch."""
        if op is not None:
            self._found[action, unit, index] = op

    def found(self, action: str, unit: str, index: int) -> int | None:
        """The op remembered, if any."""
        return self._found.get((action, unit, index))

    def transfer(self, label: str, kind: str, amount: int, *after: int | None) -> int | None:
        """Append a transfer between tiers of `amount` bytes (on the CPU: elements) to its kind's own stream.

        None where nothing moves. Where copies exclude compute, the next compute op waits for it.
        """
        transfers = self._fabric.transfers
        if transfers is None or amount == 0:
            return None
        op = Collective(
            id=self._next,
            stream=kind,
            after=ids(after),
            label=label,
            kind=kind,
            key=f"{kind}:{self._next}{self._peers.suffix}",
            cost=transfers.cost(kind, amount, self._rank),
            size_bytes=amount,
            host_s=self._fabric.stack.host.launch_s,
        )
        self._add(op)
        if transfers.exclusive and kind in ("h2d", "d2h"):
            self.hold(op.id)
        return op.id

    def compute(
        self,
        label: str,
        work: Work,
        *after: int | None,
        join: bool = True,
        waits: bool = False,
        early: bool = False,
        beside: int = 0,
    ) -> int:
        """Append `work` to the compute stream, or to the stream `beside` it. join=False leaves what is held to the op behind it; waits: so does the host.

        early: it starts with its first kernel, and what follows waits for the host to have launched the last.
        """
        _, work, seconds = self._paces.get(id(work)) or self._pace(work)
        op = Compute(
            id=self._next,
            stream=_stream(beside),
            after=self._joined(after, join=join),
            label=label,
            duration_s=seconds,
            parts=work.parts,
            host_s=work.host_s,
            first_s=min(self._fabric.stack.host.launch_s, work.host_s) if early else None,
            blocking=waits or work.level or self._fabric.stack.host.blocking,
        )
        self._last_compute = self._last_compute if beside else op.id
        return self._add(op)

    def chain(
        self, labels: Sequence[str], works: tuple[Work, ...], *after: int | None, waits: bool, beside: int
    ) -> int:
        """Append works one after another, as `compute` does; the first waits for `after`, and the host for the last. The last's id."""
        kernels = self._chains.get(key := tuple(map(id, works)))
        if kernels is None:
            each = [self._paces.get(id(work)) or self._pace(work) for work in works]
            parts = tuple(work.parts or (("compute", seconds),) for _, work, seconds in each)
            largest = tuple(max(one, key=itemgetter(1))[0] for one in parts)
            seconds, hosts = tuple(seconds for *_, seconds in each), tuple(work.host_s for _, work, _ in each)
            kernels = self._chains[key] = Kernels(seconds, parts, hosts, largest)
        stream = _stream(beside)
        joined, labels = self._joined(after), tuple(labels)
        op = Chain(id=self._next, stream=stream, after=joined, labels=labels, kernels=kernels, blocking=waits)
        self._last_compute = self._last_compute if beside else op.last
        self._add(op)
        return op.last

    def collective(
        self, label: str, kind: str, role: str, size_bytes: int, *after: int | None, count: int = 1, waits: bool = False
    ) -> int | None:
        """Append a collective (`count` equal ones, back to back); None where the group is one rank or nothing moves.

        Collectives of one role share a communicator, and NCCL runs those one after another: one stream a role.
        """
        fabric = self._fabric
        if size_bytes == 0 or fabric.shape(role).num_ranks == 1:
            return None
        price = fabric.price(kind, role, size_bytes // count, self._peers.group_kinds(role))
        host_s = fabric.issue_s(role, count) + (fabric.stack.host.unit_s if fabric.sharded else 0.0)
        named: dict[str, Any] = {"label": label, "kind": kind, "role": role, "size_bytes": size_bytes}
        call = Call(**named, cost=price[0], slows=price[1], host_s=host_s, count=count, waits=waits)
        return self._append(call, *after)

    def communicate(self, one: Communicate, *after: int | None) -> int | None:
        """Append a captured collective, or one end of a message; None where the group is one rank or nothing moves."""
        fabric = self._fabric
        if one.size_bytes == 0 or fabric.shape(one.role).num_ranks == 1:
            return None
        return self._append(captured_call(one, fabric), *after)

    def _append(self, call: Call, *after: int | None) -> int:
        fabric, size_bytes, count = self._fabric, call.size_bytes, call.count
        if not fabric.stack.overlap.communication:
            after = (*after, self._last_compute)
        one = renamed(call.cost, self._peers.suffix)
        one = self._beside_offload(one, call.kind, size_bytes // count, fabric.shape(call.role))
        group, members = self._peers.group(call.role)
        key, members = call.meets or (f"{call.role}:{self._next}{group}", members)
        op = Collective(
            id=self._next,
            stream=f"nccl:{call.stream or call.role}",
            after=ids(after),
            label=call.label,
            kind=call.kind,
            key=key,
            members=members,
            cost=times(one, count),
            size_bytes=size_bytes,
            host_s=call.host_s,
            interference=call.slows,
            blocking=call.waits or fabric.synchronous,
        )
        self._last_collective = op.id
        return self._add(op)

    def _beside_offload(self, one: CollectiveCost, kind: str, size_bytes: int, shape: GroupShape) -> CollectiveCost:
        """A collective's cost with the bytes it has on links that it shares with offload's copies."""
        fabric = self._fabric
        if fabric.transfers is None:
            return one
        more = host_traffic(kind, size_bytes, shape, fabric.cluster, fabric.curves, nccl=fabric.nccl)
        sizes = float(more.pcie_bytes), float(more.memory_bytes)
        return fabric.transfers.beside(one, *sizes, more.fastest_bytes_per_s, self._rank)

    def _pace(self, work: Work) -> tuple[Work, Work, float]:
        """A work (kept, so that its id stays its own), the same at the pace of the slowest GPU, and what that takes."""
        paced = self._paced(work)
        found = self._paces[id(work)] = work, paced, paced.duration_s
        return found

    def send_message(
        self,
        label: str,
        message: str,
        size_bytes: int,
        pair: tuple[int, int],
        *after: int | None,
        lane: str = "",
        tensors: int = 1,
        in_turn: bool = False,
    ) -> int:
        """Append this stage's end of a message of `size_bytes` from stage pair[0] to pair[1]; both ends meet.

        message: what distinguishes it from the others between the same ranks. tensors: that it carries, each of which both agree upon first. lane: messages of two lanes do not wait for each other. The sender's links are loaded, and where the two
        GPUs differ, the receiver's way in: the slower one decides.
        """
        kind = pair, size_bytes, lane, tensors, in_turn
        if (found := self._messages.get(kind)) is None:  # thousands of messages have one cost, and one object is enough
            link = f"{min(pair)} and {max(pair)}" if in_turn else f"{pair[0]} to {pair[1]}{lane}"
            found = self._messages[kind] = f"nccl:pp {link}", self._peers.message(pair, size_bytes, tensors)
        return self._joint(label, found[0], "send_recv", message, 2, found[1], size_bytes, *after)

    def all_reduce_stages(
        self, label: str, message: str, size_bytes: int, stages: tuple[int, ...], *after: int | None
    ) -> int:
        """Append this stage's part of an all-reduce among ranks at the same position in `stages`."""
        fabric = self._fabric
        shape = fabric.mesh.pair_shape(stages[0], stages[-1]) if len(stages) == 2 else fabric.mesh.group_shape("pp")
        cluster = fabric.on(self._peers.pair(stages))
        one = collective_cost("all_reduce", size_bytes, shape, cluster, curves=fabric.curves, nccl=fabric.nccl)
        one = renamed(one, self._peers.suffix)
        return self._joint(label, "nccl:pp", "all_reduce", message, len(stages), one, size_bytes, *after)

    def _joint(
        self,
        label: str,
        stream: str,
        kind: str,
        message: str,
        members: int,
        one: CollectiveCost,
        size: int,
        *after: int | None,
    ) -> int:
        op = Collective(
            id=self._next,
            stream=stream,
            after=ids(after),
            label=label,
            kind=kind,
            key=f"pp:{message}{self._peers.column}",
            members=members,
            cost=one,
            size_bytes=size,
            host_s=self._fabric.stack.host.launch_s,
        )
        return self._add(op)

    def program(self) -> Program:
        """The program built so far."""
        links = self._peers.links()
        if self._fabric.transfers is not None:
            links |= self._fabric.transfers.links(self._rank)
        name, ranks = self._peers.program_of()
        exchanges = tuple((*one, count) for one, count in self._exchanged.items())
        ops = Ops(self._ops) if self._chains else tuple(op for op in self._ops if not isinstance(op, Chain))
        return Program(name=name, num_ranks=ranks, ops=ops, links=links, exchanges=exchanges, hosted_s=self._hosted_s)


def _stream(beside: int) -> str:
    """What a captured or recorded program's stream is called; the host's own operators and waits have one, too."""
    return {0: COMPUTE_STREAM, CPU: HOST_STREAM}.get(beside) or f"stream {beside}"


Exchanges = Counter[tuple[str, str, int]]  # (kind, role, bytes) -> how many


class RecordingBuilder(Builder):
    """Builds the same program. inside: of each compute op with any, its collectives."""

    def __init__(self, *inputs: Any) -> None:  # noqa: ANN401  as Builder has them
        super().__init__(*inputs)
        self.inside: dict[int, Exchanges] = {}
        self._before: Exchanges = Counter()

    @override
    def compute(self, label: str, work: Work, *after: int | None, **how: Any) -> int:
        number = super().compute(label, work, *after, **how)
        if more := self._exchanged - self._before:
            self.inside[number], self._before = more, self._exchanged.copy()
        return number
