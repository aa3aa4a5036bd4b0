"""The channels that NCCL's graph search finds, and the bandwidth that its cost model gives them. Not what a call reaches.

Read in NVIDIA/nccl 2.18.6 to 2.30.7, src/graph/search.cc (ncclTopoCompute, ncclTopoDupChannels) and topo.h. The search
tries speeds from the fastest and keeps what carries most: a NIC gives a channel for each whole speed it has, a port has
room for so many. Channels of 25 GB/s and more are made twice at half the speed. Trees then get more inside a node, up to
twice what crosses their nics: between two nodes a tree's NIC carries half of what its ports do. Units: GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

# What the search finds of a port's data sheet, one way: 12 channels × 20 of 300 GB/s (A100), 12 × 30 of 450 (H100), as
# printed by NCCL_DEBUG (NVIDIA/nccl issue 1197); PCIe 4 x16 is 24 of 31.5 (topo.h).
GRAPH_SHARE: Final = {"nvlink": 0.8, "pcie": 24 / 31.5}
_ROUNDED: Final = 1.03  # NCCL's table has 20.6 of H100's links of 25 GB/s, and data sheets write 31 for 31.5
_PCIE3_X16: Final = (15.75, 12.0)  # data sheet, and what NCCL's table says: each generation is twice that
_C2C_FROM: Final = 100.0  # GB/s of a host link that is no PCIe
_SLOWEST: Final = 0.49  # of the speed found, below which the search does not go on
_MOST: Final = 32  # channels before they are made twice
_TWICE_FROM: Final = 25.0
_FEW, _FAST = 4, 50.0  # newer than Ampere: more channels than these, slower than that, are not made twice
_OLD, _HOPPER, _BLACKWELL = "ampere", "hopper", "blackwell"
_INSIDE: Final = {
    _OLD: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    _HOPPER: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    _BLACKWELL: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
_BETWEEN: Final = {
    _OLD: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    _HOPPER: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    _BLACKWELL: (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
}


@dataclass(frozen=True, slots=True)
class Channels:
    """count of them, and what each carries inside a node (`near`) and over a NIC (`far`), GB/s."""

    count: int
    near: float
    far: float

    def bus(self, num_nodes: int) -> float:
        """What the cost model multiplies: up to two nodes what is inside, else what crosses the NICs."""
        return self.count * (self.near if num_nodes <= 2 else self.far)


@lru_cache(maxsize=4096)
def inside(family: str, architecture: str, port: float) -> Channels:
    """Of rings and trees inside a node."""
    room = port * GRAPH_SHARE.get(family, GRAPH_SHARE["pcie"]) * _ROUNDED
    count, speed = _best(_INSIDE[_like(architecture)], lambda speed: _fit(room, speed), room)
    count, speed = _twice(count, speed, architecture)
    return Channels(count, speed, speed)


@lru_cache(maxsize=4096)
def between(
    architecture: str, room: float, card: float, num_nics: int, *, tree: bool, num_ranks_on_node: int, host: float
) -> Channels:
    """Over nodes. room: of a GPU's port as the search has it; card: of one; host: a GPU's PCIe link, data sheet."""
    speeds, passes = _BETWEEN[_like(architecture)], num_ranks_on_node * _pcie(host)
    room = room * _ROUNDED if num_ranks_on_node > 1 else passes

    def fit(speed: float) -> int:
        return min(num_nics * _fit(card, speed), _fit(room, speed), _fit(passes, speed), _MOST)

    count, far = _twice(*_best(speeds, fit, card), architecture)
    near = far
    if tree:
        for faster in sorted(speed for speed in speeds if speed > far):
            if near >= 2 * far or count * faster > room:
                break
            near = float(faster)
    return Channels(count, near, far)


def _like(architecture: str) -> str:
    return architecture if architecture in _INSIDE else _OLD


def _fit(room: float, speed: float) -> int:
    return math.floor(room / speed + 1e-6) if math.isfinite(room) else _MOST


def _best(speeds: tuple[float, ...], fit: Callable[[float], int], widest: float) -> tuple[int, float]:
    """Most bytes a second in whole channels, the first of equals, of speeds above half the last better one's.

    One slow channel where not even the slowest fits.
    """
    count, best = 0, 0.0
    for speed in speeds:
        if count and speed <= _SLOWEST * best:
            break
        found = fit(speed)
        if found * speed > count * best:
            count, best = found, float(speed)
    return (count, best) if count else (1, widest)


def _twice(count: int, speed: float, architecture: str) -> tuple[int, float]:
    newer = _like(architecture) != _OLD
    if speed < _TWICE_FROM or (newer and speed < _FAST and count > _FEW):
        return count, speed
    twice = min(2 * count, _MOST)
    return twice, speed / -(-twice // count)


def _pcie(host: float) -> float:
    """A GPU's link to its host as NCCL's table has it; no limit over NVLink C2C."""
    if host >= _C2C_FROM:
        return math.inf
    sheet, known = _PCIE3_X16
    return known * 2.0 ** round(math.log2(host / sheet)) if host > 0 else math.inf
