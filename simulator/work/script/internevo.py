"""InternEvo's hybrid ZeRO-1: whole parameters dealt to the ranks of a group, gradients all-reduced, owners that broadcast.

Each parameter belongs to one rank of the group, largest first to whoever has least; gradients are all-reduced among all replicas in
buckets beside the backward; behind the step each owner broadcasts its 16-bit parameters, flat, one owner after the other, and
everybody waits. So a group of N ranks broadcasts N times, or as often as there are tensors. Sources, at commit c18bec9:
internlm/solver/optimizer/hybrid_zero_optim.py (_partition_param_list, _reduce_grads_by_rank, broadcast_params with overlap=False).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.base.kernels import DTYPE_BYTES
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.work.script.deepspeed import DEEPSPEED
from simulator.work.script.resident import optimizer_tensors, stepped_numels
from simulator.work.script.sharding import Shape, numel_of, pieces, shard_ranks
from simulator.work.script.unit_comm import UnitComm, whole_broadcasts


def _communication(model: Model, plan: Plan, node_ranks: int | None) -> tuple[UnitComm, ...]:
    """DeepSpeed's buckets, but whole gradients to all, and broadcasts of what was updated."""
    total, tensors = model.num_parameters, sum(len(shapes) for _, shapes in pieces(model, plan))
    owners = min(shard_ranks(plan), tensors)
    return tuple(
        replace(
            comm,
            reduce_scatter_bytes=0,
            all_reduce_bytes=numel_of(shapes) * DTYPE_BYTES[plan.gradient_dtype],
            broadcasts=_broadcasts(shapes, owners, plan, alone=owners == tensors, total=total),
        )
        for comm, (_, shapes) in zip(
            DEEPSPEED.communication(model, plan, node_ranks), pieces(model, plan), strict=True
        )
    )  # fmt: skip


def _broadcasts(
    shapes: tuple[Shape, ...], owners: int, plan: Plan, *, alone: bool, total: int
) -> tuple[tuple[int, int], ...]:
    """Of a piece: one a tensor where each has a rank of its own, else its share of the owners' flat vectors."""
    size = DTYPE_BYTES[plan.compute_dtype]
    if owners == 1:
        return ()
    if alone:
        return whole_broadcasts(shapes, size)
    return ((numel_of(shapes) * size, max(1, min(len(shapes), round(numel_of(shapes) / total * owners)))),)


def _resident(model: Model, plan: Plan) -> dict[str, list[int]]:
    """Parameters in 16 bits, and of the fullest rank's own an fp32 copy and the optimizer's state, flat."""
    own = sum(stepped_numels(model, plan))
    return {
        "parameters": [model.num_parameters * DTYPE_BYTES[plan.compute_dtype]],
        "gradients": [],
        "optimizer_state": [own * 4, *optimizer_tensors(own, plan)],
        "buckets": [],
    }


INTERNEVO: Final = replace(
    DEEPSPEED,
    traits=replace(
        DEEPSPEED.traits, name="internevo", zero_stages=(0, 1), reduces_among_all=True, sums_in_fp32=False, zero_engine=False
    ),
    communication=_communication,
    resident=_resident,
)  # fmt: skip
