"""A history played through the caching allocator event by event, and what becomes of it where memory has an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from simulator.memory.tape import FREE, FREE_LATER, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """A steady step under a limit.

    num_retries: how often the allocator gives its whole cache back because a request does not fit beside it.
    malloc_calls, malloc_bytes, free_calls, free_bytes: what it takes from the driver and gives back in the step.
    fails: a request does not fit even then; the counts end there.
    """

    num_retries: int
    malloc_calls: int
    malloc_bytes: int
    free_calls: int
    free_bytes: int
    fails: bool


class DriverCalls:
    """What an allocator takes from the driver and gives back, told call by call."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[str, int]] = []

    def __call__(self, call: str, address: int, num_bytes: int) -> None:  # noqa: ARG002  where it lies does not count
        self._calls.append((call, num_bytes))

    def clear(self) -> None:
        """Forget what was before the steady step."""
        self._calls.clear()

    def pressure(self, num_retries: int = 0, *, fails: bool = False) -> Pressure:
        """The calls since, counted."""
        taken = [size for call, size in self._calls if call in ("segment_alloc", "segment_map")]
        given = [size for call, size in self._calls if call in ("segment_free", "segment_unmap")]
        return Pressure(
            num_retries=num_retries,
            malloc_calls=len(taken),
            malloc_bytes=sum(taken),
            free_calls=len(given),
            free_bytes=sum(given),
            fails=fails,
        )


def drive(events: list[Event], allocator: CachingAllocator) -> Iterator[tuple[int, Event, Block | None]]:
    """(index, event, its block) after each event has been played. Raises OutOfMemoryError where one does not fit."""
    blocks: dict[int, Block] = {}
    for index, event in enumerate(events):
        slot, num_bytes, stream, _ = event
        block = None
        if num_bytes >= 0:
            block = blocks[slot] = allocator.malloc(num_bytes, stream)
        elif num_bytes in (FREE, FREE_LATER):
            block = blocks.pop(slot)
            if num_bytes == FREE_LATER:
                allocator.record_stream(block, stream)
            allocator.free(block)
        else:
            allocator.synchronize(stream)
        yield index, event, block


def under_pressure(
    events: list[Event], steady: int, limit_bytes: int, settings: AllocatorSettings | None = None
) -> Pressure:
    """Play the events where the driver has `limit_bytes` for the allocator; those from `steady` on are counted."""
    calls = DriverCalls()
    allocator = CachingAllocator(settings, capacity_bytes=limit_bytes, on_driver=calls)
    retries_before, fails = 0, False
    try:
        for index, _, _ in drive(events, allocator):
            if index + 1 == steady:
                calls.clear()
                retries_before = allocator.num_retries
    except OutOfMemoryError:
        fails = True
    return calls.pressure(allocator.num_retries - retries_before, fails=fails)
