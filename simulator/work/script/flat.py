"""What DeepSpeed and Megatron have in common: parameters as one flat vector, an fp32 copy of which the optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from simulator.base.kernels import DTYPE_BYTES, Stream
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.resident import optimizer_tensors
from simulator.work.script.sharding import (
    ParameterUnit,
    Shape,
    apart,
    expert_shard_ranks,
    flat,
    flat_numels,
    frozen_pieces,
    numel_of,
    pieces,
    shard_ranks,
    stepped_numel,
)
from simulator.work.script.unit_comm import UnitComm


def flat_units(model: Model, plan: Plan) -> tuple[ParameterUnit, ...]:
    """Stage 3: one a piece of the model. Below it: one flat group."""
    ranks = shard_ranks(plan)
    if plan.zero == 3:
        pairs = zip(pieces(model, plan), frozen_pieces(model, plan), strict=True)
        return tuple(replace(flat(name, shapes, ranks), frozen=still) for (name, shapes), still in pairs)
    everything = tuple(shape for _, shapes in pieces(model, plan) for shape in shapes)
    return (flat("parameters", everything, ranks),)


def flat_communication(
    name: str, shapes: tuple[Shape, ...], plan: Plan, ranks: int, passes: tuple[Stream, ...] = (), num_buckets: int = 1
) -> UnitComm:
    """Stage 0 all-reduces; 1 and 2 reduce-scatter and gather new parameters; 3 gathers twice.

    passes: over the gradients before they travel.
    """
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.gradient_dtype]
    numel = padded(shapes, ranks)
    gathered = numel * compute if plan.zero == 3 else 0
    return UnitComm(
        unit=name,
        all_gather_forward_bytes=gathered,
        all_gather_backward_bytes=gathered,
        backward_gather_ranks=ranks,
        reduce_scatter_bytes=numel * reduced if plan.zero > 0 else 0,
        all_reduce_bytes=numel // ranks * reduced if plan.zero == 0 or plan.dp_replicate > 1 else 0,
        num_buckets=num_buckets,
        parameter_gather_bytes=numel * compute if plan.zero in (1, 2) else 0,
        gradient_kernels=passes,
    )


def communication_apart(
    model: Model, plan: Plan, make: Callable[[str, tuple[Shape, ...], Plan, int], UnitComm]
) -> tuple[UnitComm, ...]:
    """What each piece sends, its routed experts apart where the plan shards them so. make: of (name, shapes, plan, ranks)."""
    return tuple(
        replace(
            make(name, shapes, plan, shard_ranks(plan)),
            experts=make(name, routed, plan, expert_shard_ranks(plan)) if routed else None,
        )
        for name, shapes, routed in apart(model, plan)
    )


def padded(shapes: tuple[Shape, ...], ranks: int) -> int:
    """Elements of a flat vector, a multiple of the ranks."""
    return -(-numel_of(shapes) // ranks) * ranks


def flat_resident(
    model: Model, plan: Plan, gradients: Callable[[int, int], list[int]], buckets: list[int]
) -> dict[str, list[int]]:
    """Bytes between steps: 16-bit parameters, an fp32 master copy and momenta of this rank's flat part.

    gradients: those that stay, of (elements of this rank's part, of all).
    """
    compute = DTYPE_BYTES[plan.compute_dtype]
    padded = sum(-(-numel // ranks) * ranks for numel, ranks in flat_numels(model, plan))
    shard = stepped_numel(model, plan)
    return {
        "parameters": [(shard if plan.zero == 3 else padded) * compute],
        "gradients": gradients(shard, padded),
        "optimizer_state": [shard * 4, *optimizer_tensors(shard, plan)],
        "buckets": buckets,
    }
