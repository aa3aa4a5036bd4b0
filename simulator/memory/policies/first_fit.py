"""Slots in one range of addresses, each at the lowest offset where it fits."""

from __future__ import annotations

from bisect import bisect_left, insort

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
