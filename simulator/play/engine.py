"""The engine: plays programs against streams, links and the host. CUDA's four words are SimPy's four.

    stream (in order)     a process
    event record / wait   Event.succeed() / yield event
    kernel                a timeout
    collective            a rendezvous of its members, then a flow on `Network`

An op starts when the op before it on its stream has ended, all ops of its `after` have ended, and the host has launched
it, or the first of its kernels. The host launches a program's ops in their order, `host_s` each, from time 0; it runs ahead of the device without
limit, except that after launching a `blocking` op it waits for that op's end.

While collectives of a program move bytes (not while they wait for members, nor during their latency), its compute runs
at the rate 1 - min(sum of their interference, 9/10); compute already running changes its rate with them.

Order of simultaneous events. Programs stand in the order given, streams in the order in which a program first names
them; at time 0 each program's host runs first, then its streams. After that, events of one instant are handled in the
order in which they were caused, except that a change of compute's rate comes before everything else. Link rates are
taken last in their instant. None of this depends on hashes or on the clock on the wall: two runs give the same bytes.

A `Chain` takes one event, or one more for each change of the rate, and gives the spans of its ops as if they were played alone.

Times may be float or Fraction (or int): nothing here converts them, so Fractions in give exact Fractions out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

from simpy import Environment, Event, Interrupt
from simpy.core import EmptySchedule
from simpy.events import Process, Timeout

from simulator.base import progress
from simulator.base.errors import EngineError
from simulator.base.sums import summed
from simulator.play.chains import Chained, until
from simulator.play.links import Network
from simulator.work.program import Chain, Collective, Compute, Number, Program, ProgramOp, place
from simulator.work.trace import Span, Timeline

MOST_INTERFERENCE = Fraction(9, 10)  # compute never stops entirely: NCCL takes some SMs, not all
_LITTLE = 0.5  # surely less: comparing a float with a Fraction takes longer than all the rest of a change of rate

_REPORT_EVERY = 20_000  # events: some 50 ms
_NAMED = 8  # waiting ops that an error names
_Steps = Generator[Event, Any, None]


def run(programs: Sequence[Program], *, briefly: bool = False) -> Timeline:
    """Play the programs together from time 0 until all their ops have ended. briefly: for its length, without spans.

    Raises EngineError, naming the ops that wait and for what, where programs cannot finish: a cycle, or a collective
    with fewer arrivals than members. Programs have different names; links of one name have one capacity.
    """
    env = Environment()
    links: dict[str, Number] = {}
    for program in programs:
        links.update(program.links)
    rendezvous = _Rendezvous(env, Network(env, links))
    players = [_Player(env, rendezvous, program) for program in programs]
    for player in players:
        player.start()
    _play(env, players, sum(len(program.runs) for program in programs))
    stuck = [reason for player in players for reason in player.stuck()]
    if stuck:
        more = [f"... and {len(stuck) - _NAMED} more"] if len(stuck) > _NAMED else []
        raise EngineError("\n  ".join(["the programs cannot finish; these ops wait", *stuck[:_NAMED], *more]))
    spans = () if briefly else tuple(span for player in players for span in player.spans())
    return Timeline(spans=spans, step_s=max((player.end_s for player in players), default=0))


def _play(env: Environment, players: Sequence[_Player], num_ops: int) -> None:
    """Run the simulation to its end. A progress listener counts it as the second half of the work."""
    reported = 0
    with suppress(EmptySchedule):
        while True:
            for _ in range(_REPORT_EVERY):
                env.step()
            ended = sum(player.num_ended for player in players)
            progress.report((ended - reported) / num_ops / 2)
            reported = ended
    progress.report((num_ops - reported) / max(1, num_ops) / 2)


class _PendingCollective:
    """One rendezvous: who has arrived, and the event that ends the collective for all of them."""

    __slots__ = ("arrived", "done", "joined_s", "nominal_s")

    def __init__(self, done: Event) -> None:
        self.arrived: list[tuple[_Player, Collective]] = []
        self.done = done
        self.joined_s: Number = 0
        self.nominal_s: Number = 0


class _Rendezvous:
    """Where collectives meet. The last arrival starts the latency, then the flow."""

    def __init__(self, env: Environment, network: Network) -> None:
        self._env = env
        self._network = network
        self._open: dict[str, _PendingCollective] = {}

    def join(self, player: _Player, op: Collective) -> _PendingCollective:
        pending = self._pending(op)
        pending.arrived.append((player, op))
        if len(pending.arrived) == op.members:
            self._open.pop(op.key, None)
            pending.joined_s = self._env.now
            self._begin(pending)
        return pending

    def num_arrived(self, op: Collective) -> int:
        pending = self._open.get(op.key)
        return len(pending.arrived) if pending else 0

    def _pending(self, op: Collective) -> _PendingCollective:
        if op.members == 1:
            return _PendingCollective(Event(self._env))
        pending = self._open.get(op.key)
        if pending is None:
            pending = self._open[op.key] = _PendingCollective(Event(self._env))
        return pending

    def _begin(self, pending: _PendingCollective) -> None:
        latency: Any = max(op.cost.latency_s for _, op in pending.arrived)
        pending.nominal_s = latency
        if latency:
            Timeout(self._env, latency, pending).callbacks.append(self._latency_passed)
        else:
            self._move(pending)

    def _latency_passed(self, timeout: Event) -> None:
        pending: _PendingCollective = timeout.value  # type: ignore[assignment]
        self._move(pending)

    def _move(self, pending: _PendingCollective) -> None:
        """Load the links, and slow the members' compute until the bytes have arrived."""
        usage, share_bytes = _joint_cost([op for _, op in pending.arrived])
        flow_s = self._network.start(usage, share_bytes, pending.done)
        pending.nominal_s += flow_s
        for player, op in pending.arrived:
            if op.interference and flow_s:
                player.slow(op)
                pending.done.callbacks.append(partial(player.relieve, op))


def _joint_cost(ops: Sequence[Collective]) -> tuple[Mapping[str, Number], Number]:
    """(bytes by link, share_bytes) of the flow that all arrivals make together."""
    if len(ops) == 1:
        return ops[0].cost.link_bytes, _share_bytes(ops[0])
    usage: dict[str, Number] = {}
    for op in ops:
        for link, num_bytes in op.cost.link_bytes.items():
            usage[link] = usage.get(link, 0) + num_bytes
    return usage, max(map(_share_bytes, ops))


def _share_bytes(op: Collective) -> Number:
    return op.cost.share_bytes or max(op.cost.link_bytes.values(), default=0)


class _Player:
    """One program being played: its host, its streams, and what they wait for."""

    def __init__(self, env: Environment, rendezvous: _Rendezvous, program: Program) -> None:
        self._env = env
        self._rendezvous = rendezvous
        self._program = program
        self._launched: dict[int, Number] = {}  # op id -> when the host has launched it, as far as is known
        self._rows: dict[int, list[Number]] = {}  # of a chain's ops
        self._launches: Event | None = None  # succeeds when the host has got past a blocking op
        self._ended: dict[int, Span | Chained] = {}  # of chains by their last op
        self._ends: dict[int, Event] = {}  # of ops that something waits for
        self._computing: dict[Process, None] = {}
        self._slowed_by: dict[int, Number] = {}  # collectives moving bytes -> interference
        self._rate: Number = 1  # of compute

    def start(self) -> None:
        streams: dict[str, list[Chain | ProgramOp]] = {}
        for op in self._program.runs:
            streams.setdefault(op.stream, []).append(op)
        self._env.process(self._host())
        for ops in streams.values():
            self._env.process(self._stream(ops))

    @property
    def num_ended(self) -> int:
        return len(self._ended)

    @property
    def end_s(self) -> Number:
        return max((one.end_s for one in self._ended.values()), default=0)

    def spans(self) -> Iterator[Span]:
        for op in self._program.runs:
            one = self._ended[op.last if isinstance(op, Chain) else op.id]
            yield from (one,) if isinstance(one, Span) else one.spans(self._program.name)

    # -- the host ------------------------------------------------------------------------------------------------

    def _host(self) -> _Steps:
        """Launch times are sums, so the host takes an event only where it waits."""
        clock: Number = 0
        for op in self._program.runs:
            if isinstance(op, Chain):
                clock, *row = accumulate(op.kernels.hosts_s, initial=clock)
                self._rows[op.id], self._launched[op.id], clock = row, row[0], row[-1]
            else:
                first_s = op.first_s if isinstance(op, Compute) and op.first_s is not None else op.host_s
                self._launched[op.id] = clock + first_s
                clock += op.host_s
            if op.blocking:
                self._wake_streams()
                yield self._end_of(op.last if isinstance(op, Chain) else op.id)
                clock = max(clock, self._env.now)
        self._wake_streams()

    def _wake_streams(self) -> None:
        if self._launches is not None:
            launches, self._launches = self._launches, None
            launches.succeed()

    # -- streams -------------------------------------------------------------------------------------------------

    def _stream(self, ops: Sequence[Chain | ProgramOp]) -> _Steps:
        env = self._env
        previous: int | None = None
        for op in ops:
            cause = previous
            for before in op.after:
                if before not in self._ended:
                    yield self._end_of(before)
                    cause = before
            while op.id not in self._launched:
                if self._launches is None:
                    self._launches = Event(env)
                yield self._launches
                cause = None
            if isinstance(op, Chain):
                yield from self._chain(op, cause)
                previous = op.last
                continue
            launch: Any = self._launched[op.id] - env.now
            if launch > 0:
                yield Timeout(env, launch)
                cause = None
            if isinstance(op, Compute):
                yield from self._compute(op, cause)
            else:
                yield from self._collective(op, cause)
            previous = op.id

    def _chain(self, op: Chain, cause: int | None) -> _Steps:
        """As `_compute` of each of its ops, in one event unless the rate changes."""
        env, process = self._env, self._env.active_process
        assert process is not None
        one = Chained(op, cause, self._rows.pop(op.id), env.now, self._rate)
        self._computing[process] = None
        while True:
            try:
                delay: Any = until(one.end_s, env.now)
                yield Timeout(env, delay)
                break
            except Interrupt:
                one.change(env.now, self._rate)
        del self._computing[process]
        self._end(op.last, one)

    def _compute(self, op: Compute, cause: int | None) -> _Steps:
        env, process = self._env, self._env.active_process
        assert process is not None
        start_s = env.now
        left: Any = op.duration_s
        self._computing[process] = None
        while True:
            since, rate = env.now, self._rate
            try:
                yield Timeout(env, left if rate == 1 else left / rate)
                break
            except Interrupt:  # the rate has changed
                left = max(left - (env.now - since) * rate, 0)
        del self._computing[process]
        parts = op.parts or (("compute", op.duration_s),)
        span = Span(
            program=self._program.name,
            stream=op.stream,
            id=op.id,
            label=op.label,
            category=max(parts, key=itemgetter(1))[0],
            start_s=start_s,
            end_s=env.now,
            nominal_s=op.duration_s,
            parts=parts,
            cause=cause,
        )
        self._end(op.id, span)

    def _collective(self, op: Collective, cause: int | None) -> _Steps:
        start_s = self._env.now
        pending = self._rendezvous.join(self, op)
        yield pending.done
        span = Span(
            program=self._program.name,
            stream=op.stream,
            id=op.id,
            label=op.label,
            category=op.kind,
            start_s=start_s,
            end_s=self._env.now,
            nominal_s=pending.nominal_s,
            joined_s=pending.joined_s,
            cause=cause,
        )
        self._end(op.id, span)

    def _end_of(self, op_id: int) -> Event:
        event = self._ends.get(op_id)
        if event is None:
            event = self._ends[op_id] = Event(self._env)
        return event

    def _end(self, op_id: int, span: Span | Chained) -> None:
        self._ended[op_id] = span
        event = self._ends.get(op_id)
        if event is not None:
            event.succeed()

    # -- interference --------------------------------------------------------------------------------------------

    def slow(self, op: Collective) -> None:
        """`op` has begun to move bytes."""
        self._slowed_by[op.id] = op.interference
        self._rerate()

    def relieve(self, op: Collective, _: Event) -> None:
        """`op` has moved its bytes."""
        del self._slowed_by[op.id]
        self._rerate()

    def _rerate(self) -> None:
        slowed = summed(self._slowed_by.values())
        self._rate = 1 - (slowed if slowed < _LITTLE else min(slowed, MOST_INTERFERENCE))
        for process in self._computing:
            process.interrupt()

    # -- what went wrong -----------------------------------------------------------------------------------------

    def stuck(self) -> Iterator[str]:
        """The first op that has not ended on each stream, and why."""
        blocked: set[str] = set()
        for run in self._program.runs:
            ended = (run.last if isinstance(run, Chain) else run.id) in self._ended
            if not ended and run.stream not in blocked:
                blocked.add(run.stream)
                op = next(run.ops()) if isinstance(run, Chain) else run
                yield f"{place(self._program, op)}: {self._reason(op)}"

    def _reason(self, op: ProgramOp) -> str:
        known = {other.id: other for other in self._program.ops}
        for before in (before for before in op.after if before not in self._ended):
            if before not in known:
                return f"waits for op {before}, which the program does not have"
            return f"waits for op {before} {known[before].label!r}"
        if op.id not in self._launched:
            return "waits for the host, which waits for a blocking op before it"
        if isinstance(op, Collective):
            return f"collective {op.key!r} has {self._rendezvous.num_arrived(op)} of {op.members} members"
        return "has not ended"
