"""Ops whose order is known and whose times are not: each begins when its stream is free and what it waits for has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush

from simulator.work.recorded.recording import RecordedOp


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
