"""Axes of a mesh of devices and the order in which they fill it; how large a plan's numbers may be."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # torch's DeviceMesh, outermost first
MAX_COUNT = 2**31  # beyond any plan; keeps hostile integers out of float arithmetic
MAX_SIZE = 2**40


@lru_cache(maxsize=64)
def ordered(rank_order: str) -> tuple[str, ...]:
    """The names of a rank order, innermost first, dp as its two axes."""
    both = {"dp": ("dp_shard", "dp_replicate")}
    return tuple(axis for name in rank_order.split("-") for axis in both.get(name, (name,)))
