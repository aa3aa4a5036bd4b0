"""Seats: which GPU each rank sits on, where that is not GPU r for rank r.

A cluster's seats are the GPUs of one node's ranks, which every node then repeats, or those of all ranks, counted over the
nodes: GPU g of node n is n × gpus_per_node + g.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from simulator.errors import Fault

_SHOWN = 8  # GPUs named in one fault
Seats = tuple[int, ...]


def gpu_at(seats: Seats, rank: int) -> int:
    """The GPU of a rank, counted over the nodes."""
    if not seats:
        return rank
    block, place = divmod(rank, len(seats))
    return block * len(seats) + seats[place]


def rank_on(seats: Seats, gpu: int) -> int:
    """The rank on a GPU; the inverse of `gpu_at`."""
    if not seats:
        return gpu
    block, place = divmod(gpu, len(seats))
    return block * len(seats) + _inverse(seats)[place]


@lru_cache(maxsize=256)
def _inverse(seats: Seats) -> Seats:
    return tuple(sorted(range(len(seats)), key=seats.__getitem__))


def shortest(seats: Sequence[int], per_node: int) -> Seats:
    """The same seats as one node's where all nodes look alike, and none where rank r sits on GPU r."""
    first = tuple(seats[:per_node])
    if all(gpu == gpu_at(first, rank) for rank, gpu in enumerate(seats)):
        return () if first == tuple(range(len(first))) else first
    return tuple(seats)


def seat_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """GPUs that do not exist, hold two ranks or none. What is malformed is a fault of its own field."""
    seats, per_node, nodes = data.get("seats"), data.get("gpus_per_node"), data.get("num_nodes", 1)
    if not isinstance(seats, list | tuple) or not seats or not isinstance(per_node, int) or not isinstance(nodes, int):
        return
    where, total = f"{place}: seats", per_node * nodes
    if len(seats) not in (per_node, total):
        either = f"{per_node}, those of every node" + (f", or {total}, those of all" if nodes > 1 else "")
        yield Fault(place=where, problem=f"{len(seats)} GPUs", remedy=either)
        return
    numbers = [seat for seat in seats if isinstance(seat, int)]
    size, counts = len(seats), Counter(numbers)
    if beyond := sorted({gpu for gpu in numbers if gpu >= size}):
        yield Fault(place=where, problem=f"names GPU {_listed(beyond)}; there are {size}", remedy=f"0 to {size - 1}")
    if twice := sorted(gpu for gpu, count in counts.items() if count > 1):
        yield Fault(place=where, problem=f"GPU {_listed(twice)} stands twice", remedy="each GPU once")
    if left := [gpu for gpu in range(size) if gpu not in counts]:
        yield Fault(place=where, problem=f"GPU {_listed(left)} has no rank", remedy="each GPU once")


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus[:_SHOWN])) + (", …" if len(gpus) > _SHOWN else "")
