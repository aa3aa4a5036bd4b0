"""Blocks, the pools of free ones, and how requests are rounded."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB  # requests up to here live in the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # segment of requests between 1 and 10 MiB, page of large expandable segments
MIN_OWN_SEGMENT_BYTES = 10 * MIB  # from here on a request gets a segment of its own ...
SEGMENT_ROUND_BYTES = 2 * MIB  # ... rounded up to this
UNLIMITED_BYTES = 2**62
OnDriver = Callable[[str, int, int], None]  # (call, address, bytes)


def ignore_call(call: str, address: int, num_bytes: int) -> None:
    """Default listener: ignore the driver's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF can say; the defaults are PyTorch's.

    roundup_power2_divisions: 16 numbers for the powers of two 1 MiB .. 64 GiB, or empty (off).
    garbage_collection_threshold: fraction of the capacity, 0 = off.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int = UNLIMITED_BYTES
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0


def round_request(num_bytes: int, divisions: tuple[int, ...] = ()) -> int:
    """Bytes of the block that serves a request: a multiple of 512, at least 512, or a fraction of a power of two."""
    if divisions and num_bytes > MIN_BLOCK_BYTES:
        power = num_bytes.bit_length() - 1
        division = divisions[min(max(power - 20, 0), 15)]
        if division > 1 and num_bytes > MIN_BLOCK_BYTES * division:
            step = max((1 << power) // division, 1)
            return -(-num_bytes // step) * step
    return max(MIN_BLOCK_BYTES, -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def segment_bytes(block_bytes: int, large_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Bytes asked from the driver when no cached block fits."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_OWN_SEGMENT_BYTES:
        return large_bytes
    return -(-block_bytes // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


NO_STREAMS: frozenset[int] = frozenset()


class Block:
    """A piece of a segment. Neighbours are linked; `mapped` is False for expandable address space without memory."""

    __slots__ = ("address", "born", "expandable", "mapped", "next", "pool", "prev", "requested", "size", "used", "uses")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.requested = 0
        self.used = False
        self.uses = NO_STREAMS  # others that still read it; not free before they are done
        self.mapped = True
        self.expandable = False
        self.born = 0  # number of searches when it entered its pool: its age for garbage collection
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks of one stream and one size class, ordered by (size, address)."""

    __slots__ = ("free", "page_bytes", "searches", "small", "stream", "unmapped")

    def __init__(self, stream: int, *, small: bool, large_bytes: int = LARGE_SEGMENT_BYTES) -> None:
        self.page_bytes = SMALL_SEGMENT_BYTES if small else large_bytes  # what an expandable segment grows by
        self.stream = stream
        self.small = small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address
        self.searches = 0

    def insert(self, block: Block) -> None:
        block.born = self.searches
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        free = self.free
        del free[bisect_left(free, (block.size, block.address))]


def split(block: Block, size: int) -> Block:
    """Cut `block` to `size`; the rest becomes its next neighbour, in no pool yet."""
    rest = Block(block.address + size, block.size - size, block.pool)
    rest.mapped, rest.expandable = block.mapped, block.expandable
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
    block.size = size
    return rest


def merge(block: Block, unfile: Callable[[Block], None]) -> Block:
    """Join an unmapped block with unmapped neighbours."""
    before, after = block.prev, block.next
    if after is not None and not after.mapped:
        unfile(after)
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.prev = block
    if before is not None and not before.mapped:
        unfile(before)
        before.size += block.size
        before.next = block.next
        if block.next is not None:
            block.next.prev = before
        block = before
    return block


def least_expandable(free: list[tuple[int, int, Block]], at: int) -> int:
    """A block before unmapped space counts with what it can grow to, so a larger closed block may fit better."""

    def room(block: Block) -> int:
        after = block.next
        return block.size + (after.size if after is not None and not after.mapped else 0)

    while free[at][2].expandable and at + 1 < len(free) and room(free[at + 1][2]) < room(free[at][2]):
        at += 1
    return at
