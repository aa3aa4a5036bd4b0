"""Memory of a serving GPU: weights, the activations of the largest step, and cache blocks in what is left.

vLLM's scheme: a step of max_batched_tokens is run once. The budget (memory × gpu_memory_utilization) minus the weights,
that step's peak and the growth outside torch is divided into cache blocks. The CUDA context comes on top. The peak is
that of the caching allocator for the forward's allocations: an activation is freed after its last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from simulator.base.fit import Fit
from simulator.memory import outside_torch_bytes
from simulator.memory.allocator import Block as Storage
from simulator.memory.allocator import CachingAllocator
from simulator.memory.outside import workspace_bytes
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from simulator.studies.serving.blocks import encoder_blocks, encoder_bytes, forward_blocks, head_block
from simulator.studies.serving.context import gathered_bytes
from simulator.studies.serving.lora import lora_bytes
from simulator.studies.serving.mixers import state_bytes
from simulator.studies.serving.plan import InferencePlan
from simulator.studies.serving.shards import (
    StageShard,
    cached_layers,
    kv_bytes_per_token,
    part_bytes,
    stage_shards,
    weight_bytes,
)
from simulator.studies.serving.speculation import held_besides
from simulator.work.ops import Block

# What vLLM sees grow outside torch on one GPU between its first look and the end of its trial step: "non_torch_memory takes
# 0.16GiB" in the logs of two 80 GB GPUs (github.com/kubernetes-sigs/gateway-api-inference-extension/pull/550 and
# github.com/generative-computing/mellea/pull/416). The CUDA context is older than that look, so the fraction leaves it out.
_SEEN_BYTES = int(0.16 * 2**30)

_WHOLE = {"tp": 1, "pp": 1, "replicate": (), "attention_dp": False}
# States of a sequence whose beginnings are kept: its own, the one it began from, the one that it leaves (SGLang)
_KEPT = 3
_COPIES = ("logits.float", "probabilities")  # of logits, where sampling does not work on them as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes of one GPU of the stage that limits the cache, and what that leaves.

    weight_bytes: embedding_bytes and head_bytes among them, adapters, and what guesses tokens. activation_bytes: peak of the largest step.
    outside_torch_bytes: context, libraries, communicators; seen_outside_bytes: those that the budget has to hold.
    capacity_bytes: what a process can get; budget_bytes: the part of it that the plan allows.
    block_bytes: of one block on this GPU. num_blocks: of one scheduler (with pp stages there are pp, which share them).
    longest_tokens: of one sequence that must fit. window_tokens: tokens that some layers cache of a sequence at most (0: none does), and
    window_share: what these take over what layers that cache all of it do. state_bytes: what mixers keep of a sequence;
    states_bytes: of a pool for these alone, and most_states: sequences of one scheduler that it has room for; None: there is none. model_fraction: of all parameters' bytes, on this GPU.
    """

    stage: int
    weight_bytes: int
    embedding_bytes: int
    head_bytes: int
    model_fraction: float
    activation_bytes: int
    outside_torch_bytes: int
    seen_outside_bytes: int
    capacity_bytes: int
    budget_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    num_schedulers: int
    longest_tokens: int
    window_tokens: int = 0
    window_share: float = 0.0
    state_bytes: int = 0
    states_bytes: int = 0
    most_states: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Of all blocks on this GPU."""
        return self.num_blocks * self.num_schedulers * self.block_bytes

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.outside_torch_bytes + self.kv_bytes + self.states_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of one engine holds."""
        return self.num_blocks * self.num_schedulers * self.block_size

    @property
    def needed_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.longest_tokens // self.block_size) + self.window_blocks + self.state_blocks

    @property
    def state_blocks(self) -> int:
        """Blocks that have room for what mixers keep of a sequence."""
        return -(-self.state_bytes // self.block_bytes) if self.most_states is None else 0

    @property
    def window_blocks(self) -> int:
        """Of these, those of layers that cache a window."""
        return ceil(self.window_share * min(self.window_tokens, self.longest_tokens) / self.block_size)

    @property
    def fit(self) -> Fit:
        """One sequence of the longest kind has room, else an engine refuses to start; and the GPU has what is used.

        An engine takes its cache once and for all, so that nothing is tight.
        """
        return Fit.DOES_NOT_FIT if self.missing_bytes else Fit.FITS

    @property
    def missing_bytes(self) -> int:
        """What is short for one such sequence: of the budget, or of the GPU; 0 if it fits."""
        needed = self.needed_blocks * self.num_schedulers * self.block_bytes
        fixed = self.weight_bytes + self.activation_bytes + self.states_bytes
        return max(
            0,
            fixed + self.seen_outside_bytes + needed - self.budget_bytes,
            fixed + self.outside_torch_bytes + max(needed, self.kv_bytes) - self.capacity_bytes,
            _KEPT * self.state_bytes if self.most_states == 0 else 0,
        )

    @property
    def over_budget(self) -> bool:
        """Whether the budget is too small (not the GPU)."""
        return self.num_blocks < self.needed_blocks or self.most_states == 0


def serving_memory(model: Model, plan: InferencePlan, device: Device, stack: Stack) -> ServingMemory:
    """Memory of the stage with the fewest blocks."""
    shards = stage_shards(model, plan)
    unsharded = weight_bytes(stage_shards(model, plan.model_copy(update=_WHOLE))[0], plan)
    found = (_stage(model, plan, device, stack, shards, stage, unsharded) for stage in range(plan.pp))
    return min(found, key=lambda each: (each.num_blocks, -each.missing_bytes, each.stage))


def _stage(
    model: Model,
    plan: InferencePlan,
    device: Device,
    stack: Stack,
    shards: Sequence[StageShard],
    stage: int,
    whole_bytes: int,
) -> ServingMemory:
    shard = shards[stage]
    besides, besides_a_token = held_besides(model, plan, shard)
    besides += lora_bytes(shard, plan) + (encoder_bytes(model, plan) if shard.holds_embedding else 0)
    fixed_bytes = weight_bytes(shard, plan) + besides
    activations = activation_bytes(model, shard, plan, stack, device)
    outside = outside_torch_bytes(device, Plan(), sum(degree > 1 for degree in (plan.tp, plan.pp, plan.pcp)))
    capacity = device.usable_bytes - device.hypervisor_bytes
    budget = int(capacity * plan.gpu_memory_utilization)
    whole, windowed = cached_layers(shard, plan)
    block = max(
        1, plan.block_size * (kv_bytes_per_token(shard, plan) + besides_a_token)
    )  # a stage may have no attention
    seen = _SEEN_BYTES + outside - outside_torch_bytes(device, Plan(), 0) if outside else 0
    left = budget - fixed_bytes - activations - seen
    if plan.cache_of == "free":
        left = int((capacity - fixed_bytes - activations - outside) * plan.gpu_memory_utilization)
        budget = capacity
    elif plan.cache_of == "static":
        left = int((capacity - outside) * plan.gpu_memory_utilization) - fixed_bytes
        budget = left + fixed_bytes + activations + seen
    states, most = _pooled(left, state_bytes(shard, plan), plan)
    left -= states
    return ServingMemory(
        stage=stage,
        weight_bytes=fixed_bytes,
        embedding_bytes=part_bytes(shard, plan, "embedding"),
        head_bytes=part_bytes(shard, plan, "head"),
        model_fraction=(fixed_bytes - besides) / whole_bytes,
        activation_bytes=activations,
        outside_torch_bytes=outside,
        seen_outside_bytes=seen,
        capacity_bytes=capacity,
        budget_bytes=budget,
        block_bytes=block,
        block_size=plan.block_size,
        num_blocks=max(0, left // block // plan.pp),
        num_schedulers=plan.pp,
        longest_tokens=plan.model_len(model),
        window_tokens=(model.sliding_window or 0) if windowed or plan.window_part < 1 else 0,
        window_share=windowed / whole if whole else 0.0,
        state_bytes=state_bytes(shard, plan),
        states_bytes=states,
        most_states=most,
    )


def _pooled(left: int, each: int, plan: InferencePlan) -> tuple[int, int | None]:
    """(bytes of a pool of states, sequences that it has room for on each of pp schedulers) of what is left for cache and states."""
    if not each or not plan.state_part:
        return 0, None
    count = int(max(0, left) * plan.state_part / (1 + plan.state_part)) // each // plan.pp
    count = count if plan.prefix_caching else min(count, plan.max_sequences)
    return count * each * plan.pp, count // (_KEPT if plan.prefix_caching else 1)


def activation_bytes(model: Model, shard: StageShard, plan: InferencePlan, stack: Stack, device: Device) -> int:
    """Peak of the largest step on one GPU: its part of max_batched_tokens new tokens, max_sequences of which sample; and what it gathers."""
    tokens = -(-plan.batched_tokens(model) // plan.pcp)
    found = forward_blocks(shard, plan, stack, tokens)
    blocks = [found["embedding"]] if shard.holds_embedding else []
    for kind in dict.fromkeys(shard.part.layer_kinds):
        blocks += [found[kind]] * 2  # the second begins as all others do
    head = head_block(shard, plan, stack, min(plan.max_sequences, tokens)) if shard.holds_head else None
    allocator = CachingAllocator()
    for size in workspace_bytes(device)[:1]:  # no second thread: there is no backward
        allocator.malloc(size)
    state = allocator.malloc(blocks[0].input_bytes)
    for block in blocks:
        state = _play(allocator, block, state)
    if head is not None:
        rows = allocator.malloc(head.input_bytes)  # the rows that sample, picked from all
        allocator.free(state)
        if stack.engine is not None and stack.engine.samples_in_place:
            head = replace(head, ops=tuple(op for op in head.ops if op.name not in _COPIES))
        state = _play(allocator, head, rows)
    peak = allocator.peak_allocated_bytes
    if model.sees and shard.holds_embedding:  # as many images as a step has room for, before any text
        images = CachingAllocator()
        most = max(1, plan.batched_tokens(model) // model.image_tokens)
        for index, (block, _) in enumerate(encoder_blocks(model, plan, stack, most)):
            state = images.malloc(block.input_bytes) if index == 0 else state
            state = _play(images, block, state)
        peak = max(peak, images.peak_allocated_bytes)
    return peak + gathered_bytes(shard.part, plan, tokens)


def _play(allocator: CachingAllocator, block: Block, state: Storage) -> Storage:
    """One block's forward: each storage is freed behind its last reader. Returns that of the block's output."""
    last = {name: index for index, op in enumerate(block.ops) for name in op.inputs}
    live: dict[str, Storage] = {block.input: state}
    for index, op in enumerate(block.ops):
        for tensor in op.outputs:
            live[tensor.name] = allocator.malloc(tensor.num_bytes)
        if op.forward_temporary_bytes:
            allocator.free(allocator.malloc(op.forward_temporary_bytes))
        for name in dict.fromkeys((*op.inputs, *(tensor.name for tensor in op.outputs))):
            if name in live and name != block.output and last.get(name, index) <= index:
                allocator.free(live.pop(name))
    return live[block.output]
