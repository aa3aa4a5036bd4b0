"""A lower bound of a plan's peak memory without simulating its step: resident memory, and what must be live together.

Between steps a rank holds its parameters, optimizer state and buffers (`work.script.resident_bytes`). At the end of the
forwards that a schedule keeps in flight, it also holds what their layers save for the backward (`memory.tape`, the
events that the full simulation replays), and then what the first layer's backward needs; at the optimizer, it also holds
the gradients that the backward left. No allocator can do with less, so a plan whose floor exceeds the device cannot fit.
tests/laws holds floor ≤ peak_allocated_bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulator.base.kernels import DTYPE_BYTES
from simulator.base.remembered import made_once
from simulator.memory import capacity_bytes, outside_torch_bytes
from simulator.memory.saved import Saved, saved_of
from simulator.memory.tape import Tape
from simulator.parallel.model_shard import ModelShard, whole_body
from simulator.parallel.pipeline import peak_in_flight
from simulator.parallel.schedule_traits import filling
from simulator.spec.model.layer_kinds import TOWER_KINDS, plain
from simulator.spec.plan import Plan
from simulator.spec.plan.order import MAX_SIZE
from simulator.studies.search.blocks import BlockShapes, Shape
from simulator.studies.search.context import ModelShards, SearchContext
from simulator.studies.search.stage_memory import WHOLE, StageMemories, StageMemory
from simulator.work.ops import uses_autocast
from simulator.work.ops.op_context import OpContext


@dataclass(slots=True)
class MemoryFloor:
    """Floors of plans one after another; what they share is made once."""

    context: SearchContext
    shards: ModelShards
    shapes: BlockShapes
    _stages: StageMemories = field(init=False)
    _inputs: dict[int, Saved] = field(default_factory=dict)
    _flights: dict[object, tuple[Flight, ...]] = field(default_factory=dict)
    _last: Shape | None = None
    _tapes: dict[object, Tape] = field(default_factory=dict)  # of the last shape

    def __post_init__(self) -> None:
        self._stages = StageMemories(self.context, self.shards)

    def room(self, plan: Plan) -> int:
        """What the device has for tensors of the plan."""
        device = self.context.cluster.device
        outside = outside_torch_bytes(device, plan)
        if plan.memory.tiered:
            return MAX_SIZE  # what HBM does not hold lies elsewhere
        room = capacity_bytes(device, plan, outside) - outside
        return int(room * max([1.0, *plan.memory.compress.values()]))  # floors are of tensors as they are uncompressed

    def num_bytes(self, plan: Plan, enough: int | None = None) -> int:
        """At most the bytes of live tensors at the peak that predict() finds.

        enough: a floor above that may be any such (None: above the device).
        """
        enough = self.context.cluster.device.memory_bytes if enough is None else enough
        stages = (0,) if plan.pp == 1 else (0, plan.pp - 1)
        stage_memory = self._stages.of(plan, stages)
        floor = max(each.resident + each.gradients for each in stage_memory)
        if floor > enough or plan.offload.activations != "none":
            return floor
        # FSDP2's second micro-batch runs beside the gradients of the first; others' may exist at the optimizer alone
        again = plan.pp == 1 and plan.num_micro_batches > 1 and plan.traits.shards_rows
        shape = self.shapes.of(plan)
        # inputs of layers are saved whatever else is: where they are too much already, no tape is recorded
        for find in (self._of_blocks,) if self._recorded(plan, shape) else (self._of_inputs, self._of_blocks):
            saved = find(plan, shape)
            for stage, each in zip(stages, stage_memory, strict=True):
                base = each.resident + (each.gradients if again else 0)
                floor = max(floor, base + self._while_alive(plan, stage, each, saved))
                if floor > enough:
                    return floor
        return floor

    def _of_inputs(self, plan: Plan, shape: Shape) -> Saved:
        return made_once(self._inputs, id(shape), self._only_inputs, plan)  # shapes live as long as their BlockShapes

    def inputs_bytes(self, plan: Plan) -> int:
        """The inputs of a stage's layers for one micro-batch: in every schedule, the longest stage has these at once."""
        if plan.offload.activations != "none" or plan.recompute.mode == "every_k":
            return 0
        return self._input_bytes(plan) * (self.context.model.num_layers // plan.pp)

    def _input_bytes(self, plan: Plan) -> int:
        """What a layer gets from the one before it."""
        context = self.context
        setting = OpContext(
            model=context.model, stack=context.stack, plan=plan, autocast=uses_autocast(context.stack, plan)
        )
        return setting.stream_tokens * context.model.d_model * DTYPE_BYTES[setting.stream_dtype]

    def _only_inputs(self, plan: Plan) -> Saved:
        context, size = self.context, self._input_bytes(plan)
        each, none = (dict[str, int](dict.fromkeys(whole_body(context.model, plan), value)) for value in (size, 0))
        each = {kind: 0 if plain(kind) in TOWER_KINDS else value for kind, value in each.items()}  # type: ignore[arg-type, operator]
        return Saved(
            embedding=0,
            plain=each,
            checkpointed=each,
            head_peak=0,
            head_rise=0,
            head_gradients=0,
            message=size,
            plain_rise=none,
            checkpointed_rise=none,
        )

    def _recorded(self, plan: Plan, shape: Shape) -> bool:
        return (plan.recompute.mode, plan.implementation) in shape.saved

    def _of_blocks(self, plan: Plan, shape: Shape) -> Saved:
        key = (plan.recompute.mode, plan.implementation)
        found = shape.saved.get(key)
        if found is None:
            if self._last is not shape:  # plans that differ in what they recompute come one after another
                self._last, self._tapes = shape, {}
            found = shape.saved[key] = saved_of(shape.blocks, plan, self.context.stack, self._tapes)
        return found

    def _while_alive(self, plan: Plan, stage: int, memory: StageMemory, saved: Saved) -> int:
        """What forwards in flight hold on a stage, and the most that comes besides.

        As many micro-batches as in `memory` stand for any number.
        """
        flights = self._in_flight(plan, stage, memory, filling(plan.pipeline_schedule, plan.pp, plan.num_micro_batches))
        flying = min(_size(plan, flight, saved) for flight in flights)
        most = max(_of_head(plan, memory, saved), _rising(plan, memory, saved), _reducing(plan, memory, saved))
        # of an interleaved schedule, once all chunks have run, FSDP2 keeps what it gathered
        return flying + (memory.gathered if flights[0].of_all_chunks else 0) + most

    def _in_flight(self, plan: Plan, stage: int, memory: StageMemory, count: int) -> tuple[Flight, ...]:
        """What is saved when the first backward begins, or at any other moment with as much in flight: the least of these."""
        key = (id(memory.shard), plan.pp, stage, plan.pipeline.schedule, plan.pipeline.virtual_stages, count)
        return made_once(self._flights, key, self._flight, plan, stage, memory, count)

    def _flight(self, plan: Plan, stage: int, memory: StageMemory, count: int) -> tuple[Flight, ...]:
        shard, schedule, chunks = memory.shard, plan.pipeline_schedule, plan.pipeline.virtual_stages
        if plan.pp == 1:
            return (Flight(1, 0, memory.kinds, of_all_chunks=True),)
        assert isinstance(shard, ModelShard)
        # a pair of expert_overlap grows by a layer as it shrinks by another: nothing above the forwards before it
        if schedule in WHOLE:
            flying = self.shards.flying(schedule, plan.pp, count, stage, chunks)
            return (_flight(shard, memory, flying, of_all_chunks=all(flying)),)
        most = peak_in_flight(schedule, plan.pp, count, stage, chunks)
        alone = ([most * (chunk == only) for chunk in range(chunks)] for only in range(chunks))
        return tuple(_flight(shard, memory, flying, of_all_chunks=False) for flying in alone)


class Flight(NamedTuple):
    """Micro-batches in flight on a stage, summed over its chunks.

    embeddings: that hold what the embedding saves; messages: that hold another stage's output, less those whose output
    has been sent on; kinds: layers that hold what they save.
    """

    embeddings: int
    messages: int
    kinds: Mapping[str, int]
    of_all_chunks: bool


def _flight(shard: ModelShard, memory: StageMemory, flying: Sequence[int], *, of_all_chunks: bool) -> Flight:
    """A micro-batch in flight holds a chunk's input, what the layers add, not what has been sent on."""
    total = sum(flying)
    embeddings = 0 if shard.embedding_chunk is None else flying[shard.embedding_chunk]
    head_micro_batches = 0 if shard.head_chunk is None else flying[shard.head_chunk]
    kinds: Counter[str] = Counter()
    for count, chunk in zip(flying, memory.chunks, strict=True):
        for kind, layers in chunk.items():
            kinds[kind] += count * layers
    return Flight(embeddings, (total - embeddings) - (total - head_micro_batches), kinds, of_all_chunks)


def _size(plan: Plan, flight: Flight, saved: Saved) -> int:
    ends = flight.embeddings * saved.embedding + flight.messages * saved.message
    return ends + _layers(plan, flight.kinds, saved)


def _of_head(plan: Plan, memory: StageMemory, saved: Saved) -> int:
    """What is in flight is most right behind a forward; interleaved, the last stage's is of the chunk with the head."""
    if memory.sends_output or (plan.pp > 1 and plan.pipeline_schedule in ("dualpipe", "dualpipe_v")):
        return 0
    return saved.head_rise if plan.pipeline_schedule in WHOLE and not plan.experts.overlap else saved.head_peak


def _rising(plan: Plan, memory: StageMemory, saved: Saved) -> int:
    """What comes in the first layer's backward, whose gradient is in the place of its output.

    FSDP2 gathers that layer, and the one before it into a buffer. A stage that is not the last has sent the output on,
    and gets the gradient.
    """
    if plan.experts.overlap or plan.pipeline_schedule not in WHOLE or not all(memory.chunks):
        return 0
    gathered = 0
    if memory.layer is not None and not memory.whole_layers:
        gathered = memory.layer.parameters * (1 + (plan.fsdp.backward_prefetch > 0 and memory.shard.num_layers > 1))
    given = saved.message if memory.sends_output else 0
    return given + _rise(plan, memory, saved) + gathered + _waiting(plan, memory, saved)


def _reducing(plan: Plan, memory: StageMemory, saved: Saved) -> int:
    """What FSDP2 has besides while the first layer's gradients are reduced.

    At first these, and a copy that is reduced, and the parameters of the layer before it; then that layer's backward
    instead, beside the copy. What the first layer saved is gone by then, and its parameters.
    """
    layer, length, deep = memory.layer, memory.length, plan.fsdp.backward_prefetch > 0
    if layer is None or not plan.syncs_every_micro_batch or not length:
        return 0
    gone = max(saved.plain["layer"], saved.checkpointed["layer"])
    left = layer.parameters if deep and memory.shard.num_layers > 1 else 0
    most = layer.gradients + (-layer.parameters if memory.whole_layers else left)
    if length > 1 and not plan.experts.overlap:
        opened = layer.parameters * (1 + (deep and memory.shard.num_layers > 2))
        most = max(most, (-layer.parameters if memory.whole_layers else opened) + _rise(plan, memory, saved))
    return max(0, layer.reduced + most - gone) + _waiting(plan, memory, saved)


def _rise(plan: Plan, memory: StageMemory, saved: Saved) -> int:
    """Bytes that a layer's backward adds, without its parameters."""
    plain = [saved.plain_rise[kind] for kind in memory.kinds] if plan.recompute.mode in ("none", "every_k") else []
    again = [saved.checkpointed_rise[kind] for kind in memory.kinds] if plan.recompute.mode != "none" else []
    return min(plain + again)


def _waiting(plan: Plan, memory: StageMemory, saved: Saved) -> int:
    """Gradients of the head that FSDP2 reduces with the embedding's, at the end."""
    return saved.head_gradients if plan.pp == 1 and memory.layer is not None else 0


def _layers(plan: Plan, kinds: Mapping[str, int], saved: Saved) -> int:
    """Bytes that layers of these kinds save for the backward."""
    if plan.recompute.mode == "none":
        return sum(count * saved.plain[kind] for kind, count in kinds.items())
    if plan.recompute.mode != "every_k":
        return sum(count * saved.checkpointed[kind] for kind, count in kinds.items())
    return sum(count * min(saved.plain[kind], saved.checkpointed[kind]) for kind, count in kinds.items())
