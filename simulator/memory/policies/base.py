"""What every pool policy can do, so that one sequence of requests can be played on each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from simulator.memory.allocator import OutOfMemoryError
from simulator.memory.allocator.blocks import MIN_BLOCK_BYTES, UNLIMITED_BYTES, OnDriver, ignore_call

# What a request is for, as far as a policy may ask. ACTIVATION: kept from the forward to the backward.
PERSISTENT, ACTIVATION, TEMPORARY = range(3)
KINDS = ("persistent", "activation", "temporary")

HandleT = TypeVar("HandleT")


def rounded(num_bytes: int, unit: int = MIN_BLOCK_BYTES) -> int:
    """Up to a multiple of `unit`, at least one."""
    return max(unit, -(-num_bytes // unit) * unit)


class Counts(Protocol):
    """What a pool counts, as the caching allocator does too."""

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    num_retries: int


class Pool(ABC, Generic[HandleT]):
    """Memory of one device under one policy.

    A block is allocated until its free is requested, and active until that is complete: only then may it be reused,
    and only by its own stream, as without waiting for each other two streams cannot share it.
    """

    counts: Counts

    @property
    def allocated_bytes(self) -> int:
        """Of blocks whose free was not requested, as they were rounded."""
        return self.counts.allocated_bytes

    @property
    def active_bytes(self) -> int:
        """Of blocks that cannot be reused."""
        return self.counts.active_bytes

    @property
    def reserved_bytes(self) -> int:
        """Taken from the driver."""
        return self.counts.reserved_bytes

    @property
    def num_retries(self) -> int:
        """How often the cache was given back because a request did not fit beside it."""
        return self.counts.num_retries

    @abstractmethod
    def malloc(self, num_bytes: int, stream: int, kind: int) -> HandleT:
        """A block of at least `num_bytes`. Raises OutOfMemoryError."""

    @abstractmethod
    def request_free(self, handle: HandleT) -> None:
        """The program is done with it; other streams may not be."""

    @abstractmethod
    def complete_free(self, handle: HandleT) -> None:
        """No stream uses it any more: release it."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give back to the driver whatever is wholly free."""

    @abstractmethod
    def largest_free_bytes(self) -> int:
        """The largest request that reserved memory can serve on some stream."""

    @abstractmethod
    def pieces(self, handle: HandleT) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of what a block occupies."""


@dataclass(slots=True)
class OwnCounts:
    """Of a pool that counts for itself."""

    allocated_bytes: int = 0
    active_bytes: int = 0
    reserved_bytes: int = 0
    num_retries: int = 0


class OwnPool(Pool[HandleT]):
    """A pool that counts for itself what it takes from the driver."""

    def __init__(self, capacity_bytes: int | None = None, on_driver: OnDriver = ignore_call) -> None:
        self.counts = OwnCounts()
        self._capacity = UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
        self._on_driver = on_driver

    def _count(self, size: int) -> None:
        self.counts.allocated_bytes += size
        self.counts.active_bytes += size

    def _take(self, call: str, address: int, num_bytes: int) -> None:
        """Take memory from the driver; the cache is emptied if that is what it needs. Raises OutOfMemoryError."""
        counts = self.counts
        if counts.reserved_bytes + num_bytes > self._capacity:
            counts.num_retries += 1
            self.empty_cache()
        if counts.reserved_bytes + num_bytes > self._capacity:
            msg = f"{num_bytes} bytes do not fit: {counts.reserved_bytes} of {self._capacity} are reserved"
            raise OutOfMemoryError(msg, counts.reserved_bytes + num_bytes)
        counts.reserved_bytes += num_bytes
        self._on_driver(call, address, num_bytes)

    def _give(self, call: str, address: int, num_bytes: int) -> None:
        self.counts.reserved_bytes -= num_bytes
        self._on_driver(call, address, num_bytes)


ENDLESS = 2**59
Slot = tuple[int, int]  # (offset, bytes)


class FirstFitRange:
    """A range of `num_bytes`. free: what is free of it, in order. highest: the end of the highest slot there ever was."""

    def __init__(self, num_bytes: int = ENDLESS) -> None:
        self.free: list[Slot] = [(0, num_bytes)]
        self.highest = 0

    def put(self, size: int) -> int | None:
        """The offset of a new slot; None where none is free."""
        for index, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self.highest = max(self.highest, offset + size)
                return offset
        return None

    def take(self, slot: Slot) -> None:
        """Free a slot."""
        insort(self.free, slot)
        at = bisect_left(self.free, slot)
        for left in (at, at - 1):
            if 0 <= left < len(self.free) - 1:
                (offset, size), (after, more) = self.free[left : left + 2]
                if offset + size == after:
                    self.free[left : left + 2] = [(offset, size + more)]
