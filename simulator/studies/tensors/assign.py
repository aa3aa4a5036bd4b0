"""assign_shards: which GPU holds each tensor while it lives, so that none is over-full and roads carry as little as possible.

A tensor that is not at home is read and written in place over the road between its holder and its user, once a use. Few tensors are
tried exhaustively (branch and bound); of many, those that relieve an over-full GPU at the least cost a byte are moved, and what
fits again goes home.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from simulator.base.sums import summed
from simulator.spec.cluster import Cluster
from simulator.work.offload.tiered import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """GPUs of one node. room: bytes of each. bytes_per_s: of the road from a GPU to another, one way."""

    room: tuple[int, ...]
    bytes_per_s: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, cluster: Cluster, room: Sequence[int]) -> Node:
        """The first node of a cluster, by the data sheet of its roads."""
        pairs = [(a, b) for a in range(len(room)) for b in range(len(room)) if a != b]
        rates = {(a, b): min(float(link.bytes_per_s) for link in cluster.route(a, b)) for a, b in pairs}
        return cls(room=tuple(room), bytes_per_s=rates)

    def seconds(self, tensor: Tensor, holder: int) -> float:
        """What the tensor's uses take on the road from where it is held; nothing at home."""
        if holder == tensor.gpu:
            return 0.0
        return len(tensor.uses_s) * tensor.num_bytes / self.bytes_per_s[holder, tensor.gpu]


MOST_TRIED: Final = 200_000  # partial assignments


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """holders: GPU of each tensor. road_s: what their uses take on roads. least_s: no assignment takes less.

    exact: nothing takes less. too_much: GPU -> bytes that find no place at its worst moment; empty: all fits.
    """

    holders: tuple[int, ...]
    road_s: float
    least_s: float
    exact: bool
    too_much: dict[int, int]


class GpuMemory:
    """Bytes that each GPU holds, between moments at which anything begins or ends."""

    def __init__(self, tensors: Sequence[Tensor], node: Node) -> None:
        self._moments = sorted({moment for one in tensors for moment in (one.first_s, one.last_s)})
        self.bytes: NDArray[np.int64] = np.zeros((len(node.room), max(1, len(self._moments))), np.int64)
        self._room = np.array(node.room, np.int64)

    def part(self, tensor: Tensor) -> slice:
        """The moments of a tensor's life."""
        return slice(bisect_left(self._moments, tensor.first_s), bisect_right(self._moments, tensor.last_s))

    def at_or_before(self, time_s: float) -> float:
        """The last of the moments that is not after a time."""
        return self._moments[max(0, bisect_right(self._moments, time_s) - 1)]

    def add(self, tensor: Tensor, gpu: int, sign: int = 1) -> None:
        self.bytes[gpu, self.part(tensor)] += sign * tensor.num_bytes

    def fits(self, tensor: Tensor, gpu: int) -> bool:
        """The tensor has room on the GPU all its life, beside what is there."""
        return int(self.bytes[gpu, self.part(tensor)].max()) + tensor.num_bytes <= int(self._room[gpu])

    def over(self) -> NDArray[np.int64]:
        """Bytes beyond each GPU's room at each moment; not above 0: it fits."""
        return self.bytes - self._room[:, None]


def assign_shards(tensors: Sequence[Tensor], node: Node) -> Assignment:
    """The holder of each tensor."""
    least_s = lower_bound_s(tensors, node)
    at_home = _result(tensors, node, [one.gpu for one in tensors], least_s, exact=True)
    if not at_home.too_much:
        return at_home
    greedy = _relieved(tensors, node)
    tried = _Tried(tensors, node)
    if tried.best is not None:
        return _result(tensors, node, tried.best, least_s, exact=True)
    return _result(tensors, node, greedy, least_s, exact=False)


def lower_bound_s(tensors: Sequence[Tensor], node: Node) -> float:
    """What no assignment undercuts: of each GPU's own tensors, at its worst moment, what is beyond its room is elsewhere.

    As if tensors could be split, and the fastest road of each were free: those that are cheapest a byte leave first.
    """
    total = 0.0
    for gpu, room in enumerate(node.room):
        own = [one for one in tensors if one.gpu == gpu]
        roads = [rate for (_, to), rate in node.bytes_per_s.items() if to == gpu]
        worst = 0.0
        for moment in sorted({one.first_s for one in own}):
            alive = [one for one in own if one.first_s <= moment <= one.last_s]
            beyond, seconds = summed(one.num_bytes for one in alive) - room, 0.0
            for one in sorted(alive, key=lambda one: len(one.uses_s)):
                if beyond > 0 and roads:
                    size = min(beyond, one.num_bytes)
                    seconds += len(one.uses_s) * size / max(roads)
                    beyond -= size
            worst = max(worst, seconds)
        total += worst
    return total


def _result(
    tensors: Sequence[Tensor], node: Node, holders: Sequence[int], least_s: float, *, exact: bool
) -> Assignment:
    memory = GpuMemory(tensors, node)
    for one, gpu in zip(tensors, holders, strict=True):
        memory.add(one, gpu)
    over = memory.over().max(axis=1)
    return Assignment(
        holders=tuple(holders),
        road_s=summed(node.seconds(one, gpu) for one, gpu in zip(tensors, holders, strict=True)),
        least_s=least_s,
        exact=exact and not (over > 0).any(),
        too_much={gpu: int(size) for gpu, size in enumerate(over) if size > 0},
    )


def _relieved(tensors: Sequence[Tensor], node: Node) -> list[int]:
    """From all at home: until no GPU is over-full, the tensor that relieves the worst moment at the least cost a byte moves."""
    memory, holders = GpuMemory(tensors, node), [one.gpu for one in tensors]
    for one in tensors:
        memory.add(one, one.gpu)
    stuck: set[tuple[int, int]] = set()
    while True:
        over = memory.over()
        for key in stuck:
            over[key] = 0
        gpu, moment = (int(at) for at in np.unravel_index(int(over.argmax()), over.shape))
        if over[gpu, moment] <= 0:
            break
        moves = [
            (node.seconds(one, to) / min(one.num_bytes, int(over[gpu, moment])), node.seconds(one, to), index, to)
            for index, one in enumerate(tensors)
            if holders[index] == gpu == one.gpu and memory.part(one).start <= moment < memory.part(one).stop
            for to in range(len(node.room))
            if to != gpu and memory.fits(one, to)
        ]
        if not moves:
            stuck.add((gpu, moment))
            continue
        *_, index, to = min(moves)
        memory.add(tensors[index], gpu, -1)
        memory.add(tensors[index], to)
        holders[index] = to
    for index in sorted(range(len(tensors)), key=lambda at: -node.seconds(tensors[at], holders[at])):
        one = tensors[index]
        if holders[index] != one.gpu and memory.fits(one, one.gpu):  # what moved later made room for it
            memory.add(one, holders[index], -1)
            memory.add(one, one.gpu)
            holders[index] = one.gpu
    return holders


class _Tried:
    """Every assignment, the cheapest first, without those that are over-full or no cheaper than the best. best: None: too many."""

    def __init__(self, tensors: Sequence[Tensor], node: Node) -> None:
        self._tensors, self._node, self._held = tensors, node, GpuMemory(tensors, node)
        self._order = sorted(range(len(tensors)), key=lambda at: -tensors[at].num_bytes)
        self._now, self._left, self._least_s = [0] * len(tensors), MOST_TRIED, float("inf")
        self.best: list[int] | None = None
        if len(tensors) <= MOST_TRIED.bit_length():
            self._try(0, 0.0)
        if self._left < 0:
            self.best = None

    def _try(self, depth: int, road_s: float) -> None:
        self._left -= 1
        if self._left < 0 or road_s >= self._least_s:
            return
        if depth == len(self._order):
            self.best, self._least_s = list(self._now), road_s
            return
        index = self._order[depth]
        one = self._tensors[index]
        for gpu in sorted(range(len(self._node.room)), key=lambda to: (self._node.seconds(one, to), to)):
            if self._held.fits(one, gpu):
                self._held.add(one, gpu)
                self._now[index] = gpu
                self._try(depth + 1, road_s + self._node.seconds(one, gpu))
                self._held.add(one, gpu, -1)


# schedule_transfers: when what is held elsewhere crosses the roads of a node.
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One use of one tensor. how: a copy ahead of it, or read in place. exposed_s: by how much it comes after its use."""

    tensor: str
    source: int
    target: int
    num_bytes: int
    how: Literal["copied ahead", "read in place"]
    start_s: float
    end_s: float
    used_s: float

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.end_s - self.used_s)


def schedule_transfers(tensors: Sequence[Tensor], node: Node, found: Assignment) -> tuple[Transfer, ...]:
    """Every transfer, in the order of the uses. The first use makes the tensor, so that it is written in place."""
    memory = GpuMemory(tensors, node)
    for one, gpu in zip(tensors, found.holders, strict=True):
        memory.add(one, gpu)
    out_s, in_s = [0.0] * len(node.room), [0.0] * len(node.room)
    uses = sorted(
        (used_s, number, index)
        for index, one in enumerate(tensors)
        if found.holders[index] != one.gpu
        for number, used_s in enumerate(one.uses_s)
    )
    transfers: list[Transfer] = []
    for used_s, number, index in uses:
        one, source = tensors[index], found.holders[index]
        seconds = one.num_bytes / node.bytes_per_s[source, one.gpu]
        port_s = max(out_s[source], in_s[one.gpu])
        before_s = one.uses_s[number - 1] if number else used_s
        start_s = max(port_s, before_s)
        copy = Tensor(
            name=one.name, gpu=one.gpu, num_bytes=one.num_bytes, uses_s=(memory.at_or_before(start_s), used_s)
        )
        ahead = number > 0 and start_s < used_s and memory.fits(copy, one.gpu)
        if ahead:
            memory.add(copy, one.gpu)
        else:
            start_s = max(port_s, used_s)
        out_s[source] = in_s[one.gpu] = start_s + seconds
        transfers.append(
            Transfer(
                tensor=one.name, source=source, target=one.gpu, num_bytes=one.num_bytes, start_s=start_s,
                how="copied ahead" if ahead else "read in place", end_s=start_s + seconds, used_s=used_s,
            )
        )  # fmt: skip
    return tuple(transfers)
