"""A measured fabric in two parts: what hosts wait for each rank, and what the links give where the network took the time.

A network gives an all-reduce of large messages about twice the time of an all-gather, and either hardly grows with the ranks.
Where kinds take equal times, well above the links', and some tenths of a millisecond for each rank, the host waited: each call was
checked with every rank before it was issued. torch does so through gloo under TORCH_DISTRIBUTED_DEBUG=DETAIL
(torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp: monitoredBarrier, whose first rank hears every other in turn, and gathers of
the call's shapes). Such numbers say nothing of the links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Final

from simulator.base.remembered import Same
from simulator.spec.cluster import Cluster
from simulator.spec.software.nccl import Nccl
from simulator.work.collectives.call import Stated
from simulator.work.collectives.stated import nearest_kinds, of_kind

# All kinds at least so much slower than the model's links give them, and an all-reduce not the twice of a gather that bytes make
# it, nor much quicker than one. What else disturbs ten timed calls makes them longer, so that it may well be slower than twice.
_SLOWER: Final = 1.2
_TWICE: Final = (1.6, 2.2)
_EQUAL: Final = 1.5
# Above a step of a ring over any GPU network (10 to 60 µs), below one exchange over TCP with a process that a busy host has to wake
_LEAST_RANK_S: Final = 0.15e-3
# Seconds for a rank of another node: gathers of 1 GiB take so much longer with each from 32 to 256 ranks (8 H100 a node)
_RANK_S: Final = 0.295e-3
# In that unit: a rank of the same node, which answers without a network, and a check whoever takes part. Groups of 2, 4 and 8 inside a
# node wait 0.39, 0.86 and 1.58 ms a call (calibration of nanotron-2025; 0.40, 0.81 and 1.64 by these).
_NEAR, _CHECK = 0.70, 0.65
# Gathers that take so many times what such waits and their bytes take, or less, show them beside an all-reduce that was disturbed, too
_LONGER: Final = 1.15
_GATHERS: Final = ("all_gather", "reduce_scatter")
_MOST: Final = 1024  # clusters and kinds that are kept

Model = Callable[[Stated], float]
Seconds = Callable[[Stated, "Nccl"], float]


@dataclass(frozen=True, slots=True)
class MeasuredFabric:
    """rank_s: what the host waits for a rank of another node before a collective is issued. stated: what the links gave, by kind."""

    rank_s: float
    stated: Mapping[str, Sequence[Stated]]


def ranks_heard(num_ranks: int, ranks_per_node: int) -> float:
    """Ranks of other nodes whose waits are as long as what a call waits for all others of its group."""
    if num_ranks == 1:
        return 0.0
    near = min(num_ranks, ranks_per_node) - 1
    return _CHECK + _NEAR * near + num_ranks - 1 - near


def measured_fabric(cluster: Cluster, nccl: Nccl, seconds: Seconds) -> MeasuredFabric:
    """The cluster's numbers, taken apart once. seconds: of such a call by the calibrated links."""
    return _fabric(Same(cluster), nccl, seconds)


def stated_for(cluster: Cluster, kind: str, nccl: Nccl, seconds: Seconds) -> tuple[Stated, ...]:
    """What the links were measured to give, as `kind` follows it."""
    return _nearest(Same(measured_fabric(cluster, nccl, seconds)), kind)


@lru_cache(maxsize=_MOST)
def _nearest(fabric: Same, kind: str) -> tuple[Stated, ...]:
    return nearest_kinds(fabric.one.stated, kind)


@lru_cache(maxsize=_MOST)
def _fabric(of: Same, nccl: Nccl, seconds: Seconds) -> MeasuredFabric:
    def model(one: Stated) -> float:
        return seconds(one, nccl)

    cluster: Cluster = of.one
    known: dict[str, Sequence[Stated]] = {
        kind: of_kind(cluster, kind, nccl) for kind in {one.collective for one in cluster.fabric.measured}
    }
    waits = [wait for together in _together(known) if (wait := _rank_wait_s(together, model))]
    rank_s = cluster.fabric.call_rank_s
    rank_s = (median(waits) if waits else 0.0) if rank_s is None else rank_s
    known = _halved(known, rank_s)

    def waited(one: Stated) -> bool:  # the number is no longer than that and what the links take give it
        return rank_s > 0 and one.time_s <= 2 * (rank_s * _heard(one) + model(one))

    return MeasuredFabric(rank_s, {kind: [one for one in many if not waited(one)] for kind, many in known.items()})


def _together(known: Mapping[str, Sequence[Stated]]) -> list[list[Stated]]:
    """Numbers of all-reduce and of gathers over the same nodes in calls of one size."""
    found: dict[object, list[Stated]] = {}
    for kind in ("all_reduce", *_GATHERS):
        for one in known.get(kind, ()):
            if one.place.num_domains > 1:
                found.setdefault((one.place.num_ranks, one.place.num_domains, one.size_bytes), []).append(one)
    return [many for many in found.values() if len(many) > 1 and many[0].kind == "all_reduce"]


def _rank_wait_s(together: Sequence[Stated], model: Model) -> float:
    """Seconds for a rank of another node where the host's waits are all that the numbers show, else 0."""
    reduced, *gathers = together
    gathered_s, waited_s = min(one.time_s for one in gathers), _RANK_S * _heard(reduced)
    rank_s = min(reduced.time_s, gathered_s) / _heard(reduced)
    slower = min(one.time_s / model(one) for one in together) >= _SLOWER
    network = _TWICE[0] <= reduced.time_s / gathered_s <= _TWICE[1] or reduced.time_s * _EQUAL < gathered_s
    network &= not waited_s <= gathered_s <= _LONGER * (waited_s + max(map(model, gathers)))
    return min(rank_s, _RANK_S) if slower and not network and rank_s >= _LEAST_RANK_S else 0.0


def _heard(one: Stated) -> float:
    return ranks_heard(one.place.num_ranks, one.place.ranks_per_domain)


def _halved(known: Mapping[str, Sequence[Stated]], rank_s: float) -> dict[str, Sequence[Stated]]:
    """An all-reduce takes no longer than a reduce-scatter and an all-gather: what else its number shows was in its way once.

    It waits once for the ranks, where the two wait twice.
    """
    gathers = [one for kind in _GATHERS for one in known.get(kind, ())]

    def most_s(one: Stated) -> float:
        who = one.place, one.size_bytes
        gathered_s = max(
            (each.time_s for each in gathers if (each.place, each.size_bytes) == who), default=float("inf")
        )
        return 2 * gathered_s - min(rank_s * _heard(one), gathered_s)

    reduced = [replace(one, time_s=min(one.time_s, most_s(one))) for one in known.get("all_reduce", ())]
    return {**known, "all_reduce": reduced} if reduced else dict(known)
