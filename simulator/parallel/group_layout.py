"""How groups are spread over nodes if there is a rank mapping: counted rank by rank (without one, see `Lattice`).

What a group finds between its GPUs depends on which they are, so the GPUs of each group are listed node by node; nodes
that look alike are listed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.spec.cluster import Cluster
from simulator.spec.cluster.nics import nearest, places_of
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


def layout(cluster: Cluster, groups: ArrayLike) -> Layout:
    """How groups of ranks, a row each, lie on the nodes of a cluster: the worst of each, and all patterns of GPUs."""
    gpus = _gpus(cluster, groups)
    nodes = np.sort(gpus // cluster.gpus_per_node, axis=1)
    gaps = np.diff(nodes, axis=1, prepend=-1)  # before the first node too
    firsts = np.flatnonzero(gaps)  # of each group on each of its nodes
    widest = int(np.count_nonzero(gaps, axis=1).max())
    domains = gpus // cluster.nvlink_domain_size
    return Layout(
        num_ranks=gpus.shape[1],
        num_nodes=widest,
        ranks_per_node=int(np.diff(firsts, append=gpus.size).max()),
        num_groups_per_node=int(np.bincount(nodes.ravel()[firsts]).max()),
        spans_domain=bool((domains != domains[:, :1]).any()),
        node_stride=int(gaps[:, 1:][gaps[:, 1:] > 0].min()) if widest > 1 else 1,
        patterns=tuple(sorted(_patterns(cluster, gpus))),
        off_rail=_off_rail(cluster, gpus),
    )


def pairs_layout(cluster: Cluster, pairs: ArrayLike) -> Layout:
    """How pairs of communicating ranks are spread; if some are on different nodes, only these. Pairs are directed."""
    gpus = _gpus(cluster, pairs)
    nodes, domains = gpus // cluster.gpus_per_node, gpus // cluster.nvlink_domain_size
    is_apart = nodes[:, 0] != nodes[:, 1]
    if not is_apart.any():
        return layout(cluster, pairs)
    apart, nodes = gpus[is_apart], nodes[is_apart]
    return Layout(
        num_ranks=2,
        num_nodes=2,
        ranks_per_node=1,
        num_groups_per_node=max(int(np.bincount(side).max()) for side in nodes.T),
        spans_domain=bool((domains[:, 0] != domains[:, 1]).any()),
        node_stride=int(abs(nodes[:, 0] - nodes[:, 1]).min()),
        patterns=tuple(sorted(set[Pattern]().union(*(_patterns(cluster, side[:, None]) for side in apart.T)))),
        off_rail=_off_rail(cluster, apart),
    )


def _gpus(cluster: Cluster, ranks: ArrayLike) -> NDArray[np.int64]:
    """The GPU of each rank, counted over the nodes."""
    found, seats = np.asarray(ranks, np.int64), np.array(cluster.seats, np.int64)
    return found - found % len(seats) + seats[found % len(seats)] if len(seats) else found


def _patterns(cluster: Cluster, gpus: NDArray[np.int64]) -> set[Pattern]:
    """The GPUs of each group on a node, in the order of its ranks, for each way that nodes look."""
    order = np.argsort(gpus.ravel() // cluster.gpus_per_node, kind="stable")  # by node, group and rank
    groups, (nodes, local) = order // gpus.shape[1], np.divmod(gpus.ravel()[order], cluster.gpus_per_node)
    is_next = np.diff(nodes, prepend=-1) > 0
    row, first = np.cumsum(is_next) - 1, np.flatnonzero(is_next)
    looks = np.full((len(first), 2, cluster.gpus_per_node), -1)  # of each node its GPUs, and which begin a group
    looks[row, 0, np.arange(len(row)) - first[row]] = local
    looks[row, 1, np.arange(len(row)) - first[row]] = is_next | (np.diff(groups, prepend=-1) != 0)
    as_bytes = (
        looks.reshape(len(first), -1).view(f"V{looks[0].nbytes}").ravel()
    )  # a set of them is faster than sorted rows
    return {_cut(*np.frombuffer(look, looks.dtype).reshape(2, -1).tolist()) for look in set(as_bytes.tolist())}


def _cut(gpus: Sequence[int], begins: Sequence[int]) -> Pattern:
    """Groups, each of which begins where that is 1; behind the last is -1."""
    cuts = [place for place, begin in enumerate([*begins, 1]) if begin == 1]
    num = sum(gpu >= 0 for gpu in gpus)
    return tuple(sorted(tuple(gpus[a : min(b, num)]) for a, b in pairwise(cuts)))


def _off_rail(cluster: Cluster, gpus: NDArray[np.int64]) -> float:
    """The largest share of a group's traffic that changes rails."""
    rails = Rails.of(cluster)
    if not rails.of_node:
        return 0.0
    touches = np.isin(gpus // cluster.gpus_per_node, list(rails.of_node)).any(axis=1)
    return max((rails.missed(_by_node(cluster, group)) for group in gpus[touches].tolist()), default=0.0)


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


def _by_node(cluster: Cluster, gpus: Sequence[int]) -> Mapping[int, list[int]]:
    """Node -> the local GPUs of a group there."""
    by_node = defaultdict[int, list[int]](list)
    for gpu in gpus:
        by_node[gpu // cluster.gpus_per_node].append(gpu % cluster.gpus_per_node)
    return by_node
