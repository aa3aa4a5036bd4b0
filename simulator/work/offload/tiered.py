"""A pool over several tiers in a step: HBM first, then idle peers over NVLink, the host, drives; and what moves between them.

A tensor must be in HBM to be used, and comes up when it is. All tensors that live stand in one stack; those that do not fit beside the
ones before them go down, as far as needed, and stay until they are used. A use puts its tensor on top, and of each two that meet on the
way down the policy says which stays. The stack does not hang on the room, so that more room above never sends anything further down, and
no use waits longer (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from simulator.work.offload.hierarchy import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """gpu: whose kernels use it. uses_s: when, in order; it is held from the first use to the last, both included."""

    name: str
    gpu: int
    num_bytes: int
    uses_s: tuple[float, ...]

    @property
    def first_s(self) -> float:
        return self.uses_s[0]

    @property
    def last_s(self) -> float:
        return self.uses_s[-1]


Key = Callable[[int, int], float]  # (tensor, number of the use at hand) -> rank: the lower one stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """What a step's uses move. fetched, evicted: bytes by tier that they come from, or go to. waits_s: what uses wait for.

    hidden_s: of fetches ahead of their use, what passes beside the computation before it. peak_bytes: by tier, at its worst
    moment. changes: (when, tensor, from, to) of every move. over_bytes: what found no place in any tier. faults: rounds of page faults, mappings, or moves.
    """

    policy: str
    num_uses: int
    misses: int
    fetched: Mapping[str, int]
    evicted: Mapping[str, int]
    waits_s: float
    hidden_s: float
    peak_bytes: Mapping[str, int]
    over_bytes: int
    faults: int
    changes: tuple[tuple[float, str, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How what is missing comes. unit_bytes: pages of one fault, or chunks that are mapped; 0: whole tensors at once.

    unit_s: time of one fault, mapping or copy, on top of the bytes. ahead: fetched while the use before it still computes.
    """

    unit_bytes: int = 0
    unit_s: float = 0.0
    ahead: bool = False

    def units(self, num_bytes: int) -> int:
        """Faults, mappings or copies of so many bytes."""
        return -(-num_bytes // self.unit_bytes) if self.unit_bytes else 1


def tiered(tensors: Sequence[Tensor], tiers: Sequence[Tier], policy: str, moves: Moves = Moves()) -> Tiered:
    """Play the uses of all tensors, in order of time; of equal times, in the order of the table."""
    uses = sorted((at, number) for number, one in enumerate(tensors) for at in one.uses_s)
    order = POLICIES[policy](tensors, uses, tiers, moves)
    sizes, rooms = [one.num_bytes for one in tensors], [one.num_bytes for one in tiers]
    run, place, stack = _Run(tensors, tiers, moves), dict[int, int](), list[int]()
    for index, (now_s, used) in enumerate(uses):
        stack = restacked([one for one in stack if tensors[one].last_s >= now_s], used, lambda one: order(one, index))  # noqa: B023
        lowest = filled(sizes, rooms, stack)
        after = {number: tier if number == used else max(tier, place.get(number, 0)) for number, tier in lowest.items()}
        run.move(place, after, uses[index], now_s - (uses[index - 1][0] if index else now_s))
        run.hold(after, used)
        place = after
    return Tiered(
        policy=policy, num_uses=len(uses), misses=run.misses, fetched=dict(run.fetched), evicted=dict(run.evicted),
        waits_s=run.waits_s, hidden_s=run.hidden_s, peak_bytes=run.peaks, over_bytes=run.over, faults=run.moved,
        changes=tuple(run.changes),
    )  # fmt: skip


@dataclass(slots=True)
class _Run:
    """Counts what moves, and what lies where."""

    tensors: Sequence[Tensor]
    tiers: Sequence[Tier]
    moves: Moves
    fetched: Counter[str] = field(default_factory=Counter)
    evicted: Counter[str] = field(default_factory=Counter)
    peaks: dict[str, int] = field(default_factory=dict)
    changes: list[tuple[float, str, str, str]] = field(default_factory=list)
    misses: int = 0
    moved: int = 0
    over: int = 0
    waits_s: float = 0.0
    hidden_s: float = 0.0

    def move(self, before: Mapping[int, int], after: Mapping[int, int], use: tuple[float, int], gap_s: float) -> None:
        """From one use to the next. It waits for its own tensor; what leaves HBM leaves the other way, beside it."""
        now_s, used = use
        self.misses += before.get(used, 0) > 0
        for number, tier in after.items():
            was, one = before.get(number, 0 if number == used else tier), self.tensors[number]
            if tier == was or max(tier, was) >= len(self.tiers):
                continue
            self.moved += (units := self.moves.units(one.num_bytes))
            self.changes.append((now_s, one.name, self.tiers[was].name, self.tiers[tier].name))
            if tier > was:
                self.evicted[self.tiers[tier].name] += one.num_bytes
                continue
            self.fetched[self.tiers[was].name] += one.num_bytes
            seconds = one.num_bytes / self.tiers[was].read_bytes_per_s + units * self.moves.unit_s
            hidden = min(seconds, gap_s) if self.moves.ahead else 0.0
            self.waits_s += seconds - hidden
            self.hidden_s += hidden

    def hold(self, after: Mapping[int, int], used: int) -> None:
        """Beyond all tiers, or in one that is full, or in use and not in HBM: it finds no place."""
        resident: Counter[str] = Counter()
        for number, tier in after.items():
            resident[self.tiers[tier].name if tier < len(self.tiers) else ""] += self.tensors[number].num_bytes
        unusable = self.tensors[used].num_bytes if after[used] else 0
        beyond = sum(max(0, resident[one.name] - one.num_bytes) for one in self.tiers)
        self.over = max(self.over, resident.pop("", 0) + beyond, unusable)
        self.peaks = {name: max(self.peaks.get(name, 0), resident[name]) for name in {**self.peaks, **+resident}}


def restacked(stack: Sequence[int], used: int, rank: Callable[[int], float]) -> list[int]:
    """The stack after a use. From where the tensor comes the way up is free: of two that meet, the lower rank stays."""
    depth = stack.index(used) if used in stack else len(stack)
    found, carried = [used], list(stack[:1]) if depth else []
    for other in stack[1:depth]:
        stays, goes = sorted((carried[0], other), key=lambda one: (rank(one), one))
        found.append(stays)
        carried = [goes]
    return [*found, *carried, *stack[depth + 1 :]]


def filled(sizes: Sequence[int], rooms: Sequence[int], ranked: Sequence[int]) -> dict[int, int]:
    """Tensor -> tier: each tier takes the next ones as far as they fit; the number of tiers where none has room. In bytes."""
    found: dict[int, int] = {}
    tier, room = 0, rooms[0]
    for number in ranked:
        while tier < len(rooms) and sizes[number] > room:
            tier += 1
            room = rooms[tier] if tier < len(rooms) else 0
        room -= sizes[number]
        found[number] = tier
    return found


# -- policies: what stays


def _lru(tensors: Sequence[Tensor], uses: Sequence[tuple[float, int]], tiers: Sequence[Tier], moves: Moves) -> Key:  # noqa: ARG001
    last: dict[int, int] = {}
    seen = [0]

    def key(number: int, index: int) -> float:
        while seen[0] < index:
            last[uses[seen[0]][1]] = seen[0]
            seen[0] += 1
        return -last.get(number, -1)

    return key


def _next_uses(uses: Sequence[tuple[float, int]]) -> Callable[[int, int], float]:
    """(tensor, index) -> index of its next use from there on; infinite: none."""
    places: dict[int, list[int]] = {}
    for index, (_, number) in enumerate(uses):
        places.setdefault(number, []).append(index)

    def following(number: int, index: int) -> float:
        waiting = places[number]
        while len(waiting) > 1 and waiting[0] <= index:
            waiting.pop(0)
        return waiting[0] if waiting[0] > index else float("inf")

    return following


def _belady(tensors: Sequence[Tensor], uses: Sequence[tuple[float, int]], tiers: Sequence[Tier], moves: Moves) -> Key:  # noqa: ARG001
    """What is used soonest stays: a step repeats, so its future is known (Belady, IBM Systems Journal 5(2), 1966)."""
    return _next_uses(uses)


def _cost(tensors: Sequence[Tensor], uses: Sequence[tuple[float, int]], tiers: Sequence[Tier], moves: Moves) -> Key:
    """What saves most seconds a byte and use of its absence stays: what leaves travels twice, and small ones cost latency most."""
    following, below = _next_uses(uses), tiers[min(1, len(tiers) - 1)]

    def key(number: int, index: int) -> float:
        away = following(number, index) - index
        size = tensors[number].num_bytes
        units = moves.units(size)
        seconds = size / below.read_bytes_per_s + size / below.write_bytes_per_s + 2 * units * moves.unit_s
        return away * size / seconds if seconds else away

    return key


POLICIES: Final = {"lru": _lru, "cost": _cost, "belady": _belady}
