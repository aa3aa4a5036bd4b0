"""A predicted step as a Chrome trace, which Perfetto and chrome://tracing open.

A process is a rank class, a thread a stream; counters show memory in bytes. Times in the file are microseconds, as the
format asks. Equal predictions make equal bytes.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from simulator.base.files import write_whole
from simulator.predict import Prediction
from simulator.predict.telemetry import ProgramUse, Telemetry
from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import MemorySample, MemoryTrace, Span, Timeline

Event = dict[str, Any]


def write_chrome_trace(path: Path, prediction: Prediction, counters: Telemetry | None = None) -> None:
    """Write the trace to `path`, gzipped. Raises InputError where that file cannot be written.

    counters: also what each part of the machine does, in percent, and what the compute stream's gaps wait for.
    """
    outside, programs = prediction.memory.outside_torch_bytes, counters.programs if counters else ()
    data = chrome_trace(prediction.timeline, prediction.memory_trace, outside, programs)
    write_whole(path, data, "--trace")


def write_timeline(path: Path, timeline: Timeline) -> None:
    """The same of a timeline without memory."""
    write_whole(path, chrome_trace(timeline, MemoryTrace(samples=(), peak_index=0, by_category={}), 0), "--trace")


def chrome_trace(
    timeline: Timeline, memory: MemoryTrace, outside_torch_bytes: int, uses: tuple[ProgramUse, ...] = ()
) -> bytes:
    """The gzipped file. `memory` belongs to the first program of the timeline."""
    events = [
        *(event for pid, program in enumerate(timeline.programs) for event in _process(timeline, pid, program)),
        *_counters(timeline.of(), memory, outside_torch_bytes),
        *(event for pid, program in enumerate(uses) for event in _utilisation(timeline, pid, program)),
    ]
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def _process(timeline: Timeline, pid: int, program: str) -> Iterator[Event]:
    spans = timeline.of(program)
    streams = sorted(dict.fromkeys(span.stream for span in spans), key=lambda stream: stream != COMPUTE_STREAM)
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": program}}
    for tid, stream in enumerate(streams):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    tids = {stream: tid for tid, stream in enumerate(streams)}
    for span in spans:
        yield _complete(span, pid, tids[span.stream])


def _complete(span: Span, pid: int, tid: int) -> Event:
    start_us = _us(span.start_s)
    args: dict[str, Any] = {"nominal_s": float(span.nominal_s)}
    if span.parts:
        args["parts_s"] = {category: float(seconds) for category, seconds in span.parts}
    if span.joined_s is not None:
        args["waited_for_others_s"] = float(span.joined_s - span.start_s)
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.category,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": round(_us(span.end_s) - start_us, 3),
        "args": args,
    }


def _utilisation(timeline: Timeline, pid: int, program: ProgramUse) -> Iterator[Event]:
    """The gaps as a stream of their own, below the others, and a counter for each part of the machine."""
    tid = len({span.stream for span in timeline.of(program.name)})
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": "gaps of compute"}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for name, start_s, end_s in timeline.gaps(program.name):
        at, until = _us(start_s), _us(end_s)
        yield {"ph": "X", "name": name, "cat": "gap", "pid": pid, "tid": tid, "ts": at, "dur": round(until - at, 3)}
    counters = [
        (f"{use.name} (%)", [(at, round(100 * use.share(rate), 3)) for at, rate in use.rates]) for use in program.uses
    ]
    for name, rates in [*counters, ("nvme queue (requests)", list(program.queue))]:
        last: float | None = None
        for at, value in rates:
            if value != last:
                last = value
                yield {"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {name: value}}


def _us(seconds: object) -> float:
    """Microseconds to the nanosecond: what is finer is noise of binary fractions."""
    return round(float(seconds) * 1e6, 3)  # type: ignore[arg-type]


def _counters(spans: tuple[Span, ...], memory: MemoryTrace, outside_torch_bytes: int) -> Iterator[Event]:
    """An event for each change of a figure."""
    last: dict[str, int] = {}
    for ts, sample in _clocked(spans, memory.samples):
        figures = {
            "allocated": sample.allocated_bytes,
            "reserved": sample.reserved_bytes,
            "outside torch": outside_torch_bytes,
        }
        for name, size in figures.items():
            if last.get(name) != size:
                last[name] = size
                yield {"ph": "C", "name": f"{name} (bytes)", "pid": 0, "ts": ts, "args": {name: size}}


def _clocked(spans: tuple[Span, ...], samples: tuple[MemorySample, ...]) -> Iterator[tuple[float, MemorySample]]:
    """Memory has no clock: samples "op: detail" get the time of the next op of that label, spread evenly over it.

    Samples whose op does not come any more stay at the end of what came before them.
    """
    starts: dict[str, list[tuple[float, float]]] = {}
    for span in sorted(spans, key=lambda s: s.start_s):
        starts.setdefault(span.label, []).append((_us(span.start_s), _us(span.end_s)))
    now = 0.0
    for label, group in groupby(samples, key=lambda sample: sample.label.partition(": ")[0]):
        moments, same = starts.get(label, []), list(group)
        at = bisect_left(moments, (now, 0.0))
        start, end = moments[at] if at < len(moments) else (now, now)
        for index, sample in enumerate(same):
            yield round(start + (end - start) * index / len(same), 3), sample
        now = max(now, end)
