"""A CPU's bytes by the events of torch's own allocator, under its profiler: no mode of dispatch, no tracker.

What a tracker cannot follow, passes of several micro-batches to and fro, is counted so; whose the bytes are is not known.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from validate.steps import PHASES, TrainingStep

_MARK = "shardwise phase "


def count_step(step: TrainingStep, scratch: Path, *, counted: bool) -> dict[str, Any]:
    """Bytes of a step after two that make what stays: the optimizer's state, buffers of messages, DDP's buckets anew.

    counted: torch counts what every thread takes and frees, since before the model was made; else nothing is known.
    """
    step.run()
    step.run()
    if not counted:
        return {}
    marks = _Marks()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        marks.announce("start")
        step.run(marks.announce)
        marks.end()
    out = scratch / f"memory-{os.getpid()}.json"
    profiler.export_chrome_trace(str(out))
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    out.unlink()
    return phases_bytes(events)


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


def phases_bytes(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace's events: bytes at the borders of phases (of their last time), and the peak of each."""
    marks = sorted((e["ts"], e["name"].removeprefix(_MARK)) for e in events if str(e.get("name")).startswith(_MARK))
    rows = sorted(
        (e["ts"], e["args"]["Total Allocated"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    )
    peaks: dict[str, int] = {}
    after: dict[str, int] = {}
    place, phase = 0, "start"
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
