"""What all plans of a branch share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from simulator.base.remembered import made_once
from simulator.parallel.model_shard import ModelShard, shard_of
from simulator.parallel.pipeline import Schedule, held_at_first_backward
from simulator.play.lower.priced_stages import PricedBlocks
from simulator.spec.calibration import Calibration
from simulator.spec.calibration.collective_curves import LinkCurves, default_curves
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

# Fields that decide what stands around a plan's blocks, and nothing in them
AROUND: Final = ("bucket_bytes", "memory_fraction")
_USUAL: Final = {name: Plan.flat_fields()[name].default for name in AROUND}
_MOST_PLANS: Final = 32  # plans whose blocks are kept


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """A model, a machine and its software."""

    model: Model
    cluster: Cluster
    stack: Stack
    calibration: Calibration
    _blocks: dict[Plan, PricedBlocks] = field(default_factory=dict, compare=False, repr=False)

    @property
    def curves(self) -> LinkCurves:
        return self.calibration.links or default_curves()

    def blocks_like(self, plan: Plan) -> PricedBlocks | None:
        """Those of a plan before, if one had the same blocks."""
        return self._blocks.get(plan.copy_with(**_USUAL))

    def keep(self, plan: Plan, blocks: PricedBlocks) -> None:
        """Keep a plan's blocks for the next that has the same."""
        if len(self._blocks) >= _MOST_PLANS:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[plan.copy_with(**_USUAL)] = blocks


# Cached shards of a model: a search asks for the same few thousands of times.
_Key = tuple[object, ...]


@dataclass(slots=True)
class ModelShards:
    """The parts of one model on the ranks of plans."""

    model: Model
    _found: dict[_Key, Model] = field(default_factory=dict)
    _bodies: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    _chunks: dict[int, tuple[Counter[str], ...]] = field(default_factory=dict)
    _contents: dict[int, int] = field(default_factory=dict)
    _numbers: dict[_Key, int] = field(default_factory=dict)
    _flying: dict[_Key, tuple[int, ...]] = field(default_factory=dict)

    def of(self, plan: Plan, stage: int = 0) -> Model:
        """As `shard_of`."""
        wide = (plan.precision.first_layers_bf16, plan.precision.last_layers_bf16) if plan.narrow else (0, 0)
        tuned = (plan.peft, plan.recomputes_adapted) if plan.peft.any else ()
        if plan.tp * plan.pp * plan.ep == 1 and not any(wide) and not tuned:
            return self.model
        pipeline = plan.pipeline.schedule, plan.pipeline.virtual_stages
        ranks = plan.tp, plan.pp, plan.ep, plan.experts.etp
        key = (*wide, *tuned, *ranks, *pipeline, plan.data_parallel, plan.zero, stage)
        return made_once(self._found, key, shard_of, self.model, plan, stage)

    def content(self, shard: Model) -> int:
        """A number for what a share holds, the same for shares that hold the same in other chunks."""
        return made_once(self._contents, id(shard), self._number, shard)  # shares live as long as their Shares

    def _number(self, shard: Model) -> int:
        ends = (shard.holds_embedding, shard.holds_head) if isinstance(shard, ModelShard) else (True, True)
        return self._numbers.setdefault((*shard.body, *ends), len(self._numbers))

    def body(self, shard: Model, every: int = 1) -> Counter[str]:
        """How many blocks of each kind a share has between the model's ends; each `every`-th of them."""
        return made_once(self._bodies, (id(shard), every), lambda: Counter(shard.body[::every]))

    def flying(
        self, schedule: Schedule, num_stages: int, num_micro_batches: int, stage: int, num_chunks: int
    ) -> tuple[int, ...]:
        """As `held_at_first_backward`."""
        key = (schedule, num_stages, num_micro_batches, stage, num_chunks)
        return made_once(self._flying, key, held_at_first_backward, *key)

    def chunks(self, shard: ModelShard) -> tuple[Counter[str], ...]:
        """The same of each pipeline chunk."""
        return made_once(self._chunks, id(shard), lambda: tuple(map(Counter, shard.body_chunks)))
