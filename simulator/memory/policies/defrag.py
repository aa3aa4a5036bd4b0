"""Defragmentation beside the program: PyTorch's pool, whose live blocks move out of sparse segments, which then go back.

It looks whenever the pool has grown. While more than a share of what is reserved is free, the segment with the least alive is emptied into
free blocks of other segments of its stream, best fit and the largest first; where they do not all fit, the next one is tried. What moves
is copied beside the kernels: the bytes are told as calls named "move", and take the host no time. Addresses of tensors change, which
needs a map that programs go through; that the map is free is assumed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from typing_extensions import override

from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.memory.allocator.blocks import MIN_BLOCK_BYTES, SMALL_BYTES, OnDriver, ignore_call, split
from simulator.memory.allocator.blocks import Pool as StreamPool
from simulator.memory.policies.caching import AllocatorPool

SHARE = 0.15  # free of what is reserved, above which it acts: what tuning guides call fragmented
_TRIED = 16  # segments, the sparsest first

Cell = list[Block]  # one block, which may become another


class DefragPool(AllocatorPool[Cell]):
    """The caching allocator with compaction."""

    def __init__(
        self, settings: AllocatorSettings, capacity_bytes: int | None = None, on_driver: OnDriver = ignore_call
    ) -> None:
        self._allocator: _Compacting
        super().__init__(_Compacting(settings, capacity_bytes=capacity_bytes, on_driver=on_driver))
        self._on_driver = on_driver
        self._cells: dict[int, Cell] = {}  # address -> of blocks that may move

    @override
    def malloc(self, num_bytes: int, stream: int, kind: int) -> Cell:
        before = self._allocator.reserved_bytes
        cell = [self._allocator.malloc(num_bytes, stream)]
        self._cells[cell[0].address] = cell
        if self._allocator.reserved_bytes > before:
            self._defragment()
        return cell

    @override
    def request_free(self, handle: Cell) -> None:
        self._allocator.request_free(handle[0])
        del self._cells[handle[0].address]  # somebody may still read it there

    @override
    def complete_free(self, handle: Cell) -> None:
        self._allocator.complete_free(handle[0])

    @override
    def pieces(self, handle: Cell) -> tuple[tuple[int, int], ...]:
        return ((handle[0].address, handle[0].size),)

    def _defragment(self) -> None:
        allocator = self._allocator
        while allocator.reserved_bytes - allocator.active_bytes > SHARE * allocator.reserved_bytes:
            for segment in allocator.sparse():
                live = [block for block in segment if block.used]
                if all(block.address in self._cells for block in live) and (moved := allocator.emptied(segment)):
                    for old, new in moved:
                        cell = self._cells[new.address] = self._cells.pop(old)
                        cell[0] = new
                        self._on_driver("move", new.address, new.requested)
                    allocator.empty_segment(segment[0].address)
                    break
            else:
                return


class _Compacting(CachingAllocator):
    """The caching allocator, and how a segment of it is emptied."""

    def sparse(self) -> Iterator[list[Block]]:
        """The blocks of segments that are partly in use, the sparsest first."""
        found = []
        for address, (size, first) in self.segments.items():
            blocks, block = [], first if not first.expandable else None
            while block is not None:
                blocks.append(block)
                block = block.next
            live = sum(one.size for one in blocks if one.used)
            if 0 < live < size:
                found.append((live / size, address, blocks))
        return (blocks for _, _, blocks in sorted(found, key=lambda one: one[:2])[:_TRIED])

    def emptied(self, segment: list[Block]) -> list[tuple[int, Block]]:
        """Move all that lives in a segment into free blocks of others: (old address, new block) of each.

        Nothing where it does not fit.
        """
        pool, live = (
            segment[0].pool,
            sorted((one for one in segment if one.used), key=lambda one: (-one.size, one.address)),
        )
        own = [one for one in segment if not one.used]
        for one in own:
            pool.remove(one)
        moved = [(one.address, self._copy(one)) for one in live] if _fits(live, pool) else []
        for one in own:
            insort(pool.free, (one.size, one.address, one))
        for one in live if moved else ():
            self.request_free(one)
            self.complete_free(one)
        return moved

    def _copy(self, old: Block) -> Block:
        """A free block that holds what `old` holds."""
        block = self._find(old.pool, old.size)
        assert block is not None  # `_fits` has seen it
        if _leaves(block.size - old.size, old.pool):
            old.pool.insert(split(block, old.size))
        block.used, block.requested = True, old.requested
        self._count(block.size, old.requested)
        return block


def _leaves(rest: int, pool: StreamPool) -> bool:
    """What is left of a block becomes one of its own, as when a request is served."""
    return rest >= MIN_BLOCK_BYTES if pool.small else rest > SMALL_BYTES


def _fits(live: list[Block], pool: StreamPool) -> bool:
    """Every block finds one that is free, best fit, the largest first."""
    free = [size for size, _, _ in pool.free]
    for one in live:
        at = bisect_left(free, one.size)
        if at == len(free):
            return False
        rest = free.pop(at) - one.size
        if _leaves(rest, pool):
            insort(free, rest)
    return True
