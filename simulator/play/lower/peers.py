"""Peers: whom the ranks of one program meet in their groups, on which links, and how far behind the slowest GPU is."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.rank_classes import GroupKinds, RankClass
from simulator.work.collectives import link_capacities, renamed
from simulator.work.program import CollectiveCost, Number

IN = " in"  # of a link: the way into a GPU


class Peers:
    """Of one rank (`rank`), of a class of ranks where GPUs differ (`rank_class`), or of all ranks (of `stage`, if given)."""

    def __init__(self, fabric: MeshFabric, rank: int | None, stage: int | None, rank_class: RankClass | None) -> None:
        self._fabric, self._rank, self._stage, self._rank_class = fabric, rank, stage, rank_class
        self.at = rank if rank_class is None else rank_class.rank
        self._group_kinds_by_role: dict[str, GroupKinds] = {}
        self._meetings: dict[str, tuple[str, int]] = {}
        self._reached: dict[GroupKinds | None, dict[str, Number]] = {}

    @cached_property
    def lag(self) -> float:
        """How much slower the slowest rank of its block groups is, as a fraction."""
        rank_classes = self._fabric.rank_classes
        return 0.0 if rank_classes is None or self.at is None else rank_classes.lag(self.at)

    @cached_property
    def pace(self) -> tuple[float, float]:
        """(speed of this GPU as a fraction of its device's, what the slowest of its equals is behind)."""
        rank_classes = self._fabric.rank_classes
        if rank_classes is None or self.at is None:
            return 1.0, self._fabric.slowdown
        return rank_classes.kind(self.at).speed, rank_classes.slowdown(rank_classes.kinds.number(self.at))

    def group_kinds(self, role: str) -> GroupKinds | None:
        """The kinds of GPUs in this rank's group of a role; None where all are equal."""
        fabric = self._fabric
        if fabric.rank_classes is None or self.at is None:
            return None
        if role not in self._group_kinds_by_role:
            self._group_kinds_by_role[role] = fabric.rank_classes.group_kinds(fabric.axis(role), self.at)
        return self._group_kinds_by_role[role]

    def pair(self, stages: tuple[int, ...]) -> GroupKinds | None:
        """The kinds of GPUs at this rank's place in some stages."""
        rank_classes = self._fabric.rank_classes
        return None if rank_classes is None or self.at is None else rank_classes.pair(self.at, stages)

    def message(self, pair: tuple[int, int], size_bytes: int, tensors: int) -> CollectiveCost:
        """This stage's end of a message from one stage to another."""
        group_kinds, agreed_s = self.pair(pair), tensors * self._fabric.stack.host.message_s
        one = self._fabric.message(pair, size_bytes, group_kinds)
        if self._stage != pair[0]:
            comes_in = one.link_bytes if group_kinds is not None and len(group_kinds.members) > 1 else {}
            one = CollectiveCost(latency_s=0.0, link_bytes={f"{link}{IN}": size for link, size in comes_in.items()})
        elif agreed_s:
            one = replace(one, latency_s=one.latency_s + agreed_s)
        return renamed(one, self.suffix)

    @property
    def column(self) -> str:
        """A key shared with the ranks at its position in the other stages."""
        if self._rank_class is not None:
            return self._rendezvous("pp")[0]
        if self._rank is None:
            return ""
        return f":{self._fabric.mesh.group_of('pp', self._rank)[0]}"

    @property
    def suffix(self) -> str:
        if self._rank_class is not None:
            return f":{self._rank_class.name}"
        if self._rank is not None:
            return f":{self._rank}"
        return "" if self._stage is None else f":stage{self._stage}"

    def group(self, role: str) -> tuple[str, int]:
        """What distinguishes a rank's group from the others of the role, and how many programs meet in it."""
        if self._rank_class is not None:
            return self._rendezvous(self._fabric.axis(role))
        if self._rank is None:
            return "", 1
        ranks = self._fabric.mesh.group_of(self._fabric.axis(role), self._rank)
        return f":{ranks[0]}", len(ranks)

    def _rendezvous(self, axis: str) -> tuple[str, int]:
        """The same of a class: groups in which the same classes meet are one."""
        assert self._fabric.rank_classes is not None
        assert self._rank_class is not None
        assert axis in (*self._fabric.rank_classes.axes, "pp"), (
            f"{axis}: ranks were not told apart by who they meet there"
        )
        if axis not in self._meetings:
            classes = self._fabric.rank_classes.meeting_classes(axis, self._rank_class.rank)
            self._meetings[axis] = f":{'+'.join(map(str, classes))}", len(classes)
        return self._meetings[axis]

    def links(self) -> dict[str, Number]:
        """Capacities of this program's own links; messages come in by their own where GPUs differ."""
        rank_classes, curves = self._fabric.rank_classes, self._fabric.curves
        if rank_classes is None or self.at is None:
            return dict(link_capacities(self._fabric.cluster, curves, suffix=self.suffix))
        own = rank_classes.kinds.number(self.at)
        out = link_capacities(rank_classes.on(GroupKinds(frozenset({own}), own)), curves)
        both = out | ({f"{name}{IN}": rate for name, rate in out.items()} if self._stage is not None else {})
        return {f"{name}{self.suffix}": rate for name, rate in both.items()}

    def capacities(self, group_kinds: GroupKinds | None) -> dict[str, Number]:
        if group_kinds not in self._reached:
            self._reached[group_kinds] = link_capacities(self._fabric.on(group_kinds), self._fabric.curves)
        return self._reached[group_kinds]

    def program_of(self) -> tuple[str, int]:
        """The program's name, and how many ranks play it."""
        plan = self._fabric.mesh.plan
        if self._rank_class is not None:
            return self._rank_class.name, self._rank_class.num_ranks
        if self._rank is not None:
            return f"rank{self._rank}", 1
        return "rank" if self._stage is None else f"stage{self._stage}", plan.num_devices // plan.pp
