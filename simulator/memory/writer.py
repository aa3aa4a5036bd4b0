"""Writer: the allocations and frees of a step, in order, and the moments at which ops begin."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from simulator.memory.tape import DONE, FREE, FREE_LATER, GRADIENT, INPUT, RECORDED, TAG, Event, Part
from simulator.work.script.storage import COMPUTE

_FIRST = 1 << 20  # events of passes; those of scripts are numbered from 0
Mark = tuple[int, str, int, str, str]  # (event index, phase, micro-batch, unit, op)


class Writer:
    """Collects events and the moments at which ops begin: the `Storages` of a step."""

    def __init__(self) -> None:
        self.lead = 0  # passes of a block by which the host is ahead of the device
        self._passes = 0
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.num_slots = 0
        self._phase = ("start", 0, "")

    def at(self, phase: str, micro_batch: int, unit: str, op: str) -> None:
        """What follows happens at this moment."""
        self._phase = (phase, micro_batch, unit)
        self.marks.append((len(self.events), phase, micro_batch, unit, op))

    def alloc(self, num_bytes: int, category: str, stream: int = COMPUTE) -> int:
        slot = self.num_slots
        self.num_slots += 1
        self.events.append((slot, num_bytes, stream, TAG[category]))
        return slot

    def alloc_each(self, sizes: Sequence[int], category: str) -> list[int]:
        slots, tag = list(range(self.num_slots, self.num_slots + len(sizes))), TAG[category]
        self.num_slots += len(sizes)
        self.events.extend([(slot, size, COMPUTE, tag) for slot, size in zip(slots, sizes, strict=True)])
        return slots

    def reserve(self, count: int) -> int:
        """The first of so many slots in a row, for what is played."""
        self.num_slots += count
        return self.num_slots - count

    def alive(self, begin: int, slots: Collection[int]) -> list[Event]:
        """Allocations of these slots since an event, but those that were freed."""
        later = self.events[begin:]
        gone = {slot for slot, size, _, _ in later if size in (FREE, FREE_LATER)}
        return [event for event in later if event[1] > 0 and event[0] in slots and event[0] not in gone]

    def free(self, *slots: int) -> None:
        self.events.extend([(slot, FREE, COMPUTE, 0) for slot in slots])

    def free_later(self, event: int, *slots: int) -> None:
        self.events.extend([(slot, FREE_LATER, event, 0) for slot in slots])

    def happened(self, event: int) -> None:
        self.events.append((0, DONE, event, 0))

    def catch_up(self) -> None:
        """The device has done all that was launched."""
        for number in range(max(1, self._passes - self.lead + 1), self._passes + 1) if self.lead else ():
            self.happened(_FIRST + number)

    def play(self, part: Part, base: int, given: int, gradient: int, start: int = 0, end: int | None = None) -> None:
        """Append events `start` to `end` of a tape's part whose slots begin at `base`."""
        outside = {INPUT: given, GRADIENT: gradient}
        self._passes += 1
        if self._passes > self.lead > 0:
            self.happened(_FIRST + self._passes - self.lead)
        recorded = _FIRST + self._passes if self.lead else COMPUTE
        shift = len(self.events) - start
        phase, micro_batch, unit = self._phase
        stop = len(part.events) if end is None else end
        self.marks.extend(
            [
                (i + shift, phase, micro_batch, unit, op)
                for i, op in part.marks
                if start <= i < stop or i == stop == start
            ]
        )
        self.events.extend(
            [
                (base + s if s >= 0 else outside[s], n, recorded if stream == RECORDED else stream, tag)
                for s, n, stream, tag in part.events[start:end]
            ]
        )
