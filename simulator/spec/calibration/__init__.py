"""Calibration: curves fitted on microbenchmarks that turn kernels into seconds, with provenance and uncertainty."""

from simulator.spec.calibration.curves import AttentionCurve, GemmCurve, Power, Quality, StreamCurve
from simulator.spec.calibration.document import Calibration, calibration_names
from simulator.spec.calibration.records import DriverCall, Interference, MemoryOverheads, Overheads, Provenance

__all__ = [
    "AttentionCurve", "Calibration", "DriverCall", "GemmCurve", "Interference", "MemoryOverheads", "Overheads", "Power",
    "Provenance", "Quality", "StreamCurve", "calibration_names",
]  # fmt: skip
