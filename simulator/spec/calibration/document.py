"""Calibration: everything measured about real hardware. A file of curves with provenance; kernels in, seconds out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Self

from pydantic import PrivateAttr, ValidationError
from typing_extensions import override

from simulator.base.errors import CalibrationError, Fault
from simulator.base.files import write_whole
from simulator.base.kernels import Gemm, Kernel, Scan, Stated, Stream
from simulator.base.presets import TOPOLOGIES
from simulator.base.schema import faults_of, read_json, unknown_name
from simulator.spec.calibration.collective_curves import default_curves
from simulator.spec.calibration.curve_set import CurveSet, SpeedOf
from simulator.spec.calibration.learned import LEARNED_SUFFIX, Learned, on_links, speeds
from simulator.spec.calibration.likeness import Point
from simulator.spec.calibration.scan import CATEGORY as SCAN
from simulator.spec.calibration.scan import SIGMA as SCAN_SIGMA
from simulator.spec.calibration.timer import Timer
from simulator.spec.cluster.device import Device
from simulator.spec.software.stack import AttentionBackend

SUFFIX = ".calibration.json"
LINKS = "links"  # the curves of links stand beside the devices' and have a reader of their own
FORMAT_VERSION = 1
# One sigma, beside their own, of what curves are off by on another board than they were measured on: experiments/other_devices.py
# prices each device with kernel tables by each other's curves. Boards of another peak are others; powers are in the curves
OTHER_BOARD = {"gemm": 0.08, "attention": 0.21, "elementwise": 0.15}


class _Timers(dict[tuple[int, int], Timer]):
    """A cache is no part of a calibration's identity: any two compare equal."""

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Timers)

    __hash__ = None


class Calibration(CurveSet, defer_build=False):
    """A calibration file: loading, saving, provenance, and the timers that evaluate its curves."""

    learned: Learned | None = None  # what a user's own steps taught, already in speed and links
    _timers: _Timers = PrivateAttr(default_factory=_Timers)

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A calibration by name (`topologies/calibrations`) or from a file. Raises CalibrationError with every fault."""
        path = Path(name_or_path)
        if path.suffix == ".json" or path.is_file():
            return cls._read(path)
        known = calibration_names()
        if str(name_or_path) not in known:
            raise CalibrationError(unknown_name("calibration", str(name_or_path), known, "a calibration's .json"))
        found = cls._of_package(str(name_or_path)).model_copy()
        found._timers = _Timers()  # noqa: SLF001  its own: shared ones would grow with every device that they time
        return found

    @classmethod
    @cache  # what ships does not change while a process runs
    def _of_package(cls, name: str) -> Self:
        return cls._read(_shipped() / f"{name}{SUFFIX}")

    @classmethod
    def _read(cls, path: Path) -> Self:
        data = read_json(path, CalibrationError)
        if path.name.endswith(LEARNED_SUFFIX):
            remedy = (
                "--calibration of predict and search, or `calibration` of a study; elsewhere a measured calibration"
            )
            raise CalibrationError.at(path.name, "holds what runs taught, and no calibration of a device", remedy)
        try:
            found = cls.model_validate_json(json.dumps(data))
        except ValidationError as exc:
            raise CalibrationError(faults_of(exc, path.name)) from None
        if found.kind != "ideal" and (faults := list(islice(_unmeasurable(data, path.name), 20))):
            raise CalibrationError(faults)
        return found

    def save(self, path: str | Path) -> None:
        """Write the file; equal calibrations give equal bytes."""
        unset = {name for name in ("links", "speed", "learned") if not getattr(self, name)}
        text = json.dumps(self.model_dump(mode="json", exclude=unset), indent=1, ensure_ascii=False)
        write_whole(Path(path), text + "\n")

    @classmethod
    def ideal(cls) -> Self:
        """Efficiency 1, latency 0: t = max(FLOP / peak, bytes / bandwidth). What theory tests use."""
        from simulator.spec.calibration.datasheet import ideal

        return cls(**ideal())

    @classmethod
    def datasheet(cls, device: Device) -> Self:
        """Documented typical fractions of the device's architecture, with wide uncertainty."""
        from simulator.spec.calibration.datasheet import datasheet

        return cls(**datasheet(device))

    @classmethod
    def for_device(cls, device: Device) -> Self:
        """The calibration a device names, or else its data sheet."""
        return cls.load(device.calibration) if device.calibration else cls.datasheet(device)

    def with_speed(self, speed: dict[SpeedOf, float]) -> Self:
        """The same calibration with kernel speeds multiplied by these factors."""
        return type(self).model_validate(
            {**{name: getattr(self, name) for name in type(self).model_fields}, "speed": speed}
        )

    def with_learned(self, learned: Learned) -> Self:
        """The same under what a user's own steps taught of kernels and links; of the host, `learned.on_stack`."""
        speed = {name: self.speed.get(name, 1.0) * factor for name, factor in speeds(learned.values).items()}
        links = on_links(learned.values, self.links or default_curves(), learned.nodes)
        return self.with_speed(speed).model_copy(update={"links": links, "learned": learned})

    def at(self, point: Point) -> Self:
        """The same for a run there: what was learned of runs like it counts. Links stay (`learned.longer`)."""
        if self.learned is None or self.learned.likeness is None:
            return self
        learned = self.learned.at(point)
        alike = speeds({"software": learned.here})
        speed = {name: self.speed.get(name, 1.0) * factor for name, factor in alike.items()}
        return self.with_speed(speed).model_copy(update={"learned": learned})

    def timer(self, device: Device, backend: AttentionBackend | None = None, use: float = 1.0) -> Timer:
        """The kernel clock of one device and attention backend, kept for the life of this calibration.

        use: mean use of the tensor cores over the step; any but 1 gets a clock of its own.
        """
        if use != 1.0:
            return Timer(self, device, backend, use)
        key = (id(device), id(backend))
        timer = self._timers.get(key)
        if timer is None:  # the timer holds device and backend, so their ids stay theirs
            timer = self._timers[key] = Timer(self, device, backend)
        return timer

    def kernel_s(self, kernel: Kernel, device: Device, *, backend: AttentionBackend | None = None) -> float:
        """Seconds of a kernel in a step of products only (`Power`). Raises CalibrationError if a number is missing."""
        return self.timer(device, backend).kernel_s(kernel)

    def sigma(self, category: str, device: Device) -> float:
        """One-sigma relative systematic uncertainty of a category on a device; memory-bound ones share `elementwise`."""
        if self.kind == "ideal" or category == SCAN:
            return 0.0 if self.kind == "ideal" else SCAN_SIGMA
        name = category if category in OTHER_BOARD else "elementwise"
        curve, peak = self.gemms.get("bf16") or self.gemms.get("fp16"), max(map(device.peak, ("bf16", "fp16")))
        theirs = curve is not None and not math.isclose(curve.peak_flop_per_s, peak, rel_tol=0.02)
        return math.hypot(self.uncertainty[name], OTHER_BOARD[name] if theirs else 0.0)  # type: ignore[index]

    def extrapolated(self, kernel: Kernel, backend: AttentionBackend | None = None) -> str | None:
        """Why this kernel's time is not backed by a measurement near it; None if it is."""
        if isinstance(kernel, Stream):
            quality = next((c.quality for c in self.streams if c.op == kernel.op), None)
            operation: str = kernel.op
            why = quality.outside(num_bytes=kernel.num_bytes) if quality else None
        elif isinstance(kernel, Gemm):
            return self._extrapolated_gemm(kernel)
        elif isinstance(kernel, Scan):
            return "scan: borrowed"  # one of its kernels was measured, on Hopper
        elif isinstance(kernel, Stated):
            return None  # as its author says
        elif backend is not None and backend.states_speed(kernel.direction):
            return f"attention {kernel.direction}: the stack's own efficiency"
        else:
            quality = self.attention_curve(kernel.direction, backend).quality
            operation = f"attention {kernel.direction}"
            why = quality.outside(seq_kv=kernel.seq_kv, head_dim=kernel.head_dim)
        if quality is not None and quality.basis in ("borrowed", "prior"):
            return f"{operation}: {quality.basis}"
        return f"{operation}: {why}" if why else None

    def _extrapolated_gemm(self, kernel: Gemm) -> str | None:
        curve = self.gemms.get(kernel.dtype)
        if curve is None and kernel.dtype != "fp16":
            return f"gemm {kernel.dtype}: not measured, scaled by peak"
        curve = curve or self.gemms.get("bf16")
        if curve is None:
            return f"gemm {kernel.dtype}: not measured"
        if curve.quality.basis in ("borrowed", "prior"):
            return f"gemm {kernel.dtype}: {curve.quality.basis}"
        why = curve.quality.outside(m=kernel.m, n=kernel.n, k=kernel.k)
        return f"gemm {kernel.dtype}: {why}" if why else None


def calibration_names() -> list[str]:
    """Names of the calibrations that ship with the package."""
    names = {f.name.removesuffix(SUFFIX) for f in _shipped().iterdir() if f.name.endswith(SUFFIX)}
    return sorted(names - {LINKS})


def _shipped() -> Path:
    return TOPOLOGIES / "calibrations"


# Of seconds, rates, FLOP and shares: what lies beyond was measured by nobody, and times made of it are no numbers
_LEAST, _MOST, _WIDEST = 1e-15, 1e20, 5.0


# What nothing is divided by, so that fits may leave next to nothing of it
_VANISHING = frozenset(
    ("standard_errors", "k_ramp", "tile_pen", "t0_s", "s0", "alpha", "exponent", "clock_exponent", "p50", "p95")
)


def _unmeasurable(data: object, place: str) -> Iterator[Fault]:
    """Numbers of a file, besides 0, that nothing has."""
    if isinstance(data, dict):
        for key, one in data.items():
            small = isinstance(one, dict) or (isinstance(one, float | int) and abs(one) < _LEAST)
            if not (key in _VANISHING and small):
                yield from _unmeasurable(one, f"{place}: {key}" if ": " not in place else f"{place}.{key}")
    elif isinstance(data, list):
        for number, one in enumerate(data):
            yield from _unmeasurable(one, f"{place}[{number}]")
    elif isinstance(data, float | int) and data:
        most = _WIDEST if ": uncertainty." in place else _MOST
        if not _LEAST <= abs(data) <= most:
            yield Fault(place=place, problem=f"must be 0 or {_LEAST:g} to {most:g}; it is {str(data)[:40]}")
