"""Rank classes on a cluster with different GPUs: kinds of GPUs, and classes found by colour refinement.

Ranks are distinguished by their pipeline stage, their kind, and the groups they are in. A class is one program; it meets the
others of its groups in their collectives, which run at the pace of the slowest member. Only ranks that an exception
touches, or that wait for one of these along some axis, make classes of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from simulator.parallel.mesh import Mesh
from simulator.spec.cluster import Cluster
from simulator.spec.cluster.gpu_kinds import GpuKind, GpuKinds


@dataclass(frozen=True, slots=True)
class GroupKinds:
    """Kinds of GPUs in a group, and the kind of the one that looks at it."""

    members: frozenset[int]
    own: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """A class of equal ranks. rank: the first of them."""

    name: str
    rank: int
    stage: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class RankClasses:
    """The ranks of a mesh on a cluster with exceptions.

    axes: along which ranks meet, pp aside. memory_weights: by device, as `MeshFabric.memory_weight`. ideal: no stragglers
    but those that are stated.
    """

    cluster: Cluster  # without its exceptions
    kinds: GpuKinds
    mesh: Mesh
    axes: tuple[str, ...]
    memory_weights: dict[str, float]
    ideal: bool = False
    _clusters: dict[GroupKinds, Cluster] = field(default_factory=dict, repr=False, compare=False)

    def kind(self, rank: int) -> GpuKind:
        """The kind of a rank's GPU."""
        return self.kinds.kinds[self.kinds.number(rank)]

    def group_kinds(self, axis: str, rank: int) -> GroupKinds:
        """The kinds that a rank meets in its group of an axis."""
        return self._of(self.mesh.group_of(axis, rank), rank)

    def pair(self, rank: int, stages: Iterable[int]) -> GroupKinds:
        """The kinds at a rank's place in some pipeline stages."""
        column = self.mesh.group_of("pp", rank)
        return self._of([column[stage] for stage in stages], rank)

    def _of(self, ranks: Sequence[int], rank: int) -> GroupKinds:
        return GroupKinds(frozenset(map(self.kinds.number, ranks)), self.kinds.number(rank))

    def on(self, group_kinds: GroupKinds) -> Cluster:
        """A uniform cluster on which a group of these kinds runs as it does on this one."""
        found = self._clusters.get(group_kinds)
        if found is None:
            found = self._clusters[group_kinds] = self.kinds.slowest(self.cluster, group_kinds.members, group_kinds.own)
        return found

    def memory_weight(self, group_kinds: GroupKinds) -> float:
        """What compute of the one that looks loses of memory that a collective uses."""
        return self.memory_weights[self.kinds.kinds[group_kinds.own].device]

    def slowdown(self, number: int) -> float:
        """Of the slowest GPU's compute among those of a kind's device and speed, as a fraction."""
        kind = self.kinds.kinds[number]
        return 0.0 if self.ideal else slowdown(self._counts[kind.device, kind.speed])

    def _pace(self, number: int) -> float:
        """Time of a kind's kernels over that of its device."""
        return (1 + self.slowdown(number)) / self.kinds.kinds[number].speed

    def lag(self, rank: int) -> float:
        """How much longer than a rank its slowest peer inside blocks takes, where all of them wait for each other."""
        inner = {number for axis in self._inner for number in self.group_kinds(axis, rank).members}
        own = self._pace(self.kinds.number(rank))
        return max((self._pace(number) / own for number in inner), default=1.0) - 1

    @property
    def mixed_devices(self) -> bool:
        """Some ranks that meet inside blocks have different devices."""
        kinds = self.kinds.kinds
        found = (self.group_kinds(axis, rank).members for axis in self._inner for rank in self.kinds.of_rank)
        return any(len({kinds[number].device for number in members}) > 1 for members in found)

    @property
    def _inner(self) -> tuple[str, ...]:
        inside = {"tp", "cp", "ep", "etp"}
        return tuple(axis for axis in self.axes if axis in inside and len(self.mesh.group_of(axis, 0)) > 1)

    @cached_property
    def _counts(self) -> Counter[tuple[str, float]]:
        found: Counter[tuple[str, float]] = Counter()
        for number in self.kinds.of_rank.values():
            kind = self.kinds.kinds[number]
            found[kind.device, kind.speed] += 1
        usual = self.kinds.kinds[0]
        found[usual.device, usual.speed] += self.mesh.num_ranks - len(self.kinds.of_rank)
        return found

    @cached_property
    def colours(self) -> NDArray[np.int64]:
        """The class of every rank, numbered by their first ranks."""
        from simulator.play.fold import refine_partitions

        ranks, columns = np.arange(self.mesh.num_ranks, dtype=np.int64), self.mesh.partition("pp")
        stages = (ranks - columns) // self.mesh.stride("pp")
        kinds = np.zeros_like(ranks)
        kinds[list(self.kinds.of_rank)] = list(self.kinds.of_rank.values())
        partitions = [self.mesh.partition(axis) for axis in (*self.axes, "pp") if len(self.mesh.group_of(axis, 0)) > 1]
        labels = (stages * len(self.kinds.kinds) + kinds).tolist()
        colours = refine_partitions(labels, partitions)
        _, first, numbered = np.unique(colours, return_index=True, return_inverse=True)
        order: NDArray[np.int64] = np.argsort(np.argsort(first))
        return order[numbered]

    @cached_property
    def classes(self) -> tuple[RankClass, ...]:
        """The classes, by their first rank."""
        _, first, counts = np.unique(self.colours, return_index=True, return_counts=True)
        piped = self.mesh.axes["pp"] > 1
        return tuple(
            RankClass(
                name=f"stage{stage} rank{rank}" if piped else f"rank{rank}", rank=rank, stage=stage, num_ranks=count
            )
            for rank, count in zip(first.tolist(), counts.tolist(), strict=True)
            for stage in (self.mesh.coordinates(rank)["pp"],)
        )

    def meeting_classes(self, axis: str, rank: int) -> tuple[int, ...]:
        """The classes that meet in a rank's group of an axis."""
        ranks = self.mesh.group_of(axis, rank)
        return tuple(np.unique(self.colours[np.asarray(ranks)]).tolist())


# Stragglers: a synchronous step runs at the pace of its slowest GPU.
SPEED_SPREAD = 0.015  # prior: one standard deviation of GPUs' speed within a cluster


@cache
def slowdown(num_devices: int, spread: float = SPEED_SPREAD) -> float:
    """Expected extra compute time of the slowest of `num_devices`, as a fraction of the mean device's."""
    if num_devices == 1:
        return 0.0
    quantile = (num_devices - 3 / 8) / (num_devices + 1 / 4)
    return spread * NormalDist().inv_cdf(quantile)
