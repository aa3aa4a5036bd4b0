"""A lower bound of a plan's step time in microseconds instead of the simulation's fraction of a second.

Whatever the overlap, a stage's compute stream runs one op after another, and some waits no schedule can hide: the first
gather of parameters, collectives between the products of a block (tensor and context parallelism), a pipeline's filling
and emptying, messages that a synchronous schedule waits for, the last reduction of gradients, and gathers behind the
optimizer. Where parameters are sharded one stream reduces and gathers: a forward or backward behind a backward waits for
that one's last gradients and then for its own first parameters. Collectives that do run beside compute slow it: with compute C, waits E, and a stream that moves bytes for T
while it takes a share r of the device,

    step ≥ C + E + r · max(0, T − E)

as every second of T passes either in a wait or beside compute that then needs r longer. Besides, no stream of
collectives is quicker than their sum, and no host quicker than its launches. tests/laws holds floor ≤ predict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.remembered import made_once
from simulator.parallel.mesh import Mesh
from simulator.parallel.model_shard import ModelShard, whole_body
from simulator.parallel.pipeline import num_positions, position, splits_backward, turns
from simulator.play.lower.fabric import MeshFabric
from simulator.play.lower.rank_classes import slowdown
from simulator.play.lower.stage import waits_for_messages
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.search.blocks import GRID, BlockShapes, Chain, Clocks, Use, grid_below
from simulator.studies.search.collective_times import (
    CollectiveTimes,
    Passes,
    StagePricing,
    Traffic,
    grouped,
    own_units,
    passes_of,
)
from simulator.studies.search.context import ModelShards, SearchContext
from simulator.work.ops import Exchange

_ROUNDING: Final = 1 - 1e-9  # sums of the same seconds in another order


@dataclass(slots=True)
class TimeFloor:
    """Floors of plans one after another; what they share is made once. like: those of plans with the same blocks."""

    context: SearchContext
    shards: ModelShards
    like: InitVar[TimeFloor | None] = None
    clocks: Clocks = field(init=False)
    shapes: BlockShapes = field(init=False)
    prices: CollectiveTimes = field(init=False)
    pace: float = field(init=False)  # of the slowest GPU's compute
    _traffic: dict[object, Traffic] = field(default_factory=dict)
    _passes: dict[object, Passes] = field(default_factory=dict)
    steps: dict[object, int] = field(default_factory=dict)
    works: dict[object, _Work] = field(default_factory=dict)
    leasts: dict[object, float] = field(default_factory=dict)
    passed: dict[object, Counter[str]] = field(default_factory=dict)

    def __post_init__(self, like: TimeFloor | None) -> None:
        context = self.context
        self.clocks = Clocks(context) if like is None else like.clocks
        ideal = context.calibration.kind == "ideal"
        self.pace = 1.0 + (0.0 if ideal else slowdown(context.cluster.num_devices))
        self.shapes = BlockShapes(context, self.shards, self.pace) if like is None else like.shapes
        self.prices = CollectiveTimes(context)

    def seconds(self, plan: Plan, enough_s: float = math.inf) -> float:
        """A lower bound of the step that predict() finds. enough_s: above this, any lower bound will do.

        At no use of the tensor cores kernels are quickest, and `least_s` has timed the blocks so: most slow plans are above even then.
        """
        most_s = enough_s / _ROUNDING
        if most_s < math.inf and self.clocks.depend_on_use:
            found_s = _Floor(self, plan, step=0).seconds(most_s)
            if found_s > most_s:
                return found_s * _ROUNDING
        return _Floor(self, plan).seconds(most_s) * _ROUNDING

    def least_s(self, plan: Plan) -> float:
        """A lower and quicker floor: compute, and collectives inside blocks, of the mean pipeline stage."""
        return _Floor(self, plan, step=0 if self.clocks.depend_on_use else GRID).least_s() * _ROUNDING

    def all_passes(self, plan: Plan) -> Passes:
        """Of the first stage's share with both ends of the model: what `play.lower.power` counts."""
        shard = self.shards.of(plan)
        key = (*_shards(plan), self.shards.content(shard))
        return made_once(self._passes, key, lambda: passes_of(shard, plan, grouped(shard, plan)))

    def traffic(self, plan: Plan, stage: int, fabric: MeshFabric) -> Traffic:
        """The data-parallel collectives of a stage."""
        shard = self.shards.of(plan, stage)
        key = (*_shards(plan), self.shards.content(shard))
        return made_once(self._traffic, key, self._stage_traffic, shard, plan, fabric)

    def _stage_traffic(self, shard: Model, plan: Plan, fabric: MeshFabric) -> Traffic:
        all_units = grouped(shard, plan)
        units, layers = own_units(shard, all_units), all_units[1:-1]
        return StagePricing(self.prices, plan, fabric).traffic(units, layers, passes_of(shard, plan, units))


def _shards(plan: Plan) -> tuple[object, ...]:
    whose = (plan.implementation, plan.zero, plan.offload.optimizer != "none")
    parts = (plan.tp, plan.cp, plan.pp, plan.ep, plan.experts.etp, plan.dp_replicate, plan.dp_shard)
    return (*whose, *parts, plan.num_micro_batches > 1)


@dataclass(slots=True)
class _Work:
    """Seconds of a stage's blocks over a step. waits_s: of compute_s, collectives; weights_s: what may come last."""

    compute_s: float = 0.0
    waits_s: float = 0.0
    weights_s: float = 0.0
    host_s: float = 0.0

    def add(self, chain: Chain, count: float) -> None:
        self.compute_s += count * chain.chain_s
        self.waits_s += count * (chain.chain_s - chain.compute_s)
        self.host_s += count * chain.host_s

    def times(self, count: float) -> _Work:
        return _Work(count * self.compute_s, count * self.waits_s, count * self.weights_s, count * self.host_s)


class _Floor:
    """One plan's floor. step: a grid point at most at its mean use; None: the highest."""

    def __init__(self, base: TimeFloor, plan: Plan, step: int | None = None) -> None:
        self.base, self.plan = base, plan
        if step is not None:
            self.step = step
        self.schedule, self.splits = plan.pipeline_schedule, plan.pp > 1 and splits_backward(plan.pipeline_schedule)
        self.flows = plan.num_micro_batches / (2 if plan.pp > 1 and self.schedule == "dualpipe" else 1)  # a chunk
        self.every = plan.recompute.every if plan.recompute.mode == "every_k" else 1
        self.shape = base.shapes.of(plan)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.plan, self.base.context.cluster)

    @cached_property
    def fabric(self) -> MeshFabric:
        context = self.base.context
        return MeshFabric(
            cluster=context.cluster,
            mesh=self.mesh,
            stack=context.stack,
            curves=context.curves,
            memory_weight=0,
            slowdown=0,
        )

    def seconds(self, enough_s: float) -> float:
        """The last stage first: it waits for the others, and has the head."""
        found = self._stage_s(self.plan.pp - 1)
        return found if self.plan.pp == 1 or found > enough_s else max(found, self._stage_s(0))

    def least_s(self) -> float:
        """No stage is quicker than the longest, nor the longest than their mean: the whole model over the stages."""
        plan = self.plan
        key = (id(self.shape), plan.recompute.mode)
        return made_once(self.base.leasts, key, self._micro_batch_s) * plan.num_micro_batches / plan.pp

    def _micro_batch_s(self) -> float:
        """Through the whole model and back; what recomputes each k-th layer of a stage, without that."""
        body: Counter[str] = Counter(whole_body(self.base.context.model, self.plan))
        total_s = 0.0
        for name, count in (("embedding", 1), *body.items(), ("head", 1)):
            total_s += count * (self._chain(name, "forward").chain_s + self._chain(name, "backward").chain_s)
        if self.plan.recompute.mode in ("selective", "full"):
            total_s += sum(count * self._chain(name, "again").chain_s for name, count in body.items())
        return total_s

    # -- the clock -------------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> int:
        """A grid point at most at the plan's mean use: the two rounds of `play.lower.power`, each rounded down."""
        base, plan = self.base, self.plan
        if not base.clocks.depend_on_use:
            return GRID
        passes = base.all_passes(plan)
        key = (id(self.shape), id(passes), plan.recompute.mode, self.every, plan.num_micro_batches)
        return made_once(base.steps, key, self._mean_use_step, passes)

    def _mean_use_step(self, passes: Passes) -> int:
        first = self._use(GRID, passes)
        if not first.used_s:
            return GRID
        step = grid_below(first.used_s / first.whole_s)
        used, whole = self._use(step, passes).used_s, self._use(min(step + 1, GRID), passes).whole_s
        return grid_below(used / whole)

    def _use(self, step: int, passes: Passes) -> Use:
        """Of one micro-batch, as `play.lower.power` counts it."""
        plan, clock = self.plan, self.base.clocks.at(step)
        gather, gradient, keep, add, update = passes.uses(clock, step)
        first = 1 / plan.num_micro_batches
        shards = self.base.shards
        total = self.shape.use(clock, step, plan, shards.body(shards.of(plan))) + gather
        total += gradient if plan.syncs_every_micro_batch else gradient.times(first)
        return total + keep.times(first) + add.times(1 - first) + update.times(first)

    # -- a stage -----------------------------------------------------------------------------------------------------

    def _stage_s(self, stage: int) -> float:
        traffic = self.base.traffic(self.plan, stage, self.fabric)
        work = self._work(stage, traffic.passes)
        before_s, after_s = self._ramp(stage) if self.plan.pp > 1 else (0.0, 0.0)
        if self.splits:
            ends_s = max(0.0, after_s - work.weights_s)
        else:
            ends_s = max(after_s, traffic.last_s if stage == 0 else 0.0)
        idle_s = max(traffic.first_s, before_s) + ends_s + traffic.late_s
        idle_s += self._turns(stage) * traffic.turn_s + self._returns(stage) * traffic.return_s
        slowed_s, stream_s = self._streams(traffic, work.waits_s + idle_s)
        return max(work.compute_s + idle_s + slowed_s, stream_s, work.host_s)

    def _turns(self, stage: int) -> int:
        """Forwards right behind a backward."""
        plan = self.plan
        if self.splits or plan.experts.overlap:
            return 0
        if plan.pp == 1:
            return plan.num_micro_batches - 1
        return turns(self.schedule, plan.pp, plan.num_micro_batches, stage, plan.pipeline.virtual_stages)

    def _returns(self, stage: int) -> int:
        """Backwards of a pipeline right behind another, but for those that may begin with the head: it is kept gathered."""
        plan, shard = self.plan, self.base.shards.of(self.plan, stage)
        if plan.pp == 1 or self.splits or plan.experts.overlap or waits_for_messages(plan):
            return 0
        assert isinstance(shard, ModelShard)
        if not all(shard.body_chunks):
            return 0
        behind = plan.num_micro_batches * plan.pipeline.virtual_stages - 1 - self._turns(stage)
        return max(0, behind - (plan.num_micro_batches if shard.holds_head else 0))

    def _work(self, stage: int, passes: Passes) -> _Work:
        """Compute of a step on a stage: blocks, passes over memory around collectives, the optimizer."""
        plan, flows = self.plan, self.flows
        total = self._blocks(stage).times(flows)
        total.compute_s += self._passes_s(passes)
        if plan.pp > 1 and waits_for_messages(plan):
            places = self._places(stage)
            ends = (places[0] > 0) + (places[0] < self._last_place)
            waits_s = (flows * ends - 1) * self._message_s()
            total.compute_s += waits_s
            total.waits_s += waits_s
        return total

    def _blocks(self, stage: int) -> _Work:
        """Of one micro-batch, the stage's blocks: the same however they are sharded, and how many micro-batches there are."""
        plan, shard = self.plan, self.base.shards.of(self.plan, stage)
        pipeline = plan.pipeline.schedule, plan.pipeline.virtual_stages, plan.pp
        key = (id(self.shape), self.step, plan.recompute.mode, *pipeline, stage)
        return made_once(self.base.works, key, lambda: self._made(shard, self._places(stage)))

    def _made(self, shard: Model, places: list[int]) -> _Work:
        plan, total, body = self.plan, _Work(), self.base.shards.body
        blocks = {"embedding": places.count(0), **body(shard), "head": places.count(self._last_place)}
        for name, count in blocks.items():
            if count:
                total.add(self._chain(name, "forward"), count)
                total.add(self._chain(name, "backward"), count)
                if self.splits:
                    total.weights_s += count * self._chain(name, "weights").chain_s
        if plan.recompute.mode != "none":
            for name, count in body(shard, self.every).items():
                total.add(self._chain(name, "again"), count)
        return total

    def _places(self, stage: int) -> list[int]:
        plan = self.plan
        return [position(self.schedule, plan.pp, stage, chunk) for chunk in range(plan.pipeline.virtual_stages)]

    @property
    def _last_place(self) -> int:
        return num_positions(self.schedule, self.plan.pp, self.plan.pipeline.virtual_stages) - 1

    def _passes_s(self, passes: Passes) -> float:
        flows, plan = self.flows, self.plan
        gather, gradient, _, add, update = passes.uses(self.base.clocks.at(self.step), self.step)
        total = (flows if plan.syncs_every_micro_batch else 1) * gradient.whole_s + (flows - 1) * add.whole_s
        if plan.gathers and plan.dp_shard * plan.cp > 1:
            total += flows * gather.whole_s
        return self.base.pace * (total + update.whole_s + self.base.context.stack.fitted.step_overhead_s)

    def _chain(self, name: str, phase: str) -> Chain:
        clock = self.base.clocks.at(self.step)
        return self.shape.chain(name, phase, clock, self.step, self.plan, self._alone)  # type: ignore[arg-type]

    def _ramp(self, stage: int) -> tuple[float, float]:
        """Before a stage's first action a micro-batch has passed the chunks before it; after its last it goes back."""
        plan = self.plan
        nearest = min(position(self.schedule, plan.pp, stage, chunk) for chunk in range(plan.pipeline.virtual_stages))
        if nearest == 0:
            return 0.0, 0.0
        back = "inputs" if self.splits else "backward"
        again = plan.recompute.mode not in ("none", "every_k")
        forward_s, backward_s = self._chain("embedding", "forward").chain_s, self._chain("embedding", back).chain_s
        for name, count in self._passed(nearest).items():
            forward_s += count * self._chain(name, "forward").chain_s
            backward_s += count * self._chain(name, back).chain_s
            backward_s += count * self._chain(name, "again").chain_s if again else 0.0
        message_s = nearest * self._message_s()
        return forward_s + message_s, backward_s + message_s

    def _passed(self, count: int) -> Counter[str]:
        """Kinds of the blocks at the first `count` positions on a micro-batch's way."""
        plan = self.plan
        ranks, pipeline = (plan.tp, plan.pp, plan.ep, plan.experts.etp), plan.pipeline
        key = (*ranks, pipeline.schedule, pipeline.virtual_stages, plan.recomputes_adapted, count)
        return made_once(self.base.passed, key, lambda: Counter(self._kinds_passed(count)))

    def _kinds_passed(self, count: int) -> Iterator[str]:
        for stage in range(self.plan.pp):
            shard = self.base.shards.of(self.plan, stage)
            for chunk, kinds in enumerate(shard.body_chunks) if isinstance(shard, ModelShard) else ():
                here = position(self.schedule, self.plan.pp, stage, chunk) < count
                if here and (chunk == 0 or self.schedule != "dualpipe"):
                    yield from kinds

    def _message_s(self) -> float:
        plan = self.plan
        parts = plan.tp if plan.sequence_parallel or plan.traits.own_model_code else 1
        tokens = plan.micro_batch_size * plan.seq_len // plan.cp
        size = tokens * self.base.context.model.d_model * DTYPE_BYTES[plan.compute_dtype] // parts
        return self.base.prices.price("send_recv", size, self.base.prices.group(self.mesh, "message")).alone_s

    def _alone(self, exchange: Exchange) -> float:
        shape = self.base.prices.group(self.mesh, self.fabric.axis(exchange.axis))
        if self.plan.experts.overlap and exchange.axis == "ep":
            return 0.0  # beside another micro-batch
        copied = exchange.copied and not shape.spans_domain
        return self.base.prices.price(exchange.kind, self.fabric.sent_bytes(exchange), shape, copied=copied).alone_s

    def _streams(self, traffic: Traffic, idle_s: float) -> tuple[float, float]:
        """(what the collectives beside compute slow it at least, the longest stream of them) over a step."""
        syncs = self.flows if self.plan.syncs_every_micro_batch else 1
        slowed_s = longest_s = 0.0
        for name in ("shard", "reshard", "replicate"):
            alone = slows = most = 0.0
            for part, count in ((traffic.every, self.flows), (traffic.reductions, syncs), (traffic.once, 1)):
                for price in part.get(name, ()):
                    alone += count * price.alone_s
                    slows += count * price.slows * price.moving_s
                    most = max(most, price.slows)
            slowed_s = max(slowed_s, slows - most * idle_s)
            longest_s = max(longest_s, alone)
        return slowed_s, longest_s
