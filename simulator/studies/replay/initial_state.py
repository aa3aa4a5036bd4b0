"""The allocator's state before a recording's first event: its last segments, with the events undone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from simulator.base.errors import InputError
from simulator.memory.allocator import Block, CachingAllocator, round_request
from simulator.memory.allocator.blocks import LARGE_SEGMENT_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES
from simulator.studies.replay.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    RecordedEvent,
    Recording,
)


@dataclass(slots=True)
class Live:
    """A block in use at the start. size_bytes: None where only its request is known. awaiting: its free was asked for."""

    requested_bytes: int
    size_bytes: int | None
    awaiting: bool = False


class InitialState:
    """Segments and live blocks before the first event, by address."""

    def __init__(self, recording: Recording) -> None:
        self._place = recording.name
        self._settings = recording.settings
        self.segments: dict[int, tuple[int, int, bool]] = {}  # address -> (bytes, stream, is small)
        self.ranges: dict[int, tuple[int, int, bool]] = {}  # the same of mapped ranges of expandable segments
        self.live: dict[int, Live] = {}
        self.num_assumed = 0  # blocks that may be up to 1 MiB larger than their request: no event shows where they end
        for segment in recording.segments:
            found = self.ranges if segment.is_expandable else self.segments
            found[segment.address] = (segment.total_bytes, segment.stream, segment.is_small)
            for block in segment.blocks:
                if block.is_active:
                    awaiting = not block.is_allocated
                    self.live[block.address] = Live(block.requested_bytes, block.size_bytes, awaiting)
        self._spaces = self._kinds_of_ranges(recording)
        for event in reversed(recording.events):
            self._undo(event)
        self._find_slack(recording.events)
        self.origins = self._origins(recording.events)

    def _undo(self, event: RecordedEvent) -> None:
        action, address, size, stream, _ = event
        if action == ALLOC:
            self.live.pop(address, None)
        elif action == FREE_COMPLETED:
            self.live[address] = Live(size, None, awaiting=True)
        elif action == FREE_REQUESTED:
            self.live.setdefault(address, Live(size, None)).awaiting = False
        elif action == SEGMENT_ALLOC:
            self.segments.pop(address, None)
        elif action == SEGMENT_FREE:
            self.segments[address] = (size, stream, size == SMALL_SEGMENT_BYTES)
        elif action == SEGMENT_MAP:
            self._cut(address, size)
        elif action == SEGMENT_UNMAP:
            self._join(address, size, stream)

    def _kinds_of_ranges(self, recording: Recording) -> list[tuple[int, int, bool]]:
        """(address, stream, is small) of every range that is known, for events that say only their stream."""
        found = [(address, stream, small) for address, (_, stream, small) in self.ranges.items()]
        for action, address, size, stream, _ in recording.events:
            # large pages are of 20 MiB, a small pool maps 2 MiB at a time
            if action == SEGMENT_MAP or (action == SEGMENT_UNMAP and size % LARGE_SEGMENT_BYTES):
                found.append((address, stream, size % LARGE_SEGMENT_BYTES != 0))
        return found

    def _origins(self, events: Iterable[RecordedEvent]) -> dict[tuple[int, bool], int]:
        """(stream, is small) -> the lowest address that its expandable segment shows before nothing of it is mapped."""
        mapped: Counter[tuple[int, bool]] = Counter()
        origins: dict[tuple[int, bool], int] = {}
        for address, (size, stream, small) in sorted(self.ranges.items()):
            mapped[stream, small] += size
            origins.setdefault((stream, small), address)
        for action, address, size, stream, _ in events:
            if action not in (SEGMENT_MAP, SEGMENT_UNMAP):
                continue
            key = (stream, self._is_small(self._spaces, address, size, stream))
            if mapped[key] <= 0:
                continue
            mapped[key] += size if action == SEGMENT_MAP else -size
            origins[key] = min(origins[key], address)
        return origins

    @staticmethod
    def _is_small(ranges: list[tuple[int, int, bool]], address: int, size: int, stream: int) -> bool:
        """The pool of an unmapping: ten small pages look like a large one, so then that of the stream's nearest range."""
        if size % LARGE_SEGMENT_BYTES:
            return True
        near = [(abs(at - address), small) for at, owner, small in ranges if owner == stream]
        return min(near)[1] if near else False

    def _cut(self, address: int, size: int) -> None:
        """Unmap a range again."""
        starts = sorted(self.ranges)
        at = bisect_right(starts, address) - 1
        if at < 0:
            return
        start = starts[at]
        total, stream, small = self.ranges[start]
        if address >= start + total:
            return
        del self.ranges[start]
        if address > start:
            self.ranges[start] = (address - start, stream, small)
        end = start + total
        if address + size < end:
            self.ranges[address + size] = (end - address - size, stream, small)

    def _join(self, address: int, size: int, stream: int) -> None:
        """Map a range again, one with its neighbours."""
        small = self._is_small(self._spaces, address, size, stream)
        after = self.ranges.pop(address + size, None)
        total = size + (after[0] if after else 0)
        for start, (length, owner, kind) in self.ranges.items():
            if start + length == address and (owner, kind) == (stream, small):
                self.ranges[start] = (length + total, stream, small)
                return
        self.ranges[address] = (total, stream, small)

    def _find_slack(self, events: Iterable[RecordedEvent]) -> None:
        """A block that begins up to 1 MiB behind one still in use shows where that one ends: no smaller rest is free."""
        starts = sorted(self.live)
        segments = sorted(self.segments)
        for action, address, size, _, _ in events:
            at = bisect_right(starts, address) - 1
            if at < 0 or action not in (ALLOC, FREE_COMPLETED):
                continue
            start = starts[at]
            live = self.live[start]
            if action == FREE_COMPLETED and start == address:
                del starts[at]
            elif action == ALLOC and live.size_bytes is None and size > SMALL_BYTES:
                same = bisect_right(segments, start) == bisect_right(segments, address)
                if same and 0 < address - start - self._rounded(live) <= SMALL_BYTES:
                    live.size_bytes = address - start

    def _rounded(self, live: Live) -> int:
        return round_request(live.requested_bytes, self._settings.roundup_power2_divisions)

    def fill(self, allocator: CachingAllocator) -> dict[int, Block]:
        """Put the state into an empty allocator; its blocks in use by address.

        Raises InputError where live blocks lie outside every segment or over each other: events are lost.
        """
        inside = self._by_segment()
        for (stream, small), origin in sorted(self.origins.items()):
            allocator.adopt_space(origin, stream, small=small)
        for start in sorted(inside):
            expandable = start in self.ranges
            total, stream, small = self.ranges[start] if expandable else self.segments[start]
            live = self._blocks(
                inside[start], start + total, tight=small or expandable or self._settings.expandable_segments
            )
            allocator.adopt(start, total, stream, small=small, live=live, expandable=expandable)
        at = {block.address: block for block in allocator.blocks() if block.used}
        for address, block in self.live.items():
            if block.awaiting:
                allocator.request_free(at[address])
        return at

    def owners(self) -> Iterator[tuple[int, int]]:
        """(address, stream) of the live blocks, in order of address."""
        for start, addresses in self._by_segment().items():
            stream = (self.ranges if start in self.ranges else self.segments)[start][1]
            for address in addresses:
                yield address, stream

    def _by_segment(self) -> dict[int, list[int]]:
        sizes = {**self.segments, **self.ranges}
        starts = sorted(sizes)
        inside: dict[int, list[int]] = {start: [] for start in starts}
        for address in sorted(self.live):
            at = bisect_right(starts, address) - 1
            if at < 0 or address >= starts[at] + sizes[starts[at]][0]:
                problem = f"the block at {address} is in use before the first event, and lies in no segment"
                raise InputError.at(self._place, problem, "events are lost: record them all")
            inside[starts[at]].append(address)
        return inside

    def _blocks(self, addresses: list[int], end: int, *, tight: bool) -> list[tuple[int, int, int]]:
        """A large pool never leaves a free rest of up to 1 MiB, and cuts no block beyond the split limit.

        What is left there belongs to the block before it.
        """
        rows = []
        for address, after in zip(addresses, [*addresses[1:], end][: len(addresses)], strict=True):
            live = self.live[address]
            size = live.size_bytes or self._rounded(live)
            slack = after - address - size
            unsplit = slack <= SMALL_BYTES or size >= self._settings.max_split_size_bytes
            if live.size_bytes is None and not tight and slack > 0:
                self.num_assumed += not unsplit
                size = after - address if unsplit else size
            if address + size > after:
                problem = (
                    f"the block at {address} of {size} bytes reaches into the one at {after} before the first event"
                )
                raise InputError.at(self._place, problem, "events are lost: record them all")
            rows.append((address, size, live.requested_bytes))
        return rows
