"""Profiler events as this project's spans: one program, its compute stream, its collectives. No torch needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Span, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a profiler saw: `stream` is a thread of the host or a stream of the device, times in seconds of any origin."""

    name: str
    stream: str
    start_s: float
    end_s: float


def timeline(events: Iterable[Event], program: str, *, optimizer: Sequence[Event] = ()) -> Timeline:
    """Spans of a step: outermost events of each stream, categories from their names, times from the first one on.

    The compute stream is the one with most seconds of other events than collectives. (Copies of sharding are more, and
    shorter.) optimizer: host ranges whose work is the optimizer's, whatever its name.
    A profiler does not show when the last member of a collective arrived: `joined_s` is its own start.
    """
    outermost = sorted(_outermost(events), key=lambda event: (event.start_s, event.end_s, event.name))
    if not outermost:
        return Timeline(spans=(), step_s=0.0)
    origin, compute = outermost[0].start_s, _busiest(outermost)
    spans = tuple(_span(i, event, program, origin, compute, optimizer) for i, event in enumerate(outermost))
    return Timeline(spans=spans, step_s=max(span.end_s for span in spans))


def _busiest(outermost: Sequence[Event]) -> str | None:
    """None where there are only collectives. What a thread does inside of its collectives does not make it this one."""
    seconds: dict[str, float] = {}
    for event in outermost:
        if collective_of(event.name) is None:
            seconds[event.stream] = seconds.get(event.stream, 0.0) + event.end_s - event.start_s
    return max(seconds, key=lambda stream: seconds[stream], default=None)


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Events of one stream that lie in no other one; an overlap that is no nesting is cut off at the later start."""
    by_stream: dict[str, list[Event]] = {}
    for event in events:
        by_stream.setdefault(event.stream, []).append(event)
    outermost: list[Event] = []
    for stream in by_stream.values():
        end = float("-inf")
        for event in sorted(stream, key=lambda e: (e.start_s, -e.end_s)):
            if event.start_s >= end:
                outermost.append(event)
                end = event.end_s
            elif event.end_s > end and collective_of(event.name):
                outermost.append(Event(name=event.name, stream=event.stream, start_s=end, end_s=event.end_s))
                end = event.end_s
    return outermost


def _span(
    index: int, event: Event, program: str, origin: float, compute: str | None, optimizer: Sequence[Event]
) -> Span:
    kind = collective_of(event.name)
    start, end = event.start_s - origin, event.end_s - origin
    if kind is not None:
        return Span(
            program=program, stream=f"nccl:{event.stream}", id=index, label=event.name, category=kind,
            start_s=start, end_s=end, nominal_s=end - start, joined_s=start,
        )  # fmt: skip
    ours = any(span.start_s <= event.start_s < span.end_s for span in optimizer)
    category = "optimizer" if ours else category_of(event.name)
    return Span(
        program=program,
        stream=COMPUTE_STREAM if event.stream == compute else event.stream,
        id=index,
        label=event.name,
        category=category,
        start_s=start,
        end_s=end,
        nominal_s=end - start,
        parts=((category, end - start),),
    )
