"""Programs: what a class of equal ranks does in a step, as ops on streams. The engine plays them.

A program is data: nothing here knows about models, plans or SimPy. Times may be float or Fraction.

Links. A link is a name with a capacity. Programs that use one name use one link, so a NIC shared by a node's ranks has
one name and each of these ranks puts its own bytes on it; a link that every rank has to itself needs a name a rank
("intra:3"), or, where one program stands for many equal ranks, the name of one of them ("intra").

Rendezvous. Ops that share a `key` are one collective, whatever program they stand in. Each is one arrival; the
collective begins when `members` of them have arrived. A program that stands for 8 equal ranks arrives once, so a
collective among equal ranks has one member, and one among two classes has two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from typing_extensions import override

from simulator.base.errors import EngineError, Fault

Number = float | Fraction  # seconds: the engine must not care which

COMPUTE_STREAM = "compute"  # the stream whose gaps are exposed communication

_RELATIVE_TOLERANCE = 1e-9  # of sums of floats that should agree


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What one collective costs each of its ranks: bytes over each class of link, and a delay before they flow.

    latency_s: launch plus steps × per-step latency; the links are not loaded while it passes.
    link_bytes: link name -> bytes that must cross it; all links of a cost drain together (the slowest decides).
        The flow of several arrivals is the sum of their link_bytes, after the longest of their latencies.
    share_bytes: what stands for one rank's flow when flows divide a link: rates are fair in share_bytes per second.
        None: the most it puts on any link. Given where link_bytes are those of several ranks, as folding makes them.
    """

    latency_s: Number
    link_bytes: Mapping[str, Number]
    share_bytes: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work on the compute stream. `parts` splits its duration by category (gemm, attention, ...); they sum to it.

    host_s: what the host needs to launch it; the host stream runs ahead of the device and never waits for it,
            except where `blocking` (the host waits until the work is done, as CUDA_LAUNCH_BLOCKING or .item() do).
    first_s: of that, what passes before the first of its kernels is launched, and so before it starts; None: all of it.
    """

    id: int
    stream: str
    after: tuple[int, ...] = ()
    label: str
    duration_s: Number
    parts: tuple[tuple[str, Number], ...] = ()
    host_s: Number = 0
    first_s: Number | None = None
    blocking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective on a communication stream. All `members` ops that share `key` must arrive before it starts.

    interference: share of the device's speed that compute loses while this collective moves bytes (0..1).
    blocking: the host waits until it is over.
    """

    id: int
    stream: str
    after: tuple[int, ...] = ()
    label: str
    kind: str
    key: str
    members: int = 1
    cost: CollectiveCost
    size_bytes: int
    host_s: Number = 0
    interference: Number = 0
    blocking: bool = False


ProgramOp = Compute | Collective


class Kernels(NamedTuple):
    """What equal chains share, op by op, as `Compute` has it; categories: the largest part of each."""

    durations_s: tuple[Number, ...]
    parts: tuple[tuple[tuple[str, Number], ...], ...]
    hosts_s: tuple[Number, ...]
    categories: tuple[str, ...]


class Chain(NamedTuple):
    """Compute one behind the other on one stream and in the host's order: the engine plays it as one event.

    Nobody waits for any but the last. id: of the first; the others' count on from it. after: what the first waits for.
    blocking: the host waits for the last.
    """

    id: int
    stream: str
    after: tuple[int, ...]
    labels: Sequence[str]
    kernels: Kernels
    blocking: bool

    @property
    def last(self) -> int:
        """The last op's id."""
        return self.id + len(self.labels) - 1

    def ops(self) -> Iterator[Compute]:
        """Its ops, each on its own."""
        each = zip(self.labels, self.kernels.durations_s, self.kernels.parts, self.kernels.hosts_s, strict=True)
        for number, (label, duration_s, parts, host_s) in enumerate(each, self.id):
            after, blocking = self.after if number == self.id else (), self.blocking and number == self.last
            yield Compute(
                id=number, stream=self.stream, after=after, label=label, duration_s=duration_s, parts=parts, host_s=host_s,
                blocking=blocking,
            )  # fmt: skip


class Ops(Sequence[ProgramOp]):
    """The ops of a program with chains; a chain is expanded when one of its ops is accessed."""

    def __init__(self, runs: Sequence[Chain | ProgramOp]) -> None:
        self.runs = runs

    @cached_property
    def _each(self) -> Sequence[ProgramOp]:
        return [op for run in self.runs for op in (run.ops() if isinstance(run, Chain) else (run,))]

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._each[index]

    @override
    def __len__(self) -> int:
        return len(self._each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The ops of one rank class in host launch order. `links` are the capacities its costs refer to, bytes/s.

    exchanges: collectives inside folded compute, which no op names: (kind, role, size_bytes, how many of them).
    hosted_s: the host's time that is part of folded compute, whose host waits for it.
    """

    name: str
    num_ranks: int
    ops: Sequence[ProgramOp]
    links: Mapping[str, Number] = field(default_factory=dict)
    exchanges: tuple[tuple[str, str, int, int], ...] = ()
    hosted_s: float = 0.0

    @property
    def runs(self) -> Sequence[Chain | ProgramOp]:
        """The same, with chains where the program has some."""
        return self.ops.runs if isinstance(self.ops, Ops) else self.ops


def check(programs: Sequence[Program]) -> None:
    """Raise EngineError with every fault of the programs: names, ids, numbers, links, rendezvous, cycles."""
    faults = [fault for program in programs for fault in _op_faults(program)]
    faults += _name_faults(programs)
    faults += _link_faults(programs)
    faults += _rendezvous_faults(programs)
    faults = faults or list(_cycle_faults(programs))
    if faults:
        raise EngineError("\n".join(["the programs cannot run", *(f"  {fault}" for fault in faults)]))


def place(program: Program, op: ProgramOp) -> str:
    """How errors name an op."""
    return f"{program.name}: op {op.id} {op.label!r} on {op.stream}"


def _name_faults(programs: Sequence[Program]) -> Iterator[Fault]:
    for name, count in Counter(program.name for program in programs).items():
        if count > 1:
            yield Fault(name, f"{count} programs have this name", "a name for each")


def _op_faults(program: Program) -> Iterator[Fault]:
    ids = Counter(op.id for op in program.ops)
    for op in program.ops:
        where = place(program, op)
        if ids[op.id] > 1:
            yield Fault(where, f"{ids[op.id]} ops have this id", "an id for each")
        for missing in (before for before in op.after if before not in ids):
            yield Fault(where, f"waits for op {missing}, which the program does not have")
        for name, number in _numbers(op):
            if not 0 <= number < float("inf"):
                yield Fault(where, f"{name} is {number}", "finite and not negative")
        if isinstance(op, Compute) and op.parts:
            total: Number = sum(number for _, number in op.parts)
            slack = _RELATIVE_TOLERANCE * op.duration_s
            if not -slack <= total - op.duration_s <= slack:
                yield Fault(where, f"its parts sum to {total} s, its duration is {op.duration_s} s")


def _numbers(op: ProgramOp) -> Iterator[tuple[str, Number]]:
    yield "host_s", op.host_s
    if isinstance(op, Compute):
        yield "duration_s", op.duration_s
        yield "first_s", op.first_s or 0
        yield from ((f"part {name}", number) for name, number in op.parts)
    else:
        yield "latency_s", op.cost.latency_s
        yield "interference", op.interference
        yield "share_bytes", op.cost.share_bytes or 0
        yield from ((f"bytes on {link}", number) for link, number in op.cost.link_bytes.items())


def _link_faults(programs: Sequence[Program]) -> Iterator[Fault]:
    capacities: dict[str, Number] = {}
    for program in programs:
        for link, capacity in program.links.items():
            where = f"{program.name}: link {link}"
            if not 0 < capacity < float("inf"):
                yield Fault(where, f"capacity is {capacity} bytes/s", "finite and above 0")
            known = capacities.setdefault(link, capacity)
            if known != capacity:
                yield Fault(where, f"capacity is {capacity} bytes/s here and {known} elsewhere")
    for program in programs:
        for op in program.ops:
            used = op.cost.link_bytes if isinstance(op, Collective) else ()
            for link in (link for link in used if link not in capacities):
                yield Fault(place(program, op), f"link {link} has no capacity")


def _rendezvous_faults(programs: Sequence[Program]) -> Iterator[Fault]:
    arrivals: dict[str, list[tuple[Program, Collective]]] = {}
    for program in programs:
        for op in program.ops:
            if isinstance(op, Collective) and op.members > 1:
                arrivals.setdefault(op.key, []).append((program, op))
    for key, ops in arrivals.items():
        names = ", ".join(place(program, op) for program, op in ops)
        members = sorted({op.members for _, op in ops})
        if len(members) > 1:
            yield Fault(f"collective {key}", f"its ops disagree on the members: {members} ({names})")
        elif len(ops) != members[0]:
            yield Fault(f"collective {key}", f"{len(ops)} ops arrive, {members[0]} are its members ({names})")


def _cycle_faults(programs: Sequence[Program]) -> Iterator[Fault]:
    """Kahn's algorithm over stream order, `after`, blocking launches and rendezvous; what never gets free is faulty."""
    succ, pred = _order(programs)
    free = [node for node, number in pred.items() if not number]
    while free:
        for later in succ.get(free.pop(), ()):
            pred[later] -= 1
            if not pred[later]:
                free.append(later)
    stuck = {node for node, number in pred.items() if number}
    for p, program in enumerate(programs):
        for op in program.ops:
            if (p, op.id) in stuck:
                yield Fault(place(program, op), "can never start: it is in a cycle, or waits for one")


_Node = tuple[int, int] | str  # (program, op id): the op's end; a key: the start of a rendezvous


def _order(programs: Sequence[Program]) -> tuple[dict[_Node, list[_Node]], Counter[_Node]]:
    """What must end before what: successors, and the number of predecessors, of each op and rendezvous."""
    succ: dict[_Node, list[_Node]] = {}
    pred: Counter[_Node] = Counter()
    for p, program in enumerate(programs):
        last: dict[str, _Node] = {}
        host: _Node | None = None
        for op in program.ops:
            end: _Node = (p, op.id)
            before = [(p, other) for other in op.after]
            begin: _Node = end
            if isinstance(op, Collective) and op.members > 1:
                begin = op.key
                succ.setdefault(begin, []).append(end)
                pred[end] += 1
            for node in {*before, *(n for n in (last.get(op.stream), host) if n is not None)}:
                succ.setdefault(node, []).append(begin)
                pred[begin] += 1
            pred[begin] += 0
            last[op.stream] = end
            host = end if op.blocking else host
    return succ, pred
