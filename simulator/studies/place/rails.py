"""Nodes whose NICs are connected to other rails: their ranks change GPUs, so that a group stays on its rail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import places_of
from simulator.studies.place.trial import Choice, Trials, is_better


def on_their_rails(trials: Trials, best: Choice) -> Choice:
    """The seats with such nodes' GPUs exchanged by rail, all of them or one node after the other, where a step is shorter."""
    cluster = trials.cluster
    orders = {node: gpus for node, rails in cluster.rails.items() if (gpus := _by_rail(cluster, rails)) is not None}
    for nodes in (tuple(orders), *((node,) for node in orders)):
        choice = Choice(
            best.plan, _exchanged(cluster.with_rank_mapping(best.rank_mapping), {node: orders[node] for node in nodes})
        )
        if is_better(trials.score(choice), trials.score(best)):
            best = choice
    return best


def _by_rail(cluster: Cluster, rails: Sequence[int]) -> tuple[int, ...] | None:
    """Of each GPU the one on this node that is on its rail; None where rails do not serve equally many GPUs."""
    beside = [place.gpus for place in places_of(cluster)]
    found: dict[int, int] = {}
    here = {rail: beside[nic] for nic, rail in enumerate(rails)}
    for rail, gpus in enumerate(beside):
        if len(gpus) != len(here[rail]):
            return None
        found |= dict(zip(gpus, here[rail], strict=True))
    taken = set(found.values())
    rest = [gpu for gpu in range(cluster.gpus_per_node) if gpu not in found]
    free = [gpu for gpu in range(cluster.gpus_per_node) if gpu not in taken]
    found |= dict(zip(rest, free, strict=True))
    return tuple(found[gpu] for gpu in range(cluster.gpus_per_node))


def _exchanged(cluster: Cluster, orders: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The cluster's seats, with the GPUs of some nodes exchanged."""
    moved = defaultdict[int, tuple[int, ...]](lambda: tuple(range(cluster.gpus_per_node)), orders)
    rank_mapping = (divmod(cluster.gpu_of(rank), cluster.gpus_per_node) for rank in range(cluster.num_devices))
    return tuple(node * cluster.gpus_per_node + moved[node][gpu] for node, gpu in rank_mapping)
