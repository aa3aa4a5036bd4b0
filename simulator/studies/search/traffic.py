"""The data-parallel communication and copies of a stage: the same for all plans with the same sharding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from simulator.base.kernels import Kernel
from simulator.parallel.model_shard import ModelShard
from simulator.play.lower.work import Clock
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.search.blocks import NO_USE, Use, use_of
from simulator.work.ops import optimizer_kernels
from simulator.work.script import UnitComm, communication, last_of, pieces, stepped_numel


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
        found = self._uses.get(step)
        if found is None:
            gather = gradient = keep = add = NO_USE
            for unit in self.units:
                comm, n = unit.comm, unit.count
                gather += use_of(clock, (*comm.gather_forward_kernels, *comm.gather_backward_kernels)).times(n)
                gradient += use_of(clock, comm.gradient_kernels).times(n)
                keep += use_of(clock, comm.keep_kernels).times(n)
                add += use_of(clock, comm.add_kernels).times(n)
            found = self._uses[step] = gather, gradient, keep, add, use_of(clock, self.update)
        return found


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
