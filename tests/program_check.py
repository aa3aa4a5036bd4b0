"""Whether programs can run at all: what laws ask of those that are drawn, lowered or folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from simulator.base.errors import EngineError, Fault
from simulator.work.program import Collective, Compute, Number, Program, ProgramOp, place

_RELATIVE_TOLERANCE = 1e-9  # of sums of floats that should agree


def check(programs: Sequence[Program]) -> None:
    """Raise EngineError with every fault of the programs: names, ids, numbers, links, rendezvous, cycles."""
    faults = [fault for program in programs for fault in _op_faults(program)]
    faults += _name_faults(programs)
    faults += _link_faults(programs)
    faults += _rendezvous_faults(programs)
    faults = faults or list(_cycle_faults(programs))
    if faults:
        raise EngineError("\n".join(["the programs cannot run", *(f"  {fault}" for fault in faults)]))


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
