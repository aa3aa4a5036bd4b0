"""Exact replay: the recorded requests through our allocator; every address, segment and counter compared.

What the program did is taken from the recording (requests, frees, emptying the cache); what the allocator did is
predicted (addresses, segments, pages). After a difference the recorded address stands for ours, so that one difference
is not counted again with every later free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from simulator.base.errors import InputError
from simulator.memory.allocator import Block, CachingAllocator, OutOfMemoryError
from simulator.memory.allocator.blocks import UNLIMITED_BYTES
from simulator.studies.replay.initial_state import InitialState
from simulator.studies.replay.recording import (
    ACTIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    RecordedEvent,
    Recording,
)

_NOWHERE = 2**60  # addresses of segments that were not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One event that ours did otherwise."""

    index: int
    event: str
    recorded: str
    replayed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many of the recorded ones ours did the same; extra: ours that were not recorded."""

    total: int
    matched: int
    extra: int = 0

    @property
    def is_exact(self) -> bool:
        return self.matched == self.total and not self.extra


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What an exact replay found. counters: name -> (recorded, replayed), after the last event.

    allocations: by address. taken, returned: what the driver was asked for and given back (segments; pages of
    expandable ones), by address and size. segments, blocks: how they lie at the end. The snapshot holds no peaks;
    ours stand in `peaks`.
    """

    name: str
    num_events: int
    allocations: Tally
    taken: Tally
    returned: Tally
    segments: Tally
    blocks: Tally
    counters: dict[str, tuple[int, int]]
    peaks: dict[str, int]
    first_mismatch: Mismatch | None
    notes: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        tallies = (self.allocations, self.taken, self.returned, self.segments, self.blocks)
        return all(tally.is_exact for tally in tallies) and all(a == b for a, b in self.counters.values())


def replay(recording: Recording) -> ReplayReport:
    """Replay a recording and compare. Raises InputError if its initial state cannot be rebuilt."""
    run = Replay(recording)
    try:
        run.play(recording.events)
    except OutOfMemoryError as exc:
        raise InputError.at(recording.name, f"no device has so much memory: {exc}") from None
    return run.report()


class Replay:
    """A run: an allocator, its blocks by recorded address, and the driver's recorded answers not yet used."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.allocator = CachingAllocator(recording.settings, place=self._place, on_driver=self._compare_call)
        start = InitialState(recording)
        self.at: dict[int, Block] = start.fill(self.allocator)
        self.num_assumed = start.num_assumed
        self.requested = {address for address, live in start.live.items() if live.awaiting}
        self.counts: Counter[str] = Counter()
        self.first: Mismatch | None = None
        self._given: list[tuple[int, int, int]] = []  # (action, address, bytes)
        self._index = -1
        self._returning = False

    def play(self, events: Iterable[RecordedEvent]) -> None:
        """The next events."""
        at, requested, given = self.at, self.requested, self._given
        malloc, request_free, complete_free = (
            self.allocator.malloc,
            self.allocator.request_free,
            self.allocator.complete_free,
        )
        index, allocations, matched = self._index, 0, 0
        for action, address, size, stream, _ in events:
            index += 1
            if action in (FREE_REQUESTED, FREE_COMPLETED) and address not in at:
                raise InputError.at(f"{self.recording.name}: event {index}", f"frees {address}, which is not in use")
            if action == FREE_REQUESTED:
                request_free(at[address])
                requested.add(address)
            elif action == FREE_COMPLETED:
                block = at.pop(address)
                if address in requested:
                    requested.remove(address)
                else:  # such events can be left out of a recording
                    request_free(block)
                complete_free(block)
            elif action == ALLOC:
                self._index = index
                allocations += 1
                block = at[address] = malloc(size, stream)
                if block.address == address:
                    matched += 1
                else:
                    self._differs("alloc", f"{size} bytes at {address}", f"at {block.address}")
                if given:
                    self._not_taken()
            else:
                self._index = index
                self._driver(action, address, size)
                continue
            if self._returning:
                self._end_of_returns()
        self._index = index
        self.counts["allocations"] += allocations
        self.counts["allocations matched"] += matched

    # --- the driver

    def _driver(self, action: int, address: int, size: int) -> None:
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            self.counts["taken"] += 1
            self._given.append((action, address, size))
        elif action in (SEGMENT_FREE, SEGMENT_UNMAP):
            self.counts["returned"] += 1
            self._given.append((action, address, size))
            self._returning |= action == SEGMENT_FREE
            self._return(action, address, size)
            if self._given:
                self._given.clear()
                self._differs(ACTIONS[action], f"{size} bytes at {address}", "that is not wholly free")
        elif action == OOM:
            self.counts["out of memory"] += 1

    def _return(self, action: int, address: int, size: int) -> None:
        """Give back what was recorded; `_compare_call` takes it off the list."""
        if action == SEGMENT_FREE:
            with suppress(KeyError):
                self.allocator.empty_segment(address)
            return
        for pool in self.allocator.pools.values():
            for _, _, block in pool.free:
                if block.expandable and block.address <= address and address + size <= block.address + block.size:
                    self.allocator.unmap(block)
                    return

    def _end_of_returns(self) -> None:
        """PyTorch gives back every cached segment at once, unless it was told to keep some or there are private pools."""
        self._returning = False
        settings = self.recording.settings
        if settings.max_split_size_bytes != UNLIMITED_BYTES or settings.garbage_collection_threshold:
            return
        if any(stream < 0 for stream, _ in self.allocator.pools):
            return
        for pool in self.allocator.pools.values():
            for _, _, block in pool.free:
                if not block.expandable and block.prev is None and block.next is None:
                    self.counts["returned extra"] += 1
                    self._differs("segment_free", "kept", f"{block.size} bytes at {block.address} go back as well")

    def _place(self, num_bytes: int) -> int:
        """The address that the driver gave in the recording; another one where ours, after a difference, is in the way."""
        if self._given and (self.first is None or self._is_free(self._given[0][1], num_bytes)):
            return self._given[0][1]
        self.counts["nowhere"] += 1
        return _NOWHERE + self.counts["nowhere"] * 2**42

    def _is_free(self, address: int, num_bytes: int) -> bool:
        return not any(
            start == address if block.expandable else start < address + num_bytes and address < start + size
            for start, (size, block) in self.allocator.segments.items()
        )

    def _compare_call(self, call: str, address: int, num_bytes: int) -> None:
        kind = "taken" if call in ("segment_alloc", "segment_map") else "returned"
        if not self._given:
            self.counts[f"{kind} extra"] += 1
            self._differs("alloc", "a cached block", f"{call} of {num_bytes} bytes")
            return
        recorded = self._given.pop(0)
        if recorded == (ACTIONS.index(call), address, num_bytes):
            self.counts[f"{kind} matched"] += 1
        else:
            action, at, size = recorded
            self._differs(ACTIONS[action], f"{size} bytes at {at}", f"{call} of {num_bytes} bytes at {address}")

    def _not_taken(self) -> None:
        """The recorded allocator allocated a segment where ours had a cached block."""
        action, address, size = self._given[0]
        self._given.clear()
        self._differs(ACTIONS[action], f"{size} bytes at {address}", "a cached block")

    def _differs(self, event: str, recorded: str, replayed: str) -> None:
        if self.first is None:
            self.first = Mismatch(index=self._index, event=event, recorded=recorded, replayed=replayed)

    # --- the end

    def report(self) -> ReplayReport:
        """The differences found, and how the final state compares with the snapshot's."""
        counts, allocator, recording = self.counts, self.allocator, self.recording
        segments = [(s.address, s.total_bytes) for s in recording.segments]
        blocks = [(b.address, b.size_bytes, b.state) for s in recording.segments for b in s.blocks]
        notes = [f"{counts['out of memory']} times out of memory"] if counts["out of memory"] else []
        if self.first is not None and self.num_assumed:
            notes.append(
                f"{self.num_assumed} blocks in use at the start may be larger than assumed: no event shows their end"
            )
        return ReplayReport(
            name=recording.name,
            num_events=len(recording.events),
            allocations=Tally(total=counts["allocations"], matched=counts["allocations matched"]),
            taken=self._tally("taken"),
            returned=self._tally("returned"),
            segments=_same(segments, self._ranges()),
            blocks=_same(blocks, [(b.address, b.size, self._state(b)) for b in allocator.blocks()]),
            counters=self._counters(),
            peaks={
                "allocated_bytes": allocator.peak_allocated_bytes,
                "active_bytes": allocator.peak_active_bytes,
                "reserved_bytes": allocator.peak_reserved_bytes,
            },
            first_mismatch=self.first,
            notes=(*recording.notes, *notes),
        )

    def _tally(self, kind: str) -> Tally:
        counts = self.counts
        return Tally(total=counts[kind], matched=counts[f"{kind} matched"], extra=counts[f"{kind} extra"])

    def _state(self, block: Block) -> str:
        if not block.used:
            return "inactive"
        return "active_awaiting_free" if block.address in self.requested else "active_allocated"

    def _ranges(self) -> list[tuple[int, int]]:
        """Segments as a snapshot lists them: whole ones, and each contiguous mapped range of expandable ones."""
        found: list[tuple[int, int]] = []
        for block in self.allocator.blocks():
            if block.prev is not None and block.prev.mapped:
                found[-1] = (found[-1][0], found[-1][1] + block.size)
            else:
                found.append((block.address, block.size))
        return found

    def _counters(self) -> dict[str, tuple[int, int]]:
        segments = self.recording.segments
        blocks = [block for segment in segments for block in segment.blocks]
        return {
            "reserved_bytes": (sum(s.total_bytes for s in segments), self.allocator.reserved_bytes),
            "active_bytes": (sum(b.size_bytes for b in blocks if b.is_active), self.allocator.active_bytes),
            "allocated_bytes": (sum(b.size_bytes for b in blocks if b.is_allocated), self.allocator.allocated_bytes),
            "requested_bytes": (
                sum(b.requested_bytes for b in blocks if b.is_allocated),
                self.allocator.requested_bytes,
            ),
        }


def _same(recorded: Sequence[Hashable], replayed: Sequence[Hashable]) -> Tally:
    matched = len(set(recorded) & set(replayed))
    return Tally(total=len(recorded), matched=matched, extra=len(replayed) - matched)
