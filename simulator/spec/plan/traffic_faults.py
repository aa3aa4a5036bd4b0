"""What contradicts a plan's ZeRO++, gathers in two stages, communication hooks, and steps without replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.base.errors import Fault

if TYPE_CHECKING:
    from simulator.spec.plan.plan import Plan


def traffic_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """What compresses, splits or skips traffic and contradicts the rest of the plan."""
    yield from _zeropp_faults(plan, place)
    yield from _mics_faults(plan, place)
    yield from _hook_faults(plan, place)
    yield from _local_faults(plan, place)


def _zeropp_faults(plan: Plan, place: str) -> Iterator[Fault]:
    zeropp, where = plan.zeropp, f"{place}: zeropp"
    if not zeropp.any:
        return
    if plan.implementation != "deepspeed" or plan.zero != 3:
        problem = f"ZeRO++ is of DeepSpeed's stage 3, not {plan.implementation} with zero = {plan.zero}"
        yield Fault(place=where, problem=problem, remedy='data_parallel = "deepspeed", zero = 3')
    if plan.dp_replicate > 1:
        problem = f"ZeRO++ shards over all replicas, and dp_replicate = {plan.dp_replicate}"
        remedy = (
            f"dp_shard = {plan.dp_shard * plan.dp_replicate}, dp_replicate = 1 (secondary_ranks keeps gathers near)"
        )
        yield Fault(place=where, problem=problem, remedy=remedy)
    ranks = plan.dp_shard * plan.cp
    if ranks % zeropp.secondary_ranks:
        near = max(n for n in range(1, zeropp.secondary_ranks) if ranks % n == 0)
        problem = f"{zeropp.secondary_ranks} does not divide the {ranks} ranks that shard"
        yield Fault(place=f"{where}.secondary_ranks", problem=problem, remedy=f"secondary_ranks = {near}")
    if zeropp.quantized_gradients and plan.cp * plan.tp * plan.pp > 1:
        problem = "the two exchanges of quantised gradients take all ranks for data parallelism"
        yield Fault(place=f"{where}.quantized_gradients", problem=problem, remedy="cp = 1, tp = 1, pp = 1")
    if plan.compute_dtype == "fp32" and (zeropp.quantized_weights or zeropp.quantized_gradients):
        problem = f"its kernels quantise 16 bits, and the precision is {plan.precision}"
        yield Fault(place=where, problem=problem, remedy='precision = "bf16" or "fp16"')
    if plan.offload.any:
        problem = "ZeRO++ beside offload is not modelled"
        yield Fault(place=where, problem=problem, remedy="no offload, or no ZeRO++")


def _mics_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """MiCS is DeepSpeed's stage 3 inside groups: dp_shard ranks a group, dp_replicate groups."""
    if not plan.hierarchical_gather:
        return
    where = f"{place}: hierarchical_gather"
    if plan.implementation != "deepspeed" or plan.zero != 3 or plan.dp_replicate == 1:
        problem = "gathering in two stages is of MiCS, DeepSpeed's stage 3 inside groups"
        remedy = 'data_parallel = "deepspeed", zero = 3, dp_shard = ranks of a group, dp_replicate = groups'
        yield Fault(place=where, problem=problem, remedy=remedy)


def _hook_faults(plan: Plan, place: str) -> Iterator[Fault]:
    hook, where = plan.comm_hook, f"{place}: comm_hook"
    if hook.kind == "none":
        return
    if plan.implementation not in ("ddp", "zero_redundancy"):
        problem = f"communication hooks are DDP's, not {plan.implementation}'s"
        yield Fault(place=where, problem=problem, remedy="zero = 0 or 1 without data_parallel, or reduce_dtype")
    if plan.reduce_dtype not in (None, hook.dtype or plan.master_dtype):
        problem = f"{hook.kind} sends {hook.dtype or plan.master_dtype}, and reduce_dtype = {plan.reduce_dtype}"
        yield Fault(place=f"{place}: reduce_dtype", problem=problem, remedy="leave reduce_dtype out")
    if hook.kind == "powersgd" and hook.start_step < 2 and (hook.error_feedback or hook.warm_start):
        problem = "DDP rebuilds its buckets after the first step, which error feedback and warm start would not survive"
        yield Fault(place=f"{where}.start_step", problem=problem, remedy="start_step = 2 or more")
    if hook.kind == "powersgd" and plan.pp > 1:
        problem = "PowerSGD beside pipeline parallelism is not modelled"
        yield Fault(place=where, problem=problem, remedy="pp = 1, or fp16_compress")


def _local_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """Steps without their replicas: who can take them, and what has no meaning beside them."""
    where = f"{place}: sync_every_steps"
    if plan.sync_every_steps == 1:
        if plan.outer_optimizer != "average":
            problem = f"outer_optimizer = {plan.outer_optimizer} acts on what replicas agree on every so many steps"
            yield Fault(place=f"{place}: outer_optimizer", problem=problem, remedy="sync_every_steps = 2 or more")
        return
    if plan.dp_replicate == 1:
        problem = f"{plan.sync_every_steps} steps alone, and dp_replicate = 1: there are no replicas to agree with"
        yield Fault(place=where, problem=problem, remedy="dp_replicate = 2 or more, or sync_every_steps = 1")
    if plan.implementation not in ("ddp", "fsdp2"):
        problem = f"{plan.implementation} reduces gradients in every step"
        yield Fault(place=where, problem=problem, remedy='data_parallel = "ddp" or "fsdp2"')
    if plan.zero == 0 and plan.cp > 1:
        problem = "ranks of cp hold parts of one sequence and must reduce in every step"
        yield Fault(place=where, problem=problem, remedy='zero = 3 (data_parallel = "fsdp2"), or cp = 1')
    for name, idle, other in (
        ("pp", plan.pp == 1, plan.pp),
        ("ep", plan.ep == 1, plan.ep),
        ("comm_hook", plan.comm_hook.kind == "none", plan.comm_hook.kind),
        ("offload", not plan.offload.any, "on"),
    ):
        if not idle:
            remedy = f"without {name}, or sync_every_steps = 1"
            yield Fault(place=where, problem=f"local steps beside {name} = {other} are not modelled", remedy=remedy)
