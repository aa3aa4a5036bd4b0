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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

from typing_extensions import override

Number = float | Fraction  # seconds: the engine must not care which

COMPUTE_STREAM = "compute"  # the stream whose gaps are exposed communication
HOST_STREAM = "host"  # of a captured program: what its CPU computes, and where it waits


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


def place(program: Program, op: ProgramOp) -> str:
    """How errors name an op."""
    return f"{program.name}: op {op.id} {op.label!r} on {op.stream}"
