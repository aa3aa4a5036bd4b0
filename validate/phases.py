"""The phases of `calibrate run`, in order, and what part of the budget each may take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

SHARES: Final[dict[str, float]] = {
    "host": 1.0,
    "gemm": 5.0,
    "streams": 6.0,
    "attention": 3.0,
    "loss": 1.5,
    "optimizer": 1.0,
    "collectives": 5.0,
    "pairs": 1.0,
    "groups": 0.7,
    "overlap": 1.5,
    "transfers": 0.8,
    "allocations": 0.5,
    "storage": 0.5,
    "sustained": 4.0,
    "libraries": 1.0,
}
# Items that are measured whatever the time: an operator and a block that are all overhead, eight shapes of a product in
# three layouts, every pass at three sizes, attention at four, four kinds of collective at four sizes, a link both ways, both sizes of AdamW.
FEWEST: Final[dict[str, int]] = {
    "host": 2,
    "gemm": 24,
    "streams": 51,
    "attention": 4,
    "loss": 2,
    "optimizer": 2,
    "collectives": 16,
    "pairs": 2,
}
ONLY_GPU: Final = frozenset({"allocations", "sustained", "libraries"})
ONLY_SEVERAL: Final = frozenset({"collectives", "pairs", "groups", "overlap"})


def phases_of(device: str, num_ranks: int, only: Collection[str] = ()) -> tuple[str, ...]:
    """The phases that make sense here. only: of these, if any."""
    return tuple(
        phase
        for phase in SHARES
        if (not only or phase in only)
        and (device == "cuda" or phase not in ONLY_GPU)
        and (num_ranks > 1 or phase not in ONLY_SEVERAL or (device == "cuda" and phase == "overlap"))
    )
