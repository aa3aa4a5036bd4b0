"""Device: what one accelerator can do and hold, from its data sheet. What it *achieves* is calibration's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simulator.schema import Strict

Architecture = Literal["volta", "ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"]


class PeakFlop(Strict):
    """Dense peak FLOP/s by dtype; 0 where the device has no such units."""

    fp32: float = Field(gt=0)
    tf32: float = Field(ge=0, default=0)
    bf16: float = Field(ge=0, default=0)
    fp16: float = Field(ge=0, default=0)
    fp8: float = Field(ge=0, default=0)


class Device(Strict):
    """One accelerator.

    memory_bytes: what the driver reports as total (nvidia-smi's MiB × 2**20), not the marketing gigabytes.
    power_w: the board's power cap; sustained matrix speed follows it.
    aliases: other names that tables and users give it.
    sources: where each number stands.
    """

    name: str
    architecture: Architecture
    memory_bytes: int = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    peak_flop_per_s: PeakFlop
    num_sms: int = Field(gt=0)
    power_w: float = Field(gt=0)
    calibration: str = ""  # the calibration whose kernels this device shares (its own name if empty)
    aliases: tuple[str, ...] = ()
    sources: dict[str, str] = {}

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s for `dtype`; 0 if the device lacks it."""
        return float(getattr(self.peak_flop_per_s, dtype))
