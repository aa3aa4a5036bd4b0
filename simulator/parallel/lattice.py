"""Lattice: the groups that ranks form along one or several axes of a mesh, without listing the ranks.

A rank is a number of mixed radix, one digit an axis. A group varies some of the digits and fixes the others: its ranks are
base + Σ i · stride over these digits. Neighbouring digits join into one, so a group of neighbouring axes is an
arithmetic progression; axes that others stand between leave two strides or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

Digit = tuple[int, int]  # (count, stride)


@dataclass(frozen=True, slots=True)
class Lattice:
    """digits: (how many, how far apart), innermost first; each digit's stride is a multiple of all that lies below it."""

    digits: tuple[Digit, ...]

    @classmethod
    def of(cls, digits: Iterable[Digit]) -> Self:
        """The lattice of these digits in any order; digits of one go, neighbours join."""
        joined: list[Digit] = []
        for count, stride in sorted((d for d in digits if d[0] > 1), key=lambda digit: digit[1]):
            if joined and joined[-1][0] * joined[-1][1] == stride:
                joined[-1] = (joined[-1][0] * count, joined[-1][1])
            else:
                joined.append((count, stride))
        return cls(tuple(joined))

    @property
    def count(self) -> int:
        """Ranks of a group."""
        return prod(count for count, _ in self.digits)

    @property
    def period(self) -> int:
        """Ranks after which the pattern of groups repeats."""
        return prod(self.digits[-1]) if self.digits else 1

    @property
    def reach(self) -> int:
        """From the first rank of a group to its last."""
        return sum((count - 1) * stride for count, stride in self.digits)

    def base(self, rank: int) -> int:
        """The first rank of the group that `rank` is in."""
        return rank - sum(rank // stride % count * stride for count, stride in self.digits)

    def bases(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """`base` of many ranks."""
        return ranks - sum((ranks // stride % count * stride for count, stride in self.digits), 0 * ranks)

    def firsts(self, num_ranks: int) -> list[int]:
        """The first rank of every group, ascending: what the places between the digits make."""
        found, reached = [0], 1
        for count, stride in (*self.digits, (1, num_ranks)):
            found = [i * reached + first for i in range(stride // reached) for first in found]
            reached = count * stride
        return found

    def ranks(self, base: int) -> Sequence[int]:
        """The group of a first rank, ascending; a range where it has one stride."""
        if len(self.digits) <= 1:
            count, stride = self.digits[0] if self.digits else (1, 1)
            return range(base, base + count * stride, stride)
        return tuple(base + offset for offset in _offsets(self.digits))

    def part(self, count: int, skip: int = 1) -> Lattice | None:
        """Groups of `count` within each group, `skip` places from one to the next; None where they are no lattice.

        Within a group's ranks in ascending order: `part(n)` are n neighbours, `part(n, skip)` every skip-th.
        """
        above = _split(self.digits, skip)
        within = None if above is None else _split(above[1], count)
        return None if within is None else Lattice.of(within[0])

    def on_each(self, size: int) -> int | None:
        """Ranks of a group on each block of `size` consecutive ranks that it touches; None where blocks differ."""
        num_members = 1
        for count, stride in self.digits:
            if size % (count * stride) == 0:
                num_members *= count
            elif size % stride == 0 and count * stride % size == 0:
                num_members *= size // stride
            elif stride % size:
                return None
        return num_members

    def within(self, size: int) -> tuple[Digit, ...]:
        """The digits that vary inside a block of `size` consecutive ranks, as far as they do."""
        return tuple((min(count, -(-size // stride)), stride) for count, stride in self.digits if stride < size)


@cache
def _offsets(digits: tuple[Digit, ...]) -> tuple[int, ...]:
    found = [0]
    for count, stride in digits:
        found = [i * stride + offset for i in range(count) for offset in found]
    return tuple(found)


def _split(digits: Sequence[Digit], inner: int) -> tuple[list[Digit], list[Digit]] | None:
    """The digits of the first `inner` places, and those above; None where no digit can be cut there."""
    below: list[Digit] = []
    above: list[Digit] = []
    for count, stride in digits:
        if inner % count == 0:
            below.append((count, stride))
            inner //= count
        elif count % inner == 0:
            below.append((inner, stride))
            above.append((count // inner, stride * inner))
            inner = 1
        else:
            return None
    return (below, above) if inner == 1 else None
