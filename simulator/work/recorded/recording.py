"""A recorded step of one rank: its ops in the order in which they were issued. Times are seconds from the step's start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

HOST_CATEGORY = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a collective carries. size_bytes: of the full tensor, None: not recorded. ranks: of its group, empty: not recorded."""

    kind: str
    size_bytes: int | None
    group_size: int | None
    ranks: tuple[int, ...]
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """A kernel, a copy or a collective. stream: 0 is the compute stream.

    issued_s: when the host had issued it; None: not recorded. after: indices of ops that it is recorded to have waited for.
    marks: how often the host made a stream wait for an event since the launch before. blocks: the host went on at its end.
    alone_s: of a collective whose members were recorded too, since the last of them came; None: its whole time counts.
    operator: the torch operator that launched it and its arguments as `work.captured` has them, where shapes were recorded.
    """

    name: str
    category: str
    stream: int
    start_s: float
    end_s: float
    issued_s: float | None = None
    carried: Carried | None = None
    operator: tuple[str, tuple[Any, ...]] | None = None
    after: tuple[int, ...] = ()
    marks: int = 0
    blocks: bool = False
    alone_s: float | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """The host waited for the device. before: index of the first op that was issued behind it."""

    name: str
    start_s: float
    end_s: float
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One step of one rank.

    origin_s: the step's start on the clock of the file. step_s: until the next one starts. step_times_s: of every complete step
    of the file, by number; empty where steps were not marked. host_ahead_s: how long before the step's start its host had begun
    with it; host_end_s: when it was through (None: not recorded). on_host: no device was recorded, operators of the CPU are its ops.
    rank, world_size: None where the file does not say. peaks: allocated and reserved bytes, where recorded.
    """

    name: str
    ops: Sequence[RecordedOp]
    waits: Sequence[HostWait]
    step: int | None
    step_s: float
    step_times_s: dict[int, float]
    origin_s: float
    host_ahead_s: float
    host_end_s: float | None
    on_host: bool
    rank: int | None
    world_size: int | None
    device: str
    peaks: tuple[int, int] | None
    notes: tuple[str, ...]

    @property
    def launched(self) -> bool:
        """It is recorded when the host issued the ops."""
        return any(op.issued_s is not None for op in self.ops)


# Ops whose order is known and whose times are not: each begins when its stream is free and what it waits for has ended.
def scheduled(ops: Sequence[RecordedOp]) -> list[RecordedOp]:
    """The ops at the earliest times that the order of each stream and their waits allow; durations are kept."""
    free: dict[int, float] = {}
    found: list[RecordedOp] = []
    for op in ops:
        start_s = max([free.get(op.stream, 0.0), *(found[before].end_s for before in op.after)])
        free[op.stream] = start_s + op.duration_s
        found.append(replace(op, start_s=start_s, end_s=free[op.stream]))
    return found


def in_order(waits: Mapping[int, Sequence[int]]) -> tuple[list[int], list[int]]:
    """Nodes so that each comes behind what it waits for, else in their order; and those that are in a cycle, or behind one."""
    left = {node: len(set(before)) for node, before in waits.items()}
    behind: dict[int, list[int]] = {}
    for node, before in waits.items():
        for one in set(before):
            behind.setdefault(one, []).append(node)
    place = {node: index for index, node in enumerate(waits)}
    ready = [(place[node], node) for node, count in left.items() if not count]
    order: list[int] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for later in behind.get(node, ()):
            left[later] -= 1
            if not left[later]:
                heappush(ready, (place[later], later))
    return order, [node for node, count in left.items() if count]
