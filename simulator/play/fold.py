"""Folding: which ranks are equal, found by colour refinement, never declared.

Ranks and the groups they form are coloured together: two ranks are equal while they have the same label and are in
equally coloured groups; two groups while they lie along the same axis and have equally coloured members. Colours only
ever split, so the loop ends (Weisfeiler and Leman, 1968; for bipartite incidence: Berkholz, Bonsma, Grohe, Theory of
Computing Systems 60, 2017).

A group is the *set* of its members with what each pays, not its ring: a ring remembers distances along it, and would
tell ranks apart that wait and pay alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def refine_partitions(labels: Sequence[Hashable], partitions: Sequence[Ints]) -> Ints:
    """Colours of ranks that form groups along several axes: two are equal where labels and all their groups are.

    labels: what each rank does by itself. partitions: for each axis, of every rank the group that it is in there.
    """
    hubs: list[int] = []  # by hub, the axis of the group
    touches: list[Ints] = []
    for number, groups in enumerate(partitions):
        _, numbered = np.unique(groups, return_inverse=True)
        touches.append(numbered + len(hubs))
        hubs += [number] * (int(numbered.max()) + 1)
    ranks = np.tile(np.arange(len(labels), dtype=np.int64), len(partitions))
    touched = np.concatenate([*touches, np.array([], dtype=np.int64)])
    return _refine(_number(labels), np.array(hubs, dtype=np.int64), ranks, touched)


def _number(labels: Iterable[Hashable]) -> Ints:
    """Labels as integers, in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels], dtype=np.int64)


def _refine(ranks: Ints, hubs: Ints, touch_rank: Ints, touch_hub: Ints) -> Ints:
    """Stable colours of the ranks. The two touch_ arrays are parallel: one entry a rank in a hub."""
    to_hubs, to_ranks = _Gather(touch_hub, len(hubs)), _Gather(touch_rank, len(ranks))
    num_colours = -1
    while num_colours != (num_colours := len(np.unique(ranks)) + len(np.unique(hubs))):
        hubs = to_hubs.colour(hubs, ranks[touch_rank])
        ranks = to_ranks.colour(ranks, hubs[touch_hub])
    return ranks


class _Gather:
    """Recolours one side by the multiset of colours that each of its nodes sees on the other side."""

    def __init__(self, node: Ints, num_nodes: int) -> None:
        self._node = node
        degree = np.bincount(node, minlength=num_nodes)
        first = np.cumsum(degree) - degree
        self._rows = [(np.flatnonzero(degree == d), int(d)) for d in np.unique(degree)]
        self._first = first

    def colour(self, own: Ints, seen: Ints) -> Ints:
        sight = seen[np.lexsort((seen, self._node))]
        new = np.empty_like(own)
        count = 0
        for nodes, degree in self._rows:  # nodes of one degree make a rectangular table, compared row by row
            columns = self._first[nodes][:, None] + np.arange(degree)
            table = np.column_stack([own[nodes], sight[columns]])
            rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel()
            kinds, inverse = np.unique(rows, return_inverse=True)
            new[nodes] = inverse + count
            count += len(kinds)
        return new
