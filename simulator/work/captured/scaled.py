"""A program at another number of ranks, extrapolated from two captures.

The rule, for each number in which the two captures differ (sizes of tensors and storages, ranks of groups): as many ranks,
as many times it (pieces of an all-gather); or a share of one whole, which is rounded up to whole elements (shards, padded; at
fewer ranks than both it may be an element too large).
What is equal in both does not depend on the number of ranks. Where a number follows neither rule, or the captures do not run
the same operators in the same order, the program changes with its ranks in a way that two captures do not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from simulator.base.errors import InputError
from simulator.work.captured.capture import Capture, Kind

_NUMBERS = {  # places of values of events that are sizes; everything else names something
    Kind.ALLOCATE: (2,),
    Kind.COLLECTIVE: (4,),
    Kind.MESSAGE: (4, 5),
}
_REMEDY = "shardwise capture … --ranks {ranks}: a capture at that size"


class _Rule:
    """How numbers grow from one capture to another, and what that makes them at a third number of ranks."""

    def __init__(self, one: Capture, other: Capture, ranks: int) -> None:
        self._one, self._other, self._ranks = one.world_size, other.world_size, ranks

    def number(self, a: int, b: int) -> int | None:
        """The value of a number that is `a` in one capture and `b` in the other; None if no rule explains both."""
        if a == b:
            return a
        if a * self._other == b * self._one:
            return a * self._ranks // self._one if a * self._ranks % self._one == 0 else None
        low = max((a - 1) * self._one, (b - 1) * self._other) + 1
        base = min(a * self._one, b * self._other)
        if base < low:
            return None
        return -(-base // self._ranks)  # the base is known up to the padding of the finer capture

    def value(self, a: Any, b: Any) -> Any:  # noqa: ANN401  what the file holds
        """The same of whatever a signature holds. Raises ValueError where no rule says."""
        if type(a) is int and type(b) is int:
            found = self.number(a, b)
            if found is None:
                raise ValueError(f"{a:,} of {self._one:,} ranks, {b:,} of {self._other:,}")
            return found
        if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            return [self.value(x, y) for x, y in zip(a, b, strict=True)]
        if a != b:
            raise ValueError(f"{a!r} of {self._one:,} ranks, {b!r} of {self._other:,}")
        return a

    def group(self, a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
        """A group's ranks: rank 0's, equally far apart."""
        count = self.value(len(a), len(b))
        step = self.value(*((ranks[1] - ranks[0] if len(ranks) > 1 else 1) for ranks in (a, b)))
        even = all(tuple(r) == tuple(range(r[0], r[0] + len(r) * d, d)) for r, d in ((a, _step(a)), (b, _step(b))))
        if not even:
            raise ValueError("a group whose ranks are not equally far apart")
        return tuple(range(a[0], a[0] + count * step, step))


def _step(ranks: Sequence[int]) -> int:
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def scaled(one: Capture, other: Capture, ranks: int) -> Capture:
    """The program of both captures at so many ranks. Raises InputError where the rule does not say."""
    rule = _Rule(one, other, ranks)
    place = f"{one.target} at {ranks:,} ranks"
    try:
        _same_program(one, other)
        found = _scaled(one, other, rule, ranks)
        pairs = zip(one.others, other.others, strict=True)
        return replace(found, others=tuple(_scaled(a, b, rule, ranks) for a, b in pairs))
    except ValueError as exc:
        problem = f"does not follow from captures at {one.world_size:,} and {other.world_size:,}: {exc}"
        raise InputError.at(place, problem, _REMEDY.format(ranks=ranks)) from None


def _same_program(one: Capture, other: Capture) -> None:
    if one.world_size == other.world_size:
        raise ValueError("both have as many ranks")
    if len(one.others) != len(other.others):
        raise ValueError("one of them has more kinds of ranks")
    if len(one.events) != len(other.events) or one.steady != other.steady:
        raise ValueError("one of them does more in a step")


def _scaled(one: Capture, other: Capture, rule: _Rule, ranks: int) -> Capture:
    pairs: dict[tuple[int, int], int] = {}
    signatures: list[tuple[str, Any, Any]] = []
    groups: dict[tuple[int, int], int] = {}
    ranks_of: list[tuple[int, ...]] = []
    events: list[list[int]] = []
    for a, b in zip(one.events, other.events, strict=True):
        if a[0] != b[0]:
            raise ValueError(f"{Kind(a[0]).name} in one where the other has {Kind(b[0]).name}")
        event = list(a)
        if a[0] == Kind.OPERATOR:
            key = a[1], b[1]
            if key not in pairs:
                pairs[key] = len(signatures)
                signatures.append(_signature(one.signatures[a[1]], other.signatures[b[1]], rule))
            event[1] = pairs[key]
        elif a[0] in (Kind.COLLECTIVE, Kind.MESSAGE):
            group = a[3], b[3]
            if group not in groups:
                groups[group] = len(ranks_of)
                ranks_of.append(rule.group(one.groups[a[3]], other.groups[b[3]]))
            event[3] = groups[group]
        for at in _NUMBERS.get(Kind(a[0]), ()):
            event[at] = rule.value(a[at], b[at])
        events.append(event)
    note = f"sizes at {ranks:,} ranks from captures at {one.world_size:,} and {other.world_size:,}: equal, in proportion, or a share"
    return replace(
        one, rank=ranks - 1 if one.rank == one.world_size - 1 else rule.value(one.rank, other.rank), world_size=ranks,
        signatures=signatures, groups=ranks_of, events=events, costs=dict(_costs(one, other, pairs)), others=(),
        tokens_per_step=rule.value(one.tokens_per_step, other.tokens_per_step), answers={**one.answers, note: 1},
    )  # fmt: skip


def _signature(a: tuple[str, Any, Any], b: tuple[str, Any, Any], rule: _Rule) -> tuple[str, Any, Any]:
    if a[0] != b[0]:
        raise ValueError(f"{a[0]} in one where the other has {b[0]}")
    try:
        return a[0], rule.value(a[1], b[1]), rule.value(a[2], b[2])
    except ValueError as exc:
        raise ValueError(f"{a[0]}: {exc}") from None


def _costs(one: Capture, other: Capture, pairs: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, Any]]:
    """What authors say of operators whose shapes do not depend on the ranks."""
    for (a, b), number in pairs.items():
        if a in one.costs:
            if one.costs[a] != other.costs.get(b):
                raise ValueError(f"the kernel_cost of {one.signatures[a][0]}")
            yield number, one.costs[a]
