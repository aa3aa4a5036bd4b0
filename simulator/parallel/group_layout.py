"""How groups are spread over nodes if there is a rank mapping: counted rank by rank (without one, see `Lattice`).

What a group finds between its GPUs depends on which they are, so the GPUs of each group are listed node by node; nodes
that look alike are listed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import nearest, places_of
from simulator.spec.cluster.rank_mapping import gpus_at
from simulator.spec.cluster.wiring import Wiring

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
    off_rail: float


def layout(cluster: Cluster, groups: Iterable[Sequence[int]]) -> Layout:
    """How groups of ranks lie on the nodes of a cluster: the worst of each, and all patterns of GPUs."""
    size, nodes, apart = 0, defaultdict[int, list[tuple[int, ...]]](list), cluster.num_nodes
    widest, fullest, spans, off, rails = 1, 1, False, 0.0, Rails.of(cluster)
    for group in groups:
        on_node = _by_node(cluster, group)
        for node, gpus in on_node.items():
            nodes[node].append(gpus)
        size, widest = max(size, len(group)), max(widest, len(on_node))
        fullest = max(fullest, *map(len, on_node.values()))
        apart = min((apart, *(b - a for a, b in pairwise(sorted(on_node)))))
        spans = spans or _spans(cluster, on_node)
        off = max(off, rails.missed(on_node))
    return Layout(
        num_ranks=size,
        num_nodes=widest,
        ranks_per_node=fullest,
        num_groups_per_node=max(map(len, nodes.values()), default=1),
        spans_domain=spans,
        node_stride=apart if widest > 1 else 1,
        patterns=tuple(sorted({tuple(sorted(on_node)) for on_node in nodes.values()})),
        off_rail=off,
    )


def pairs_layout(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Layout:
    """How pairs of communicating ranks are spread; if some are on different nodes, only these. Pairs are directed."""
    gpus = cluster.gpus_per_node
    places = [(cluster.gpu_of(a), cluster.gpu_of(b)) for a, b in pairs]
    apart = [(a, b) for a, b in places if a // gpus != b // gpus]
    if not apart:
        return layout(cluster, pairs)
    rails = Rails.of(cluster)
    ends_of = ({end // gpus: (end % gpus,) for end in pair} for pair in apart)
    sides = [defaultdict[int, list[tuple[int, ...]]](list) for _ in range(2)]
    for ends in apart:
        for side, gpu in zip(sides, ends, strict=True):
            side[gpu // gpus].append((gpu % gpus,))
    return Layout(
        num_ranks=2,
        num_nodes=2,
        ranks_per_node=1,
        num_groups_per_node=max(len(members) for side in sides for members in side.values()),
        spans_domain=any(_domain(cluster, a) != _domain(cluster, b) for a, b in places),
        node_stride=max(1, min(abs(a // gpus - b // gpus) for a, b in apart)),
        patterns=tuple(sorted({tuple(sorted(members)) for side in sides for members in side.values()})),
        off_rail=max(map(rails.missed, ends_of)),
    )


@dataclass(frozen=True, slots=True)
class Rails:
    """Which rails the NICs beside GPUs are on. of_node: those of nodes that are cabled otherwise."""

    of_node: Mapping[int, tuple[int, ...]]
    nics: tuple[tuple[int, ...], ...]  # the nearest of each GPU

    @classmethod
    def of(cls, cluster: Cluster) -> Rails:
        """Of a cluster; without exceptions nothing changes rails."""
        stated = cluster.rails
        if not stated:
            return cls({}, ())
        wiring, places = Wiring.of(cluster), places_of(cluster)
        return cls(stated, tuple(nearest(wiring, places, gpu)[0] for gpu in range(cluster.gpus_per_node)))

    def missed(self, on_node: Mapping[int, Sequence[int]]) -> float:
        """Share of the traffic between a group's consecutive nodes that changes rails."""
        nodes = sorted(on_node)
        if self.of_node.keys().isdisjoint(nodes) or len(nodes) == 1:
            return 0.0
        rails = [{rail for gpu in on_node[node] for rail in self.at(node, gpu)} for node in nodes]
        hops = list(zip(rails, [*rails[1:], rails[0]], strict=True))
        return sum(1 - len(here & there) / len(here) for here, there in hops) / len(hops)

    def at(self, node: int, gpu: int) -> tuple[int, ...]:
        """The rails of a GPU's nearest NICs."""
        order = self.of_node.get(node)
        return self.nics[gpu] if order is None else tuple(order[nic] for nic in self.nics[gpu])


def _by_node(cluster: Cluster, group: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """Node -> the local GPUs of a group there, in the order of its ranks."""
    per_node, by_node = cluster.gpus_per_node, defaultdict[int, list[int]](list)
    for gpu in gpus_at(cluster.seats, group):
        by_node[gpu // per_node].append(gpu % per_node)
    return {node: tuple(gpus) for node, gpus in by_node.items()}


def _spans(cluster: Cluster, on_node: Mapping[int, Sequence[int]]) -> bool:
    per_node, size = cluster.gpus_per_node, cluster.nvlink_domain_size
    if size % per_node == 0:
        return len({node * per_node // size for node in on_node}) > 1
    return len({(node * per_node + gpu) // size for node, gpus in on_node.items() for gpu in gpus}) > 1


def _domain(cluster: Cluster, gpu: int) -> int:
    return gpu // cluster.nvlink_domain_size
