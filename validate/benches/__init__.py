"""Benches: what is measured of a machine, as generators of items in the order of what they tell.

The ends and the middle of a range come first, then what lies between. An item is a call; the worker stops asking when
the phase's time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Item = Callable[[], object]
Tensor = Any  # torch is loaded by the worker
Shape = dict[str, object]
ROTATE_BYTES = 2e8  # inputs are rotated until they exceed every cache, four sets at most


def spread(items: Sequence[T]) -> list[T]:
    """The ends first, then the middle, then the quarters …: every prefix covers the range."""
    last = len(items) - 1
    order = dict.fromkeys((0, last)) if last >= 0 else {}
    step = last
    while step > 1 and len(order) < len(items):
        step = (step + 1) // 2
        order |= dict.fromkeys(range(0, last, step))
    order |= dict.fromkeys(range(len(items)))
    return [items[i] for i in order]
