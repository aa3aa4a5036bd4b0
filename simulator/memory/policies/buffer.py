"""A persistent buffer for activation checkpoints, taken once; everything else lives in PyTorch's allocator.

What is kept from the forward to the backward no longer cuts up the blocks that temporaries come and go in. The buffer
is as large as the checkpoints' own worst moment, placed first fit: known before the step, as their sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import override

from simulator.memory.allocator import AllocatorSettings, Block
from simulator.memory.allocator.blocks import SEGMENT_ROUND_BYTES, OnDriver, ignore_call
from simulator.memory.policies.base import ACTIVATION, FirstFitRange, OwnPool, Slot, rounded
from simulator.memory.policies.caching import CachingPool

_BASE = 2**60


def buffer_bytes(requests: Iterable[tuple[bool, int, int]]) -> int:
    """What the buffer must hold: `requests` are (is an allocation, id, bytes) of the checkpoints, in order."""
    first_fit = FirstFitRange()
    slots: dict[int, Slot] = {}
    for is_alloc, number, num_bytes in requests:
        if is_alloc:
            size = rounded(num_bytes)
            offset = first_fit.put(size)
            assert offset is not None
            slots[number] = (offset, size)
        else:
            first_fit.take(slots.pop(number))
    return first_fit.highest


class BufferPool(OwnPool["Block | Slot"]):
    """num_bytes: of the buffer, which serves `stream`; what finds no place in it comes from the allocator like all else."""

    def __init__(
        self,
        num_bytes: int,
        stream: int,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        on_driver: OnDriver = ignore_call,
    ) -> None:
        super().__init__(capacity_bytes, on_driver)
        self._buffer_bytes = -(-num_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        rest = None if capacity_bytes is None else max(0, capacity_bytes - self._buffer_bytes)
        self._rest = CachingPool(settings, rest, self._rest_call)
        if self._buffer_bytes:
            self._take("segment_alloc", _BASE, self._buffer_bytes)
        self._shelf = FirstFitRange(self._buffer_bytes)
        self._stream = stream

    def _rest_call(self, call: str, address: int, num_bytes: int) -> None:
        taken = call in ("segment_alloc", "segment_map")
        self.counts.reserved_bytes += num_bytes if taken else -num_bytes
        self._on_driver(call, address, num_bytes)

    @property
    @override
    def num_retries(self) -> int:
        return self.counts.num_retries + self._rest.num_retries

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> Block | Slot:
        if kind == ACTIVATION and stream == self._stream:
            size = rounded(num_bytes)
            offset = self._shelf.put(size)
            if offset is not None:
                self._count(size)
                return offset, size
        block = self._rest.malloc(num_bytes, stream, kind)
        self._count(block.size)
        return block

    @override
    def request_free(self, handle: Block | Slot) -> None:
        if isinstance(handle, Block):
            self._rest.request_free(handle)
        self.counts.allocated_bytes -= _size(handle)

    @override
    def complete_free(self, handle: Block | Slot) -> None:
        self.counts.active_bytes -= _size(handle)
        if isinstance(handle, Block):
            self._rest.complete_free(handle)
        else:
            self._shelf.take(handle)

    @override
    def empty_cache(self) -> None:
        self._rest.empty_cache()

    @override
    def largest_free_bytes(self) -> int:
        return max([self._rest.largest_free_bytes(), *(size for _, size in self._shelf.free)])

    @override
    def pieces(self, handle: Block | Slot) -> tuple[tuple[int, int], ...]:
        return ((handle.address, handle.size),) if isinstance(handle, Block) else ((_BASE + handle[0], handle[1]),)


def _size(handle: Block | Slot) -> int:
    return handle.size if isinstance(handle, Block) else handle[1]
