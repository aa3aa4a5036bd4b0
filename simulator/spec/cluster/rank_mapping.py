"""Rank mapping: the GPU of each rank, if rank r is not GPU r.

A cluster's seats are the GPUs of one node's ranks, which every node then repeats, or those of all ranks, counted over the
nodes: GPU g of node n is n × gpus_per_node + g.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from simulator.base.errors import Fault
from simulator.base.schema import more_than_once

_SHOWN = 8  # GPUs named in one fault
RankMapping = tuple[int, ...]


def gpu_at(rank_mapping: RankMapping, rank: int) -> int:
    """The GPU of a rank, counted over the nodes."""
    if not rank_mapping:
        return rank
    block, place = divmod(rank, len(rank_mapping))
    return block * len(rank_mapping) + rank_mapping[place]


def rank_on(rank_mapping: RankMapping, gpu: int) -> int:
    """The rank on a GPU; the inverse of `gpu_at`."""
    return next(ranks_on(rank_mapping, (gpu,)))


def ranks_on(rank_mapping: RankMapping, gpus: Iterable[int]) -> Iterator[int]:
    """The rank on each of some GPUs. The mapping is looked up once, which passes over all of it."""
    if not rank_mapping:
        yield from gpus
        return
    size, inverse = len(rank_mapping), _inverse(rank_mapping)
    for gpu in gpus:
        block, place = divmod(gpu, size)
        yield block * size + inverse[place]


@lru_cache(maxsize=256)
def _inverse(rank_mapping: RankMapping) -> RankMapping:
    return tuple(sorted(range(len(rank_mapping)), key=rank_mapping.__getitem__))


def shortest(rank_mapping: Sequence[int], per_node: int) -> RankMapping:
    """The same mapping, as one node's if all nodes are alike, and empty if rank r is GPU r."""
    first = tuple(rank_mapping[:per_node])
    if all(gpu == gpu_at(first, rank) for rank, gpu in enumerate(rank_mapping)):
        return () if first == tuple(range(len(first))) else first
    return tuple(rank_mapping)


def rank_mapping_faults(data: Mapping[str, object], place: str) -> Iterator[Fault]:
    """GPUs that do not exist, or that have two ranks or none. Malformed values are reported by their own field."""
    rank_mapping, per_node, nodes = data.get("seats"), data.get("gpus_per_node"), data.get("num_nodes", 1)
    if (
        not isinstance(rank_mapping, list | tuple)
        or not rank_mapping
        or not isinstance(per_node, int)
        or not isinstance(nodes, int)
    ):
        return
    where, total = f"{place}: seats", per_node * nodes
    if len(rank_mapping) not in (per_node, total):
        either = f"{per_node}, those of every node" + (f", or {total}, those of all" if nodes > 1 else "")
        yield Fault(place=where, problem=f"{len(rank_mapping)} GPUs", remedy=either)
        return
    numbers = [gpu for gpu in rank_mapping if isinstance(gpu, int)]
    size, taken = len(rank_mapping), set(numbers)
    if beyond := sorted({gpu for gpu in numbers if gpu >= size}):
        yield Fault(place=where, problem=f"names GPU {_listed(beyond)}; there are {size}", remedy=f"0 to {size - 1}")
    if twice := sorted(more_than_once(numbers)):
        yield Fault(place=where, problem=f"GPU {_listed(twice)} appears twice", remedy="each GPU once")
    if left := [gpu for gpu in range(size) if gpu not in taken]:
        yield Fault(place=where, problem=f"GPU {_listed(left)} has no rank", remedy="each GPU once")


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus[:_SHOWN])) + (", …" if len(gpus) > _SHOWN else "")
