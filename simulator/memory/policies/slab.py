"""A slab allocator: slots of exactly one size, cut from slabs; a freed slot serves the same size again and no other."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from simulator.memory.allocator import segment_bytes
from simulator.memory.allocator.blocks import OnDriver, ignore_call
from simulator.memory.policies.base import OwnPool, rounded


@dataclass(slots=True, eq=False)
class Slab:
    """A segment cut into equal slots. free: offsets, the lowest last."""

    base: int
    num_bytes: int
    slot_bytes: int
    stream: int
    free: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return len(self.free) == self.num_bytes // self.slot_bytes


class SlabPool(OwnPool[tuple[Slab, int]]):
    """Slabs by stream and size (in steps of 512 bytes); a slab is as large as PyTorch's segment for that size."""

    def __init__(self, capacity_bytes: int | None = None, on_driver: OnDriver = ignore_call) -> None:
        super().__init__(capacity_bytes, on_driver)
        self._open: dict[tuple[int, int], list[Slab]] = {}  # slabs with a free slot
        self._slabs: dict[int, Slab] = {}
        self._top = 2**40

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> tuple[Slab, int]:
        size = rounded(num_bytes)
        slabs = self._open.setdefault((stream, size), [])
        if not slabs:
            slab = self._new(size, stream)
            slabs.append(slab)
        slab = slabs[-1]
        offset = slab.free.pop()
        if not slab.free:
            slabs.pop()
        self._count(size)
        return slab, offset

    def _new(self, size: int, stream: int) -> Slab:
        num_bytes = segment_bytes(size)
        self._take("segment_alloc", self._top, num_bytes)
        slab = Slab(self._top, num_bytes, size, stream, [i * size for i in reversed(range(num_bytes // size))])
        self._slabs[slab.base] = slab
        self._top += num_bytes
        return slab

    @override
    def request_free(self, handle: tuple[Slab, int]) -> None:
        self.counts.allocated_bytes -= handle[0].slot_bytes

    @override
    def complete_free(self, handle: tuple[Slab, int]) -> None:
        slab, offset = handle
        self.counts.active_bytes -= slab.slot_bytes
        if not slab.free:
            self._open[slab.stream, slab.slot_bytes].append(slab)
        slab.free.append(offset)

    @override
    def empty_cache(self) -> None:
        for slab in [slab for slab in self._slabs.values() if slab.is_empty]:
            self._open[slab.stream, slab.slot_bytes].remove(slab)
            del self._slabs[slab.base]
            self._give("segment_free", slab.base, slab.num_bytes)

    @override
    def largest_free_bytes(self) -> int:
        return max((slab.slot_bytes for slab in self._slabs.values() if slab.free), default=0)

    @override
    def pieces(self, handle: tuple[Slab, int]) -> tuple[tuple[int, int], ...]:
        slab, offset = handle
        return ((slab.base + offset, slab.slot_bytes),)
