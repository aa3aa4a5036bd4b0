"""Steps that really run: their times by phase, their profile, and what the allocator did."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from simulator.work.trace import Timeline
from validate.every_thread import wait_for_threads
from validate.report import RankReport
from validate.spans import Event, timeline
from validate.steps import PHASES, TrainingStep
from validate.stopwatch import reference_s
from validate.torch_private import begin_allocator_history, end_allocator_history, raw_events

_SNAPSHOT_EVENTS = 400_000
_TRACE = ("action", "addr", "size", "stream", "time_us", "device_free")
_SEGMENT = (
    "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type", "is_expandable",
)  # fmt: skip
_BLOCK = ("address", "size", "requested_size", "state")


class Clock:
    """Seconds between a step's phases: CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def announce(self, phase: str) -> None:
        """A phase begins."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase, over all micro-batches. The device must be done."""
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if phase in found:
                found[phase] += start.elapsed_time(end) * 1e-3 if self.cuda else end - start
        return found


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed_steps(
    step: TrainingStep,
    device: torch.device,
    report: RankReport,
    *,
    warm_up: int,
    count: int,
    barrier: Callable[[], None],
) -> dict[str, Any]:
    """Run `warm_up` steps, then `count` with their times; what is known goes out after each one."""
    for index in range(warm_up):
        report.phase(f"warm-up {index + 1}")
        step.run()
        wait(device)
    times: list[float] = []
    references: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    for index in range(count):
        report.phase(f"step {index + 1}")
        barrier()
        if device.type == "cpu":  # all ranks at once, as in the step
            references.append(reference_s(torch))
            barrier()
        clock = Clock(device)
        start = time.perf_counter()
        step.run(clock.announce)
        wait(device)
        times.append(time.perf_counter() - start)
        for name, seconds in clock.phases_s().items():
            phases[name].append(seconds)
        report.partial(step_times_s=times, phase_times_s=phases, reference_times_s=references)
    return {"step_times_s": times, "phase_times_s": phases, "reference_times_s": references}


def profiled_step(step: TrainingStep, device: torch.device, rank: int, barrier: Callable[[], None]) -> Timeline:
    """One more step under torch's profiler, as spans."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    barrier()
    with profile(activities=activities) as profiler:
        step.run()
        wait(device)
        wait_for_threads()
    return _timeline(raw_events(profiler), f"rank{rank}", cuda=device.type == "cuda")


def _timeline(events: Any, program: str, *, cuda: bool) -> Timeline:  # noqa: ANN401  Kineto's own list
    host: list[Event] = []
    kernels: list[Event] = []
    optimizer: list[Event] = []
    for event in events:
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        stream = f"{event.device_resource_id()}"
        start = event.start_ns() * 1e-9
        ours = Event(name=event.name(), stream=stream, start_s=start, end_s=start + event.duration_ns() * 1e-9)
        if on_device:
            if not (hasattr(event, "is_user_annotation") and event.is_user_annotation()):
                kernels.append(ours)
        elif ours.name.startswith("Optimizer.step"):
            optimizer.append(ours)
        elif ours.name.startswith(("aten::", "fsdp::", "gloo:")):
            host.append(ours)
    return timeline(kernels, program) if cuda else timeline(host, program, optimizer=optimizer)


# --- the caching allocator's own account


class AllocatorTimeline:
    """Allocated and reserved bytes at the borders of a step's phases, and the peak of each, from CUDA's allocator."""

    def __init__(self) -> None:
        self.phase = "start"
        self.allocated: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def announce(self, phase: str) -> None:
        """The allocator's state depends on the host's order alone, so the device need not be waited for."""
        self.allocated[self.phase] = torch.cuda.memory_allocated()
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), torch.cuda.max_memory_allocated())
        self.phase = phase
        torch.cuda.reset_peak_memory_stats()

    def as_json(self) -> dict[str, Any]:
        peaks = {name: self.peaks.get(name, 0) for name in PHASES}
        worst = max(peaks, key=lambda name: peaks[name])
        return {
            "start_bytes": self.allocated["start"],
            "after_forward_bytes": self.allocated["forward"],
            "after_backward_bytes": self.allocated["backward"],
            "peak_bytes": peaks[worst],
            "peak_phase": worst,
            "peak_by_phase_bytes": peaks,
        }


def allocator_bytes(total_bytes: int) -> dict[str, int]:
    """Peaks since the process began, as the three figures that users confuse."""
    statistics = torch.cuda.memory_stats()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total_bytes - torch.cuda.mem_get_info()[0],
        "num_alloc_retries": statistics["num_alloc_retries"],
    }


def recorded_step(step: TrainingStep, device: torch.device, out: Path) -> None:
    """Run a step and write the allocator's events of it, in the form that the replay tests read."""
    begin_allocator_history(_SNAPSHOT_EVENTS)
    step.run()
    wait(device)
    snapshot = end_allocator_history()
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write(json.dumps(_stripped(snapshot), separators=(",", ":")).encode())


def _stripped(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Events and segments without stack frames."""
    segments = [
        {k: s[k] for k in _SEGMENT if k in s}
        | {"blocks": [{k: block[k] for k in _BLOCK if k in block} for block in s["blocks"]]}
        for s in snapshot["segments"]
    ]
    return {
        "allocator_settings": snapshot.get("allocator_settings"),
        "device_traces": [[{k: e[k] for k in _TRACE if k in e} for e in t] for t in snapshot["device_traces"] if t],
        "segments": segments,
    }
