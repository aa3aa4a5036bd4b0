"""A recording: the events of a CUDA memory snapshot as plain numbers, read by `simulator.formats.readers.snapshot`."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.memory.allocator import AllocatorSettings

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
)

# (action, address, bytes, stream, time in microseconds); bytes as asked for, of segments as taken from the driver.
# A stream with a private memory pool is a stream of its own.
RecordedEvent = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """A piece of a segment at the end. state: active_allocated, active_awaiting_free or inactive."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: str

    @property
    def is_active(self) -> bool:
        return self.state != "inactive"

    @property
    def is_allocated(self) -> bool:
        return self.state == "active_allocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """What the driver gave, and how it is cut up at the end; of an expandable segment, one contiguous mapped range."""

    address: int
    total_bytes: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One device's events in order, and its segments after the last of them.

    notes: what the reader left out, repaired or assumed, for the reader of the answer.
    """

    name: str
    device: int
    events: tuple[RecordedEvent, ...]
    segments: tuple[RecordedSegment, ...]
    settings: AllocatorSettings
    notes: tuple[str, ...] = ()
