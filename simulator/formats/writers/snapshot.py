"""The predicted allocator as a CUDA memory snapshot, for PyTorch's memory viewer (https://pytorch.org/memory_viz).

The format is `torch.cuda.memory._dump_snapshot`'s: a pickle of plain containers with `segments`, `device_traces`,
`allocator_settings` and `external_annotations`. Where a recording has a stack of frames, here stands one frame: the
category as the file, the moment of the step as the function. Memory has no clock: `time_us` counts events.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

from simulator.base.files import write_whole
from simulator.base.progress import WRITING, reported
from simulator.memory import History, label
from simulator.memory.allocator import AllocatorSettings, Block, CachingAllocator
from simulator.memory.pressure import drive
from simulator.memory.tape import CATEGORIES, Event

Entry = dict[str, Any]
_BATCH: Final = 5_000  # entries that are held at a time: a step of thousands of layers has millions
_OPENED: Final = len(b"]q\x00")  # how a list or a dictionary begins


def write_snapshot(path: Path, history: History, settings: AllocatorSettings | None = None) -> None:
    """Write the snapshot of a first and a steady step. Raises InputError where the file cannot be written."""
    write_whole(path, _pickled(history, settings or AllocatorSettings()), "--snapshot")


def _pickled(history: History, settings: AllocatorSettings) -> Iterator[bytes]:
    """The snapshot as a pickle in pieces, each with a memory of its own: one object would take ten times the file's size."""
    yield b"\x80\x04}(" + _opcodes("device_traces") + b"]]"  # a dictionary, its first key, a list, and in it another
    tracer = _Tracer(history)
    allocator = CachingAllocator(settings, on_driver=tracer.call)
    for index, event, block in drive(reported(history.events, 1.0, WRITING), allocator):
        tracer.record(index, event, block)
        if len(tracer.entries) >= _BATCH:
            yield _opcodes(tracer.entries)[_OPENED:]
            tracer.entries.clear()
    yield _opcodes(tracer.entries)[_OPENED:]
    rest = {
        "segments": list(_segments(allocator, tracer.frames)),
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if settings.expandable_segments else "",
            "expandable_segments": settings.expandable_segments,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }
    yield b"a" + _opcodes(rest)[_OPENED + 1 :] + b"."


def _opcodes(value: object) -> bytes:
    """What makes the value, without the pickle's first and last opcode. Protocol 3 numbers what it remembers, so pieces may follow."""
    return pickle.dumps(value, protocol=3)[2:-1]


class _Tracer:
    """Writes down what the allocator and the driver do, in the viewer's words."""

    def __init__(self, history: History) -> None:
        self.entries: list[Entry] = []
        self._events = count()
        self.frames: dict[int, list[Entry]] = {}  # address -> who allocated the block there
        self._marks = history.marks
        self._starts = [mark[0] for mark in history.marks]
        self._words: dict[tuple[str, str], list[Entry]] = {}  # equal frames are one object: the file stays small
        self._slots: dict[int, tuple[str, int]] = {}  # slot -> (category, bytes asked for)
        self._calls: list[tuple[str, int, int]] = []  # of the driver, during the event at hand
        self._waiting: list[tuple[Block, int, int, list[Entry]]] = []  # freed while other streams use them

    def call(self, action: str, address: int, num_bytes: int) -> None:
        """The driver was called; the event that caused it comes right behind."""
        self._calls.append((action, address, num_bytes))

    def record(self, index: int, event: Event, block: Block | None) -> None:
        """An event has been played."""
        slot, num_bytes, stream, tag = event
        if num_bytes >= 0 and block is not None:
            self._slots[slot] = CATEGORIES[tag], num_bytes
            frames = self._frames(index, CATEGORIES[tag])
            for action, address, size in self._calls:
                self._write(action, address, size, stream, frames)
            self._calls.clear()
            self.frames[block.address] = frames
            self._write("alloc", block.address, num_bytes, stream, frames, CATEGORIES[tag])
        elif block is not None:
            category, requested = self._slots.pop(slot)
            frames = self._frames(index, category)
            self._write("free_requested", block.address, requested, block.pool.stream, frames, category)
            self._waiting.append((block, block.address, requested, frames))
        self._complete()

    def _complete(self) -> None:
        """Write the frees whose streams have finished."""
        waiting = []
        for block, address, requested, frames in self._waiting:
            if block.uses:
                waiting.append((block, address, requested, frames))
            else:
                self._write("free_completed", address, requested, block.pool.stream, frames)
        self._waiting = waiting

    def _write(
        self, action: str, address: int, size: int, stream: int, frames: list[Entry], category: str | None = None
    ) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": next(self._events)}
        entry["frames"] = frames
        if category is not None:
            entry["category"] = category
        self.entries.append(entry)

    def _frames(self, index: int, category: str) -> list[Entry]:
        moment = label(self._marks[bisect_right(self._starts, index) - 1][1:])
        key = (category, moment)
        if key not in self._words:
            self._words[key] = [{"filename": category, "line": 0, "name": moment}]
        return self._words[key]


def _segments(allocator: CachingAllocator, frames: dict[int, list[Entry]]) -> Iterator[Entry]:
    """The segments at the end, in order of address; of an expandable one each stretch that has memory."""
    together: list[Block] = []
    for block in allocator.blocks():
        last = together[-1] if together else None
        if last is not None and (last.next is not block or block.address in allocator.segments):
            yield _segment(together, frames)
            together = []
        together.append(block)
    if together:
        yield _segment(together, frames)


def _segment(blocks: list[Block], frames: dict[int, list[Entry]]) -> Entry:
    first = blocks[0]
    used = [block for block in blocks if block.used]
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in used if not block.uses),
        "active_size": sum(block.size for block in used),
        "requested_size": sum(block.requested for block in used),
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": first.expandable,
        "frames": [],
        "blocks": [_block(block, frames) for block in blocks],
    }


def _block(block: Block, frames: dict[int, list[Entry]]) -> Entry:
    state = "inactive" if not block.used else "active_awaiting_free" if block.uses else "active_allocated"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if block.used else 0,
        "state": state,
        "frames": frames.get(block.address, []) if block.used else [],
    }
