"""The caching allocator itself: which blocks it hands out, which segments it takes from the driver.

It has no clock: it is driven by an ordered sequence of `malloc` and `free`, so it can replay a sequence recorded on a
real GPU on a machine without one. Rules and constants: PyTorch's `c10/cuda/CUDACachingAllocator.cpp` and its headers
(torch 2.11-2.13); `tests/replay` holds them against recorded traces, address by address.

    request -> round to 512 B -> small (<= 1 MiB) or large pool of its stream -> best fit, split | new segment
    free    -> coalesce with free neighbours of the segment -> back to its stream's pool; segments stay reserved
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from typing_extensions import override

from simulator.base.errors import ShardwiseError
from simulator.memory.allocator.blocks import (
    MIN_BLOCK_BYTES,
    NO_STREAMS,
    SEGMENT_ROUND_BYTES,
    SMALL_BYTES,
    UNLIMITED_BYTES,
    AllocatorSettings,
    Block,
    OnDriver,
    Pool,
    ignore_call,
    least_expandable,
    round_request,
    segment_bytes,
    split,
)
from simulator.memory.allocator.expandable import ADOPTED_SPAN_BYTES, ExpandableSegments


class OutOfMemoryError(ShardwiseError):
    """The driver's memory is used up even after every cached segment was returned.

    needed_bytes: what is reserved then, and the segment that was asked for; 0: unknown.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class CachingAllocator(ExpandableSegments):
    """One device's allocator.

    capacity_bytes: what the driver can give (None: no limit). place: gives the address of a new segment of so many
    bytes; addresses only break ties between equally large free blocks. on_driver: is told (call, address, bytes) of
    each segment_alloc, segment_free, segment_map and segment_unmap. Figures without `peak_` are current.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
        place: Callable[[int], int] | None = None,
        on_driver: OnDriver | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.segments: dict[int, tuple[int, Block]] = {}  # address -> (bytes, first block)
        self._place = place or self._next_address
        self._on_driver = on_driver or ignore_call
        self._top = 2**40
        self._pending: list[Block] = []
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.active_bytes = self.peak_active_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0

    # --- what a program calls

    def malloc(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least `num_bytes` for `stream`. Raises OutOfMemoryError."""
        settings = self.settings
        divisions = settings.roundup_power2_divisions
        size = round_request(num_bytes, divisions) if divisions or num_bytes < 1 else (num_bytes + 511) & -512
        small = size <= SMALL_BYTES
        pool = self.pools.get((stream, small)) or self.new_pool(stream, small=small)
        block = self._find(pool, size) or self.from_driver(pool, size)
        remaining = block.size - size
        if small or settings.expandable_segments:
            cut = remaining >= MIN_BLOCK_BYTES
        else:
            cut = remaining > SMALL_BYTES and size < settings.max_split_size_bytes
        if cut:
            pool.insert(split(block, size))
        block.used = True
        block.requested = num_bytes
        self._count(block.size, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back. Blocks other streams still use stay active until `synchronize` of those streams."""
        self.request_free(block)
        if block.uses:
            self._pending.append(block)
        else:
            self.complete_free(block)

    def request_free(self, block: Block) -> None:
        """The program gives a block back that other streams may still read: active until `complete_free`."""
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested

    def complete_free(self, block: Block) -> None:
        """No stream uses the block any more, and its free was requested: release it."""
        block.used = False
        self.active_bytes -= block.size
        self._coalesce(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream reads the block: a later `free` waits for it."""
        if stream != block.pool.stream:
            block.uses |= {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """All work enqueued so far on `stream` (None: on every stream) is done: pending frees complete."""
        waiting: list[Block] = []
        for block in self._pending:
            block.uses = NO_STREAMS if stream is None else block.uses - {stream}
            if block.uses:
                waiting.append(block)
            else:
                self.complete_free(block)
        self._pending = waiting

    def empty_cache(self) -> None:
        """Return every segment that is one free block (expandable: every wholly free page) to the driver."""
        self.synchronize()
        for pool in self.pools.values():
            for _, _, block in list(pool.free):
                if block.expandable:
                    self.unmap(block)
                elif block.prev is None and block.next is None:
                    self._drop_segment(block)

    def adopt(
        self,
        address: int,
        num_bytes: int,
        stream: int,
        *,
        small: bool,
        live: Iterable[tuple[int, int, int]],
        expandable: bool = False,
    ) -> None:
        """Take over a segment as it is: `live` are the (address, block bytes, requested bytes) in use, in order.

        expandable: it is one mapped range; ranges of one stream and size come in order of address and share a segment.
        """
        pool = self.pools.get((stream, small)) or self.new_pool(stream, small=small)
        if expandable:
            rest = self._adopt_range(pool, address, num_bytes)
        else:
            rest = Block(address, num_bytes, pool)
            self.segments[address] = (num_bytes, rest)
        self._reserve(num_bytes)
        for start, size, requested in live:
            block = rest if start == rest.address else split(rest, start - rest.address)
            if block is not rest:
                pool.insert(rest)
            end = start + size
            tail = None if end == block.address + block.size else split(block, size)
            block.used, block.requested = True, requested
            self._count(size, requested)
            if tail is None:
                return
            rest = tail
        pool.insert(rest)

    def adopt_space(self, address: int, stream: int, *, small: bool) -> None:
        """Take over the address space of an expandable segment, nothing of which is mapped yet."""
        pool = self.pools.get((stream, small)) or self.new_pool(stream, small=small)
        self._space(pool, address, ADOPTED_SPAN_BYTES)

    def empty_segment(self, address: int) -> None:
        """Return the wholly free segment at `address` to the driver. Raises KeyError where there is none."""
        block = self.segments[address][1]
        if block.used or block.next is not None:
            raise KeyError(address)
        self._drop_segment(block)

    def blocks(self) -> Iterator[Block]:
        """Every mapped block, segment by segment in order of address."""
        for address in sorted(self.segments):
            block: Block | None = self.segments[address][1]
            while block is not None:
                if block.mapped:
                    yield block
                block = block.next

    # --- searching and splitting

    def _find(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        pool.searches += 1
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        block = free[at][2]
        if block.expandable:
            at = least_expandable(free, at)
            block = free[at][2]
        limit = self.settings.max_split_size_bytes
        if limit != UNLIMITED_BYTES:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        del free[at]
        return block

    def from_driver(self, pool: Pool, size: int) -> Block:
        """A block for which no cached one is large enough. Raises OutOfMemoryError."""
        if self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        for attempt in (lambda *_: True, self._release_oversize, self._retry):
            if attempt(pool, size):
                block = self._expand(pool, size) if self.settings.expandable_segments else self._segment(pool, size)
                if block is not None:
                    return block
        msg = f"{size} bytes do not fit: {self.reserved_bytes} of {self.capacity_bytes} are reserved"
        raise OutOfMemoryError(msg, self.reserved_bytes + segment_bytes(size, self.settings.large_segment_bytes))

    def _retry(self, pool: Pool, size: int) -> bool:  # noqa: ARG002  last try: after emptying the cache
        self.num_retries += 1
        self.empty_cache()
        return True

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With a finite split limit, oversize cached segments of the pool are returned first."""
        limit = self.settings.max_split_size_bytes
        if limit == UNLIMITED_BYTES or self.settings.expandable_segments:
            return False
        at = bisect_left(pool.free, (max(size, limit),))
        if at < len(pool.free):
            self._drop_segment(pool.free[at][2])
            return True
        released = 0
        for _, _, block in reversed(pool.free[:]):
            if block.size < limit or released >= size:
                break
            released += block.size
            self._drop_segment(block)
        return released >= size

    def _segment(self, pool: Pool, size: int) -> Block | None:
        num_bytes = segment_bytes(size, self.settings.large_segment_bytes)
        if self.reserved_bytes + num_bytes > self.capacity_bytes:
            return None
        block = Block(self._place(num_bytes), num_bytes, pool)
        self.segments[block.address] = (num_bytes, block)
        self._reserve(num_bytes)
        self._on_driver("segment_alloc", block.address, num_bytes)
        return block

    def _next_address(self, num_bytes: int) -> int:
        address = self._top
        self._top += -(-num_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        return address

    # --- freeing

    @override
    def _coalesce(self, block: Block) -> Block:
        pool = block.pool
        prev, after = block.prev, block.next
        if prev is not None and not prev.used and prev.mapped:
            pool.remove(prev)
            prev.size += block.size
            prev.next = after
            if after is not None:
                after.prev = prev
            block = prev
        if after is not None and not after.used and after.mapped:
            pool.remove(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.prev = block
        block.born = pool.searches
        insort(pool.free, (block.size, block.address, block))
        return block

    def _drop_segment(self, block: Block) -> None:
        block.pool.remove(block)
        del self.segments[block.address]
        self.reserved_bytes -= block.size
        self._on_driver("segment_free", block.address, block.size)

    def _collect_garbage(self) -> None:
        """Return old, unsplit large segments while more than the threshold of the capacity is reserved."""
        target = int(self.settings.garbage_collection_threshold * self.capacity_bytes)
        while self.reserved_bytes > target:
            idle = [
                (pool.searches - block.born, block)
                for (_, small), pool in self.pools.items()
                if not small
                for _, _, block in pool.free
                if block.prev is None and block.next is None and not block.expandable
            ]
            if not idle:
                return
            mean_age = sum(age for age, _ in idle) / len(idle)
            for age, block in idle:
                if age >= mean_age and self.reserved_bytes > target:
                    self._drop_segment(block)

    # --- counters

    def new_pool(self, stream: int, *, small: bool) -> Pool:
        """The first block of a stream and a size class is asked for."""
        pool = self.pools[stream, small] = Pool(stream, small=small, large_bytes=self.settings.large_segment_bytes)
        return pool

    @override
    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _count(self, size: int, requested: int) -> None:
        """A block is handed out. A search does so millions of times."""
        self.allocated_bytes = now = self.allocated_bytes + size
        if now > self.peak_allocated_bytes:  # noqa: PLR1730  quicker than max
            self.peak_allocated_bytes = now
        self.active_bytes = now = self.active_bytes + size
        if now > self.peak_active_bytes:  # noqa: PLR1730
            self.peak_active_bytes = now
        self.requested_bytes = now = self.requested_bytes + requested
        if now > self.peak_requested_bytes:  # noqa: PLR1730
            self.peak_requested_bytes = now
