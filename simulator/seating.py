"""How groups lie on nodes where ranks do not sit in order: counted rank by rank, where `Lattice` needs no list.

What a group finds between its GPUs depends on which they are, so the GPUs of each group are told node by node; nodes
that look alike are told once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypedDict

from simulator.topology import Cluster

Pattern = tuple[tuple[int, ...], ...]  # the GPUs of each group on a node, by local index


class Layout(TypedDict):
    """The fields of a `GroupShape`."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    num_groups_per_node: int
    spans_domain: bool
    node_stride: int
    patterns: tuple[Pattern, ...]


def layout(cluster: Cluster, groups: Iterable[Sequence[int]]) -> Layout:
    """How groups of ranks lie on the nodes of a cluster: the worst of each, and all patterns of GPUs."""
    size, nodes, nearest = 0, defaultdict[int, list[tuple[int, ...]]](list), cluster.num_nodes
    widest, fullest, spans = 1, 1, False
    for group in groups:
        held = _by_node(cluster, group)
        for node, gpus in held.items():
            nodes[node].append(gpus)
        size, widest = max(size, len(group)), max(widest, len(held))
        fullest = max(fullest, *map(len, held.values()))
        nearest = min((b - a for a, b in pairwise(sorted(held))), default=nearest) if len(held) > 1 else nearest
        spans = spans or _spans(cluster, group)
    return Layout(
        num_ranks=size,
        num_nodes=widest,
        ranks_per_node=fullest,
        num_groups_per_node=max(map(len, nodes.values()), default=1),
        spans_domain=spans,
        node_stride=nearest if widest > 1 else 1,
        patterns=tuple(sorted({tuple(sorted(held)) for held in nodes.values()})),
    )


def pairs_layout(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Layout:
    """How pairs of ranks lie that send to each other; where some are apart, these. Senders and receivers are told apart."""
    gpus = cluster.gpus_per_node
    places = [(cluster.gpu_of(a), cluster.gpu_of(b)) for a, b in pairs]
    apart = [(a, b) for a, b in places if a // gpus != b // gpus]
    if not apart:
        return layout(cluster, pairs)
    sides = [defaultdict[int, list[tuple[int, ...]]](list) for _ in range(2)]
    for ends in apart:
        for side, gpu in zip(sides, ends, strict=True):
            side[gpu // gpus].append((gpu % gpus,))
    return Layout(
        num_ranks=2,
        num_nodes=2,
        ranks_per_node=1,
        num_groups_per_node=max(len(held) for side in sides for held in side.values()),
        spans_domain=any(_domain(cluster, a) != _domain(cluster, b) for a, b in places),
        node_stride=max(1, min(abs(a // gpus - b // gpus) for a, b in apart)),
        patterns=tuple(sorted({tuple(sorted(held)) for side in sides for held in side.values()})),
    )


def _by_node(cluster: Cluster, group: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """Node -> the local GPUs of a group there, in the order of its ranks."""
    held = defaultdict[int, tuple[int, ...]](tuple)
    for rank in group:
        node, gpu = divmod(cluster.gpu_of(rank), cluster.gpus_per_node)
        held[node] += (gpu,)
    return held


def _spans(cluster: Cluster, group: Sequence[int]) -> bool:
    return len({_domain(cluster, cluster.gpu_of(rank)) for rank in group}) > 1


def _domain(cluster: Cluster, gpu: int) -> int:
    return gpu // cluster.nvlink_domain_size
