"""A pool over several tiers in a step: HBM first, then idle peers over NVLink, the host, drives; and what moves between them.

A tensor must be in HBM to be used, and comes up when it is. All tensors that live stand in one stack; those that do not fit beside the
ones before them go down, as far as needed, and stay until they are used. A use puts its tensor on top, and of each two that meet on the
way down the policy says which stays. The stack does not hang on the room, so that more room above never sends anything further down, and
no use waits longer (Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from simulator.studies.tensors.table import Tensor
from simulator.work.offload.hierarchy import Tier

Key = Callable[[int, int], float]  # (tensor, number of the use at hand) -> rank: the lower one stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """What a step's uses move. fetched, evicted: bytes by tier that they come from, or go to. waits_s: what uses wait for.

    hidden_s: of fetches ahead of their use, what passes beside the computation before it. peak_bytes: by tier, at its worst
    moment. over_bytes: what found no place in any tier. faults: rounds of page faults, mappings, or moves.
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


@dataclass(slots=True)
class _Run:
    fetched: dict[str, int] = field(default_factory=dict)
    evicted: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    moves: int = 0
    over: int = 0
    waits_s: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How what is missing comes. unit_bytes: pages of one fault, or chunks that are mapped; 0: whole tensors at once.

    unit_s: time of one fault, mapping or copy, on top of the bytes. ahead: fetched while the use before it still computes.
    """

    unit_bytes: int = 0
    unit_s: float = 0.0
    ahead: bool = False


def tiered(tensors: Sequence[Tensor], tiers: Sequence[Tier], policy: str, moves: Moves = Moves()) -> Tiered:
    """Play the uses of all tensors, in order of time; of equal times, in the order of the table."""
    uses = sorted((at, number) for number, one in enumerate(tensors) for at in one.uses_s)
    order = POLICIES[policy](tensors, uses, tiers, moves)
    run, place, stack = _Run(), dict[int, int](), list[int]()
    for index, (now_s, used) in enumerate(uses):
        stack = _restacked([one for one in stack if tensors[one].last_s >= now_s], used, lambda one: order(one, index))  # noqa: B023
        lowest = _filled(tensors, tiers, stack)
        after = {number: tier if number == used else max(tier, place.get(number, 0)) for number, tier in lowest.items()}
        before_s = uses[index - 1][0] if index else now_s
        _move(run, tensors, tiers, place, after, used, moves, now_s - before_s)
        place = after
        held: dict[str, int] = {}
        for number, tier in after.items():
            name = tiers[tier].name if tier < len(tiers) else ""
            held[name] = held.get(name, 0) + tensors[number].num_bytes
        unusable = tensors[used].num_bytes if after[used] else 0  # larger than HBM
        beyond = sum(max(0, held.get(one.name, 0) - one.num_bytes) for one in tiers)
        run.over = max(run.over, held.pop("", 0) + beyond, unusable)
        run.peaks = {name: max(run.peaks.get(name, 0), held.get(name, 0)) for name in {**run.peaks, **held}}
    return Tiered(
        policy=policy, num_uses=len(uses), misses=run.misses, fetched=run.fetched, evicted=run.evicted, waits_s=run.waits_s,
        hidden_s=run.hidden_s, peak_bytes=run.peaks, over_bytes=run.over, faults=run.moves,
    )  # fmt: skip


def _restacked(stack: Sequence[int], used: int, rank: Callable[[int], float]) -> list[int]:
    """The stack after a use. From where the tensor comes the way up is free: of two that meet, the lower rank stays."""
    depth = stack.index(used) if used in stack else len(stack)
    found, carried = [used], list(stack[:1]) if depth else []
    for other in stack[1:depth]:
        stays, goes = sorted((carried[0], other), key=lambda one: (rank(one), one))
        found.append(stays)
        carried = [goes]
    return [*found, *carried, *stack[depth + 1 :]]


def _filled(tensors: Sequence[Tensor], tiers: Sequence[Tier], ranked: Sequence[int]) -> dict[int, int]:
    """Tensor -> tier: each tier takes the next ones as far as they fit; the number of tiers where none has room."""
    found: dict[int, int] = {}
    tier, room = 0, tiers[0].num_bytes
    for number in ranked:
        while tier < len(tiers) and tensors[number].num_bytes > room:
            tier += 1
            room = tiers[tier].num_bytes if tier < len(tiers) else 0
        room -= tensors[number].num_bytes
        found[number] = tier
    return found


def _move(
    run: _Run, tensors: Sequence[Tensor], tiers: Sequence[Tier], before: Mapping[int, int], after: Mapping[int, int],
    used: int, moves: Moves, gap_s: float,
) -> None:  # fmt: skip
    """Count what changes its tier at a use. The use waits for its own tensor; what leaves HBM leaves the other way, beside it."""
    source = before.get(used, 0)
    if source:
        run.misses += 1
    for number, tier in after.items():
        was, size = before.get(number, 0 if number == used else tier), tensors[number].num_bytes
        if tier == was or max(tier, was) >= len(tiers):
            continue
        units = -(-size // moves.unit_bytes) if moves.unit_bytes else 1
        run.moves += units
        if tier > was:
            run.evicted[tiers[tier].name] = run.evicted.get(tiers[tier].name, 0) + size
            continue
        run.fetched[tiers[was].name] = run.fetched.get(tiers[was].name, 0) + size
        seconds = size / tiers[was].read_bytes_per_s + units * moves.unit_s
        hidden = min(seconds, gap_s) if moves.ahead else 0.0
        run.waits_s += seconds - hidden
        run.hidden_s += hidden


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
        units = -(-size // moves.unit_bytes) if moves.unit_bytes else 1
        seconds = size / below.read_bytes_per_s + size / below.write_bytes_per_s + 2 * units * moves.unit_s
        return away * size / seconds if seconds else away

    return key


POLICIES: Final = {"lru": _lru, "cost": _cost, "belady": _belady}
