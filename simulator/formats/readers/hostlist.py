"""SLURM's hostlists: `node[01-04,8],login1` and products `rack[1-2]n[1-4]`. Counted before anything is written out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Final

from simulator.base.errors import ClusterError

MOST_NAMES: Final = 65536  # as many nodes as a cluster may have
_PART = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TEXT = re.compile(r"[A-Za-z0-9_.\-]*")
_MOST_CHARS = 2**20


def expand(text: str, place: str) -> tuple[str, ...]:
    """The names. Raises ClusterError naming the place: unbalanced brackets, no ranges, or more than 65,536 names."""
    problem = ""
    names: list[str] = []
    if len(text) > _MOST_CHARS:
        problem = f"a list of {len(text)} characters"
    for part in () if problem else _split(text):
        pieces, problem = _pieces(part)
        if not problem and len(names) + prod(len(piece) for piece in pieces) > MOST_NAMES:
            problem = f"{part[:60]!r} makes it {len(names) + prod(map(len, pieces)):,} names"
        if problem:
            break
        names += ("".join(made) for made in product(*map(list, pieces)))
    if problem or not names:
        raise ClusterError.at(place, problem or "an empty list", f"as node[01-16,20], at most {MOST_NAMES:,} names")
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    """At the commas outside brackets."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


class _Numbers:
    """A bracket's numbers, not yet written out: (first, last, digits)."""

    def __init__(self, ranges: list[tuple[int, int, int]]) -> None:
        self.ranges = ranges

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last, _ in self.ranges)

    def __iter__(self) -> Iterator[str]:
        for first, last, width in self.ranges:
            yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def _pieces(part: str) -> tuple[list[_Numbers | list[str]], str]:
    """Fixed text and brackets in turn, or the problem."""
    pieces: list[_Numbers | list[str]] = []
    for index, piece in enumerate(_PART.split(part)):
        if index % 2 == 0:
            if not _TEXT.fullmatch(piece):
                return [], f"{part[:60]!r} is not a name with [ranges]"
            pieces.append([piece])
            continue
        ranges = []
        for one in piece.split(","):
            found = _RANGE.fullmatch(one.strip())
            if found is None or (found[2] and int(found[2]) < int(found[1])):
                return [], f"{one[:40]!r} is not a range of numbers"
            ranges.append((int(found[1]), int(found[2] or found[1]), len(found[1])))
        pieces.append(_Numbers(ranges))
    return pieces, "" if part else "an empty name"
