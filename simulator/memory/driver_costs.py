"""The time of driver calls: a stall of the host, and of a device that has no work queued."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.spec.calibration import Calibration
from simulator.spec.calibration.records import DriverCall

MEASURED = "h200-sxm"  # where cudaMalloc and cudaFree were measured (experiments/cuda_malloc.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCosts:
    """Seconds of a call, by its bytes. source: where they come from, for the reader of the answer.

    Nobody measured mapping: a page taken is priced as cudaMalloc, a page given back as cudaFree, pages mapped anew
    (`remap`, one call a request) as cudaMalloc without its bytes, as no memory is made.
    """

    malloc: DriverCall
    free: DriverCall
    source: str

    @classmethod
    def of(cls, calibration: Calibration | None = None) -> DriverCosts:
        """The calibration's; where it has none, or None is given, those that were measured on one H200 are assumed."""
        if calibration is None or calibration.overheads.cuda_malloc is None or calibration.overheads.cuda_free is None:
            return cls._of(Calibration.load(MEASURED), "assumed: those of ")
        return cls._of(calibration, "")

    @classmethod
    def _of(cls, calibration: Calibration, how: str) -> DriverCosts:
        overheads = calibration.overheads
        assert overheads.cuda_malloc is not None
        assert overheads.cuda_free is not None
        provenance = overheads.sources.get("cuda_malloc", "")
        source = f"{how}calibration {calibration.name}" + (f" ({provenance})" if provenance else "")
        return cls(malloc=overheads.cuda_malloc, free=overheads.cuda_free, source=source)

    def seconds(self, call: str, num_bytes: int) -> float:
        """Of a segment_alloc, segment_free, segment_map, segment_unmap or remap."""
        return self.all_seconds(call, 1, num_bytes)

    def all_seconds(self, call: str, count: int, num_bytes: int) -> float:
        """Of so many calls of one kind, of so many bytes together; what moves beside the program takes the host none."""
        if call == "move":
            return 0.0
        if call == "remap":
            return count * self.malloc.call_s
        return (self.free if call in ("segment_free", "segment_unmap") else self.malloc).seconds(count, num_bytes)
