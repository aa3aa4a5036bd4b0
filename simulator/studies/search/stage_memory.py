"""Memory of a pipeline stage apart from activations: its states between steps, and parameters that FSDP2 gathers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.remembered import made_once
from simulator.parallel.model_shard import ModelShard
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.studies.search.context import ModelShards, SearchContext
from simulator.work.script import gathered_sizes, gradient_tensors, keeps_layers, keeps_root, resident_bytes, units

WHOLE: Final = ("gpipe", "1f1b", "interleaved")  # schedules whose backwards are never split


class Layer(NamedTuple):
    """Bytes of a layer under FSDP2: its whole parameters, its gradients, and the copy of these that is reduced."""

    parameters: int
    gradients: int
    reduced: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """A stage's share, and bytes.

    kinds, chunks: its layers by kind, all and by chunk. resident: between steps. gradients: at the optimizer. gathered:
    parameters that FSDP2 keeps from the forward to the backward; layer: one of its layers, where it is FSDP2 and all
    layers are alike; whole_layers: layers are among those that it keeps.
    """

    shard: Model
    kinds: Mapping[str, int]
    chunks: tuple[Mapping[str, int], ...]
    resident: int
    gradients: int
    gathered: int
    layer: Layer | None
    whole_layers: bool

    @property
    def length(self) -> int:
        """Layers of the chunk whose backward comes first."""
        return sum(self.chunks[-1].values())

    @property
    def sends_output(self) -> bool:
        """Another stage has the head."""
        return isinstance(self.shard, ModelShard) and self.shard.head_chunk is None


@dataclass(slots=True)
class StageMemories:
    """Stages of plans one after another; what they share is made once."""

    context: SearchContext
    shards: ModelShards
    _found: dict[object, StageMemory] = field(default_factory=dict)
    _resident: dict[object, tuple[int, int]] = field(default_factory=dict)
    _gathered: dict[object, tuple[int, Layer]] = field(default_factory=dict)

    def of(self, plan: Plan, stages: tuple[int, ...]) -> list[StageMemory]:
        """Those stages of a plan."""
        states = _states(plan)
        chunks = (states, plan.pipeline.schedule, plan.pipeline.virtual_stages)
        return [made_once(self._found, (*chunks, stage), self._made, plan, stage, states) for stage in stages]

    def _made(self, plan: Plan, stage: int, states: tuple[object, ...]) -> StageMemory:
        shard, shards = self.shards.of(plan, stage), self.shards
        body, key = shards.body(shard), (states, shards.content(shard))
        resident, gradients = made_once(self._resident, key, self._between, plan, shard)
        known = plan.traits.shards_rows and plan.pipeline_schedule in WHOLE and shard.experts is None
        gathered, layer = made_once(self._gathered, key, _gathered, plan, shard) if known else (0, None)
        return StageMemory(
            shard=shard,
            kinds=body,
            chunks=shards.chunks(shard) if isinstance(shard, ModelShard) else (body,),
            resident=resident,
            gradients=gradients,
            gathered=gathered,
            layer=layer if set(body) == {"layer"} else None,
            whole_layers=keeps_layers(plan),
        )

    def _between(self, plan: Plan, shard: Model) -> tuple[int, int]:
        """(bytes between steps, those of gradients at the optimizer)."""
        # a gradient buffer leaves no gradients of their own where nothing shards them
        full_gradients = plan.traits.whole_modules and self.context.stack.traits.gradient_buffer
        gradients = 0 if full_gradients else sum(gradient_tensors(shard, plan))
        return sum(resident_bytes(shard, plan).values()), gradients


def _gathered(plan: Plan, shard: Model) -> tuple[int, Layer]:
    """What FSDP2 keeps gathered, and a layer."""
    root, *layers = units(shard, plan)
    kept_units = [*([root] if keeps_root(plan) else []), *(layers if keeps_layers(plan) else [])]
    wide, narrow = DTYPE_BYTES[plan.gradient_dtype], DTYPE_BYTES[plan.compute_dtype]
    last = layers[-1] if layers else root
    layer = Layer(sum(gathered_sizes(last, plan)), last.numel * narrow, last.padded_numel * wide)
    return sum(sum(gathered_sizes(unit, plan)) for unit in kept_units), layer


def _states(plan: Plan) -> tuple[object, ...]:
    offload = plan.offload
    whose = (plan.implementation, plan.zero, plan.pp, offload.optimizer, offload.parameters)
    ranks = (plan.tp, plan.cp, plan.ep, plan.experts.etp, plan.dp_replicate, plan.dp_shard)
    return (*whose, *ranks, plan.recomputes_adapted)
