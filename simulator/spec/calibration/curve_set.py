"""The content of a calibration: curves, overheads, interference and uncertainties, checked against one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from simulator.base.errors import CalibrationError
from simulator.base.kernels import Direction, Dtype
from simulator.base.schema import Strict
from simulator.spec.calibration.collective_curves import LinkCurves
from simulator.spec.calibration.curves import AttentionCurve, GemmCurve, Power, StreamCurve
from simulator.spec.calibration.records import Interference, MemoryOverheads, Overheads, Provenance
from simulator.spec.software.stack import AttentionBackend

SpeedOf = Literal["gemm", "attention", "elementwise", "scan"]


class CurveSet(Strict, defer_build=True):  # its own validator is never needed: that of `Calibration` is
    """What a device achieves: curves, overheads, interference, and how sure each is.

    kind: fitted (from microbenchmarks), datasheet (typical fractions of its architecture), ideal (efficiency 1).
    gemms: by dtype. attention: one curve a direction and kernel generation; the first of a direction is the default.
    streams: one curve a StreamOp. uncertainty: category -> one-sigma relative systematic uncertainty.
    power: the cap that the matrix speeds were reached at, null if none applies.
    links: the machine's own collectives where they were measured with it; null: the shipped curves.
    speed: a what-if: kernels so many times as fast as the curves say; no file of a measured machine has it.
    """

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    kind: Literal["fitted", "datasheet", "ideal"]
    power: Power | None = None
    gemms: dict[Dtype, GemmCurve] = Field(min_length=1)
    attention: tuple[AttentionCurve, ...]
    streams: tuple[StreamCurve, ...]
    overheads: Overheads
    interference: Interference
    memory: MemoryOverheads
    uncertainty: dict[Literal["gemm", "attention", "elementwise", "communication"], NonNegativeFloat]
    provenance: Provenance
    links: LinkCurves | None = None
    speed: dict[SpeedOf, PositiveFloat] = {}

    @model_validator(mode="after")
    def _each_curve_once(self) -> Self:
        ops = [curve.op for curve in self.streams]
        problems = [f"streams: {op} appears twice" for op in sorted({op for op in ops if ops.count(op) > 1})]
        problems += [f"attention: {text}" for text in _attention_faults(self.attention)]
        missing = {"gemm", "attention", "elementwise", "communication"} - set(self.uncertainty)
        problems += [f"uncertainty: {name} is missing" for name in sorted(missing)]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def attention_curve(self, direction: Direction, backend: AttentionBackend | None = None) -> AttentionCurve:
        """The curve of a backend's kernel in a direction; without a backend the file's first of that direction."""
        curves = [curve for curve in self.attention if curve.direction == direction]
        for curve in curves:
            if backend is None or backend.kernel in curve.kernels:
                return curve
        kernel = backend.kernel if backend else "fused attention"
        has = ", ".join(sorted({name for curve in curves for name in curve.kernels})) or "none"
        raise CalibrationError.at(
            self.name,
            f"attention: no {direction} curve for {kernel}; it has {has}",
            f"a stack with one of these kernels, or {direction}_efficiency in its attention section",
        )


def _attention_faults(curves: Iterable[AttentionCurve]) -> list[str]:
    """Backends that two curves claim in one direction."""
    seen: set[tuple[str, str]] = set()
    twice: list[str] = []
    for curve in curves:
        for name in curve.kernels:
            key = (name, curve.direction)
            if key in seen:
                twice.append(f"{name} {curve.direction} has two curves")
            seen.add(key)
    return twice
