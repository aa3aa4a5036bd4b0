"""An arena: a region of addresses for each lifetime, so that what comes and goes never lies between what stays.

A region grows by pages like an expandable segment; a block takes the lowest place in its region where it fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from simulator.memory.allocator.blocks import LARGE_SEGMENT_BYTES, OnDriver, ignore_call
from simulator.memory.policies.base import FirstFitRange, OwnPool, Slot, rounded

PAGE_BYTES = LARGE_SEGMENT_BYTES  # what a region grows by, as expandable segments do
_REGION_SPAN = 2**60


@dataclass(slots=True, eq=False)
class Region:
    """A shelf whose first `mapped` bytes have memory."""

    base: int
    mapped: int = 0
    first_fit: FirstFitRange = field(default_factory=FirstFitRange)

    @property
    def end(self) -> int:
        """Where the highest block in use ends."""
        return self.first_fit.free[-1][0]


class ArenaPool(OwnPool[tuple[Region, Slot]]):
    """Regions by stream and kind of request."""

    def __init__(self, capacity_bytes: int | None = None, on_driver: OnDriver = ignore_call) -> None:
        super().__init__(capacity_bytes, on_driver)
        self._regions: dict[tuple[int, int], Region] = {}

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> tuple[Region, Slot]:
        region = self._regions.get((stream, kind))
        if region is None:
            region = self._regions[stream, kind] = Region((1 + len(self._regions)) * _REGION_SPAN)
        size = rounded(num_bytes)
        offset = region.first_fit.put(size)
        assert offset is not None  # a shelf has no end
        if offset + size > region.mapped:
            missing = rounded(offset + size - region.mapped, PAGE_BYTES)
            start = region.base + region.mapped
            region.mapped += missing
            self._take("segment_map", start, missing)
        self._count(size)
        return region, (offset, size)

    @override
    def request_free(self, handle: tuple[Region, Slot]) -> None:
        self.counts.allocated_bytes -= handle[1][1]

    @override
    def complete_free(self, handle: tuple[Region, Slot]) -> None:
        region, slot = handle
        self.counts.active_bytes -= slot[1]
        region.first_fit.take(slot)

    @override
    def empty_cache(self) -> None:
        for region in self._regions.values():
            keep = -(-region.end // PAGE_BYTES) * PAGE_BYTES
            if keep < region.mapped:
                self._give("segment_unmap", region.base + keep, region.mapped - keep)
                region.mapped = keep

    @override
    def largest_free_bytes(self) -> int:
        return max(
            (
                min(size, region.mapped - offset)
                for region in self._regions.values()
                for offset, size in region.first_fit.free
            ),
            default=0,
        )

    @override
    def pieces(self, handle: tuple[Region, Slot]) -> tuple[tuple[int, int], ...]:
        region, (offset, size) = handle
        return ((region.base + offset, size),)
