"""Activation offload in a step's events: what a block saves leaves HBM after its forward and is back for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.memory.tape import DONE, FREE, INPUT, Event, Tape
from simulator.work.script.storage import COMPUTE

Saved = list[tuple[int, int, int]]  # (slot, bytes, category)


def left_over(tape: Tape) -> Saved:
    """What a block's forward leaves for its backward in slots of its own.

    Its output is the next block's input, and leaves with the next block.
    """
    alive: dict[int, tuple[int, int, int]] = {}
    for slot, num_bytes, _, tag in tape.forward.events:
        if num_bytes >= 0:
            alive[slot] = (slot, num_bytes, tag)
        elif num_bytes != DONE:
            alive.pop(slot, None)
    alive.pop(tape.output, None)
    return list(alive.values())


def keeps_input(tape: Tape) -> bool:
    """The block's input outlives its forward."""
    return not any(slot == INPUT and num_bytes < 0 for slot, num_bytes, _, _ in tape.forward.events)


def output_of(tape: Tape) -> tuple[int, int, int] | None:
    """The block's output as (slot, bytes, category); None where it is its input."""
    if tape.output < 0:
        return None
    made = [(s, n, tag) for s, n, _, tag in tape.forward.events if s == tape.output and n >= 0]
    return made[-1] if made else None


def saved_bytes(tape: Tape, before: Tape) -> int:
    """Bytes that leave with a block which follows `before`."""
    given = output_of(before)
    return sum(size for _, size, _ in left_over(tape)) + (given[1] if given and keeps_input(tape) else 0)


@dataclass(slots=True)
class _Block:
    saved: Saved
    gone: bool = False


class Evictor:
    """Writes the frees and allocations of one micro-batch's offload. Blocks by their number in the pass.

    A block's tensors stay until the block after it has run, while they are copied; the last block's stay altogether.
    """

    def __init__(self, write: Callable[[Event], None]) -> None:
        self._write = write
        self._blocks: dict[int, _Block] = {}
        self._last: _Block | None = None
        self._given: tuple[int, int, int] | None = None

    def forward(self, number: int, tape: Tape, base: int) -> None:
        """A block has run."""
        saved = [(base + slot, size, tag) for slot, size, tag in left_over(tape)]
        if self._given is not None and keeps_input(tape):
            saved.append(self._given)
        made = output_of(tape)
        if made is not None:
            self._given = (base + made[0], made[1], made[2])
        if self._last is not None:
            self._last.gone = True
            for slot, _, _ in self._last.saved:
                self._write((slot, FREE, COMPUTE, 0))
        self._last = self._blocks[number] = _Block(saved)

    def restore(self, numbers: Iterable[int]) -> None:
        """What these blocks saved is back."""
        for block in (self._blocks[number] for number in numbers if number in self._blocks):
            if block.gone:
                block.gone = False
                for slot, size, tag in block.saved:
                    self._write((slot, size, COMPUTE, tag))
