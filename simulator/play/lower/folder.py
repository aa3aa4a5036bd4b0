"""Folder: works, phases and concurrent collectives as one piece of work, on links without other traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace

from simulator.play.lower.fabric import MeshFabric, issued_s
from simulator.play.lower.peers import Peers
from simulator.play.lower.work import NO_WORK, Phase, Segment, Work, added, levelled
from simulator.work.ops import Exchange

# Categories of the breakdown: a GPU that the cluster says is slow, the slowest of equal ones, a slower peer inside a block
SLOW, STRAGGLERS, WAITING = "slow_gpu", "stragglers", "slow_peer"


class Folder:
    """Folds work of one program, with its ranks' pace and the cost of its collectives."""

    def __init__(self, fabric: MeshFabric, peers: Peers) -> None:
        self._fabric, self._peers = fabric, peers
        # the last of each: what has the id in its kind, which equal layers and micro-batches share; kept, so the id stays its own
        self._pieces: dict[Hashable, tuple[Work, Counter[tuple[str, str, int]], float, object]] = {}
        self._exchanged: Counter[tuple[str, str, int]] = Counter()
        self._hosted_s = 0.0  # the host's time that is part of folded work

    def once(self, kind: Hashable, make: Callable[[], Work], of: object = None) -> Work:
        """The work of a kind of piece, made the first time that the program has one; its collectives count each time."""
        if found := self._pieces.get(kind):
            self._exchanged.update(found[1])
            self._hosted_s += found[2]
            return found[0]
        before, hosted_s, work = self._exchanged.copy(), self._hosted_s, make()
        self._pieces[kind] = work, self._exchanged - before, self._hosted_s - hosted_s, of
        return work

    def folded(self, *phases: Phase, synchronous: bool) -> Work:
        """Consecutive phases as one op, on links without other traffic.

        synchronous: the host waits for the device before and after, so its time counts where it is the longer one. A host
        that waits for every kernel adds all of its time; one that waits for blocks waits for each phase, if anything waits.
        """
        if len(phases) == 1:
            return self._folded_alone(phases[0], synchronous=synchronous)
        if synchronous and self._fabric.stack.host.waits_for_blocks:
            return added(self.folded(phase, synchronous=True) for phase in phases)
        return self._folded_together(phases, synchronous=synchronous)

    def _folded_alone(self, phase: Phase, *, synchronous: bool) -> Work:
        key = "phase", id(phase), synchronous
        return self.once(key, lambda: self._folded_together((phase,), synchronous=synchronous), phase)

    def _folded_together(self, phases: tuple[Phase, ...], *, synchronous: bool) -> Work:
        total, blocking = self.summed(*phases), self._fabric.stack.host.blocking
        if any(segment.waits for phase in phases for segment in phase.segments) and not blocking:
            return self._in_turns(phases)
        if not synchronous and not blocking:
            return total
        spare_s = total.host_s if blocking else total.host_s - total.duration_s
        self._hosted_s += total.host_s
        return Work(parts=(*total.parts, ("host", spare_s)) if spare_s > 0 else total.parts, host_s=0.0)

    def summed(self, *phases: Phase) -> Work:
        """Consecutive phases, on links without other traffic, and the host's time."""
        return added(self._alone(segment) for phase in phases for segment in phase.segments)

    def _alone(self, segment: Segment) -> Work:
        return self.once(("segment", id(segment)), lambda: self._made(segment), segment)

    def _made(self, segment: Segment) -> Work:
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
        self._hosted_s += total.host_s
        return levelled(total, done_s)

    def alongside(self, exchanges: tuple[Exchange, ...], work: Work) -> Work:
        """Work with concurrent collectives that it does not depend on, on links without other traffic."""
        return self._beside(Segment(work=NO_WORK, exchanges=exchanges, beside=work))

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
        """The same on all ranks of a block: this rank waits for slower ones."""
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
