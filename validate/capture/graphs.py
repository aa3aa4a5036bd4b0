"""CUDA graphs: what runs under `torch.cuda.graph` is written down and runs when the graph is replayed.

Storages that it frees stay: they are the graph's own pool. Each replay is its operators once more, in their order, as if the
host launched each; a graph that holds the optimizer's step ends a step where it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch

from simulator.work.captured.capture import Kind
from validate.capture.log import Log
from validate.capture.storages import Storages
from validate.capture.streams import Recorder

_STORAGE = frozenset({Kind.ALLOCATE, Kind.FREE, Kind.RECORD_STREAM})
# where a collective's number and streams stand in an event
_NUMBER = {Kind.COLLECTIVE: 1, Kind.MESSAGE: 1, Kind.WAIT_WORK: 2}
_STREAMS = {
    Kind.OPERATOR: (2,), Kind.COLLECTIVE: (5,), Kind.RECORD: (2,), Kind.WAIT_EVENT: (1,), Kind.WAIT_STREAM: (1, 2),
    Kind.WAIT_WORK: (1,), Kind.SYNCHRONIZE: (1,), Kind.MESSAGE: (6,),
}  # fmt: skip


class Graph:
    """torch.cuda.CUDAGraph."""

    log: ClassVar[Log]
    storages: ClassVar[Storages]
    numbered: Callable[[], int]  # gives each collective its number
    stepped: Callable[[], None]  # an optimizer's step is over
    recording: ClassVar[Graph | None] = None

    def __init__(self, *_: object, **__: object) -> None:
        self._begin, self._events, self._pool, self._stream = 0, list[list[int]](), -1, 0
        self.steps = 0  # of an optimizer, inside

    def capture_begin(self, *_: object, **__: object) -> None:
        Graph.recording, self._begin, self._detailed = self, len(self.log.events), self.log.detailed
        self._stream = Recorder.stack[-1].number
        self.log.detailed, self.log.counts_host = True, False

    def capture_end(self) -> None:
        Graph.recording, self.log.detailed, self.log.counts_host = None, self._detailed, True
        inside = self.log.events[self._begin :]
        self._events = [event for event in inside if event[0] not in _STORAGE]
        self.log.events[self._begin :] = [event for event in inside if event[0] in _STORAGE]
        if passing := _most_alive(inside) - _left(inside):
            self._pool = self.storages.begin(passing)

    def replay(self) -> None:
        """All of it, on the current stream; streams that it forked are its own."""
        numbers: dict[int, int] = {}
        for one in self._events if self.log.detailed else ():
            kind, event = Kind(one[0]), list(one)
            if kind in _NUMBER:
                old = event[_NUMBER[kind]]
                if old not in numbers:
                    numbers[old] = Graph.numbered()
                event[_NUMBER[kind]] = numbers[old]
            for at in _STREAMS.get(kind, ()):
                event[at] = Recorder.stack[-1].number if event[at] == self._stream else event[at]
            self.log.add(kind, *event[1:])
        for _ in range(self.steps):
            Graph.stepped()

    def reset(self) -> None:
        if self._pool >= 0:
            self.storages.end(self._pool)
        self._events, self._pool = [], -1

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def __del__(self) -> None:
        self.reset()


class Recorded:
    """torch.cuda.graph: a context whose operators become the graph's."""

    default_capture_stream: ClassVar[Any] = None

    def __init__(self, cuda_graph: Graph, _pool: object = None, stream: Any = None, **_: object) -> None:
        self._graph = cuda_graph
        self._stream = torch.cuda.stream(stream or torch.cuda.Stream())

    def __enter__(self) -> Self:
        self._stream.__enter__()
        self._graph.capture_begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(None, None, None)


def answers() -> Mapping[str, Any]:
    """What torch.cuda says of graphs."""
    return {
        "CUDAGraph": Graph, "graph": Recorded, "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: Graph.recording is not None,
    }  # fmt: skip


def _left(events: list[list[int]]) -> int:
    """Bytes that storages leave behind."""
    sizes = {event[1]: event[2] for event in events if event[0] == Kind.ALLOCATE}
    return sum(sizes.values()) - sum(sizes.get(event[1], 0) for event in events if event[0] == Kind.FREE)


def _most_alive(events: list[list[int]]) -> int:
    """Of the storages that begin here."""
    alive, total, most = dict[int, int](), 0, 0
    for kind, *values in events:
        if kind == Kind.ALLOCATE:
            alive[values[0]] = values[1]
            total += values[1]
            most = max(most, total)
        elif kind == Kind.FREE:
            total -= alive.pop(values[0], 0)
    return most
