"""Kineto and Chrome traces (`torch.profiler`'s export_chrome_trace), as .json or .json.gz, of any size; Nsight Systems' exports.

The file is read once, event by event; of each event on a device a few numbers are kept, and one step of them becomes
a Timeline. Times in the file are microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.base.errors import InputError
from simulator.base.units import counted
from simulator.formats.readers.json_stream import Broken, JsonStream, open_text
from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.formats.readers.kineto_events import NAME_LENGTH, Events
from simulator.formats.readers.nsight import is_nsight, read_nsight
from simulator.work.program import COMPUTE_STREAM
from simulator.work.recorded.recording import Carried
from simulator.work.trace import MemorySample, MemoryTrace, Span, Timeline

MAX_SPANS = 500_000  # of the step that is asked for
_PROGRESS_EVENTS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One profiled step by its number, from the start of its work on the device to that of the next step's."""

    number: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoTrace:
    """A trace. timeline, memory and collectives are those of `step`, or of all that was recorded where that is None.

    step_times_s: of every complete step. about: what the head of the file says (devices, rank, world size).
    """

    name: str
    timeline: Timeline
    memory: MemoryTrace | None
    collectives: tuple[Carried, ...]
    step: TracedStep | None
    steps: tuple[TracedStep, ...]
    about: Mapping[str, Any]
    notes: tuple[str, ...]


def read_kineto(path: Path, step: int | None = None, progress: Callable[[int], None] | None = None) -> KinetoTrace:
    """Read a trace. step: the number of a profiled step; None takes the one of median duration.

    progress(characters) is called now and then while a large file is read.

    Raises InputError where the file is no trace, has no events of a device, or has no such step.
    """
    events = Events()
    head = read_events(path, events, progress)
    if not len(events.starts):
        problem = f"none of its {events.num_seen:,} events ran on a device"
        raise InputError.at(str(path), problem, "profile with ProfilerActivity.CUDA, or nsys profile --trace=cuda,nvtx")
    return _trace(path, events, head, step)


def read_events(path: Path, events: Events, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Pass every event of a file to `events`; returns the file's other values. Raises InputError."""
    if is_nsight(path):
        return read_nsight(path, events)
    try:
        with open_text(path) as file:
            stream = JsonStream(file, "traceEvents")
            try:
                for number, event in enumerate(stream.items(), 1):
                    events.add(event)
                    if progress is not None and number % _PROGRESS_EVENTS == 0:
                        progress(stream.position)
            except Broken as exc:
                if not events.num_seen:
                    raise InputError.at(str(path), f"is not a trace: {exc}") from None
                where = f"the file breaks off after {stream.position:,} characters"
                events.notes.append(f"{where} ({exc}); kept until there")
    except OSError as exc:
        raise InputError.at(str(path), f"cannot be read: {exc.strerror or exc}") from None
    return stream.head


def _trace(path: Path, events: Events, head: Mapping[str, Any], number: int | None) -> KinetoTrace:
    steps = traced_steps(events)
    step = chosen_step(path, steps, number)
    notes = [*events.notes, *(f"{counted(count, 'event')} left out: {why}" for why, count in events.dropped.items())]
    if step is None:
        notes.append("no ProfilerStep in it: all that was recorded is taken as one step")
    chosen = _window(events, step)
    if len(chosen) > MAX_SPANS:
        notes.append(f"only the first {MAX_SPANS:,} of {len(chosen):,} kernels are shown")
        del chosen[MAX_SPANS:]
    if not chosen:
        raise InputError.at(str(path), "nothing ran on a device in that step")
    origin = events.starts[chosen[0]] if step is None else step.start_s * 1e6
    spans = _spans(events, chosen, origin)
    end = max(float(span.end_s) for span in spans)
    timeline = Timeline(spans=tuple(spans), step_s=max(end, step.duration_s) if step else end)
    return KinetoTrace(
        name=path.name,
        timeline=timeline,
        memory=_memory_trace(events, step),
        collectives=tuple(
            Carried(kind=kind, size_bytes=size, group_size=members, group=group, ranks=())
            for kind, size, members, group, _ in (events.collectives[i] for i in chosen if i in events.collectives)
        ),
        step=step,
        steps=steps,
        about=about(head),
        notes=tuple(notes),
    )


def traced_steps(events: Events) -> tuple[TracedStep, ...]:
    """Profiled steps by the device's own ranges, or the host's where it has none; a step ends where the next begins."""
    ranges = events.device_steps or events.host_steps
    ordered = sorted((start, end, number) for number, (start, end) in ranges.items())
    found = []
    for index, (start, end, number) in enumerate(ordered):
        until = ordered[index + 1][0] if index + 1 < len(ordered) else end
        found.append(TracedStep(number=number, start_s=start * 1e-6, end_s=until * 1e-6))
    return tuple(found)


def chosen_step(path: Path, steps: tuple[TracedStep, ...], number: int | None) -> TracedStep | None:
    """The step of that number, or of median duration; None where none was marked. Raises InputError."""
    if number is not None:
        for step in steps:
            if step.number == number:
                return step
        has = ", ".join(str(step.number) for step in steps[:20]) or "none"
        raise InputError.at(str(path), f"has no step {number}", f"its steps: {has}")
    ordered = sorted(steps, key=lambda step: step.duration_s)
    return ordered[len(ordered) // 2] if ordered else None


def _window(events: Events, step: TracedStep | None) -> list[int]:
    """Indices of the kernels that start within a step, by start."""
    starts = events.starts
    if step is None:
        return sorted(range(len(starts)), key=lambda i: starts[i])
    low, high = step.start_s * 1e6, step.end_s * 1e6
    return sorted((i for i, start in enumerate(starts) if low <= start < high), key=lambda i: starts[i])


def _spans(events: Events, chosen: list[int], origin: float) -> list[Span]:
    texts, lanes = list(events.texts), list(events.lanes)
    categories = [category_of(text) for text in texts]
    kinds = [collective_of(text) for text in texts]
    compute = compute_lanes(events, chosen, kinds)
    optimizer = sorted(events.optimizer)
    free: dict[int, float] = {}  # when a stream's last span ends: those of one stream do not overlap
    spans: list[Span] = []
    for number, index in enumerate(chosen):
        name, lane = events.names[index], events.streams[index]
        device, stream = lanes[lane]
        start = max(events.starts[index], free.get(lane, 0.0))
        end = max(events.starts[index] + events.durations[index], start)
        free[lane] = end
        kind = events.collectives[index][0] if index in events.collectives else kinds[name]
        ours = kind is None and any(low <= events.starts[index] < high for low, high in optimizer)
        category = kind or ("optimizer" if ours else categories[name])
        start_s, end_s = (start - origin) * 1e-6, (end - origin) * 1e-6
        spans.append(
            Span(
                program=f"gpu{device}" if device >= 0 else "gpu",
                stream=f"nccl:{stream}" if kind else COMPUTE_STREAM if lane in compute else f"stream:{stream}",
                id=number,
                label=texts[name],
                category=category,
                start_s=start_s,
                end_s=end_s,
                nominal_s=end_s - start_s,
                parts=() if kind else ((category, end_s - start_s),),
                joined_s=start_s if kind else None,
            )
        )
    return _with_causes(spans)


def compute_lanes(events: Events, chosen: list[int], kinds: list[str | None]) -> set[int]:
    """Of each device, the stream on which kernels other than collectives take most time."""
    busy: dict[int, float] = {}
    for index in chosen:
        if kinds[events.names[index]] is None and index not in events.collectives:
            lane = events.streams[index]
            busy[lane] = busy.get(lane, 0.0) + events.durations[index]
    lanes = list(events.lanes)
    best: dict[int, int] = {}
    for lane in sorted(busy):
        device = lanes[lane][0]
        if device not in best or busy[lane] > busy[best[device]]:
            best[device] = lane
    return set(best.values())


def _with_causes(spans: list[Span]) -> list[Span]:
    """What the compute stream waited for: the work on another stream whose end falls into the gap, the last of it.

    A trace does not say so, but an event wait lets go at once, and nothing else of the device can hold a stream back.
    """
    others: dict[str, list[tuple[float, int]]] = {}
    for span in spans:
        if span.stream != COMPUTE_STREAM:
            others.setdefault(span.program, []).append((float(span.end_s), span.id))
    for ends in others.values():
        ends.sort()
    ended: dict[str, float] = {}
    found: list[Span] = []
    for span in spans:
        if span.stream == COMPUTE_STREAM:
            ends, start = others.get(span.program, []), float(span.start_s)
            at = bisect_right(ends, (start, len(spans))) - 1
            if at >= 0 and ended.get(span.program, 0.0) < ends[at][0]:
                span = span._replace(cause=ends[at][1])  # noqa: PLW2901  the same span, with its cause
            ended[span.program] = float(span.end_s)
        found.append(span)
    return found


def _memory_trace(events: Events, step: TracedStep | None) -> MemoryTrace | None:
    """The profiler's own account of allocated and reserved bytes, in the step's window of the host's clock."""
    times, allocated, reserved = events.memory
    low, high = (step.start_s * 1e6, step.end_s * 1e6) if step else (-1e18, 1e18)
    samples = [
        MemorySample(label=f"{time_us - low if step else time_us:.0f} us", allocated_bytes=a, reserved_bytes=r)
        for time_us, a, r in sorted(zip(times, allocated, reserved, strict=True), key=lambda row: row[0])
        if low <= time_us < high
    ]
    if not samples:
        return None
    peak = max(range(len(samples)), key=lambda index: samples[index].allocated_bytes)
    by_category = {"in use": samples[peak].allocated_bytes}
    return MemoryTrace(samples=tuple(samples), peak_index=peak, by_category=by_category)


def about(head: Mapping[str, Any]) -> dict[str, Any]:
    """Scalar metadata of the job from the head of the file."""
    about: dict[str, Any] = {}
    devices = head.get("deviceProperties")
    if isinstance(devices, list):
        about["devices"] = [str(d.get("name", ""))[:NAME_LENGTH] for d in devices[:64] if isinstance(d, dict)]
    job = head.get("distributedInfo")
    if isinstance(job, dict):
        for key in ("backend", "rank", "world_size", "nccl_version"):
            if isinstance(job.get(key), (int, str)):
                about[key] = job[key]
    return about


def summary(trace: KinetoTrace) -> dict[str, Any]:
    """The trace's step as plain data: seconds by part, stream and kind of collective."""
    timeline = trace.timeline
    by_kind: dict[str, dict[str, Any]] = {}
    kinds = dict.fromkeys(span.category for span in timeline.spans if span.is_collective)
    for kind in kinds:
        found = [c for c in trace.collectives if c.kind == kind]
        by_kind[kind] = {
            "count": sum(span.is_collective and span.category == kind for span in timeline.of()),
            "exposed_s": float(timeline.exposed(kind)),
            "hidden_s": float(timeline.hidden(kind)),
            "size_bytes": sum(c.size_bytes or 0 for c in found),
            "groups": sorted({f"{c.group or '?'} ({c.group_size or '?'})" for c in found}),
        }
    streams: dict[str, float] = {}
    for span in timeline.of():
        streams[span.stream] = streams.get(span.stream, 0.0) + float(span.end_s - span.start_s)
    return {
        "name": trace.name,
        "about": dict(trace.about),
        "programs": list(timeline.programs),
        "step": None if trace.step is None else trace.step.number,
        "step_s": float(timeline.step_s),
        "step_times_s": {str(step.number): step.duration_s for step in trace.steps},
        "breakdown_s": {name: float(seconds) for name, seconds in timeline.breakdown().items()},
        "streams_s": streams,
        "communication": by_kind,
        "memory": None if trace.memory is None else _peaks(trace.memory),
        "notes": list(trace.notes),
    }


def _peaks(memory: MemoryTrace) -> dict[str, int]:
    return {
        "peak_allocated_bytes": memory.peak.allocated_bytes,
        "peak_reserved_bytes": max(sample.reserved_bytes for sample in memory.samples),
    }
