"""A lower bound of a plan's peak memory without writing its step: what stays, and what must be alive together.

Between steps a rank holds its parameters, optimizer state and buffers (`zero.resident_bytes`). At the end of the
forwards that a schedule keeps in flight, it holds besides what their layers save for the backward (`memory.tape`, the
events that the full simulation replays); at the optimizer, the gradients that the backward left. No allocator can do
with less, so a plan whose floor exceeds the device cannot fit. tests/laws holds floor ≤ peak_allocated_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from simulator.kernels import DTYPE_BYTES
from simulator.memory import capacity_bytes, outside_torch_bytes
from simulator.memory.saved import Saved, saved_of
from simulator.model import Model
from simulator.ops import uses_autocast
from simulator.ops.setting import Setting
from simulator.pipeline import peak_in_flight
from simulator.plan import Plan
from simulator.search.blocks import BlockShapes, block_key
from simulator.search.nouns import Nouns
from simulator.search.shares import Shares
from simulator.share import Share
from simulator.zero import gathered_sizes, gradient_tensors, keeps_layers, keeps_root, resident_bytes, units

_WHOLE: Final = ("gpipe", "1f1b", "interleaved")  # schedules whose backwards are never split


@dataclass(slots=True)
class MemoryFloor:
    """Floors of plans one after another; what they share is made once."""

    nouns: Nouns
    shares: Shares
    shapes: BlockShapes
    _resident: dict[object, tuple[int, int]] = field(default_factory=dict)
    _gathered_bytes: dict[object, int] = field(default_factory=dict)
    _reducing_bytes: dict[object, int] = field(default_factory=dict)
    _saved: dict[object, Saved] = field(default_factory=dict)

    def fits(self, plan: Plan) -> bool:
        """False where no allocator could make the plan fit."""
        device = self.nouns.cluster.device
        outside = outside_torch_bytes(device, plan)
        return self.num_bytes(plan) + outside <= capacity_bytes(device, plan, outside)

    def num_bytes(self, plan: Plan) -> int:
        """At most the bytes of live tensors at the peak that predict() finds."""
        stages = (0,) if plan.pp == 1 else (0, plan.pp - 1)
        between = [self._between(plan, stage) for stage in stages]
        floor = max(resident + gradients for resident, gradients in between)
        if plan.offload.activations != "none":
            return floor
        # inputs of layers are saved whatever else is: where they are too much already, no tape is recorded
        for saved in (self._inputs, self._of_blocks):
            if floor > self.nouns.cluster.device.memory_bytes:
                break
            held = saved(plan)
            alive = [r + self._alive(plan, stage, held) for (r, _), stage in zip(between, stages, strict=True)]
            floor = max(floor, *alive)
        return floor

    def _inputs(self, plan: Plan) -> Saved:
        nouns = self.nouns
        setting = Setting(model=nouns.model, stack=nouns.stack, plan=plan, autocast=uses_autocast(nouns.stack, plan))
        size = setting.stream_tokens * nouns.model.d_model * DTYPE_BYTES[setting.stream_dtype]
        each: dict[str, int] = dict.fromkeys(nouns.model.body, size)
        return Saved(embedding=0, plain=each, checkpointed=each, head_peak=0, message=size)

    def _between(self, plan: Plan, stage: int) -> tuple[int, int]:
        """(bytes between steps, those of gradients at the optimizer) on a stage."""
        share = self.shares.of(plan, stage)
        key = (*_states(plan), self.shares.content(share))
        found = self._resident.get(key)
        if found is None:
            resident = sum(resident_bytes(share, plan).values())
            # hand-fused blocks leave no gradients of their own where nothing shards them
            whole = plan.implementation in ("ddp", "zero_redundancy") and self.nouns.stack.blocks == "fused"
            gradients = 0 if whole else sum(gradient_tensors(share, plan))
            found = self._resident[key] = resident, gradients
        return found

    def _of_blocks(self, plan: Plan) -> Saved:
        key = (*block_key(plan, self.nouns, self.shares), plan.recompute, plan.implementation)
        found = self._saved.get(key)
        if found is None:
            found = self._saved[key] = saved_of(self.shapes.of(plan).blocks, plan, self.nouns.stack)
        return found

    def _alive(self, plan: Plan, stage: int, saved: Saved) -> int:
        """What forwards in flight hold on a stage. Two micro-batches a stage stand for any number, as in `memory`."""
        share = self.shares.of(plan, stage)
        head_peak = saved.head_peak
        if plan.pp == 1:
            held = self._gathered(plan, share) + saved.embedding + _layers(plan, self.shares.body(share), saved)
        else:
            assert isinstance(share, Share)
            held = self._in_flight(plan, stage, share, saved)
            # what is in flight is most right behind a forward; interleaved, the last stage's is of the chunk with the head
            head_peak = (
                0 if share.head_chunk is None or plan.pipeline_schedule in ("dualpipe", "dualpipe_v") else head_peak
            )
        return held + max(head_peak, self._reducing(plan, share, saved))

    def _in_flight(self, plan: Plan, stage: int, share: Share, saved: Saved) -> int:
        """What a pipeline stage holds when its first backward begins, or at any other moment with as much in flight."""
        schedule, chunks = plan.pipeline_schedule, plan.virtual_stages
        count = min(plan.num_micro_batches, 2 * plan.pp)
        # a pair of expert_overlap grows by a layer as it shrinks by another: nothing above the forwards before it
        if schedule not in _WHOLE:
            flying = peak_in_flight(schedule, plan.pp, count, stage, chunks)
            return flying * min(self._chunks(plan, share, saved))
        flying_by_chunk = self.shares.flying(schedule, plan.pp, count, stage, chunks)
        held = sum(
            flying * size for flying, size in zip(flying_by_chunk, self._chunks(plan, share, saved), strict=True)
        )
        # of an interleaved schedule, once all chunks have run, FSDP2 keeps what it gathered
        return held + (self._gathered(plan, share) if all(flying_by_chunk) else 0)

    def _chunks(self, plan: Plan, share: Share, saved: Saved) -> Iterator[int]:
        """What a micro-batch in flight holds in each chunk: its input, what the layers add, not what has been sent on."""
        for index, kinds in enumerate(self.shares.chunks(share)):
            given = saved.embedding if index == share.embedding_chunk else saved.message
            sent = 0 if index == share.head_chunk else saved.message
            yield max(0, given + _layers(plan, kinds, saved) - sent)

    def _reducing(self, plan: Plan, share: Model, saved: Saved) -> int:
        """What FSDP2 has besides when the first layer's backward ends: its gradients, and a copy that is reduced.

        What the layer saved is gone by then, and its parameters; those of the layer before it are gathered already.
        """
        if not self._fsdp2(plan, share) or not plan.syncs_every_micro_batch:
            return 0
        ends_with_layer = not isinstance(share, Share) or bool(self.shares.chunks(share)[-1])
        found = self._of_one_layer(plan, share) if ends_with_layer else 0
        return max(0, found - max(saved.plain["layer"], saved.checkpointed["layer"])) if found else 0

    def _of_one_layer(self, plan: Plan, share: Model) -> int:
        """Bytes of that, but for what the layer saved; 0 where not all layers are alike."""
        key = (*_states(plan), self.shares.content(share))
        found = self._reducing_bytes.get(key)
        if found is None:
            layer, kept = units(share, plan)[-1], keeps_layers(plan)
            wide, narrow = DTYPE_BYTES[plan.gradient_dtype], DTYPE_BYTES[plan.compute_dtype]
            parameters = sum(gathered_sizes(layer, plan))
            ahead = parameters if plan.backward_prefetch and share.num_layers > 1 else 0
            found = layer.numel * narrow + layer.padded_numel * wide + (-parameters if kept else ahead)
            found = self._reducing_bytes[key] = found if set(share.body) == {"layer"} else 0
        return found

    def _fsdp2(self, plan: Plan, share: Model) -> bool:
        """What FSDP2 gathers and reduces is known: whole backwards, and no experts."""
        return plan.implementation == "fsdp2" and plan.pipeline_schedule in _WHOLE and share.experts is None

    def _gathered(self, plan: Plan, share: Model) -> int:
        """Whole parameters that FSDP2 keeps from the forward to the backward."""
        if not self._fsdp2(plan, share):
            return 0
        key = (*_states(plan), self.shares.content(share))
        found = self._gathered_bytes.get(key)
        if found is None:
            root, *layers = units(share, plan)
            kept = [*([root] if keeps_root(plan) else []), *(layers if keeps_layers(plan) else [])]
            found = sum(sum(gathered_sizes(unit, plan)) for unit in kept)
            self._gathered_bytes[key] = found
        return found


def _layers(plan: Plan, kinds: Mapping[str, int], saved: Saved) -> int:
    """What layers of these kinds save."""
    if plan.recompute == "none":
        return sum(count * saved.plain[kind] for kind, count in kinds.items())
    if plan.recompute != "every_k":
        return sum(count * saved.checkpointed[kind] for kind, count in kinds.items())
    return sum(count * min(saved.plain[kind], saved.checkpointed[kind]) for kind, count in kinds.items())


def _states(plan: Plan) -> tuple[object, ...]:
    offload = (plan.offload.optimizer, plan.offload.parameters)
    whose = (plan.implementation, plan.zero, plan.pp > 1)
    return (*whose, plan.tp, plan.cp, plan.ep, plan.etp, plan.dp_replicate, plan.dp_shard, *offload)
