"""The in-memory form of a profiler's trace: columns of numbers, and a few special events."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from simulator.base.units import whole
from simulator.formats.readers.kernel_names import collective_of

MAX_EVENTS = 2_000_000  # on devices, of all steps
MAX_NAMES = 50_000
NAME_LENGTH = 200

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"}
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,12})")
_TOO_LARGE = 2**62  # for what is counted in 64 bits
_BYTES = {
    "float": 4, "float32": 4, "int": 4, "bfloat16": 2, "half": 2, "float16": 2, "long": 8, "int64": 8, "double": 8,
    "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(slots=True)
class Events:
    """Columns: 32 bytes an event, whatever the file's size."""

    starts: array[float] = field(default_factory=lambda: array("d"))
    durations: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("l"))
    streams: array[int] = field(default_factory=lambda: array("l"))
    texts: dict[str, int] = field(default_factory=dict)
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)  # (device, stream)
    collectives: dict[int, tuple[str, int | None, int | None, str, str]] = field(default_factory=dict)
    device_steps: dict[int, list[float]] = field(default_factory=dict)
    host_steps: dict[int, list[float]] = field(default_factory=dict)
    optimizer: list[tuple[float, float]] = field(default_factory=list)
    memory: tuple[array[float], array[int], array[int]] = field(
        default_factory=lambda: (array("d"), array("q"), array("q"))
    )
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    num_seen: int = 0

    def add(self, event: object) -> None:
        """Keep what matters of one event."""
        self.num_seen += 1
        if not isinstance(event, dict):
            self.dropped["no objects"] += 1
            return
        category = _text(event.get("cat"))
        if category in _ON_DEVICE and event.get("ph") == "X":
            self._kernel(event)
        elif category in ("user_annotation", "gpu_user_annotation"):
            self._annotation(event, on_device=category == "gpu_user_annotation")
        elif event.get("name") == "[memory]":
            self._memory(event)

    def _kernel(self, event: dict[str, Any]) -> None:
        start, duration = _time(event.get("ts")), _time(event.get("dur"))
        if start is None or duration is None or duration < 0:
            self.dropped["without a time"] += 1
            return
        if len(self.starts) >= MAX_EVENTS:
            self.dropped[f"beyond {MAX_EVENTS:,}"] += 1
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        lane = (_integer(args.get("device"), event.get("pid")), _integer(args.get("stream"), event.get("tid")))
        name = str(event.get("name", ""))[:NAME_LENGTH]
        if name not in self.texts and len(self.texts) >= MAX_NAMES:
            name = "(other)"
        if "Collective name" in args:
            self._collective(len(self.starts), name, args)
        self.starts.append(start)
        self.durations.append(duration)
        self.names.append(self.texts.setdefault(name, len(self.texts)))
        self.streams.append(self.lanes.setdefault(lane, len(self.lanes)))

    def _collective(self, index: int, name: str, args: dict[str, Any]) -> None:
        recorded_name = str(args["Collective name"])[:NAME_LENGTH]
        kind = collective_of(name, recorded_name)
        size = _BYTES.get(str(args.get("dtype", "")).lower())
        numel = [n for key in ("In msg nelems", "Out msg nelems") if (n := _count(args.get(key))) is not None]
        group = str(args.get("Process Group Description") or args.get("Process Group Name") or "")[:NAME_LENGTH]
        self.collectives[index] = (
            kind or "collective",
            max(numel) * size if numel and size else None,
            _count(args.get("Group size")),
            group,
            str(args.get("Process Group Ranks", ""))[:NAME_LENGTH],
        )

    def _annotation(self, event: dict[str, Any], *, on_device: bool) -> None:
        name, start, duration = str(event.get("name", "")), _time(event.get("ts")), _time(event.get("dur"))
        if start is None or duration is None:
            return
        found = _STEP.match(name)
        if found:
            steps = self.device_steps if on_device else self.host_steps
            window = steps.setdefault(int(found[1]), [start, start + duration])
            window[:] = [min(window[0], start), max(window[1], start + duration)]
        elif on_device and name.startswith("Optimizer.step") and len(self.optimizer) < MAX_NAMES:
            self.optimizer.append((start, start + duration))

    def _memory(self, event: dict[str, Any]) -> None:
        args, time_us = event.get("args"), _time(event.get("ts"))
        if not isinstance(args, dict) or args.get("Device Type") != 1 or time_us is None:
            return
        allocated, reserved = _count(args.get("Total Allocated")), _count(args.get("Total Reserved"))
        if allocated is not None and reserved is not None and len(self.memory[0]) < MAX_EVENTS:
            self.memory[0].append(time_us)
            self.memory[1].append(allocated)
            self.memory[2].append(reserved)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _time(value: object) -> float | None:
    """Microseconds; None where it is no number, NaN or out of all proportion."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None


def _integer(*values: object) -> int:
    """The first that is a whole number, or reads as one."""
    for value in values:
        if isinstance(value, str) and (number := whole(value)) is not None:
            return number
        if type(value) is int and abs(value) < _TOO_LARGE:
            return value
    return -1


def _count(value: object) -> int | None:
    """A whole number of things; None where it is none, or out of all proportion."""
    return value if type(value) is int and 0 <= value < _TOO_LARGE else None
