"""A CPU's bytes by the events of torch's own allocator, under its profiler: no mode of dispatch, no tracker.

A mode of dispatch changes what autograd does: it sums gradients out of place. Whose the bytes are an allocator does not know.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from validate.every_thread import wait_for_threads
from validate.parallel import POWERSGD_BEGINS
from validate.players.memory import MICRO_BATCHES
from validate.steps import PHASES, TrainingStep
from validate.torch_private import is_kernel

_MARK = "shardwise phase "
Event = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Change:
    """Bytes taken (above zero) or given back, and what all threads hold behind it.

    in_kernel: while one ran. scratch: gone with it.
    """

    at: float
    address: int
    num_bytes: int
    total_bytes: int
    in_kernel: bool
    scratch: bool = False


def count_step(step: TrainingStep, scratch: Path, *, counted: bool) -> dict[str, Any]:
    """Bytes of a step after those that make what stays: the optimizer's state, buffers of messages, DDP's buckets anew.

    counted: torch counts what every thread takes and frees, since before the model was made; else nothing is known.
    """
    number = min(step.plan.num_micro_batches, MICRO_BATCHES)
    for _ in range(POWERSGD_BEGINS + 1):
        step.run(num_micro_batches=number)
    if not counted:
        return {}
    return phases_bytes(profiled(lambda announce: step.run(announce, number), scratch))


def profiled(run: Callable[[Callable[[str], None]], object], folder: Path) -> list[Event]:
    """Events of a run that announces its phases; `folder` is for torch's own file of them."""
    marks = _Marks()
    wait_for_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        marks.announce("start")
        run(marks.announce)
        marks.end()
        wait_for_threads()
    out = folder / f"memory-{os.getpid()}.json"
    profiler.export_chrome_trace(str(out))
    events: list[Event] = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    out.unlink()
    return events


class _Marks:
    """A named range of each phase in the profile."""

    def __init__(self) -> None:
        self._mark: Any = None

    def announce(self, phase: str) -> None:
        self.end()
        self._mark = record_function(_MARK + phase)
        self._mark.__enter__()
        torch.empty(1)  # an event at each border: what is alive there, also where a phase allocates nothing

    def end(self) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)


def changes(events: Sequence[Event]) -> list[Change]:
    """What the CPU's allocator did, in its order."""
    kernels = _kernels(events)
    found: list[Change] = []
    taken: dict[int, tuple[Change, float]] = {}  # by address: with the end of the kernel that took it
    for event in sorted((one for one in events if _is_memory(one)), key=lambda one: one["ts"]):
        at, arguments = event["ts"], event["args"]
        address, size, end = arguments["Addr"], arguments["Bytes"], _end(kernels.get(event["tid"], []), event["ts"])
        change = Change(
            at=at, address=address, num_bytes=size, total_bytes=arguments["Total Allocated"], in_kernel=end > 0
        )
        if size > 0:
            taken[address] = change, end
        elif address in taken:
            before, end = taken.pop(address)
            before.scratch = change.scratch = at < end
        found.append(change)
    return found


def _is_memory(event: Event) -> bool:
    return event.get("name") == "[memory]" and event["args"].get("Device Type") == 0


def _kernels(events: Sequence[Event]) -> dict[int, list[tuple[float, float]]]:
    """When each thread was inside of an operator that a device runs as one.

    An operator with one of its own name inside is a subclass's (DTensor's), which exchanges tensors before it calls that.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for thread, ranges in _ranges(events).items():
        above: list[int] = []
        outer: set[int] = set()
        for number, (begin, _, name) in enumerate(ranges):
            while above and ranges[above[-1]][1] <= begin:
                above.pop()
            outer.update(one for one in above if ranges[one][2] == name or not name.startswith("aten::"))
            above.append(number)
        there = found.setdefault(thread, [])
        for number, (begin, end, name) in enumerate(ranges):
            if (not there or begin >= there[-1][1]) and number not in outer and is_kernel(name):
                there.append((begin, end))
    return found


def _ranges(events: Sequence[Event]) -> dict[int, list[tuple[float, float, str]]]:
    """(begin, end, name) of each thread's operators, those around before those inside."""
    found: dict[int, list[tuple[float, float, str]]] = {}
    for one in sorted((one for one in events if one.get("cat") == "cpu_op"), key=lambda one: (one["ts"], -one["dur"])):
        found.setdefault(one["tid"], []).append((one["ts"], one["ts"] + one["dur"], one["name"]))
    return found


def _end(kernels: list[tuple[float, float]], at: float) -> float:
    """When the kernel that runs at a time ends; 0 where none does."""
    place = bisect_right(kernels, (at, float("inf"))) - 1
    return kernels[place][1] if place >= 0 and at < kernels[place][1] else 0.0


def phases_bytes(events: Sequence[Event]) -> dict[str, Any]:
    """Of a trace's events: bytes at the borders of phases (of their last time), and the peak of each, without kernels' scratch."""
    rows: list[tuple[float, int]] = []
    scratch = 0
    for one in changes(events):
        scratch += one.num_bytes if one.scratch else 0
        rows.append((one.at, one.total_bytes - scratch))
    return moments(rows, events)


def moments(rows: Sequence[tuple[float, int]], events: Sequence[Event]) -> dict[str, Any]:
    """The record's account of (time, bytes alive from then on), by the phases that the events announce."""
    marks = sorted((e["ts"], e["name"].removeprefix(_MARK)) for e in events if str(e.get("name")).startswith(_MARK))
    peaks: dict[str, int] = {}
    after: dict[str, int] = {}
    place, phase = 0, "before"
    for at, size in rows:
        while place < len(marks) and marks[place][0] <= at:
            phase, place = marks[place][1], place + 1
        after[phase] = size
        peaks[phase] = max(peaks.get(phase, 0), size)
    by_phase = {name: peaks.get(name, 0) for name in PHASES}
    worst = max(by_phase, key=lambda name: by_phase[name])
    return {
        "start_bytes": after.get("start", 0),
        "after_forward_bytes": after.get("forward", 0),
        "after_backward_bytes": after.get("backward", 0),
        "peak_bytes": by_phase[worst],
        "peak_phase": worst,
        "peak_by_phase_bytes": by_phase,
    }
