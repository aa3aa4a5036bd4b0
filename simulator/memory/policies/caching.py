"""PyTorch's own pools (cached segments, expandable segments), and the same with the first block that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from typing_extensions import override

from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.memory.allocator.blocks import UNLIMITED_BYTES, OnDriver, ignore_call
from simulator.memory.allocator.blocks import Pool as StreamPool
from simulator.memory.policies.base import HandleT, Pool


class FirstFitAllocator(CachingAllocator):
    """The caching allocator, but of the blocks that fit the one at the lowest address."""

    @override
    def _find(self, pool: StreamPool, size: int) -> Block | None:
        pool.searches += 1
        limit = self.settings.max_split_size_bytes
        most = limit - 1 if size < limit else size + self.settings.max_non_split_rounding_bytes - 1
        if limit == UNLIMITED_BYTES:
            most = limit
        fitting = [
            block for block_bytes, _, block in pool.free[bisect_left(pool.free, (size,)) :] if block_bytes <= most
        ]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: block.address)
        pool.remove(block)
        return block


class AllocatorPool(Pool[HandleT]):
    """What a caching allocator counts, as a pool."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = self.counts = allocator

    @override
    def empty_cache(self) -> None:
        self._allocator.empty_cache()

    @override
    def largest_free_bytes(self) -> int:
        return max((pool.free[-1][0] for pool in self._allocator.pools.values() if pool.free), default=0)


class CachingPool(AllocatorPool[Block]):
    """A caching allocator as a pool."""

    def __init__(
        self,
        settings: AllocatorSettings,
        capacity_bytes: int | None = None,
        on_driver: OnDriver = ignore_call,
        *,
        kind: type[CachingAllocator] = CachingAllocator,
        place: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(kind(settings, capacity_bytes=capacity_bytes, on_driver=on_driver, place=place))

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> Block:
        return self._allocator.malloc(num_bytes, stream)

    @override
    def request_free(self, handle: Block) -> None:
        self._allocator.request_free(handle)

    @override
    def complete_free(self, handle: Block) -> None:
        self._allocator.complete_free(handle)

    @override
    def pieces(self, handle: Block) -> tuple[tuple[int, int], ...]:
        return ((handle.address, handle.size),)
