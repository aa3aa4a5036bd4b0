"""A history played through the caching allocator event by event, and what becomes of it where memory has an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator, OutOfMemoryError
from simulator.memory.history import History, played, step_reserved_bytes
from simulator.memory.tape import DONE, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """A steady step under a limit.

    peak_reserved_bytes: the most that is reserved; where a request fails, what it needed.
    num_retries: how often the allocator gives its whole cache back because a request does not fit beside it.
    malloc_calls, malloc_bytes, free_calls, free_bytes: what it takes from the driver and gives back in the step.
    fails: a request does not fit even then; the counts end there.
    """

    peak_reserved_bytes: int
    num_retries: int
    malloc_calls: int
    malloc_bytes: int
    free_calls: int
    free_bytes: int
    fails: bool


def pressure_of(
    calls: Mapping[str, int], sizes: Mapping[str, int], peak_reserved_bytes: int, num_retries: int, *, fails: bool
) -> Pressure:
    """From the driver's calls and their bytes, by name."""
    taken, given = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
    return Pressure(
        peak_reserved_bytes=peak_reserved_bytes,
        num_retries=num_retries,
        malloc_calls=sum(calls.get(one, 0) for one in taken),
        malloc_bytes=sum(sizes.get(one, 0) for one in taken),
        free_calls=sum(calls.get(one, 0) for one in given),
        free_bytes=sum(sizes.get(one, 0) for one in given),
        fails=fails,
    )


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

    def pressure(self, peak_reserved_bytes: int, num_retries: int = 0, *, fails: bool = False) -> Pressure:
        """The calls since, counted."""
        counts, sizes = Counter(call for call, _ in self._calls), Counter[str]()
        for call, size in self._calls:
            sizes[call] += size
        return pressure_of(counts, sizes, peak_reserved_bytes, num_retries, fails=fails)


def drive(events: Iterable[Event], allocator: CachingAllocator) -> Iterator[tuple[int, Event, Block | None]]:
    """(index, event, its block) after each event has been played. Raises OutOfMemoryError where one does not fit."""
    blocks: dict[int, Block] = {}
    for index, event in enumerate(events):
        slot, num_bytes, _, _ = event
        freed = blocks.get(slot)
        played((event,), allocator, blocks)
        yield index, event, None if num_bytes == DONE else blocks.get(slot, freed)


def under_pressure(
    history: History, limit_bytes: int, settings: AllocatorSettings | None = None
) -> tuple[Pressure, list[int]]:
    """Play a history where the driver has `limit_bytes` for the allocator; the steady step is counted.

    Also what is reserved at the end of each of its moments; nothing where a request fails.
    """
    calls = DriverCalls()
    allocator = CachingAllocator(settings, capacity_bytes=limit_bytes, on_driver=calls)
    retries_before = 0

    def at_steady() -> None:
        nonlocal retries_before
        calls.clear()
        retries_before, allocator.peak_reserved_bytes = allocator.num_retries, allocator.reserved_bytes

    try:
        reserved = step_reserved_bytes(history, allocator, at_steady)
    except OutOfMemoryError as exc:
        return calls.pressure(exc.needed_bytes, allocator.num_retries - retries_before, fails=True), []
    return calls.pressure(allocator.peak_reserved_bytes, allocator.num_retries - retries_before), reserved
