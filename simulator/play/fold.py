"""Folding: which ranks are equal, found by colour refinement, never declared.

Ranks, the groups they form and the links they load are coloured together: two ranks are equal while they have the same
label and touch equally coloured groups and links in the same way; two groups (or links) while they have the same label
and equally coloured members. Colours only ever split, so the loop ends (Weisfeiler and Leman, 1968; for bipartite
incidence: Berkholz, Bonsma, Grohe, Theory of Computing Systems 60, 2017).

A group is the *set* of its members with what each pays, not its ring: a ring remembers distances along it, and would
tell ranks apart that wait and pay alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulator.work.program import Collective, CollectiveCost, Number, Program

Ints = NDArray[np.int64]
Touch = tuple[int, int, Hashable]  # (rank, hub, how the rank touches it); a hub is a group or a link


def refine(
    rank_labels: Mapping[int, Hashable] | Sequence[Hashable], groups: Sequence[tuple[Hashable, Sequence[int]]]
) -> list[tuple[int, ...]]:
    """Classes of equal ranks, each in rank order, by their first rank.

    rank_labels: what a rank does by itself (its ops, its device, its links), by rank. groups: (label, ranks) of each
    group in which ranks meet; the label is its cost and which op it is.
    """
    ranks = list(rank_labels) if isinstance(rank_labels, Mapping) else list(range(len(rank_labels)))
    labels = list(rank_labels.values()) if isinstance(rank_labels, Mapping) else list(rank_labels)
    sizes = np.fromiter((len(members) for _, members in groups), dtype=np.int64, count=len(groups))
    members = np.fromiter((rank for _, each in groups for rank in each), dtype=np.int64, count=int(sizes.sum()))
    if ranks != list(range(len(ranks))):
        position = {rank: i for i, rank in enumerate(ranks)}
        members = np.fromiter((position[int(rank)] for rank in members), dtype=np.int64, count=len(members))
    hubs = np.repeat(np.arange(len(groups), dtype=np.int64), sizes)
    colours, _ = _refine(_number(labels), _number(label for label, _ in groups), members, hubs, np.zeros_like(hubs))
    return [tuple(ranks[i] for i in each) for each in _classes(colours)]


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
    return _refine(_number(labels), np.array(hubs, dtype=np.int64), ranks, touched, np.zeros_like(touched))[0]


def _number(labels: Iterable[Hashable]) -> Ints:
    """Labels as integers, in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(label, len(seen)) for label in labels], dtype=np.int64)


def _classes(colours: Ints) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for i, colour in enumerate(colours.tolist()):
        found.setdefault(colour, []).append(i)
    return list(found.values())


def _refine(ranks: Ints, hubs: Ints, touch_rank: Ints, touch_hub: Ints, touch_how: Ints) -> tuple[Ints, Ints]:
    """Stable colours of ranks and hubs. The three touch_ arrays are parallel: one entry a rank in a hub."""
    to_hubs, to_ranks = _Gather(touch_hub, len(hubs)), _Gather(touch_rank, len(ranks))
    num_colours = -1
    while num_colours != (num_colours := len(np.unique(ranks)) + len(np.unique(hubs))):
        hubs = to_hubs.colour(hubs, ranks[touch_rank], touch_how)
        ranks = to_ranks.colour(ranks, hubs[touch_hub], touch_how)
    return ranks, hubs


class _Gather:
    """Recolours one side by the multiset of (colour, how) that each of its nodes sees on the other side."""

    def __init__(self, node: Ints, num_nodes: int) -> None:
        self._node = node
        degree = np.bincount(node, minlength=num_nodes)
        first = np.cumsum(degree) - degree
        self._rows = [(np.flatnonzero(degree == d), int(d)) for d in np.unique(degree)]
        self._first = first

    def colour(self, own: Ints, seen: Ints, how: Ints) -> Ints:
        sight = seen * (int(how.max(initial=0)) + 1) + how
        sight = sight[np.lexsort((sight, self._node))]
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


def fold_programs(programs: Sequence[Program]) -> list[Program]:
    """One program per class of equal ranks; the engine gives them the step time of the whole.

    programs: one a rank. A class is played by its first rank, on links that stand for all links of their class: the
    bytes of a cost become those that all ranks of the class put on one such link, and each collective has as many
    members as it has different arrivals. Ranks are equal only if their op ids are.
    """
    touches = _Touches(programs)
    ranks, hubs = touches.refine()
    classes = _classes(ranks)
    folding = _Folding(touches, classes, hubs)
    return [
        replace(folding.program(programs[each[0]], number), num_ranks=sum(programs[rank].num_ranks for rank in each))
        for number, each in enumerate(classes)
    ]


class _Touches:
    """The incidence of ranks with groups and links. A hub is named ("key", key) or ("link", name)."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.links = {link: capacity for program in programs for link, capacity in program.links.items()}
        self.hubs: dict[tuple[str, str], int] = {}
        self.labels: list[Hashable] = []
        self.meets: list[tuple[int, int, int]] = []  # (rank, hub, op id)
        self.loads: dict[tuple[int, int], list[tuple[int, Number]]] = {}  # (rank, hub) -> (op id, bytes)
        for rank, program in enumerate(programs):
            for op in (op for op in program.ops if isinstance(op, Collective)):
                if op.members > 1:
                    self.meets.append((rank, self._hub(("key", op.key), op.members), op.id))
                for link, num_bytes in op.cost.link_bytes.items():
                    hub = self._hub(("link", link), self.links[link])
                    self.loads.setdefault((rank, hub), []).append((op.id, num_bytes))

    def _hub(self, name: tuple[str, str], label: Hashable) -> int:
        if name not in self.hubs:
            self.hubs[name] = len(self.hubs)
            self.labels.append((name[0], label))
        return self.hubs[name]

    def refine(self) -> tuple[Ints, Ints]:
        """Colours of the ranks and of the hubs."""
        every: list[Touch] = [*self.meets, *((*at, tuple(load)) for at, load in self.loads.items())]
        return _refine(
            _number(map(_own_label, self.programs)),
            _number(self.labels),
            np.array([rank for rank, _, _ in every], dtype=np.int64),
            np.array([hub for _, hub, _ in every], dtype=np.int64),
            _number(how for _, _, how in every),
        )


def _own_label(program: Program) -> Hashable:
    """What a program does, without the groups and links it does it with."""
    return tuple(_alone(op) if isinstance(op, Collective) else op for op in program.ops)


def _alone(op: Collective) -> Hashable:
    launch = (op.id, op.stream, op.after, op.label, op.host_s)
    return (*launch, op.kind, op.members, op.size_bytes, op.interference, op.cost.latency_s, op.cost.share_bytes)


class _Folding:
    """What a class's program says once names are those of hub classes."""

    def __init__(self, touches: _Touches, classes: Sequence[Sequence[int]], colours: Ints) -> None:
        class_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
        names = list(touches.hubs)
        first = {colour: hub for hub, colour in reversed(list(enumerate(colours.tolist())))}
        self._touches = touches
        self._name = [names[first[colour]][1] for colour in colours.tolist()]
        self._arrivals: dict[int, set[tuple[int, int]]] = {}
        for rank, hub, op_id in touches.meets:
            self._arrivals.setdefault(hub, set()).add((class_of[rank], op_id))
        self._load: dict[tuple[int, int, int], Number] = {}
        for (rank, hub), load in touches.loads.items():
            for op_id, num_bytes in load:
                at = (class_of[rank], hub, op_id)
                self._load[at] = self._load.get(at, 0) + num_bytes

    def program(self, program: Program, number: int) -> Program:
        """`program`, the first rank's, speaking for class `number`."""
        ops = tuple(self._collective(op, number) if isinstance(op, Collective) else op for op in program.ops)
        used = {link for op in ops if isinstance(op, Collective) for link in op.cost.link_bytes}
        links = {link: capacity for link, capacity in self._touches.links.items() if link in used}
        return replace(program, ops=ops, links=links)

    def _collective(self, op: Collective, number: int) -> Collective:
        hubs = self._touches.hubs
        link_bytes = {}
        for link in op.cost.link_bytes:
            hub = hubs["link", link]
            link_bytes[self._name[hub]] = self._load[number, hub, op.id]
        share = op.cost.share_bytes
        if share is None and link_bytes:
            share = max(op.cost.link_bytes.values())
        cost = CollectiveCost(latency_s=op.cost.latency_s, link_bytes=link_bytes, share_bytes=share)
        if op.members == 1:
            return replace(op, cost=cost)
        hub = hubs["key", op.key]
        return replace(op, key=self._name[hub], members=len(self._arrivals[hub]), cost=cost)
