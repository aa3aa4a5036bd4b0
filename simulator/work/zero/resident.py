"""What stays on a GPU between steps, and what a backward leaves for the optimizer: exact bytes of every tensor."""

from __future__ import annotations

from math import prod

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.zero.hooks import hook_tensors
from simulator.work.zero.units import flat_numels, pieces, shard_ranks, stepped_numel, units

MIN_8BIT_NUMEL = 4096  # bitsandbytes keeps 32-bit state for smaller tensors
QUANT_BLOCK_NUMEL = 256  # bitsandbytes: one fp32 scale a block


def resident_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Bytes of every tensor that lives on the fullest GPU between steps, by category.

    parameters: as the implementation stores them. gradients: only where their buffer outlives the step.
    optimizer_state: momenta, and the fp32 master copy if it is one more. buckets: communication buffers that stay.
    buffers: the model's own (position tables).
    """
    plain = plan.implementation in ("ddp", "zero_redundancy", "fsdp1", "fsdp2")
    tensors = _torch_tensors(model, plan) if plain else _flat_tensors(model, plan)
    return {**_not_offloaded(tensors, model, plan), "buffers": buffer_tensors(model, plan)}


def _not_offloaded(tensors: dict[str, list[int]], model: Model, plan: Plan) -> dict[str, list[int]]:
    """What stays in HBM. Stages 1 and 2 keep a buffer of the largest parameter, through which gradients leave."""
    if plan.offload.optimizer != "none":
        tensors = {**tensors, "gradients": [], "optimizer_state": []}
        if plan.implementation == "deepspeed" and plan.zero < 3:
            largest = max(prod(shape) for _, shapes in pieces(model) for shape in shapes)
            tensors["buckets"] = [*tensors["buckets"], largest * DTYPE_BYTES[plan.compute_dtype]]
    return tensors if plan.offload.parameters == "none" else {**tensors, "parameters": []}


def buffer_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of the model's own buffers: fp32 tables of the rotary cosines and sines."""
    if model.positions != "rope":
        return []
    return [plan.seq_len * int(model.head_dim * model.rotary_fraction) * 4] * 2


def resident_bytes(model: Model, plan: Plan, *, granularity_bytes: int = 1) -> dict[str, int]:
    """Category -> bytes between steps on the fullest GPU; each tensor rounded up to `granularity_bytes` (CUDA: 512)."""
    return {
        category: sum(-(-size // granularity_bytes) * granularity_bytes for size in sizes)
        for category, sizes in resident_tensors(model, plan).items()
    }


def gradient_tensors(model: Model, plan: Plan) -> list[int]:
    """Bytes of every tensor that the backward leaves for the optimizer and that did not exist before the step."""
    if plan.offload.optimizer != "none":
        return []
    master = DTYPE_BYTES[plan.master_dtype]
    match plan.implementation:
        case "fsdp1" | "fsdp2":
            # FSDP2's sharded gradients are views of one flat output a unit, FSDP1's are that output
            return [unit.shard_numel * master for unit in units(model, plan)]
        case "ddp" | "zero_redundancy":
            return [] if plan.gradient_as_bucket_view else _replicated(model, master)
        case "deepspeed" if plan.zero < 3:
            shard = 1 if plan.zero < 2 else shard_ranks(plan)
            return [-(-model.num_parameters // shard) * DTYPE_BYTES[plan.compute_dtype]]
        case "megatron" if plan.zero < 3 and DTYPE_BYTES[plan.gradient_dtype] < 4:
            return [stepped_numel(model, plan) * 4]  # fp32 copies of its part's, gone when the next step begins
        case _:
            return []


def model_state_bytes(model: Model, plan: Plan) -> int:
    """Parameters, gradients and optimizer state on one GPU: the figure of ZeRO's table."""
    held = resident_tensors(model, plan)
    kinds = ("parameters", "gradients", "optimizer_state")
    return sum(sum(held[kind]) for kind in kinds) + sum(gradient_tensors(model, plan))


def _replicated(model: Model, element_bytes: int) -> list[int]:
    return [prod(shape) * element_bytes for _, shapes in pieces(model) for shape in shapes]


def _torch_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    master = DTYPE_BYTES[plan.master_dtype]
    if plan.implementation in ("fsdp1", "fsdp2"):
        stored = [numel for unit in units(model, plan) for numel in unit.local_numels]
        stepped, buckets = stored, []
    else:
        stored = [prod(shape) for _, shapes in pieces(model) for shape in shapes]
        stepped = stepped_numels(model, plan)
        alone = plan.dp_replicate * shard_ranks(plan) == 1
        buckets = [] if alone else [unit.numel * master for unit in units(model, plan)] + hook_tensors(model, plan)
    return {
        "parameters": [numel * master for numel in stored],
        "gradients": [],
        "optimizer_state": [
            size for numel in stepped for size in (*optimizer_tensors(numel, plan), *_outer_tensors(numel, plan))
        ],
        "buckets": buckets,
    }


def _outer_tensors(numel: int, plan: Plan) -> list[int]:
    """DiLoCo's outer optimizer: where replicas last agreed, and its momentum."""
    outer = plan.sync_every_steps > 1 and plan.outer_optimizer == "nesterov"
    return [numel * DTYPE_BYTES[plan.master_dtype]] * 2 if outer else []


def _flat_tensors(model: Model, plan: Plan) -> dict[str, list[int]]:
    """DeepSpeed and Megatron: compute-dtype parameters, an fp32 master copy and momenta of this rank's flat part."""
    compute = DTYPE_BYTES[plan.compute_dtype]
    whole = sum(-(-numel // ranks) * ranks for numel, ranks in flat_numels(model, plan))
    shard = stepped_numel(model, plan)
    megatron, sharded = plan.implementation == "megatron", plan.zero == 3
    reduced = DTYPE_BYTES[plan.gradient_dtype]
    gradients = [shard * compute] if sharded else [whole * 4] if plan.sums_in_fp32 else []
    if megatron:
        # Megatron-FSDP adds reduced gradients up in fp32 shards, the distributed optimizer keeps whole gradients
        gradients = [shard * 4] if sharded else [whole * reduced]
    return {
        "parameters": [(shard if sharded else whole) * compute],
        "gradients": gradients,
        "optimizer_state": [shard * 4, *optimizer_tensors(shard, plan)],
        "buckets": [plan.reduce_bucket_numel * compute] if sharded and not megatron else [],
    }


def optimizer_tensors(numel: int, plan: Plan) -> list[int]:
    """Bytes of the state tensors of one parameter of `numel` elements. The fused optimizer keeps its step on the GPU."""
    step = [4] if plan.optimizer_impl == "fused" and plan.optimizer in ("adam", "adamw") else []
    match plan.optimizer:
        case "sgd":
            return []
        case "sgd_momentum":
            return [numel * DTYPE_BYTES[plan.optimizer_dtype]]
        case "adam8bit" if numel >= MIN_8BIT_NUMEL:
            return [numel, numel, *[-(-numel // QUANT_BLOCK_NUMEL) * 4] * 2]
        case "adam8bit":
            return [numel * 4] * 2
        case _:
            return [numel * DTYPE_BYTES[plan.optimizer_dtype]] * 2 + step


def stepped_numels(model: Model, plan: Plan) -> list[int]:
    """Elements of the parameters that the fullest rank steps where all ranks hold all: its part under ZeRO-1, or all."""
    stored = [prod(shape) for _, shapes in pieces(model) for shape in shapes]
    return _largest_part(stored, shard_ranks(plan)) if plan.zero == 1 else stored


def _largest_part(numels: list[int], ranks: int) -> list[int]:
    """ZeRO-1 of torch gives whole parameters away, largest first, to the rank that has least; the fullest rank's part."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for numel in sorted(numels, reverse=True):
        rank = held.index(min(held))
        parts[rank].append(numel)
        held[rank] += numel
    return parts[held.index(max(held))]
