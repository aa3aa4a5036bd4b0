"""What copies, storage and the driver's allocations cost: t = latency + bytes / bandwidth, with intervals of 90 %."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.base.errors import CalibrationError
from simulator.base.units import format_rate, format_seconds
from simulator.spec.calibration.records import DriverCall
from validate.fit.line import Line, fit_line
from validate.fit.robust import rounded
from validate.samples import Sample

# kind -> the key that says its bytes, and the key of a cluster's [tier] that its bandwidth is (none: nothing reads it)
COPIES = {
    "hbm_copy": ("bytes_moved", ""),
    "h2d_pinned": ("bytes", "h2d_bytes_per_s"),
    "d2h_pinned": ("bytes", "d2h_bytes_per_s"),
    "h2d_d2h_together": ("bytes", "both_bytes_per_s"),
    "h2d_pageable": ("bytes", "pageable_bytes_per_s"),
    "d2h_pageable": ("bytes", ""),
    "h2d_d2h_together_pageable": ("bytes", ""),
    "storage_read": ("bytes", "nvme_read_bytes_per_s"),
    "storage_write": ("bytes", "nvme_write_bytes_per_s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """lines: what to tell people. tier: a cluster file's [tier], key by key. refused: kinds with too few sizes."""

    lines: tuple[str, ...]
    tier: dict[str, float]
    refused: tuple[str, ...]


def copies(samples: Sequence[Sample]) -> Copies:
    """A line for every kind of copy that was measured."""
    lines: list[str] = []
    refused: list[str] = []
    tier: dict[str, float] = {}
    for kind, (size, key) in COPIES.items():
        mine = [s for s in samples if s.kind == kind]
        if not mine:
            continue
        try:
            line = _line(mine, size, kind)
        except CalibrationError as exc:
            refused += [f"{f.place}: {f.problem} ({f.remedy})" for f in exc.faults]
            continue
        lines.append(_as_text(kind, line) + (f" ([tier] {key})" if key else ""))
        if key:
            tier[key] = rounded(line.bytes_per_s.value)
    return Copies(lines=tuple(lines), tier=tier, refused=tuple(refused))


def driver_call(samples: Sequence[Sample], kind: str) -> DriverCall | None:
    """device_malloc or device_free; None where nobody measured it at enough sizes."""
    try:
        line = _line([s for s in samples if s.kind == kind], "bytes", kind)
    except CalibrationError:
        return None
    return DriverCall(call_s=rounded(line.latency_s.value, 3), s_per_byte=rounded(1 / line.bytes_per_s.value, 3))


def _line(samples: Sequence[Sample], size: str, kind: str) -> Line:
    return fit_line([float(s[size]) for s in samples], [s.time_s for s in samples], noun=kind)


def _as_text(kind: str, line: Line) -> str:
    speed, start = line.bytes_per_s, line.latency_s
    between = " to ".join(format_rate(v) for v in (speed.low, speed.high))
    return f"{kind}: {format_rate(speed.value)} (90 % {between}), latency {format_seconds(start.value)}"
