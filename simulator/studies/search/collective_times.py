"""Prices of a plan's collectives alone on their links, and what the data parallelism of a pipeline stage costs by stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from simulator.base.kernels import Kernel
from simulator.base.remembered import made_once
from simulator.base.sums import summed
from simulator.parallel.mesh import GroupShape, Mesh
from simulator.parallel.mesh.groups import EXPERT_AXES
from simulator.parallel.model_shard import ModelShard
from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.work import Clock
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.search.blocks import NO_USE, Use, use_of
from simulator.studies.search.context import SearchContext
from simulator.work.collectives import collective_cost, copies, interference, link_capacities
from simulator.work.ops import optimizer_kernels
from simulator.work.script import UnitComm, communication, last_of, pieces, stepped_numel
from simulator.work.script.sums import OrderSums, order_sums


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Equal communication units of a rank's share: `count` of them."""

    count: int
    comm: UnitComm


def grouped(shard: Model, plan: Plan) -> tuple[UnitGroup, ...]:
    """Embedding, layers and head; those that differ in nothing but their name are counted. Buckets of DDP may differ."""
    bucketed = plan.traits.whole_modules or shard.experts is not None or shard.mtp_layers > 0
    layers = shard.num_layers
    one = {"num_layers": 1, **({"chunks": ((0,),)} if isinstance(shard, ModelShard) else {})}
    short = shard if bucketed or layers <= 1 else shard.model_copy(update=one)
    first, *middle, last = (replace(comm, unit="") for comm in communication(short, plan))
    if not bucketed and layers > 1:
        return UnitGroup(1, first), UnitGroup(layers, middle[0]), UnitGroup(1, last)
    return UnitGroup(1, first), *(UnitGroup(n, comm) for comm, n in Counter(middle).items()), UnitGroup(1, last)


def own_units(shard: Model, units: tuple[UnitGroup, ...]) -> tuple[UnitGroup, ...]:
    """Those that a pipeline stage holds: a root without the embedding is gathered with the head."""
    if not isinstance(shard, ModelShard):
        return units
    first, *layers, last = units
    if shard.holds_head and not shard.holds_embedding:
        return *layers, UnitGroup(1, last_of(first.comm, last.comm))
    return (*((first,) if shard.holds_embedding else ()), *layers, *((last,) if shard.holds_head else ()))


@dataclass(slots=True)
class Passes:
    """Passes over memory around the collectives of units, and the optimizer's, by the step of the clock."""

    units: tuple[UnitGroup, ...]
    update: Sequence[Kernel]
    _uses: dict[int, tuple[Use, Use, Use, Use, Use]] = field(default_factory=dict)

    def uses(self, clock: Clock, step: int) -> tuple[Use, Use, Use, Use, Use]:
        """Of gathers, gradients, keeping, adding, and the optimizer."""
        return made_once(self._uses, step, self._used, clock)

    def _used(self, clock: Clock) -> tuple[Use, Use, Use, Use, Use]:
        gather = gradient = keep = add = NO_USE
        for unit in self.units:
            comm, n = unit.comm, unit.count
            gather += use_of(clock, (*comm.gather_forward_kernels, *comm.gather_backward_kernels)).times(n)
            gradient += use_of(clock, comm.gradient_kernels).times(n)
            keep += use_of(clock, comm.keep_kernels).times(n)
            add += use_of(clock, comm.add_kernels).times(n)
        return gather, gradient, keep, add, use_of(clock, self.update)


def passes_of(shard: Model, plan: Plan, units: tuple[UnitGroup, ...]) -> Passes:
    """The passes of a rank's share. With ZeRO++'s second copy, those of the later, cheaper gathers stand for all."""
    if plan.deepspeed.zeropp.secondary_ranks > 1:
        again = (replace(u.comm, gather_forward_kernels=u.comm.gather_backward_kernels) for u in units)
        units = tuple(UnitGroup(unit.count, comm) for unit, comm in zip(units, again, strict=True))
    if plan.offload.optimizer != "none":
        return Passes(units, ())
    numel = stepped_numel(shard, plan)
    parts = pieces(shard, plan)
    return Passes(units, optimizer_kernels(numel, sum(len(shapes) for _, shapes in parts), plan, parts))


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective alone: seconds until it is over, seconds in which it moves bytes, the share of compute it takes."""

    alone_s: float = 0.0
    moving_s: float = 0.0
    slows: float = 0.0

    def times(self, count: float) -> CollectiveTime:
        return CollectiveTime(count * self.alone_s, count * self.moving_s, self.slows)


_FREE: Final = CollectiveTime()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A stage's data-parallel collectives: by stream, those of every micro-batch, of every reduction, of a step.

    first_s: before the first compute; last_s: after the last backward; late_s: after the optimizer; turn_s, return_s:
    between a backward and a forward, or another chunk's or micro-batch's backward, behind it.
    """

    every: dict[str, list[CollectiveTime]]
    reductions: dict[str, list[CollectiveTime]]
    once: dict[str, list[CollectiveTime]]
    first_s: float
    last_s: float
    late_s: float
    turn_s: float
    return_s: float
    passes: Passes


@dataclass(slots=True)
class CollectiveTimes:
    """Prices under one machine and software, remembered."""

    context: SearchContext
    _prices: dict[object, CollectiveTime] = field(default_factory=dict)
    _groups: dict[object, GroupShape] = field(default_factory=dict)
    _capacities: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = link_capacities(self.context.cluster, self.context.curves)
        self._capacities = {name: float(capacity) for name, capacity in found.items()}

    def group(self, mesh: Mesh, axis: str) -> GroupShape:
        """How the groups of an axis, or the ends of a message, lie on the nodes."""
        plan = mesh.plan
        places = tuple((name, mesh.axes[name]) for name in plan.axis_order)
        key = (places, axis, (plan.ep, plan.experts.etp, plan.zero > 0) if axis in EXPERT_AXES else ())
        return made_once(
            self._groups, key, lambda: mesh.pair_shape(0, 1) if axis == "message" else mesh.group_shape(axis)
        )

    def price(self, kind: str, size_bytes: int, shape: GroupShape, *, copied: bool = False) -> CollectiveTime:
        """A collective alone, or the copies that stand for it."""
        if size_bytes == 0 or shape.num_ranks == 1:
            return _FREE
        key = (kind, size_bytes, shape, copied)
        return made_once(self._prices, key, self._price, *key)

    def _price(self, kind: str, size_bytes: int, shape: GroupShape, copied: bool) -> CollectiveTime:  # noqa: FBT001  of its key
        context = self.context
        nccl, weight = context.stack.software(), context.calibration.interference.hbm_weight
        slows = 0.0
        if copied:
            one, slows = copies(kind, size_bytes, shape, context.cluster, context.curves, memory_weight=weight)
        else:
            one = collective_cost(kind, size_bytes, shape, context.cluster, curves=context.curves, nccl=nccl)
        if kind != "send_recv" and not copied:
            slows = float(interference(kind, shape, context.cluster, context.curves, memory_weight=weight, nccl=nccl))
        moving = max((float(size) / self._capacities[link] for link, size in one.link_bytes.items()), default=0.0)
        return CollectiveTime(float(one.latency_s) + moving, moving, slows)


@dataclass(frozen=True, slots=True)
class StagePricing:
    """Prices of one plan's roles."""

    prices: CollectiveTimes
    plan: Plan
    fabric: MeshFabric

    def one(self, kind: str, role: str, size_bytes: int, count: int = 1) -> CollectiveTime:
        if size_bytes == 0:
            return _FREE
        shape = self.prices.group(self.fabric.mesh, self.fabric.axis(role))
        price = self.prices.price(kind, size_bytes // count, shape)
        return price if count == 1 else price.times(count)

    def traffic(self, units: tuple[UnitGroup, ...], layers: tuple[UnitGroup, ...], passes: Passes) -> Traffic:
        """The collectives of a stage's units, of which `layers` are no ends of the model."""
        plan, edge = self.plan, units[0].comm  # of the first unit, which the backward reduces last
        every: dict[str, list[CollectiveTime]] = {"shard": [], "reshard": []}
        reductions: dict[str, list[CollectiveTime]] = {"shard": [], "replicate": []}
        once: dict[str, list[CollectiveTime]] = {"shard": []}
        again = "shard" if plan.reshard_ranks is None else "reshard"
        order = order_sums(plan, self.fabric.stack)
        joined = self.fabric.stack.overlap.all_reduce_combine > 0  # into calls of other sizes
        for unit in units:
            comm, n = unit.comm, unit.count
            if order.gathers and not plan.deepspeed.hierarchical_gather:  # two stages may be quicker than one
                near = again if plan.deepspeed.zeropp.secondary_ranks > 1 else "shard"  # ZeRO++'s later forwards
                size = comm.all_gather_backward_bytes if near == again else comm.all_gather_forward_bytes
                every[near].append(self.one("all_gather", near, size).times(n))
                every[again].append(self.one("all_gather", again, comm.all_gather_backward_bytes).times(n))
            elif comm.parameter_gather_bytes:
                once["shard"] += [one.times(n) for one in self._late(comm)]
            reductions["shard"].append(self.one("reduce_scatter", "shard", comm.reduce_scatter_bytes).times(n))
            if not joined and not comm.late_all_reduce:  # MiCS sums with the last micro-batch alone
                reductions["replicate"].append(self._all_reduce(comm).times(n))
        last_s = self.one("reduce_scatter", "shard", edge.reduce_scatter_bytes).alone_s
        return Traffic(
            every=every,
            reductions=reductions,
            once=once,
            first_s=self._first_s(edge, order),
            last_s=last_s + (0.0 if joined else self._all_reduce(edge).alone_s),
            late_s=summed(price.alone_s for price in once["shard"]) if order.updated_last else 0.0,
            turn_s=self._turn_s([unit.comm for unit in units]),
            return_s=self._return_s([unit.comm for unit in units], [unit.comm for unit in layers]),
            passes=passes,
        )

    def _turn_s(self, comms: Sequence[UnitComm]) -> float:
        """Sharded parameters: one stream reduces a backward's last gradients, then gathers the next forward's first unit."""
        firsts = comms[:1] if self.plan.pp == 1 else comms  # any that a chunk may begin with
        return self._in_turn(firsts, [comm.all_gather_forward_bytes for comm in firsts])

    def _return_s(self, comms: Sequence[UnitComm], layers: Sequence[UnitComm]) -> float:
        """The same before another backward that begins with a layer, gathered again."""
        if self.plan.pp == 1 or self.plan.reshard_ranks is not None:
            return 0.0
        return self._in_turn(comms, [comm.all_gather_backward_bytes for comm in layers])

    def _in_turn(self, comms: Sequence[UnitComm], gathered: Sequence[int]) -> float:
        """The least that a reduction of one of the units and then a gather of one of those sizes take."""
        plan = self.plan
        if not plan.gathers or not plan.syncs_every_micro_batch or plan.deepspeed.hierarchical_gather:
            return 0.0
        reduces, gathers = min(comm.reduce_scatter_bytes for comm in comms), min(gathered, default=0)
        if not reduces or not gathers:
            return 0.0
        return self.one("reduce_scatter", "shard", reduces).alone_s + self.one("all_gather", "shard", gathers).alone_s

    def _first_s(self, edge: UnitComm, order: OrderSums) -> float:
        if order.waits_for_gather:
            size = 0 if self.plan.deepspeed.hierarchical_gather else edge.all_gather_forward_bytes
            return self.one("all_gather", "shard", size).alone_s
        if order.waits_for_updated:
            return self.one("all_gather", "shard", edge.parameter_gather_bytes).alone_s
        return 0.0

    def _late(self, comm: UnitComm) -> list[CollectiveTime]:
        if comm.broadcasts:
            return [self.one("broadcast", "shard", size, count) for size, count in comm.broadcasts]
        return [self.one("all_gather", "shard", comm.parameter_gather_bytes)]

    def _all_reduce(self, comm: UnitComm) -> CollectiveTime:
        return self.one("all_reduce", "replicate", comm.all_reduce_bytes, comm.num_buckets)
