"""The orders of axes that are tried, and the seats that they give."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.rank_mapping import RankMapping
from simulator.spec.plan import Plan


def blocks_of(plan: Plan, cluster: Cluster, *, across_nodes: bool) -> Iterator[tuple[str, RankMapping]]:
    """(rank order, seats): the plan's own first; across_nodes: every other order of its axes that differs."""
    yield plan.rank_order, ()
    if not across_nodes or cluster.num_nodes == 1:
        return
    mesh = Mesh(plan, cluster)
    axes = [axis for axis in reversed(plan.axis_order) if mesh.axes[axis] > 1]
    seen = {tuple(range(mesh.num_ranks))}
    for order in permutations(axes):
        name = "-".join(order)
        other = Mesh(plan.copy_with(rank_order=name), cluster)
        rank_mapping = tuple(other.rank(mesh.coordinates(rank)) for rank in range(mesh.num_ranks))
        if rank_mapping not in seen:
            seen.add(rank_mapping)
            yield name, rank_mapping


def composed(blocks: RankMapping, order: RankMapping, num_devices: int) -> RankMapping:
    """Places of all ranks: rank -> place by the blocks, place -> GPU by every node's order."""
    size = len(order)
    places = blocks or range(num_devices)
    return tuple(place // size * size + order[place % size] for place in places)
