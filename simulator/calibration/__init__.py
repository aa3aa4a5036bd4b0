"""Calibration: curves fitted on microbenchmarks that turn kernels into seconds, with provenance and uncertainty."""

from simulator.calibration.curves import AttentionCurve, GemmCurve, Power, Quality, StreamCurve
from simulator.calibration.document import Calibration, calibration_names
from simulator.calibration.records import DriverCall, Interference, MemoryOverheads, Overheads, Provenance
from simulator.calibration.timer import Timer

__all__ = [
    "AttentionCurve",
    "Calibration",
    "DriverCall",
    "GemmCurve",
    "Interference",
    "MemoryOverheads",
    "Overheads",
    "Power",
    "Provenance",
    "Quality",
    "StreamCurve",
    "Timer",
    "calibration_names",
]
