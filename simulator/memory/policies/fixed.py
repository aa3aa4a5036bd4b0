"""Fixed blocks: large requests take whole blocks of one size from anywhere, joined to one range by mapping them.

Nothing is ever too scattered to be used, whatever the sizes; the rest of each request's last block is wasted, and
every allocation maps its blocks anew. Requests of up to 1 MiB come from PyTorch's small pool.
"""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import override

from simulator.memory.allocator import AllocatorSettings, Block
from simulator.memory.allocator.blocks import SEGMENT_ROUND_BYTES, SMALL_BYTES, OnDriver, ignore_call
from simulator.memory.policies.base import OwnPool
from simulator.memory.policies.caching import CachingPool

BLOCK_BYTES = SEGMENT_ROUND_BYTES  # the smallest that the driver maps


class _Blocks:
    """Blocks in runs of neighbours, as a request may be of millions: the last that came are the first that go."""

    def __init__(self) -> None:
        self.runs: list[range] = []
        self.count = 0

    def add(self, runs: Iterable[range]) -> None:
        """Put blocks at the end."""
        for run in runs:
            self.runs.append(run)
            self.count += len(run)

    def take(self, count: int) -> _Blocks:
        """The last blocks, in their order."""
        left, found = count, list[range]()
        while left:
            run = self.runs.pop()
            if len(run) > left:
                self.runs.append(run[:-left])
                run = run[-left:]
            found.append(run)
            left -= len(run)
        self.count -= count
        taken = _Blocks()
        taken.add(reversed(found))
        return taken


Taken = tuple[int, _Blocks]  # stream, whose they are


class FixedPool(OwnPool["Block | Taken"]):
    """block_bytes: of a block, a multiple of 2 MiB."""

    def __init__(
        self, capacity_bytes: int | None = None, on_driver: OnDriver = ignore_call, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        super().__init__(capacity_bytes, on_driver)
        self._small = CachingPool(AllocatorSettings(), None, self._small_call)
        self._block_bytes = block_bytes
        self._free: dict[int, _Blocks] = {}
        self._top = 2**50

    def _small_call(self, call: str, address: int, num_bytes: int) -> None:
        (self._take if call == "segment_alloc" else self._give)(call, address, num_bytes)

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> Block | Taken:
        if num_bytes <= SMALL_BYTES:
            block = self._small.malloc(num_bytes, stream, kind)
            self._count(block.size)
            return block
        free = self._free.setdefault(stream, _Blocks())
        num_blocks = -(-num_bytes // self._block_bytes)
        before = free.count
        new = num_blocks - before
        if new > 0:
            self._take("segment_map", self._top, new * self._block_bytes)
            if free.count < before:  # the cache had to be emptied, of these too
                self._take("segment_map", self._top + new * self._block_bytes, before * self._block_bytes)
                new = num_blocks
            end = self._top + new * self._block_bytes
            free.add([range(self._top, end, self._block_bytes)])
            self._top = end
        taken = free.take(num_blocks)
        reused = num_blocks - max(new, 0)
        if reused:
            self._on_driver("remap", taken.runs[0][0], reused * self._block_bytes)
        self._count(num_blocks * self._block_bytes)
        return stream, taken

    @override
    def request_free(self, handle: Block | Taken) -> None:
        if isinstance(handle, Block):
            self._small.request_free(handle)
        self.counts.allocated_bytes -= self._size(handle)

    @override
    def complete_free(self, handle: Block | Taken) -> None:
        self.counts.active_bytes -= self._size(handle)
        if isinstance(handle, Block):
            self._small.complete_free(handle)
        else:
            self._free[handle[0]].add(handle[1].runs)

    def _size(self, handle: Block | Taken) -> int:
        return handle.size if isinstance(handle, Block) else handle[1].count * self._block_bytes

    @override
    def empty_cache(self) -> None:
        self._small.empty_cache()
        for free in self._free.values():
            if free.count:
                self._give("segment_unmap", free.runs[0][0], free.count * self._block_bytes)
                free.take(free.count)

    @override
    def largest_free_bytes(self) -> int:
        return max((free.count * self._block_bytes for free in self._free.values()), default=0)

    @override
    def pieces(self, handle: Block | Taken) -> tuple[tuple[int, int], ...]:
        if isinstance(handle, Block):
            return ((handle.address, handle.size),)
        return tuple((run[0], len(run) * self._block_bytes) for run in handle[1].runs)
