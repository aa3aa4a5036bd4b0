"""Meetings of captured ranks: whose messages and collectives are one another's, and whether they agree.

Messages between two ranks in a group are matched by their order, as NCCL matches them; so are the collectives of ranks of
one group. Ranks that exchange messages are a column (the stages of a pipeline): all columns of the job do the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from simulator.base.errors import Fault, InputError
from simulator.base.units import format_bytes
from simulator.work.captured.capture import Capture, Kind

_EXCHANGES = frozenset(map(int, (Kind.COLLECTIVE, Kind.MESSAGE)))
_NAMED = 8  # faults that an error lists

Way = tuple[int, int, int]  # sender, receiver, number of the group


@dataclass(frozen=True, slots=True)
class Column:
    """Captured ranks that exchange messages, ascending; each represents `num_ranks` of the job."""

    captures: tuple[Capture, ...]
    num_ranks: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(one.rank for one in self.captures)


def columns(capture: Capture, *, known: bool = False) -> list[Column]:
    """The captured ranks by whom they exchange messages with; the first rank's column first. known: they agree.

    Raises InputError where ranks of one column do not agree on what they exchange.
    """
    every = {one.rank: one for one in (capture, *capture.others)}
    parents = {rank: rank for rank in every}
    for rank, one in every.items():
        for peer in {event[4] for event in _steady(one) if event[0] == Kind.MESSAGE} & every.keys():
            parents[_root(parents, peer)] = _root(parents, rank)
    found: dict[int, list[Capture]] = defaultdict(list)
    for rank in sorted(every):
        found[_root(parents, rank)].append(every[rank])
    first = _root(parents, capture.rank)
    members = [found.pop(first), *found.values()]
    faults = [fault for one in members for fault in _faults(one)] if not known else []
    if faults:
        raise InputError(faults[:_NAMED])
    return [Column(tuple(one), max(1, capture.world_size // len(one))) for one in members]


def unlike(column: Column, other: Column) -> str:
    """Where the collectives of two columns differ in kind, order, bytes or the size of their groups; "" where they do not."""
    if len(column.captures) != len(other.captures):
        return f"{len(column.captures)} and {len(other.captures)} ranks exchange messages"
    for one, two in zip(column.captures, other.captures, strict=True):
        for number, (a, b) in enumerate(zip_longest(_calls(one), _calls(two))):
            if a != b:
                return f"collective {number} of rank {one.rank} is {_call(a)}, of rank {two.rank} {_call(b)}"
    return ""


def _calls(one: Capture) -> list[tuple[str, int, int]]:
    """(kind, bytes, ranks of the group) of a rank's collectives, in order."""
    return [
        (one.names[event[2]], event[4], len(one.groups[event[3]]))
        for event in _steady(one)
        if event[0] == Kind.COLLECTIVE
    ]


def _call(one: tuple[str, int, int] | None) -> str:
    return "none" if one is None else f"{one[0]} of {format_bytes(one[1])} among {one[2]:,}"


def _faults(captures: Sequence[Capture]) -> Iterator[Fault]:
    if len(captures) > 1:
        yield from _message_faults(captures)
        yield from _collective_faults(captures)


def _message_faults(captures: Sequence[Capture]) -> Iterator[Fault]:
    """Messages that only one side knows, and those of different sizes."""
    there = {one.rank for one in captures}
    sent, received = defaultdict[Way, list[int]](list), defaultdict[Way, list[int]](list)
    for one in captures:
        for event in _steady(one):
            if event[0] == Kind.MESSAGE and event[4] in there:
                _, _, pair, group, peer, size, *_ = event
                ends = (peer, one.rank) if pair else (one.rank, peer)
                (received if pair else sent)[*ends, group].append(size)
    for both in sorted(sent.keys() | received.keys()):
        for number, (out, back) in enumerate(zip_longest(sent[both], received[both])):
            if out != back:
                problem = f"rank {both[0]} {_does('sends', out)}, and rank {both[1]} {_does('receives', back)}"
                place = f"message {number} from rank {both[0]} to rank {both[1]}"
                yield Fault(place, problem, "as many sends as receives, in one order, of equal size")
                break


def _does(verb: str, size: int | None) -> str:
    return f"{verb} nothing more" if size is None else f"{verb} {format_bytes(size)}"


def _collective_faults(captures: Sequence[Capture]) -> Iterator[Fault]:
    """Collectives of groups that several captured ranks are in: every rank must make the same ones."""
    calls: dict[int, dict[int, list[tuple[str, int]]]] = defaultdict(dict)
    for one in captures:
        for event in _steady(one):
            if event[0] == Kind.COLLECTIVE:
                calls[event[3]].setdefault(one.rank, []).append((one.names[event[2]], event[4]))
    members = {number: [one.rank for one in captures if one.rank in captures[0].groups[number]] for number in calls}
    for number, of_rank in sorted(calls.items()):
        first, *others = members[number]
        mine = of_rank.get(first, [])
        for rank in others:
            for index, (a, b) in enumerate(zip_longest(mine, of_rank.get(rank, []))):
                if a != b:
                    yield Fault(
                        f"collective {index} of ranks {first} and {rank} in a group of {len(captures[0].groups[number])}",
                        f"rank {first} calls {_named(a)}, and rank {rank} {_named(b)}",
                        "the same calls on all ranks of a group",
                    )
                    break


def _named(one: tuple[str, int] | None) -> str:
    return "nothing more" if one is None else f"{one[0]} of {format_bytes(one[1])}"


def _steady(one: Capture) -> Sequence[Sequence[int]]:
    """Collectives and messages of the recorded step."""
    return [event for event in one.events[one.steady :] if event[0] in _EXCHANGES]


def _root(parents: dict[int, int], rank: int) -> int:
    while parents[rank] != rank:
        rank = parents[rank]
    return rank


def lattice(ranks: Sequence[int]) -> str:
    """A group's ranks as digits from the first one on, innermost first: "8:1,4:16" is 4 × 8 ranks, 16 apart.

    Of ranks that are no lattice: as many, as far apart as they are on average.
    """
    ordered = sorted(ranks)
    rest, digits = [rank - ordered[0] for rank in ordered], list[tuple[int, int]]()
    while len(rest) > 1:
        stride = rest[1]
        count = next((i for i, rank in enumerate(rest) if rank != i * stride), len(rest))
        digits.append((count, stride))
        rest = rest[::count]
    there = [0]
    for count, stride in digits:
        there = [base + index * stride for index in range(count) for base in there]
    if [rank + ordered[0] for rank in there] != ordered:
        digits = [(len(ordered), max(1, (ordered[-1] - ordered[0]) // (len(ordered) - 1)))]
    return ",".join(f"{count}:{stride}" for count, stride in digits) or "1:1"


class Meetings:
    """Names the meetings of one rank: calls in a group in order, and messages by sender, receiver and order."""

    def __init__(self, one: Capture, column: Column) -> None:
        self._rank, self._there = one.rank, frozenset(column.ranks)
        self._column = lattice(column.ranks)
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._members = [len(self._there.intersection(group)) for group in one.groups]

    def collective(self, group: int) -> tuple[str, int]:
        """What the next collective in a group is called among those who meet, and how many of the captured they are."""
        if self._members[group] < 2:
            return "", 1
        self._counts[group,] += 1
        return f"group {group}, {self._counts[group,]}", self._members[group]

    def message(self, pair: int, group: int, peer: int) -> tuple[str, str] | None:
        """What the next message to or from a rank is called, and its role; None where that rank is not captured."""
        if peer not in self._there:
            return None
        both = (peer, self._rank) if pair else (self._rank, peer)
        self._counts[*both, group] += 1
        return (
            f"{both[0]} to {both[1]} in {group}, {self._counts[*both, group]}",
            f"#{both[0]}>{both[1]}@{self._column}",
        )
