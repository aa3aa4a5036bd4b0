"""Every operator of a recorded step, with the device's time that it launched: what a capture is lined up with. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.kineto import chosen_step, read_events, traced_steps
from simulator.formats.readers.kineto_host import HostEvents, HostOp, kind_of
from simulator.formats.readers.recording_host import WRAPPERS
from simulator.formats.readers.recording_parts import arguments
from simulator.work.captured.tensors import tensors


class RecordedOperator(NamedTuple):
    """An operator, or a kernel by its launch. shapes: of its tensors, those without dims left out. start, end: us, on its thread.

    seconds: of the kernels that were launched inside it; on a CPU its own.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    thread: int
    start: float
    end: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperators:
    """operators: all, in the order in which they began. kernels: what ran, by the moment of its launch. issued: collectives."""

    operators: tuple[RecordedOperator, ...]
    kernels: tuple[RecordedOperator, ...]
    issued: tuple[str, ...]
    on_host: bool


def read_operators(path: Path, step: int | None = None) -> RecordedOperators:
    """Operators of one step of a trace, in the order in which they began. Raises InputError."""
    events = HostEvents()
    read_events(path, events)
    chosen = chosen_step(path, traced_steps(events), step)
    begin, end = events.host_steps.get(chosen.number, (0.0, 1e18)) if chosen is not None else (0.0, 1e18)
    inside = sorted(
        (one for one in events.operators if begin <= one.start < end), key=lambda one: (one.start, -one.end)
    )
    if not any(one.shapes >= 0 for one in inside):
        problem = "its operators bear no shapes"
        raise InputError(Fault(place=str(path), problem=problem, remedy="torch.profiler with record_shapes=True"))
    launched = _Launched(events)
    on_host = not len(events.starts)
    found = [_operator(events, one, one.end - one.start if on_host else launched.within(one)) for one in inside]
    return RecordedOperators(
        operators=tuple(found),
        kernels=tuple(_work(inside) if on_host else launched.kernels(begin, end)),
        issued=tuple(_issued(inside)),
        on_host=on_host,
    )


def _operator(events: HostEvents, one: HostOp, microseconds: float) -> RecordedOperator:
    args = arguments(events.arguments[one.shapes]) if one.shapes >= 0 else ()
    shapes = tuple(tensor.shape for tensor in tensors(args) if tensor.shape)
    return RecordedOperator(one.name.rpartition("::")[2], shapes, one.thread, one.start, one.end, microseconds * 1e-6)


def _work(inside: list[HostOp]) -> Iterator[RecordedOperator]:
    """On a CPU: the outermost operators that are work are its kernels."""
    free: dict[int, float] = {}
    for one in inside:
        if not WRAPPERS.match(one.name) and one.start >= free.get(one.thread, 0.0):
            free[one.thread] = one.end
            yield RecordedOperator(one.name, (), one.thread, one.start, one.end, (one.end - one.start) * 1e-6)


def _issued(inside: list[HostOp]) -> Iterator[str]:
    """Kinds of collectives, in order."""
    return (kind for one in inside if (kind := kind_of(one.name)))


class _Launched:
    """Kernels by the thread and the time of their launch."""

    def __init__(self, events: HostEvents) -> None:
        rows: dict[int, list[tuple[float, float, str]]] = {}
        names = list(events.texts)
        for i, correlation in enumerate(events.correlations):
            call = events.calls.get(correlation)
            if call is not None and i not in events.collectives:
                rows.setdefault(call.thread, []).append((call.start, events.durations[i], names[events.names[i]]))
        self._rows = {thread: sorted(found) for thread, found in rows.items()}
        self._starts = {thread: [start for start, _, _ in found] for thread, found in self._rows.items()}
        self._sums = {thread: [0.0, *accumulate(d for _, d, _ in found)] for thread, found in self._rows.items()}

    def within(self, one: HostOp) -> float:
        """Microseconds of the kernels that were launched inside an operator."""
        starts = self._starts.get(one.thread, [])
        low, high = bisect_left(starts, one.start), bisect_right(starts, one.end)
        sums = self._sums.get(one.thread, [0.0])
        return sums[high] - sums[low] if starts else 0.0

    def kernels(self, begin: float, end: float) -> Iterator[RecordedOperator]:
        """Each with the moment of its launch."""
        for thread, rows in self._rows.items():
            for start, duration, name in rows:
                if begin <= start < end:
                    yield RecordedOperator(name, (), thread, start, start, duration * 1e-6)
