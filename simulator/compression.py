"""What a plan does to its data-parallel traffic beyond sharding: quantised, kept near, in two hops, of low rank.

ZeRO++: arXiv 2306.10209, as DeepSpeed 0.18 runs it (runtime/zero/partition_parameters.py, runtime/comm/
coalesced_collectives.py). MiCS: arXiv 2205.00119, DeepSpeed's runtime/zero/mics.py. Hooks of DDP: torch 2.13,
distributed/algorithms/ddp_comm_hooks; PowerSGD: arXiv 1905.13727. docs/background/compression.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Literal

from pydantic import Field

from simulator.errors import Fault
from simulator.schema import Strict

if TYPE_CHECKING:
    from simulator.plan import Plan

MAX_RANKS: Final = 2**31


class ZeroPlusPlus(Strict):
    """ZeRO++, of DeepSpeed's stage 3.

    quantized_weights (qwZ): parameters are gathered as int8 with a scale a block. secondary_ranks (hpZ): neighbours that
    keep a second copy of the parameters between them from the first forward to the optimizer, where all later gathers
    stay; 1: none. quantized_gradients (qgZ): gradients are exchanged as int4, inside the nodes and then between them.
    """

    quantized_weights: bool = False
    secondary_ranks: int = Field(ge=1, le=MAX_RANKS, default=1)
    quantized_gradients: bool = False

    @property
    def any(self) -> bool:
        return self.quantized_weights or self.quantized_gradients or self.secondary_ranks > 1


NO_ZEROPP: Final = ZeroPlusPlus()


class CommHook(Strict):
    """What DDP does with a bucket instead of an all-reduce (`register_comm_hook`).

    kind: fp16_compress, bf16_compress: the bucket travels in 16 bits. powersgd: of each matrix travel two factors of `rank`
    columns (matrix_approximation_rank), where that saves more than min_compression_rate; the rest whole. error_feedback:
    what a step lost is added in the next. warm_start: factors begin where those of the step before ended.
    start_step: PowerSGD begins after so many steps with a plain all-reduce (start_powerSGD_iter); one after that is predicted.
    """

    kind: Literal["none", "fp16_compress", "bf16_compress", "powersgd"] = "none"
    rank: int = Field(ge=1, le=2**20, default=1)
    min_compression_rate: float = Field(gt=0, le=1e9, default=2.0)
    error_feedback: bool = True
    warm_start: bool = True
    start_step: int = Field(ge=0, le=2**31, default=1000)

    @property
    def dtype(self) -> Literal["fp16", "bf16"] | None:
        """What it makes buckets travel in; None: what they are in."""
        return {"fp16_compress": "fp16", "bf16_compress": "bf16"}.get(self.kind)  # type: ignore[return-value]


NO_HOOK: Final = CommHook()


def compression_faults(plan: Plan, place: str) -> Iterator[Fault]:
    """What of it contradicts the rest of the plan."""
    yield from _zeropp_faults(plan, place)
    yield from _mics_faults(plan, place)
    yield from _hook_faults(plan, place)
    yield from _local_faults(plan, place)
    yield from _ends_faults(plan, place)
    yield from _fp8_faults(plan, place)


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


def _ends_faults(plan: Plan, place: str) -> Iterator[Fault]:
    if plan.first_layers_bf16 + plan.last_layers_bf16 and not plan.narrow:
        problem = f"layers stay in bf16 where the others' products are narrower, and the precision is {plan.precision}"
        yield Fault(place=f"{place}: first_layers_bf16", problem=problem, remedy='precision = "fp8" or "nvfp4", or 0')


def _fp8_faults(plan: Plan, place: str) -> Iterator[Fault]:
    if plan.precision != "fp8":
        for name, given in (("fp8_recipe", plan.fp8_recipe is not None), ("fp8_all_gather", plan.fp8_all_gather)):
            if given:
                problem = f"it is of fp8 products, and the precision is {plan.precision}"
                yield Fault(place=f"{place}: {name}", problem=problem, remedy=f'precision = "fp8", or no {name}')
        return
    if plan.fp8_recipe == "rowwise" and plan.implementation == "megatron":
        remedy = 'fp8_recipe = "delayed", "tensorwise", "blockwise" or "mxfp8"'
        yield Fault(place=f"{place}: fp8_recipe", problem="Transformer Engine scales no rows", remedy=remedy)
    if not plan.fp8_all_gather:
        return
    if plan.first_layers_bf16 + plan.last_layers_bf16:
        problem = "layers of another precision among those gathered in fp8 are not modelled"
        yield Fault(
            place=f"{place}: fp8_all_gather", problem=problem, remedy="fp8_all_gather = false, or no such layers"
        )
    where = f"{place}: fp8_all_gather"
    if (plan.implementation, plan.zero) not in (("fsdp2", 2), ("fsdp2", 3), ("megatron", 1)):
        problem = f"{plan.implementation} with zero = {plan.zero} gathers no fp8"
        yield Fault(place=where, problem=problem, remedy='data_parallel = "fsdp2", or "megatron" with zero = 1')
    if plan.implementation == "fsdp2" and plan.fp8_recipe not in (None, "tensorwise"):
        problem = f"FSDP2 gathers fp8 that is scaled by tensor, not {plan.fp8_recipe}"
        yield Fault(place=where, problem=problem, remedy='fp8_recipe = "tensorwise"')
    elif plan.fp8_recipe in ("mxfp8", "blockwise"):
        problem = f"{plan.fp8_recipe} needs copies along rows and columns, so Megatron gathers 16 bits and casts them on arrival"
        yield Fault(place=where, problem=problem, remedy="fp8_all_gather = false")
