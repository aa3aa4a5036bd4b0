"""Expandable segments: one growing range of addresses a (stream, pool), mapped page by page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable

from simulator.memory.allocator.blocks import UNLIMITED_BYTES, Block, OnDriver, Pool, merge, split

ADOPTED_SPAN_BYTES = 2**41  # a recording does not say how far an expandable segment may grow: beyond any device


class ExpandableSegments(ABC):
    """The part of the caching allocator that maps and unmaps pages."""

    capacity_bytes: int
    reserved_bytes: int
    segments: dict[int, tuple[int, Block]]
    _place: Callable[[int], int]
    _on_driver: OnDriver

    @abstractmethod
    def _reserve(self, num_bytes: int) -> None:
        """Count what was taken from the driver."""

    @abstractmethod
    def _coalesce(self, block: Block) -> Block:
        """Merge with free neighbours of the segment, and file the result in its pool."""

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map pages behind the lowest hole (and the free block before it) that is long enough."""
        block = self._hole(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            hole = block.next
            mapped = None if hole is None else self._map(hole, min(size - block.size, hole.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _hole(self, pool: Pool, size: int) -> Block:
        for _, hole in pool.unmapped:
            before = hole.prev
            start = before if before is not None and not before.used and not before.uses else hole
            room = 0
            block: Block | None = start
            while room < size and block is not None and not block.used and not block.uses:
                room += block.size
                block = block.next
            if room >= size:
                return start
        page = pool.page_bytes
        span = max(self.capacity_bytes if self.capacity_bytes < UNLIMITED_BYTES else 2**40, size) * 9 // 8
        span = -(-span // page) * page
        return self._space(pool, self._place(span), span)

    def _space(self, pool: Pool, address: int, span: int) -> Block:
        """A new expandable segment: address space without memory."""
        hole = Block(address, span, pool)
        hole.mapped, hole.expandable = False, True
        self.segments[address] = (span, hole)
        insort(pool.unmapped, (address, hole))
        return hole

    def _adopt_range(self, pool: Pool, address: int, num_bytes: int) -> Block:
        """Cut a mapped range out of the pool's last hole, or out of a segment that begins with it."""
        hole = pool.unmapped[-1][1] if pool.unmapped else self._space(pool, address, ADOPTED_SPAN_BYTES)
        if address > hole.address:
            hole = split(hole, address - hole.address)
        else:
            del pool.unmapped[-1]
        after = split(hole, num_bytes)
        insort(pool.unmapped, (after.address, after))
        hole.mapped = True
        return hole

    def _map(self, hole: Block, num_bytes: int) -> Block | None:
        """Give pages to the front of a hole, merged with free neighbours; the block that contains them."""
        pool = hole.pool
        page = pool.page_bytes
        num_bytes = -(-num_bytes // page) * page
        if self.reserved_bytes + num_bytes > self.capacity_bytes:
            return None
        del pool.unmapped[bisect_left(pool.unmapped, (hole.address,))]
        if hole.size > num_bytes:
            rest = split(hole, num_bytes)
            insort(pool.unmapped, (rest.address, rest))
        hole.mapped = True
        self._reserve(num_bytes)
        self._on_driver("segment_map", hole.address, hole.size)
        return self._coalesce(hole)

    def unmap(self, block: Block) -> None:
        """Return the whole pages inside a free block of an expandable segment."""
        pool = block.pool
        page, origin = pool.page_bytes, block
        while origin.prev is not None:
            origin = origin.prev
        base = origin.address  # pages count from the segment's start
        first = base - (base - block.address) // page * page
        last = base + (block.address + block.size - base) // page * page
        if last <= first:
            return
        pool.remove(block)
        if first > block.address:
            tail = split(block, first - block.address)
            pool.insert(block)
            block = tail
        if block.address + block.size > last:
            pool.insert(split(block, last - block.address))
        block.mapped = False
        self.reserved_bytes -= block.size
        self._on_driver("segment_unmap", block.address, block.size)
        block = merge(block, lambda b: pool.unmapped.remove((b.address, b)))
        if block.prev is None and block.next is None:
            del self.segments[block.address]  # nothing of it is mapped any more: the addresses go back as well
        else:
            insort(pool.unmapped, (block.address, block))
