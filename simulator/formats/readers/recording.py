"""Recordings: a profiler's trace (Kineto), or the spans that `validate run` keeps, as one step that can be played again.

What a trace does not say is inferred, and `Recording` says which: see docs/guides/traces-as-programs.md.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Collected, Fault, InputError
from simulator.base.units import counted
from simulator.formats.readers import chakra
from simulator.formats.readers.json_stream import open_text
from simulator.formats.readers.kernel_names import category_of, collective_of
from simulator.formats.readers.kineto import MAX_SPANS, chosen_step, compute_lanes, read_events, traced_steps
from simulator.formats.readers.kineto_events import Events
from simulator.formats.readers.kineto_host import HostEvents, HostOp
from simulator.formats.readers.nsight import is_nsight
from simulator.formats.readers.recording_host import host_recording
from simulator.formats.readers.recording_parts import arguments, by_external, device_name, job, peaks, ranks
from simulator.formats.readers.spans import read_spans
from simulator.work.program import COMPUTE_STREAM
from simulator.work.recorded.recording import Carried, HostWait, RecordedOp, Recording

MAX_RANKS: Final = 64  # files of one folder
_NAMES: Final = (".json", ".json.gz", chakra.SUFFIX, ".sqlite")
_HEAD = 4096  # characters in which a file says what it is
_WAITS = re.compile(r"(Device|Stream|Event)Synchronize$")
_SYNCHRONOUS_COPY = "cudaMemcpy"

Progress = Callable[[int], None]


def is_recording(path: Path) -> bool:
    """Whether a file or folder is a recording: by its first bytes, else by its name."""
    if path.is_dir() or path.name.endswith(chakra.SUFFIX) or is_nsight(path):
        return True
    head = _head(path)
    if '"shardwise capture"' in head:
        return False
    return path.name.endswith((".json", ".json.gz")) or head.startswith(("[", '{"schemaVersion"', '{"traceEvents"'))


def read_recordings(path: Path, step: int | None = None, progress: Progress | None = None) -> tuple[Recording, ...]:
    """The recording of a file, or of every trace in a folder: a file a rank. Raises InputError with every fault.

    step: the number of a profiled step; None takes the one of median duration, of several ranks that of the first one's.
    """
    if not path.is_dir():
        return (read_recording(path, step, progress),)
    traces = sorted(one for one in path.iterdir() if one.name.endswith(_NAMES))
    files = [one for one in traces if one.name.endswith(chakra.SUFFIX)] or traces
    if not files or len(files) > MAX_RANKS:
        problem = f"{len(files)} traces in it" if files else f"no traces ({', '.join(_NAMES)}) in it"
        raise InputError.at(str(path), problem, f"a trace a rank, at most {MAX_RANKS}")
    found: list[Recording] = []
    faults: list[Fault] = []
    for one in files:
        with Collected(faults):
            found.append(read_recording(one, found[0].step if step is None and found else step, progress))
    faults += _same_rank(found, path)
    InputError.raise_for(faults)
    return tuple(sorted(found, key=lambda one: one.rank or 0))


def _same_rank(found: Sequence[Recording], path: Path) -> Iterator[Fault]:
    """A file that is no other rank than one before it."""
    seen: dict[int | None, str] = {}
    for one in found if len(found) > 1 else ():
        if one.rank is None:
            problem, remedy = "does not say which rank it is of", "traces whose distributedInfo has a rank, or one file"
            yield Fault(f"{path / one.name}", problem, remedy)
        elif one.rank in seen:
            yield Fault(f"{path / one.name}", f"is of rank {one.rank}, as {seen[one.rank]} is", "a file a rank")
        seen.setdefault(one.rank, one.name)


def read_recording(path: Path, step: int | None = None, progress: Progress | None = None) -> Recording:
    """One file. Raises InputError where it is no trace, has no such step, or nothing ran in it."""
    if path.name.endswith(chakra.SUFFIX):
        _one_step(path, step)
        return chakra.read_chakra(path)
    if not is_nsight(path) and _head(path).startswith('{"schema_version"'):
        return _of_spans(path, step)
    events = HostEvents()
    head = read_events(path, events, progress)
    events.notes += [f"{counted(count, 'event')} left out: {why}" for why, count in events.dropped.items()]
    if len(events.starts):
        return _of_device(path, events, head, step)
    if events.operators:
        return host_recording(path, events, head, step)
    remedy = "torch.profiler with ProfilerActivity.CPU and CUDA, exported by export_chrome_trace"
    raise InputError.at(str(path), f"none of its {events.num_seen:,} events is a kernel or an operator", remedy)


# -- what ran on a device


def _of_device(path: Path, events: HostEvents, head: Mapping[str, Any], number: int | None) -> Recording:
    steps = traced_steps(events)
    step = chosen_step(path, steps, number)
    first = min(events.starts) if step is None else step.start_s * 1e6
    last = (
        max(s + d for s, d in zip(events.starts, events.durations, strict=True)) if step is None else step.end_s * 1e6
    )
    inside = [i for i, start in enumerate(events.starts) if first <= start < last]
    if not inside:
        raise InputError.at(str(path), "nothing ran on a device in that step")
    if len(inside) > MAX_SPANS:
        problem = f"{len(inside):,} kernels in one step, and {MAX_SPANS:,} can be played"
        raise InputError.at(str(path), problem, "one step of a smaller number of micro-batches")
    device, lanes = _one_device(events, inside), list(events.lanes)
    inside = [i for i in inside if lanes[events.streams[i]][0] == device]
    calls = {i: events.calls.get(events.correlations[i]) for i in inside if events.correlations[i] >= 0}
    inside.sort(key=lambda i: (call.start if (call := calls.get(i)) else events.starts[i], events.starts[i]))
    host = events.host_steps.get(step.number) if step is not None else None
    ops = _Ops(events, inside, {i: call for i, call in calls.items() if call is not None}, first)
    notes = list(events.notes)
    if step is None:
        notes.append("no ProfilerStep in it: all that was recorded is taken as one step")
    ahead = max(0.0, first - host[0]) * 1e-6 if host else 0.0
    return Recording(
        name=path.name, ops=ops.made(), waits=_host_waits(events, inside, calls, first, host), step=step.number if step else None,
        step_s=(last - first) * 1e-6, step_times_s={one.number: one.duration_s for one in steps}, origin_s=first * 1e-6,
        host_ahead_s=ahead, host_end_s=(host[1] - first) * 1e-6 if host else None, on_host=False,
        device=device_name(head), peaks=peaks(events, first, last), notes=tuple(notes), **job(head),
    )  # fmt: skip


def _one_device(events: Events, inside: list[int]) -> int:
    """A process drives one GPU; of a trace of several the busiest is taken."""
    lanes, busy = list(events.lanes), dict[int, float]()
    for i in inside:
        device = lanes[events.streams[i]][0]
        busy[device] = busy.get(device, 0.0) + events.durations[i]
    best = max(busy, key=lambda device: (busy[device], -device))
    if len(busy) > 1:
        events.notes.append(f"kernels of {len(busy)} devices in it: those of device {best} are played")
    return best


class _Ops:
    """Events of one device and step as ops, in the order of their launches."""

    def __init__(self, events: HostEvents, inside: list[int], calls: Mapping[int, HostOp], first: float) -> None:
        self._events, self._inside, self._calls, self._first = events, inside, calls, first
        self._texts = list(events.texts)
        self._categories = [category_of(text) for text in self._texts]
        self._kinds = [collective_of(text) for text in self._texts]
        self._operators = by_external(events)
        self._optimizer = sorted(events.optimizer)
        self._compute = compute_lanes(events, inside, self._kinds)

    def made(self) -> tuple[RecordedOp, ...]:
        events = self._events
        synchronised = self._recorded_waits()
        marks = sorted(c.start for c in events.calls.values() if c.name.endswith("StreamWaitEvent"))
        found: list[RecordedOp] = []
        free: dict[int, float] = {}
        before = float("-inf")
        for number, i in enumerate(self._inside):
            call = self._calls.get(i)
            one = self._op(i, call, free)
            if call is not None:
                since = bisect_right(marks, call.start) - bisect_right(marks, before)
                one = replace(one, marks=since, after=synchronised.get(number, ()))
                before = call.start
            found.append(one)
        return tuple(found)

    def _op(self, i: int, call: HostOp | None, free: dict[int, float]) -> RecordedOp:
        events, name, lane = self._events, self._events.names[i], self._events.streams[i]
        start = max(events.starts[i], free.get(lane, 0.0))
        end = free[lane] = max(events.starts[i] + events.durations[i], start)
        carried = self._carried(i)
        ours = carried is None and any(low <= events.starts[i] < high for low, high in self._optimizer)
        category = carried.kind if carried else "optimizer" if ours else self._categories[name]
        seconds = [(time - self._first) * 1e-6 for time in (start, end)]
        issued = None if call is None else (min(call.end, start) - self._first) * 1e-6
        blocks = call is not None and call.name.startswith(_SYNCHRONOUS_COPY) and call.start < end <= call.end
        return RecordedOp(
            name=self._texts[name], category=category, stream=0 if lane in self._compute else lane + 1, start_s=seconds[0],
            end_s=seconds[1], issued_s=issued, carried=carried, blocks=blocks, operator=None if carried else self._operator(i),
        )  # fmt: skip

    def _carried(self, i: int) -> Carried | None:
        """The collective of a kernel, by its arguments, or by those of the call on the host."""
        events = self._events
        described = events.collectives.get(i)
        described = (
            events.described.get(events.externals[i], described)
            if described is None or described[1] is None
            else described
        )
        kind = self._kinds[events.names[i]]
        if described is None:
            return None if kind is None else Carried(kind=kind, size_bytes=None, group_size=None, ranks=(), group="")
        kind = described[0] if described[0] != "collective" else kind or "collective"
        return Carried(
            kind=kind,
            size_bytes=described[1],
            group_size=described[2],
            ranks=ranks(described[4], described[2]),
            group=described[3],
        )

    def _operator(self, i: int) -> tuple[str, tuple[Any, ...]] | None:
        one = self._operators.get(self._events.externals[i])
        return None if one is None or one.shapes < 0 else (one.name, arguments(self._events.arguments[one.shapes]))

    def _recorded_waits(self) -> dict[int, tuple[int, ...]]:
        """Waits that the profiler records (`enable_cuda_sync_events`): op -> ops whose event its stream waited for."""
        events = self._events
        if not events.synchronised:
            return {}
        lanes = list(events.lanes)
        issued: dict[int, list[tuple[float, int]]] = {}  # stream -> launches
        for number, i in enumerate(self._inside):
            start = self._calls[i].start if i in self._calls else events.starts[i]
            issued.setdefault(lanes[events.streams[i]][1], []).append((start, number))
        found: dict[int, tuple[int, ...]] = {}
        for wait, record, waits, on in events.synchronised:
            called, recorded = events.calls.get(wait), events.calls.get(record)
            if called is None or recorded is None:
                continue
            before, behind = issued.get(on, []), issued.get(waits, [])
            last = bisect_right(before, (recorded.start, len(self._inside))) - 1
            taker = bisect_right(behind, (called.start, len(self._inside)))
            if last >= 0 and taker < len(behind):
                number = behind[taker][1]
                found[number] = (*found.get(number, ()), before[last][1])
        return found


def _host_waits(
    events: HostEvents,
    inside: list[int],
    calls: Mapping[int, HostOp | None],
    first: float,
    host: Sequence[float] | None,
) -> tuple[HostWait, ...]:
    """When the host waited for the device, between which launches."""
    issued = [call.start if (call := calls.get(i)) else events.starts[i] for i in inside]
    until = host[1] if host else events.starts[inside[-1]]
    found = []
    for one in sorted(events.calls.values(), key=lambda call: call.start):
        if _WAITS.search(one.name) and one.end > first and one.start < until:
            times = ((one.start - first) * 1e-6, (one.end - first) * 1e-6)
            found.append(
                HostWait(name=one.name, start_s=times[0], end_s=times[1], before=bisect_right(issued, one.start))
            )
    return tuple(found)


# -- spans that `validate run` keeps


def _head(path: Path) -> str:
    """How a file begins; nothing where it cannot be read: reading it as a trace reports that."""
    try:
        with open_text(path) as file:
            return file.read(_HEAD).lstrip()
    except (OSError, EOFError, ValueError, zlib.error):
        return ""


def _one_step(path: Path, number: int | None) -> None:
    """Raises InputError where a step is asked of a file that holds one without a number."""
    if number is not None:
        raise InputError.at(str(path), f"has no step {number}", "it holds one step: leave --step out")


def _of_spans(path: Path, number: int | None) -> Recording:
    """One step; when its ops were launched is not kept in it."""
    _one_step(path, number)
    timeline = read_spans(path)
    if not timeline.spans:
        raise InputError.at(str(path), "nothing ran in it")
    lanes = {COMPUTE_STREAM: 0}
    ops = [
        RecordedOp(
            name=span.label, category=span.category, stream=lanes.setdefault(span.stream, len(lanes)),
            start_s=float(span.start_s), end_s=float(span.end_s),
            carried=Carried(kind=span.category, size_bytes=None, group_size=None, ranks=(), group="") if span.is_collective else None,
        )
        for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.id))
    ]  # fmt: skip
    return Recording(
        name=path.name, ops=ops, waits=(), step=None, step_s=float(timeline.step_s), step_times_s={}, origin_s=0.0,
        host_ahead_s=0.0, host_end_s=None, on_host=False, rank=None, world_size=None, device="", peaks=None,
        notes=("spans of one step: when the host launched them is not recorded",),
    )  # fmt: skip
