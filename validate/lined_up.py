"""A recorded step of a program beside its capture, operator by operator: what both have, what only one has.

The k-th operator of a name and shapes in the capture is the k-th of them in the recording. A profiler records wrappers and the
operators inside them alike, so a captured operator finds its like whichever of them it is. What the recording has more is told
by its kernels: those that were launched inside no matched operator.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from simulator.spec.calibration import Calibration
from simulator.spec.calibration.timer import Timer
from simulator.spec.cluster.device import Device
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.kernels import priced
from simulator.work.captured.tensors import parsed, tensors
from validate.recorded_operators import RecordedOperator, RecordedOperators

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinedUp:
    """rows: name -> (matched, predicted seconds, measured seconds). in_order: of the matched ones, how many follow each other.

    captured_only: operators without a like in the recording -> how often. recorded_only: kernels inside no matched operator ->
    (how many, seconds). collectives: kinds captured and recorded, in order.
    """

    matched: int
    in_order: int
    rows: Mapping[str, tuple[int, float, float]]
    captured_only: Mapping[str, int]
    recorded_only: Mapping[str, tuple[int, float]]
    collectives: tuple[tuple[str, ...], tuple[str, ...]]
    on_host: bool


def lined_up(
    capture: Capture, recorded: RecordedOperators, device: Device, calibration: Calibration | None = None
) -> LinedUp:
    """Match the two. device: prices the captured operators; measured is what the recording's ran."""
    timer = (calibration or Calibration.for_device(device)).timer(device)
    waiting: dict[tuple[str, Shapes], deque[int]] = {}
    for index, one in enumerate(recorded.operators):
        waiting.setdefault((one.name, one.shapes), deque()).append(index)
    rows: dict[str, tuple[int, float, float]] = {}
    missing, places = Counter[str](), list[int]()
    for name, shapes, seconds in _captured(capture, timer):
        queue = waiting.get((name, shapes))
        if not queue:
            missing[name] += 1
            continue
        places.append(queue.popleft())
        count, predicted_s, measured_s = rows.get(name, (0, 0.0, 0.0))
        rows[name] = (count + 1, predicted_s + seconds, measured_s + recorded.operators[places[-1]].seconds)
    events = capture.events[capture.steady :]
    return LinedUp(
        matched=len(places),
        in_order=_longest_rise(places),
        rows=dict(sorted(rows.items())),
        captured_only=dict(sorted(missing.items())),
        recorded_only=_left(recorded, [recorded.operators[place] for place in places]),
        collectives=(tuple(capture.names[e[2]] for e in events if e[0] == Kind.COLLECTIVE), recorded.issued),
        on_host=recorded.on_host,
    )


def _captured(capture: Capture, timer: Timer) -> Iterator[tuple[str, Shapes, float]]:
    """(name, shapes of its tensors, predicted seconds) of the captured step's operators that run kernels, in order."""
    known: dict[int, tuple[str, Shapes, float] | None] = {}
    for event in capture.events[capture.steady :]:
        if event[0] != Kind.OPERATOR:
            continue
        if event[1] not in known:
            name, args, results = capture.signatures[event[1]]
            one = priced(name, parsed(args), parsed(results))
            shapes = tuple(tensor.shape for tensor in tensors(parsed(args)) if tensor.shape)
            seconds = sum(map(timer.kernel_s, one.kernels))
            known[event[1]] = (name.split(".")[1], shapes, seconds) if one.kernels else None
        found = known[event[1]]
        if found is not None:
            yield found


def _left(recorded: RecordedOperators, matched: list[RecordedOperator]) -> dict[str, tuple[int, float]]:
    """Kernels that no matched operator launched; on a CPU, operators that neither hold one nor lie in one."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for one in matched:
        spans.setdefault(one.thread, []).append((one.start, one.end))
    for found in spans.values():
        found.sort()
    left: dict[str, tuple[int, float]] = {}
    for one in recorded.kernels:
        if not _covered(spans.get(one.thread, []), one):
            count, seconds = left.get(one.name, (0, 0.0))
            left[one.name] = (count + 1, seconds + one.seconds)
    return dict(sorted(left.items(), key=lambda item: (-item[1][1], item[0])))


def _covered(spans: list[tuple[float, float]], one: RecordedOperator) -> bool:
    """A matched operator began before it and ended behind it, or lies in it."""
    at = bisect_right(spans, (one.start, float("inf")))
    around = any(end >= one.start for _, end in spans[max(0, at - 8) : at])  # few operators lie in each other
    within = bisect_left(spans, (one.start, 0.0)) < bisect_right(spans, (one.end, float("inf")))
    return around or within


def _longest_rise(places: list[int]) -> int:
    """The most of them that follow each other in order."""
    ends: list[int] = []
    for place in places:
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(ends)
