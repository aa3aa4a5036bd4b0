"""The price of a placement: seconds per step in which a GPU's links are busy, by the paths of its groups.

Every call is priced alone, as the simulator prices it, with all groups of its axis at once (`ports`, `nics`); the prices
are added. Overlap with compute is not subtracted: the simulated steps include it, and they decide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from simulator.base.sums import summed
from simulator.parallel.group_layout import Pattern
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.play.lower import Lowering
from simulator.play.lower.messages import calls_of
from simulator.spec.cluster.rank_mapping import RankMapping
from simulator.work.collectives.call import Call as NcclCall
from simulator.work.collectives.cost import call_of, call_s
from simulator.work.collectives.ports import PCIE

# What a step's groups and stages send: the calls that a placement is priced by.
Where = str | tuple[int, int]  # a mesh axis, or two pipeline stages
_MESSAGE: Final = re.compile(r"pp (\d+) to (\d+)")
_PLAYED: Final = 4  # micro-batches a stage, from which on one more adds what the last ones did


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective or message that a step repeats. count: times in a step, the mean over pipeline stages."""

    kind: str
    where: Where
    size_bytes: int
    count: float


def step_calls(lowering: Lowering) -> tuple[Call, ...]:
    """Everything that a step's ranks send each other, in a fixed order; groups of one rank left out."""
    plan = lowering.plan
    longer = _PLAYED * plan.pp
    if plan.num_micro_batches <= longer:
        counts: dict[tuple[str, Where, int], float] = dict(_counts(lowering, plan.num_micro_batches))
    else:
        long, short = _counts(lowering, longer), _counts(lowering, longer // 2)
        more = (plan.num_micro_batches - longer) / (longer - longer // 2)
        counts = {call: count + more * (count - short[call]) for call, count in long.items()}
    return tuple(
        Call(kind=kind, where=where, size_bytes=size_bytes, count=count / plan.pp)
        for (kind, where, size_bytes), count in sorted(counts.items(), key=lambda item: str(item[0]))
        if count > 0 and (isinstance(where, tuple) or len(lowering.mesh.group_of(where, 0)) > 1)
    )


def _counts(lowering: Lowering, num_micro_batches: int) -> Counter[tuple[str, Where, int]]:
    """Calls of all stages together; a message is its sender's."""
    found: Counter[tuple[str, Where, int]] = Counter()
    for stage in range(lowering.plan.pp):
        for kind, role, size_bytes, count in calls_of(lowering.program(num_micro_batches, stage=stage), stage):
            message = _MESSAGE.match(role)
            if message is None:
                found[kind, lowering.fabric.axis(role), size_bytes] += count
            else:
                found[kind, (stage, int(message[2])), size_bytes] += count
    return found


_IN_ORDER: Final = "send_recv"  # of other kinds NCCL orders the GPUs of a group
_LOUD: Final = 0.1  # of all bytes: who sends less does not decide who gets the cables


class PlacementPrice(NamedTuple):
    """A placement. crossings: for each axis with much traffic, how many of its sets of groups cross PCIe; prices_s: by call.

    Prices assume PCIe's data-sheet speed, which machines reach less reliably than that of NVLink. So placements are
    compared by their PCIe crossings before their prices, the axis with most bytes first.
    """

    crossings: tuple[int, ...]
    prices_s: tuple[float, ...]

    @property
    def price_s(self) -> float:
        return summed(self.prices_s)


class PlacementPricer:
    """The price of mapping the ranks at every node's places 0, 1, … to its GPUs, in the same way on all nodes.

    blocks: the place of each rank, counted over the nodes; none: rank r has place r. calls: of the step.
    """

    def __init__(self, lowering: Lowering, calls: Sequence[Call], blocks: RankMapping = ()) -> None:
        self.cluster, self.curves, self.nccl = lowering.cluster, lowering.curves, lowering.fabric.nccl
        self.calls = tuple(calls)
        self.num_places = self.cluster.gpus_per_node
        rank_mapping = blocks or tuple(range(self.num_places))
        self.mesh = Mesh(lowering.plan, lowering.full_cluster.model_copy(update={"seats": rank_mapping}))
        self._seen: dict[tuple[Where, str, tuple[Pattern, ...]], int] = {}  # by where they lie: a kind of call
        self._numbers: dict[NcclCall, int] = {}
        self._kinds: list[NcclCall] = []
        self._over_pcie: list[bool] = []
        self._seconds: dict[tuple[int, int], float] = {}  # by call and kind of call: few, as routes are alike

    @classmethod
    def of(cls, lowering: Lowering, blocks: RankMapping = ()) -> PlacementPricer:
        """The routes of a lowered step."""
        return cls(lowering, step_calls(lowering), blocks)

    def price_s(self, order: Sequence[int]) -> float:
        """Seconds a step; order: the GPU of each place."""
        return self.evaluated(order).price_s

    def evaluated(self, order: Sequence[int]) -> PlacementPrice:
        """The price of every call, and which groups use PCIe although the node has NVLinks."""
        moved = {where: self.moved(where, order) for where in self.shapes}
        kinds = [self._kind(call, moved[call.where]) for call in self.calls]
        over = {call.where for call, kind in zip(self.calls, kinds, strict=True) if self._over_pcie[kind]}
        return PlacementPrice(
            crossings=tuple(summed(where in over for where in wheres) for wheres in self._loud),
            prices_s=tuple(self._call_s(index, kind) for index, kind in enumerate(kinds)),
        )

    @cached_property
    def _loud(self) -> tuple[tuple[Where, ...], ...]:
        """Axes (and all messages together) that send a tenth of all bytes or more, the one with most bytes first."""
        sent: Counter[str] = Counter()
        wheres: dict[str, dict[Where, None]] = {}
        for call in self.calls:
            name = "messages" if isinstance(call.where, tuple) else call.where
            sent[name] += call.count * call.size_bytes  # type: ignore[assignment]  # a Counter adds fractions as well
            wheres.setdefault(name, {})[call.where] = None
        loud = [name for name in sent if sent[name] >= _LOUD * sent.total()]
        return tuple(tuple(wheres[name]) for name in sorted(loud, key=lambda name: (-sent[name], name)))

    def moved(self, where: Where, order: Sequence[int]) -> tuple[Pattern, ...]:
        """The GPUs of each group, for each way that nodes look."""
        keep = where in self._ordered
        return tuple(sorted({_moved(pattern, order, keep=keep) for pattern in self.shapes[where].patterns}))

    @cached_property
    def shapes(self) -> dict[Where, GroupShape]:
        """How groups and stages lie; their patterns are of places."""
        return {call.where: self._shape(call.where) for call in self.calls}

    @cached_property
    def _ordered(self) -> frozenset[Where]:
        return frozenset(call.where for call in self.calls if call.kind == _IN_ORDER)

    def _shape(self, where: Where) -> GroupShape:
        return self.mesh.pair_shape(*where) if isinstance(where, tuple) else self.mesh.group_shape(where)

    def _kind(self, call: Call, patterns: tuple[Pattern, ...]) -> int:
        """Equal for calls that find equal routes."""
        kind = self._seen.get((call.where, call.kind, patterns))
        if kind is None:
            shape = replace(self.shapes[call.where], patterns=patterns)
            one = call_of(call.kind, 0, shape, self.cluster, self.nccl)
            kind = self._seen[call.where, call.kind, patterns] = self._numbers.setdefault(one, len(self._kinds))
            if kind == len(self._kinds):
                self._kinds.append(one)
                self._over_pcie.append(one.links.port_link == PCIE)
        return kind

    def _call_s(self, index: int, kind: int) -> float:
        found = self._seconds.get((index, kind))
        if found is None:
            call = self.calls[index]
            alone = float(call_s(replace(self._kinds[kind], size_bytes=call.size_bytes), self.curves))
            found = self._seconds[index, kind] = call.count * alone
        return found


def _moved(pattern: Pattern, order: Sequence[int], *, keep: bool) -> Pattern:
    groups = (tuple(order[place] for place in group) for group in pattern)
    return tuple(sorted(groups if keep else (tuple(sorted(group)) for group in groups)))
