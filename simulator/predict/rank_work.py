"""What each class of equal ranks computes in a step, by category: seconds, FLOP, HBM bytes and use of the tensor cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from simulator.parallel.model_shard import ModelShard, shard_of
from simulator.play.lower import Lowering
from simulator.play.lower.power import step_kernels
from simulator.work.program import Compute, Program


@dataclass(slots=True)
class Computed:
    """One category of a step. used_s: of its kernels' time, weighted by their use of the tensor cores."""

    seconds: float = 0.0
    flop: float = 0.0
    hbm_bytes: float = 0.0
    kernels_s: float = 0.0
    used_s: float = 0.0

    @property
    def tensor_use(self) -> float:
        """Mean use of the tensor cores, 0 to 1; 0 where no kernel is known."""
        return self.used_s / self.kernels_s if self.kernels_s else 0.0


@dataclass(frozen=True)
class RankWork:
    """A class of ranks: a pipeline stage, or ranks with equal GPUs. program: its whole step, every micro-batch."""

    lowering: Lowering
    stage: int
    program: Program

    @cached_property
    def by_category(self) -> Mapping[str, Computed]:
        """Seconds as its ops have them (without what collectives take from compute), amounts as its kernels do."""
        found: dict[str, Computed] = defaultdict(Computed)
        for op in self.program.ops:
            for category, part_s in op.parts if isinstance(op, Compute) else ():
                found[category].seconds += float(part_s)
        lowering, plan = self.lowering, self.lowering.plan
        shard = shard_of(lowering.model, plan, self.stage)
        held = (shard.holds_embedding, shard.holds_head) if isinstance(shard, ModelShard) else (True, True)
        without = tuple(name for name, holds in zip(("embedding", "head"), held, strict=True) if not holds)
        for category, kernel, each in step_kernels(shard, plan, lowering.stack, lowering.blocks, without=without):
            one, times = found[category], each * plan.num_micro_batches
            seconds = times * lowering.clock.seconds(kernel)
            one.flop += times * kernel.flop
            one.hbm_bytes += times * kernel.num_bytes
            one.kernels_s += seconds
            one.used_s += seconds * lowering.clock.tensor_use(kernel)
        return dict(found)

    @property
    def compute_s(self) -> float:
        """Of the whole step, without what collectives take from it."""
        return sum(float(op.duration_s) for op in self.program.ops if isinstance(op, Compute))


def rank_works(lowering: Lowering) -> tuple[RankWork, ...]:
    """Every class of ranks, in the order of a prediction's programs."""
    classes, programs = lowering.rank_classes, lowering.programs(lowering.plan.num_micro_batches)
    stages = range(lowering.plan.pp) if classes is None else [one.stage for one in classes.classes]
    return tuple(RankWork(lowering, *pair) for pair in zip(stages, programs, strict=True))
