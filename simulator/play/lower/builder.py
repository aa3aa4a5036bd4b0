"""Builder: appends ops to one rank class's program and keeps its ids. It knows streams and links, not models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from simulator.parallel.mesh import GroupShape
from simulator.play.lower.calls import Call, captured_call, ids, issued_s, times
from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.peers import Peers
from simulator.play.lower.rank_classes import RankClass
from simulator.play.lower.work import NO_WORK, Phase, Segment, Work, added, levelled
from simulator.work.collectives import collective_cost, host_traffic, renamed
from simulator.work.ops import Exchange
from simulator.work.program import COMPUTE_STREAM, Collective, CollectiveCost, Compute, Program, ProgramOp
from simulator.work.script.instructions import Communicate

# Categories of the breakdown: a GPU that the cluster says is slow, the slowest of equal ones, a slower peer inside a block
SLOW, STRAGGLERS, WAITING = "slow_gpu", "stragglers", "slow_peer"


class Builder:
    """One program under construction. Ids count up in host launch order; `after` lists may hold None (ignored).

    rank: None builds that of the class of all ranks (of a pipeline stage, if given); a number that of one rank, on its own links,
    which meets the others of its groups. rank_class: of ranks with equal GPUs, where GPUs differ; it meets the other classes.
    """

    def __init__(
        self, fabric: MeshFabric, rank: int | None = None, stage: int | None = None, rank_class: RankClass | None = None
    ) -> None:
        self._fabric, self._rank, self._stage = fabric, rank, stage
        self._peers = Peers(fabric, rank, stage, rank_class)
        self._ops: list[ProgramOp] = []
        self._last_collective: int | None = None
        self._last_compute: int | None = None
        self._held, self._pending_bytes = list[int | None](), 0
        self._found: dict[tuple[str, str, int], int] = {}
        self._pieces: dict[Hashable, tuple[Work, Counter[tuple[str, str, int]]]] = {}
        self._phases: dict[int, Phase] = {}
        self._paces: dict[int, tuple[Work, Work, float]] = {}  # by id of the work
        self._messages: dict[Hashable, tuple[str, CollectiveCost]] = {}  # kind -> its stream and its cost
        self._exchanged: Counter[tuple[str, str, int]] = Counter()

    def combined(self, size_bytes: int, *, last: bool) -> int:
        """Bytes to all-reduce now: those of joined units, once they reach the stack's threshold; else 0."""
        self._pending_bytes += size_bytes
        if self._pending_bytes < self._fabric.stack.overlap.all_reduce_combine and not last:
            return 0
        ready, self._pending_bytes = self._pending_bytes, 0
        return ready

    def far_part(self, size_bytes: int) -> int:
        """What ranks at one place of each node gather among them of a shard group's `size_bytes`."""
        return size_bytes // self._fabric.near_ranks

    @property
    def agrees(self) -> bool:
        """Replicas agree at the end of this step, where they take steps alone."""
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
            after=ids(after),
            label=label,
            kind=kind,
            key=f"{kind}:{len(self._ops)}{self._peers.suffix}",
            cost=transfers.cost(kind, amount, self._rank),
            size_bytes=amount,
            host_s=self._fabric.stack.host.launch_s,
        )
        self._ops.append(op)
        if transfers.exclusive and kind in ("h2d", "d2h"):
            self.hold(op.id)
        return op.id

    @property
    def reads_loss(self) -> bool:
        """The host waits for a micro-batch's loss before it goes on."""
        return self._fabric.stack.host.reads_loss

    @property
    def reduces_late(self) -> bool:
        """The stack reduces the gradients of all micro-batches once, behind the last backward."""
        return self._fabric.stack.overlap.late_gradients

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
        if join:
            after, self._held = (*after, *self._held), []
        if not self._fabric.stack.overlap.communication:
            after = (*after, self._last_collective)
        _, work, seconds = self._paces.get(id(work)) or self._pace(work)
        op = Compute(
            id=len(self._ops),
            stream=f"stream {beside}" if beside else COMPUTE_STREAM,
            after=ids(after) if after else (),
            label=label,
            duration_s=seconds,
            parts=work.parts,
            host_s=work.host_s,
            first_s=min(self._fabric.stack.host.launch_s, work.host_s) if early else None,
            blocking=waits or work.level or self._fabric.stack.host.blocking,
        )
        self._ops.append(op)
        self._last_compute = self._last_compute if beside else op.id
        return op.id

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
        key, members = call.meets or (f"{call.role}:{len(self._ops)}{group}", members)
        op = Collective(
            id=len(self._ops),
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
        self._ops.append(op)
        self._last_collective = op.id
        return op.id

    def _beside_offload(self, one: CollectiveCost, kind: str, size_bytes: int, shape: GroupShape) -> CollectiveCost:
        """A collective's cost with the bytes it has on links that it shares with offload's copies."""
        fabric = self._fabric
        if fabric.transfers is None:
            return one
        more = host_traffic(kind, size_bytes, shape, fabric.cluster, fabric.curves, nccl=fabric.nccl)
        sizes = float(more.pcie_bytes), float(more.memory_bytes)
        return fabric.transfers.beside(one, *sizes, more.fastest_bytes_per_s, self._rank)

    def once(self, kind: Hashable, make: Callable[[], Work]) -> Work:
        """The work of a kind of piece, made the first time that the program has one; its collectives count each time."""
        if found := self._pieces.get(kind):
            self._exchanged.update(found[1])
            return found[0]
        before, work = self._exchanged.copy(), make()
        self._pieces[kind] = work, self._exchanged - before
        return work

    def folded(self, *phases: Phase, synchronous: bool) -> Work:
        """Phases one after another as one op, on links that nobody else uses meanwhile.

        synchronous: the host waits for the device before and after, so its time counts where it is the longer one. A host
        that waits for every kernel adds all of its time; one that waits for blocks waits for each phase, if anything waits.
        """
        if len(phases) == 1:
            return self._folded_alone(phases[0], synchronous=synchronous)
        if synchronous and self._fabric.stack.host.waits_for_blocks:
            return added(self.folded(phase, synchronous=True) for phase in phases)
        return self._folded_together(phases, synchronous=synchronous)

    def _folded_alone(self, phase: Phase, *, synchronous: bool) -> Work:
        """One phase, made the first time: equal layers and micro-batches have the same object, kept so that its id stays its own."""
        self._phases[id(phase)] = phase
        key = "phase", id(phase), synchronous
        return self.once(key, lambda: self._folded_together((phase,), synchronous=synchronous))

    def _folded_together(self, phases: tuple[Phase, ...], *, synchronous: bool) -> Work:
        total, blocking = self.summed(*phases), self._fabric.stack.host.blocking
        if any(segment.waits for phase in phases for segment in phase.segments) and not blocking:
            return self._in_turns(phases)
        if not synchronous and not blocking:
            return total
        spare_s = total.host_s if blocking else total.host_s - total.duration_s
        return Work(parts=(*total.parts, ("host", spare_s)) if spare_s > 0 else total.parts, host_s=0.0)

    def summed(self, *phases: Phase) -> Work:
        """Phases one after another, on links that nobody else uses meanwhile, and the host's time beside it."""
        return added(self._alone(segment) for phase in phases for segment in phase.segments)

    def _alone(self, segment: Segment) -> Work:
        if segment.beside is NO_WORK and not segment.exchanges and self._fabric.rank_classes is None:
            return added((self._paced(segment.work),))
        work, beside = self._with_peers(segment.work), self._with_peers(segment.beside)
        return work + self._beside(replace(segment, beside=beside))

    def _in_turns(self, phases: tuple[Phase, ...]) -> Work:
        """The same where the host waits inside: neither is ahead of the other at the begin, nor behind each wait."""
        total, issued_s, done_s = NO_WORK, 0.0, 0.0
        for segment in (segment for phase in phases for segment in phase.segments):
            one = self._alone(segment)
            total += one
            issued_s += one.host_s
            done_s = max(done_s + one.duration_s, issued_s)  # its last kernel starts when it is issued
            issued_s = done_s if segment.waits else issued_s
        return levelled(total, done_s)

    def alongside(self, exchanges: tuple[Exchange, ...], work: Work) -> Work:
        """Finished work with collectives beside it that it does not need, on links that nobody else uses meanwhile."""
        return self._beside(Segment(work=NO_WORK, exchanges=exchanges, beside=work))

    def _pace(self, work: Work) -> tuple[Work, Work, float]:
        """A work (kept, so that its id stays its own), the same at the pace of the slowest GPU, and what that takes."""
        paced = self._paced(work)
        found = self._paces[id(work)] = work, paced, paced.duration_s
        return found

    def _paced(self, work: Work) -> Work:
        """Kernels at the pace of the slowest GPU, if they are not yet; on a GPU that is known to be slow, at its own."""
        if any(name in (STRAGGLERS, SLOW) for name, _ in work.parts):
            return work
        speed, slowest = self._peers.pace
        own_s = work.duration_s * (1 / speed - 1)
        waiting_s = slowest * (work.duration_s + own_s)
        more = ((SLOW, own_s), (STRAGGLERS, waiting_s))
        added = tuple((name, seconds) for name, seconds in more if seconds)
        return Work(parts=(*work.parts, *added), host_s=work.host_s) if added else work

    def _with_peers(self, work: Work) -> Work:
        """The same on all ranks of a block: where one of them is slower than this one, this one waits."""
        work, rank_classes = self._paced(work), self._fabric.rank_classes
        if rank_classes is None or self._peers.at is None or self._peers.lag == 0:
            return work
        return Work(parts=(*work.parts, (WAITING, self._peers.lag * work.duration_s)), host_s=work.host_s)

    def _beside(self, segment: Segment) -> Work:
        """A segment's collectives and the compute beside them, which they slow while their bytes move."""
        fabric, stack = self._fabric, self._fabric.stack
        end_s, lost_s = 0.0, 0.0
        left_s = (
            segment.beside.duration_s if stack.overlap.communication else 0.0
        )  # without overlap it runs before or after
        beside_s, longest, host_s = left_s, "", segment.beside.host_s
        for exchange in segment.exchanges:
            if exchange.num_bytes == 0 or fabric.shape(exchange.axis).num_ranks == 1:
                continue
            group_kinds = self._peers.group_kinds(exchange.axis)
            one, slows = fabric.exchanged(exchange, group_kinds)
            self._exchanged[exchange.kind, exchange.axis, exchange.num_bytes] += 1
            capacities = self._peers.capacities(group_kinds)
            moving_s = max((float(size / capacities[link]) for link, size in one.link_bytes.items()), default=0.0)
            free_s = max(end_s + float(one.latency_s) - (beside_s - left_s + lost_s), 0.0)
            left_s -= min(left_s, free_s)
            slowed_s = min(moving_s, left_s / (1 - slows))
            left_s, lost_s = left_s - slowed_s * (1 - slows), lost_s + slowed_s * slows
            end_s += float(one.latency_s) + moving_s
            longest = exchange.kind
            host_s += issued_s(exchange, fabric)
        exposed_s = max(end_s - beside_s - lost_s, 0.0)
        parts = [*segment.beside.parts]
        parts += [("interference", lost_s)] if lost_s else []
        parts += [(f"exposed:{longest}", exposed_s)] if exposed_s else []
        return Work(parts=tuple(parts), host_s=host_s)

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
            way = f"{min(pair)} and {max(pair)}" if in_turn else f"{pair[0]} to {pair[1]}{lane}"
            found = self._messages[kind] = f"nccl:pp {way}", self._peers.message(pair, size_bytes, tensors)
        return self._joint(label, found[0], "send_recv", message, 2, found[1], size_bytes, *after)

    def all_reduce_stages(
        self, label: str, message: str, size_bytes: int, stages: tuple[int, ...], *after: int | None
    ) -> int:
        """Append this stage's part of an all-reduce among the ranks that stand at the same place in `stages`."""
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
            id=len(self._ops),
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
        self._ops.append(op)
        return op.id

    def program(self) -> Program:
        """What was built so far."""
        links = self._peers.links()
        if self._fabric.transfers is not None:
            links |= self._fabric.transfers.links(self._rank)
        name, ranks = self._peers.program_of()
        exchanges = tuple((*one, count) for one, count in self._exchanged.items())
        return Program(name=name, num_ranks=ranks, ops=tuple(self._ops), links=links, exchanges=exchanges)
