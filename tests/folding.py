"""The oracle of folding: ranks, groups and links coloured together from whole programs, and one program played a class.

The product finds classes on the mesh before any program exists (`simulator.play.fold`). This reads the programs that
were built, and shows that a step played by one rank of each class is the step of all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from simulator.work.program import Collective, CollectiveCost, Number, Program

Touch = tuple[int, int, Hashable]  # (rank, hub, how the rank touches it); a hub is a group or a link


def refine(rank_labels: Sequence[Hashable], groups: Sequence[tuple[Hashable, Sequence[int]]]) -> list[tuple[int, ...]]:
    """Classes of equal ranks, each in rank order, by their first rank.

    groups: (label, ranks) of each group in which ranks meet; the label is its cost and which op it is.
    """
    touches = [(rank, hub, 0) for hub, (_, members) in enumerate(groups) for rank in members]
    ranks, _ = _colours(rank_labels, [label for label, _ in groups], touches)
    return [tuple(each) for each in _classes(ranks)]


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


def _number(labels: Iterable[Hashable]) -> list[int]:
    """Labels as integers, in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels]


def _classes(colours: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for i, colour in enumerate(colours):
        found.setdefault(colour, []).append(i)
    return list(found.values())


def _colours(
    rank_labels: Iterable[Hashable], hub_labels: Iterable[Hashable], touches: Sequence[Touch]
) -> tuple[list[int], list[int]]:
    """Stable colours of ranks and hubs: each is told apart by its own colour and by those it touches, until none splits."""
    ranks, hubs, hows = _number(rank_labels), _number(hub_labels), _number(how for _, _, how in touches)
    num_colours = -1
    while num_colours != (num_colours := len(set(ranks)) + len(set(hubs))):
        seen: list[list[tuple[int, int]]] = [[] for _ in hubs]
        for (rank, hub, _), how in zip(touches, hows, strict=True):
            seen[hub].append((ranks[rank], how))
        hubs = _number((own, *sorted(each)) for own, each in zip(hubs, seen, strict=True))
        seen = [[] for _ in ranks]
        for (rank, hub, _), how in zip(touches, hows, strict=True):
            seen[rank].append((hubs[hub], how))
        ranks = _number((own, *sorted(each)) for own, each in zip(ranks, seen, strict=True))
    return ranks, hubs


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

    def refine(self) -> tuple[list[int], list[int]]:
        """Colours of the ranks and of the hubs."""
        loads: list[Touch] = [(*at, tuple(load)) for at, load in self.loads.items()]
        return _colours(map(_own_label, self.programs), self.labels, [*self.meets, *loads])


def _own_label(program: Program) -> Hashable:
    """What a program does, without the groups and links it does it with."""
    return tuple(_alone(op) if isinstance(op, Collective) else op for op in program.ops)


def _alone(op: Collective) -> Hashable:
    launch = (op.id, op.stream, op.after, op.label, op.host_s)
    return (*launch, op.kind, op.members, op.size_bytes, op.interference, op.cost.latency_s, op.cost.share_bytes)


class _Folding:
    """What a class's program says once names are those of hub classes."""

    def __init__(self, touches: _Touches, classes: Sequence[Sequence[int]], colours: Sequence[int]) -> None:
        class_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
        names = list(touches.hubs)
        first = {colour: hub for hub, colour in reversed(list(enumerate(colours)))}
        self._touches = touches
        self._name = [names[first[colour]][1] for colour in colours]
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
