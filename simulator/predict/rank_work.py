"""What each class of equal ranks computes in a step, by category: seconds, FLOP, HBM bytes and use of the tensor cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from simulator.base.sums import summed
from simulator.parallel.model_shard import ModelShard, shard_of
from simulator.parallel.pipeline import micro_batches
from simulator.play.lower import Lowering
from simulator.play.lower.power import step_kernels
from simulator.predict.play import repeats_of
from simulator.work.program import Compute, Program, ProgramOp


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


Weighed = tuple[tuple[float, Program], ...]


@dataclass(frozen=True)
class RankWork:
    """A class of ranks: a pipeline stage, or ranks with equal GPUs.

    programs: whose sum, each so many times, is the mean step: one with every micro-batch; or one of those that are played and
    what one repetition adds to it; of replicas that agree every so many steps, steps with and without.
    """

    lowering: Lowering
    stage: int
    programs: Weighed

    @property
    def program(self) -> Program:
        """The first of them: its name, and its ranks."""
        return self.programs[0][1]

    @cached_property
    def ops(self) -> tuple[tuple[float, ProgramOp], ...]:
        """Every op, with how often it runs in a step."""
        return tuple((times, op) for times, program in self.programs for op in program.ops)

    @property
    def exchanges(self) -> Iterator[tuple[str, str, int, float]]:
        """(kind, role, bytes, how many in a step) of the collectives inside folded compute."""
        for times, program in self.programs:
            for kind, role, size_bytes, count in program.exchanges:
                yield kind, role, size_bytes, times * count

    @cached_property
    def by_category(self) -> Mapping[str, Computed]:
        """Seconds as its ops have them (without what collectives take from compute), amounts as its kernels do."""
        found: dict[str, Computed] = defaultdict(Computed)
        for times, op in self.ops:
            for category, part_s in (op.parts or (("compute", op.duration_s),)) if isinstance(op, Compute) else ():
                found[category].seconds += times * float(part_s)
        lowering, plan = self.lowering, self.lowering.plan
        shard = shard_of(lowering.model, plan, self.stage)
        has_ends = (shard.holds_embedding, shard.holds_head) if isinstance(shard, ModelShard) else (True, True)
        without = tuple(name for name, holds in zip(("embedding", "head"), has_ends, strict=True) if not holds)
        each_way = len(micro_batches(plan.pipeline_schedule, plan.num_micro_batches, 0))  # of two directions, half
        for category, kernel, each in step_kernels(shard, plan, lowering.stack, lowering.blocks, without=without):
            passes = plan.num_micro_batches if category == "optimizer" else each_way
            one, times = found[category], each * passes
            seconds = times * lowering.clock.seconds(kernel)
            one.flop += times * kernel.flop
            one.hbm_bytes += times * kernel.num_bytes
            one.kernels_s += seconds
            one.used_s += seconds * lowering.clock.tensor_use(kernel)
        return dict(found)

    @property
    def compute_s(self) -> float:
        """Of the whole step, without what collectives take from it."""
        return summed(times * float(op.duration_s) for times, op in self.ops if isinstance(op, Compute))


def rank_works(lowering: Lowering) -> tuple[RankWork, ...]:
    """Every class of ranks, in the order of a prediction's programs."""
    plan, classes = lowering.plan, lowering.rank_classes
    stages = range(plan.pp) if classes is None else [one.stage for one in classes.classes]
    more, last, period = repeats_of(plan)
    counts = [(1.0 + more, last), (-float(more), last - period)] if more else [(1.0, last)]
    every = plan.agrees_every
    both = (
        [(1.0, lowering)] if every == 1 else [(1 / every, lowering), (1 - 1 / every, replace(lowering, agrees=False))]
    )
    found = [(share * times, one.programs(count)) for share, one in both for times, count in counts]
    return tuple(
        RankWork(lowering, stage, tuple((times, programs[at]) for times, programs in found))
        for at, stage in enumerate(stages)
    )
