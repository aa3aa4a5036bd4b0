"""Operators of a recorded step, wrappers and what is inside them alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RecordedOperator(NamedTuple):
    """An operator, or a kernel by its launch. shapes: of its tensors, those without dims left out. start, end: us, on its thread.

    seconds: of the kernels that were launched inside it; on a CPU its own.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    thread: int
    start: float
    end: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOperators:
    """operators: all, in the order in which they began. kernels: what ran, by the moment of its launch. asked: collectives."""

    operators: tuple[RecordedOperator, ...]
    kernels: tuple[RecordedOperator, ...]
    asked: tuple[str, ...]
    on_host: bool
