"""Blocks of a plan and the least time their phases can take, shared by all plans with the same shapes.

Under the board's power cap, the speed of matrix products depends on their share of the step, which differs between plans
with equal blocks. A lower bound uses the time at a tensor-core use that is at most the plan's own, rounded down to
a grid so that plans share it: less use never makes a kernel slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from simulator.base.kernels import Kernel
from simulator.base.remembered import made_once
from simulator.memory.saved import Saved
from simulator.play.lower.work import Clock, Direction, Phase
from simulator.spec.plan import Plan
from simulator.studies.search.context import ModelShards, SearchContext
from simulator.work.ops import Block, Exchange, ModelBlocks, build_blocks, recompute_ops, uses_autocast

GRID: Final = 64  # steps of use between 0 and 1

Alone = Callable[[Exchange], float]  # seconds of a collective inside a block, alone on its links


@dataclass(frozen=True, slots=True)
class Chain:
    """Seconds of a phase: its compute alone, and with the collectives inside that it cannot hide. host_s: to launch it."""

    compute_s: float = 0.0
    chain_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds in which the tensor cores are used, weighted by how much, and all seconds."""

    used_s: float = 0.0
    whole_s: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(self.used_s + other.used_s, self.whole_s + other.whole_s)

    def times(self, count: float) -> Use:
        return Use(count * self.used_s, count * self.whole_s)


NO_USE: Final = Use()


@dataclass(slots=True)
class Clocks:
    """Clocks of a device under a stack, by use: each remembers the kernels it has timed."""

    context: SearchContext
    _clocks: dict[int, Clock] = field(default_factory=dict)

    @property
    def depend_on_use(self) -> bool:
        return self.at(GRID).depends_on_use

    def at(self, step: int) -> Clock:
        """The clock at a use of step / GRID."""
        context = self.context
        given = context.cluster.device, context.calibration, context.stack, step / GRID
        return made_once(self._clocks, step, Clock, *given)


@dataclass(slots=True)
class Shape:
    """The blocks of plans that are equal in all fields that blocks depend on, except recomputation; cached times."""

    blocks: ModelBlocks
    pace: float
    _totals: dict[object, Use] = field(default_factory=dict)
    _uses: dict[tuple[str, int], Use] = field(default_factory=dict)
    _chains: dict[tuple[str, str, int], Chain] = field(default_factory=dict)
    saved: dict[tuple[str, str], Saved] = field(default_factory=dict)  # by what is recomputed, and the implementation

    def use(self, clock: Clock, step: int, plan: Plan, body: Mapping[str, int]) -> Use:
        """Of one micro-batch through the embedding, a body of so many blocks of each kind, and the head."""
        key = (step, plan.recompute.mode, *body.items())
        return made_once(self._totals, key, self._total, clock, step, plan, body)

    def _total(self, clock: Clock, step: int, plan: Plan, body: Mapping[str, int]) -> Use:
        total = self._use_of("embedding", clock, step, plan) + self._use_of("head", clock, step, plan)
        every = plan.recompute.every if plan.recompute.mode == "every_k" else 1
        for name, count in body.items():
            total += self._use_of(name, clock, step, plan).times(count)
            if plan.recompute.mode != "none":
                total += self._use_of(f"{name} {plan.recompute.mode}", clock, step, plan).times(count / every)
        return total

    def _use_of(self, name: str, clock: Clock, step: int, plan: Plan) -> Use:
        return made_once(self._uses, (name, step), lambda: use_of(clock, self._kernels(name, clock, plan)))

    def _kernels(self, name: str, clock: Clock, plan: Plan) -> list[Kernel]:
        """Of a block, or of what is computed again of it."""
        kind, _, again = name.partition(" ")
        block = self._block(kind)
        if again:
            return [kernel for op in recompute_ops(block, plan, clock.stack) for kernel in op.forward]
        return [kernel for op in block.ops for kernel in (*op.forward, *op.backward)]

    def _block(self, name: str) -> Block:
        return next(block for block in self.blocks.kinds if block.name == name)

    def chain(
        self, name: str, phase: Direction | Literal["again"], clock: Clock, step: int, plan: Plan, alone: Alone
    ) -> Chain:
        """A block's forward, backward, inputs, weights (the backward in two) or again (its recomputation)."""
        key = (name, plan.recompute.mode if phase == "again" else phase, step)
        return made_once(self._chains, key, lambda: _chain(self._phase(name, phase, clock, plan), self.pace, alone))

    def _phase(self, name: str, phase: Direction | Literal["again"], clock: Clock, plan: Plan) -> Phase:
        block = self._block(name)
        if phase == "again":
            return clock.phase(recompute_ops(block, plan, clock.stack), forward=True)
        return clock.direction(block, phase)


@dataclass(slots=True)
class BlockShapes:
    """Shapes by what a block knows of a plan."""

    context: SearchContext
    shards: ModelShards
    pace: float
    _found: dict[object, Shape] = field(default_factory=dict)

    def of(self, plan: Plan) -> Shape:
        """The shape of the plan's blocks."""
        model, stack, key = self.context.model, self.context.stack, block_key(plan, self.context, self.shards)
        return made_once(self._found, key, lambda: Shape(build_blocks(model, stack, plan), self.pace))


def block_key(plan: Plan, context: SearchContext, shards: ModelShards) -> tuple[object, ...]:
    """The fields of a plan on which its blocks depend, except what is recomputed."""
    model = context.model
    layers = shards.of(plan).num_layers if model.sliding_window else 0
    whose = uses_autocast(context.stack, plan), plan.traits.own_model_code
    ranks = plan.tp, plan.cp, plan.ep, plan.experts.etp
    parts = (*ranks, plan.experts.overlap, plan.sequence_parallel, plan.micro_batch_size)
    fp8 = plan.precision
    casts = fp8.fp8_recipe, fp8.fp8_all_gather, fp8.first_layers_bf16, fp8.last_layers_bf16  # of weights, once a step
    usual = plan.rank_order == Plan.model_fields["rank_order"].default  # where only tp, cp and ep decide their groups
    apart = () if usual else (plan.pp, plan.dp_replicate, plan.dp_shard, plan.zero > 0)
    return (
        *whose,
        *parts,
        (plan.num_micro_batches, *casts) if plan.narrow else (),
        plan.pp > 1 and model.tied_embeddings,
        layers,
        plan.recomputes_adapted,
        *apart,
    )


def use_of(clock: Clock, kernels: Iterable[Kernel]) -> Use:
    """The use of the tensor cores by kernels one after another."""
    used_s = whole_s = 0.0
    for kernel in kernels:
        seconds = clock.seconds(kernel)
        whole_s += seconds
        used_s += seconds * clock.tensor_use(kernel)
    return Use(used_s, whole_s)


def grid_below(use: float) -> int:
    """The grid point at or below a use."""
    return max(0, math.floor(use * GRID))


def _chain(phase: Phase, pace: float, alone: Alone) -> Chain:
    """A segment ends when its collectives and the compute beside them have."""
    compute = chain = host = 0.0
    for segment in phase.segments:
        before, beside = pace * segment.work.duration_s, pace * segment.beside.duration_s
        axes: dict[str, float] = {}
        for exchange in segment.exchanges:
            axes[exchange.axis] = axes.get(exchange.axis, 0.0) + alone(exchange)
        compute += before + beside
        chain += before + max(beside, max(axes.values(), default=0.0))
        host += segment.work.host_s + segment.beside.host_s
    return Chain(compute, chain, host)
