"""The one place that knows how to make programs that can run: written by hand in short form, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from hypothesis import strategies as st

from simulator.work.program import Collective, CollectiveCost, Compute, Number, Program, ProgramOp

seconds = st.builds(Fraction, st.integers(0, 6), st.sampled_from((1, 2, 3)))
shares = st.sampled_from((Fraction(0), Fraction(0), Fraction(1, 4), Fraction(3, 5)))


def compute(number: int, duration_s: Number, *after: int, host_s: Number = 0, blocking: bool = False) -> Compute:
    """A kernel on the compute stream."""
    return Compute(
        id=number,
        stream="compute",
        after=after,
        label=f"kernel {number}",
        duration_s=duration_s,
        parts=(("gemm", duration_s),),
        host_s=host_s,
        blocking=blocking,
    )


def gather(
    number: int,
    num_bytes: Mapping[str, Number],
    *after: int,
    stream: str = "gather",
    kind: str = "all_gather",
    key: str = "",
    members: int = 1,
    latency_s: Number = 0,
    interference: Number = 0,
) -> Collective:
    """A collective with these bytes by link; its key is its own unless given."""
    return Collective(
        id=number,
        stream=stream,
        after=after,
        label=f"{kind} {number}",
        kind=kind,
        key=key or f"alone {number}",
        members=members,
        cost=CollectiveCost(latency_s=latency_s, link_bytes=num_bytes),
        size_bytes=1,
        interference=interference,
    )


def program(*ops: ProgramOp, name: str = "rank 0", **links: Number) -> Program:
    """One rank's ops, and the capacities of its links."""
    return Program(name=name, num_ranks=1, ops=ops, links=links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes of equal ranks: each rank has a port of its own, each node a NIC that its ranks share."""

    num_nodes: int
    ranks_per_node: int
    slowness: tuple[Fraction, ...]  # by rank: factor on its compute
    nic_bytes_per_s: tuple[Fraction, ...]  # by node

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def links(self, rank: int) -> dict[str, Number]:
        node = rank // self.ranks_per_node
        return {f"port:{rank}": Fraction(4), f"nic:{node}": self.nic_bytes_per_s[node]}

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Ranks that meet: those of a node, those with one place in all nodes, everyone, or nobody."""
        ranks = range(self.num_ranks)
        if axis == "node":
            return [tuple(r for r in ranks if r // self.ranks_per_node == n) for n in range(self.num_nodes)]
        if axis == "rail":
            return [tuple(r for r in ranks if r % self.ranks_per_node == i) for i in range(self.ranks_per_node)]
        return [tuple(ranks)] if axis == "world" else [(r,) for r in ranks]


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Up to 3 nodes of up to 3 ranks, most of them equal, perhaps with one straggler and one slow NIC."""
    num_nodes, ranks_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slowness = [Fraction(1)] * (num_nodes * ranks_per_node)
    nics = [Fraction(6)] * num_nodes
    if draw(st.booleans()):
        slowness[draw(st.integers(0, len(slowness) - 1))] = Fraction(3, 2)
    if draw(st.booleans()):
        nics[draw(st.integers(0, num_nodes - 1))] = Fraction(2)
    return Machine(
        num_nodes=num_nodes, ranks_per_node=ranks_per_node, slowness=tuple(slowness), nic_bytes_per_s=tuple(nics)
    )


class _Draft:
    """The ops of every rank, appended in one order everywhere: so no rank can wait for itself."""

    def __init__(self, draw: st.DrawFn, machine: Machine) -> None:
        self.draw = draw
        self.machine = machine
        self.ops: list[list[ProgramOp]] = [[] for _ in range(machine.num_ranks)]

    def after(self) -> tuple[int, ...]:
        count = len(self.ops[0])
        return tuple(sorted(self.draw(st.sets(st.integers(0, count - 1), max_size=2)))) if count else ()

    def compute(self) -> None:
        number, after = len(self.ops[0]), self.after()
        duration, host_s = self.draw(seconds), self.draw(seconds) / 4
        stream, blocking = self.draw(st.sampled_from(("compute", "compute", "copy"))), self.draw(st.integers(0, 9)) == 0
        for ops, slowness in zip(self.ops, self.machine.slowness, strict=True):
            gemm = duration * slowness / 3
            ops.append(
                Compute(
                    id=number,
                    stream=stream,
                    after=after,
                    label=f"compute {number}",
                    duration_s=duration * slowness,
                    parts=(("gemm", gemm), ("elementwise", duration * slowness - gemm)),
                    host_s=host_s,
                    blocking=blocking,
                )
            )

    def collective(self, axis: str, streams: Sequence[str]) -> None:
        stream, after, kind = self.draw(st.sampled_from(streams)), self.after(), f"{axis} gather"
        latency_s, interference, host_s = self.draw(seconds) / 4, self.draw(shares), self.draw(seconds) / 8
        port_bytes, nic_bytes = self.draw(st.integers(0, 9)), self.draw(st.integers(0, 9))
        for group in self.machine.groups(axis):
            for rank in group:
                port, nic = self.machine.links(rank)
                number = len(self.ops[rank])
                self.ops[rank].append(
                    Collective(
                        id=number,
                        stream=stream,
                        after=after,
                        label=f"{kind} {number}",
                        kind=kind,
                        key=f"{number}:{group[0]}",
                        members=len(group),
                        cost=CollectiveCost(latency_s=latency_s, link_bytes={port: port_bytes, nic: nic_bytes}),
                        size_bytes=9,
                        host_s=host_s,
                        interference=interference,
                    )
                )

    def shift(self) -> None:
        """Every rank sends to the next one, round a ring: two ops a rank, each meeting another rank's."""
        after, num_bytes, num_ranks = self.after(), self.draw(st.integers(0, 9)), self.machine.num_ranks
        first = len(self.ops[0])
        for rank, ops in enumerate(self.ops):
            port, nic = self.machine.links(rank)
            for way, source, link in (("send", rank, nic), ("receive", (rank - 1) % num_ranks, port)):
                ops.append(
                    Collective(
                        id=len(ops),
                        stream=way,
                        after=after,
                        label=f"{way} {first}",
                        kind="shift",
                        key=f"{first}:{source} to next",
                        members=2,
                        cost=CollectiveCost(latency_s=0, link_bytes={link: num_bytes}),
                        size_bytes=num_bytes,
                    )
                )

    def programs(self) -> list[Program]:
        return [
            Program(name=f"rank {rank}", num_ranks=1, ops=tuple(ops), links=self.machine.links(rank))
            for rank, ops in enumerate(self.ops)
        ]


@st.composite
def clusters(draw: st.DrawFn, *, max_ops: int = 8) -> list[Program]:
    """A program for each rank of a drawn machine: compute, collectives on every axis, shifts, shared NICs."""
    draft = _Draft(draw, draw(machines()))
    for _ in range(draw(st.integers(1, max_ops))):
        what = draw(st.sampled_from(("compute", "compute", "node", "rail", "world", "alone", "shift")))
        if what == "compute":
            draft.compute()
        elif what == "shift":
            draft.shift()
        else:
            draft.collective(what, ("gather", "reduce"))
    return draft.programs()


@st.composite
def uncontended(draw: st.DrawFn, *, max_ops: int = 10) -> Program:
    """One rank whose collectives follow one another on one stream, so that none shares a link with another."""
    machine = Machine(num_nodes=1, ranks_per_node=1, slowness=(Fraction(1),), nic_bytes_per_s=(Fraction(6),))
    draft = _Draft(draw, machine)
    for _ in range(draw(st.integers(1, max_ops))):
        if draw(st.booleans()):
            draft.compute()
        else:
            draft.collective("alone", ("gather",))
    return draft.programs()[0]


def scaled(program: Program, factor: Fraction) -> Program:
    """The same program on a clock that runs `factor` times slower: durations × factor, capacities / factor."""
    return replace(
        program,
        ops=tuple(_scaled(op, factor) for op in program.ops),
        links={link: capacity / factor for link, capacity in program.links.items()},
    )


def _scaled(op: ProgramOp, factor: Fraction) -> ProgramOp:
    if isinstance(op, Compute):
        parts = tuple((name, factor * number) for name, number in op.parts)
        return replace(op, duration_s=factor * op.duration_s, parts=parts, host_s=factor * op.host_s)
    cost = replace(op.cost, latency_s=factor * op.cost.latency_s)
    return replace(op, cost=cost, host_s=factor * op.host_s)
