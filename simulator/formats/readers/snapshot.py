"""CUDA memory snapshots (`torch.cuda.memory._dump_snapshot`), as pickles or JSON, gzipped or not.

The file itself is read by `plain_data` in a process of its own; here its parts become a Recording.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.base.files import ordinary
from simulator.base.schema import unreadable
from simulator.formats.readers import plain_data
from simulator.memory.allocator import AllocatorSettings
from simulator.memory.allocator.blocks import UNLIMITED_BYTES
from simulator.studies.replay.recording import (
    ACTIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    RecordedBlock,
    RecordedEvent,
    RecordedSegment,
    Recording,
)

_TIMEOUT_S = 3600  # the reader has a limit of its own, of processor time
_NUM_DIVISIONS = 16  # 1 MiB to 32 GiB
_STATES = {"active_pending_free": "active_awaiting_free"}  # the name that older versions gave it
_AS_SORTED = {FREE_REQUESTED: 0, FREE_COMPLETED: 1, SEGMENT_FREE: 2, SEGMENT_ALLOC: 3, ALLOC: 5}


def read_snapshot(path: Path, device: int | None = None) -> Recording:
    """The recording of one device (None: the first with events).

    Raises InputError where the file is no snapshot, asks for globals, ends early, or contradicts itself; nothing in
    it is ever executed.
    """
    data = _plain(path)
    traces = data["device_traces"]
    recorded = [number for number, trace in enumerate(traces) if trace]
    if device is None and recorded:
        device = recorded[0]
    if device is None or device not in recorded:
        wanted = "no device" if device is None else f"device {device}"
        has = f"it has events of device {', '.join(map(str, recorded))}" if recorded else ""
        remedy = has or "call torch.cuda.memory._record_memory_history() before what is to be recorded"
        raise InputError.at(str(path), f"there are no events of {wanted}", remedy)
    notes = [f"{count} events {name!r} left out: unknown" for name, count in data["unknown_actions"].items()]
    notes = [note for note in notes if "snapshot'" not in note and "user_defined" not in note]
    if len(recorded) > 1:
        notes.append(f"device {device} of {len(recorded)} with events")
    streams = _Streams(data["segments"], device)
    segments = _segments(data["segments"], device, streams, path)
    events, repaired = _ordered([_event(row, streams) for row in traces[device]], f"{path}: device_traces[{device}]")
    settings, assumed = _settings(data["allocator_settings"], segments, path)
    return Recording(
        name=path.name,
        device=device,
        events=tuple(events),
        segments=segments,
        settings=settings,
        notes=(*notes, *repaired, *assumed, *streams.notes()),
    )


def _plain(path: Path) -> dict[str, Any]:
    try:
        ordinary(path)
    except OSError as exc:
        raise InputError(unreadable(path, exc)) from None
    command = [sys.executable, "-I", str(Path(plain_data.__file__)), str(path)]
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603  our own script
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        problem = f"reading it went beyond its limit of memory or time (exit status {done.returncode})"
        raise InputError.at(str(path), problem, "nothing was executed; a snapshot of this size needs less") from None
    if "faults" in answer:
        faults = [
            Fault(f"{path}: {place}" if place else str(path), problem, remedy)
            for place, problem, remedy in answer["faults"]
        ]
        raise InputError(faults)
    return answer


class _Streams:
    """A number for each (stream, private pool): a stream of the usual pool keeps its own."""

    def __init__(self, segments: Sequence[Sequence[Any]], device: int) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        own = [row for row in segments if row[0] == device and any(row[6])]
        self._private = sorted((row[1], row[1] + row[2], row[6]) for row in own)

    def of(self, stream: int, pool: Sequence[int]) -> int:
        if not any(pool):
            return stream
        return self._numbers.setdefault((stream, pool[0], pool[1]), -1 - len(self._numbers))

    def at(self, stream: int, pool: Sequence[int] | None, address: int) -> int:
        """Events of older versions do not name their pool: the segment around their address does."""
        if pool is None:
            pool = next((pool for start, end, pool in self._private if start <= address < end), (0, 0))
        return self.of(stream, pool)

    def notes(self) -> list[str]:
        return [f"{len(self._numbers)} private memory pools"] if self._numbers else []


def _segments(rows: Sequence[Sequence[Any]], device: int, streams: _Streams, path: Path) -> tuple[RecordedSegment, ...]:
    found = [
        RecordedSegment(
            address=address,
            total_bytes=total,
            stream=streams.of(stream, pool),
            is_small=small,
            is_expandable=expandable,
            blocks=tuple(
                RecordedBlock(address=at, size_bytes=size, requested_bytes=requested, state=_STATES.get(state, state))
                for at, size, requested, state in blocks
            ),
        )
        for owner, address, total, stream, small, expandable, pool, blocks in sorted(rows, key=lambda row: row[1])
        if owner == device
    ]
    for before, after in pairwise(found):
        if before.address + before.total_bytes > after.address:
            raise InputError.at(str(path), f"the segments at {before.address} and {after.address} overlap")
    return tuple(found)


def _event(row: Sequence[Any], streams: _Streams) -> RecordedEvent:
    action, address, size, stream, time_us, pool = row
    return ACTIONS.index(action), address, size, streams.at(stream, pool, address), time_us


def _ordered(events: list[RecordedEvent], place: str) -> tuple[list[RecordedEvent], list[str]]:
    """The events as they stand, or by their times where only that makes sense. Raises InputError where neither does."""
    wrong = contradiction(events)
    backwards = sum(after[4] < before[4] for before, after in pairwise(events))
    if wrong is None:
        notes = (
            [f"time stamps go back {backwards} times; the file's order makes sense and was kept"] if backwards else []
        )
        return events, notes
    if backwards:
        for key in (lambda e: e[4], lambda e: (e[4], _AS_SORTED.get(e[0], 4))):
            by_time = sorted(events, key=key)
            if contradiction(by_time) is None:
                return by_time, [f"events were out of order (the first at {wrong[0]}: {wrong[1]}): sorted by time"]
    index, problem = wrong
    remedy = "events are lost, or out of order in a way that their times do not mend"
    raise InputError.at(f"{place}[{index}]", problem, remedy)


def contradiction(events: Iterable[RecordedEvent]) -> tuple[int, str] | None:
    """The first event that cannot follow those before it, and why; None where there is none."""
    live: dict[int, bool] = {}  # address -> is in use
    requested: set[int] = set()
    returned: list[tuple[int, int]] = []
    for index, (action, address, size, _, _) in enumerate(events):
        problem = ""
        if action == ALLOC:
            problem = f"address {address} is handed out, and is in use" if live.get(address) else ""
            live[address] = True
        elif action in (FREE_REQUESTED, FREE_COMPLETED):
            again = action == FREE_REQUESTED and address in requested
            problem = f"address {address} is freed twice" if again or not live.get(address, True) else ""
            live[address] = action == FREE_REQUESTED
            (requested.add if action == FREE_REQUESTED else requested.discard)(address)
        elif action == SEGMENT_ALLOC and address in live:
            if live[address] or not any(start <= address < end for start, end in returned):
                problem = f"the segment at {address} is taken after its first block was used"
        elif action == SEGMENT_FREE:
            returned.append((address, address + size))
            problem = f"the segment at {address} is returned while it is in use" if live.get(address) else ""
        if problem:
            return index, problem
    return None


def _settings(
    data: dict[str, Any] | None, segments: Sequence[RecordedSegment], path: Path
) -> tuple[AllocatorSettings, list[str]]:
    """The allocator's settings, and those that were assumed. Raises InputError with every impossible value."""
    expandable = any(segment.is_expandable for segment in segments)
    if data is None:
        return AllocatorSettings(expandable_segments=expandable), [
            "no allocator_settings in the file: PyTorch's assumed"
        ]
    limit, divisions = data.get("max_split_size", -1), data.get("roundup_power2_divisions", {})
    threshold = data.get("garbage_collection_threshold", 0.0)
    values = tuple(divisions.values()) if isinstance(divisions, dict) else (None,)
    faults = []
    if type(limit) is not int:
        faults.append(("max_split_size", "a whole number of bytes, or -1"))
    if values and (len(values) != _NUM_DIVISIONS or not all(type(value) is int and value >= 0 for value in values)):
        faults.append(("roundup_power2_divisions", f"{_NUM_DIVISIONS} whole numbers, by megabytes"))
    if type(threshold) not in (int, float) or not 0 <= threshold < 1:
        faults.append(("garbage_collection_threshold", "from 0 to 1"))
    if faults:
        raise InputError(
            Fault(f"{path}: allocator_settings.{key}", f"is {str(data[key])[:40]!r}", remedy) for key, remedy in faults
        )
    settings = AllocatorSettings(
        expandable_segments=expandable or data.get("expandable_segments") is True,
        max_split_size_bytes=limit if limit > 0 else UNLIMITED_BYTES,
        roundup_power2_divisions=values if any(values) else (),
        garbage_collection_threshold=float(threshold),
    )
    return settings, []
