"""What compresses, splits or skips traffic: ZeRO++, gathers in two stages, communication hooks, steps without replicas."""

from __future__ import annotations

from functools import partial
from typing import Final

from simulator.parallel.legality.rule import PlanRule
from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS


def _at_stage_3(plan: Plan) -> bool:
    return plan.traits.zero_engine and plan.zero == 3


def _zeropp(plan: Plan) -> bool:
    return plan.deepspeed.zeropp.any


def _nearest_secondary(plan: Plan) -> str:
    ranks, given = plan.dp_shard * plan.cp, plan.deepspeed.zeropp.secondary_ranks
    return f"secondary_ranks = {max(n for n in range(1, min(given, ranks + 1)) if ranks % n == 0)}"


_zeropp_rule = partial(PlanRule, where="zeropp", applies=_zeropp)
_ZEROPP: Final = (
    _zeropp_rule(
        holds=_at_stage_3,
        equation=lambda plan: (
            f"ZeRO++ exists in DeepSpeed's stage 3, not in {plan.implementation} with zero = {plan.zero}"
        ),
        remedy='data_parallel = "deepspeed", zero = 3',
    ),
    _zeropp_rule(
        holds=lambda plan: plan.dp_replicate <= 1,
        equation=lambda plan: f"ZeRO++ shards over all replicas, and dp_replicate = {plan.dp_replicate}",
        remedy=lambda plan: (
            f"dp_shard = {plan.dp_shard * plan.dp_replicate}, dp_replicate = 1 (secondary_ranks keeps gathers near)"
        ),
    ),
    PlanRule(
        where="zeropp.secondary_ranks",
        applies=_zeropp,
        holds=lambda plan: plan.dp_shard * plan.cp % plan.deepspeed.zeropp.secondary_ranks == 0,
        equation=lambda plan: (
            f"{plan.deepspeed.zeropp.secondary_ranks} does not divide the {plan.dp_shard * plan.cp} ranks that shard"
        ),
        remedy=_nearest_secondary,
    ),
    PlanRule(
        where="zeropp.quantized_gradients",
        applies=lambda plan: plan.deepspeed.zeropp.quantized_gradients,
        holds=lambda plan: plan.cp * plan.tp * plan.pp <= 1,
        equation="quantised gradients need all ranks for data parallelism",
        remedy="cp = 1, tp = 1, pp = 1",
    ),
    PlanRule(
        where="zeropp",
        applies=lambda plan: plan.deepspeed.zeropp.quantized_weights or plan.deepspeed.zeropp.quantized_gradients,
        holds=lambda plan: plan.compute_dtype != "fp32",
        equation=lambda plan: f"its kernels quantise 16-bit values, and the precision is {plan.precision.compute}",
        remedy='precision = "bf16" or "fp16"',
    ),
    _zeropp_rule(
        holds=lambda plan: not plan.offload.any,
        equation="ZeRO++ with offload is not modelled",
        remedy="leave offload out, or zeropp",
    ),
)


def _one_bit(plan: Plan) -> bool:
    return plan.deepspeed.one_bit.any


def _without(plan: Plan) -> bool:
    alone = plan.cp * plan.tp * plan.pp * plan.ep == 1 and plan.sync_every_steps == 1
    return alone and not plan.offload.any and not plan.peft.any


_one_bit_rule = partial(PlanRule, where="one_bit", applies=_one_bit)
_ONE_BIT: Final = (
    _one_bit_rule(
        holds=lambda plan: plan.traits.zero_engine and plan.zero == 0,
        equation=lambda plan: (
            f"one-bit optimizers need whole states in DeepSpeed, not {plan.implementation} with zero = {plan.zero}"
        ),
        remedy='data_parallel = "deepspeed", zero = 0',
    ),
    _one_bit_rule(
        holds=lambda plan: plan.optimizer.kind in ("adam", "adamw") and plan.optimizer.dtype == "fp32",
        equation=lambda plan: f"it is an Adam with fp32 moments itself, beside optimizer = {plan.optimizer.kind}",
        remedy='optimizer = "adam", optimizer_dtype = "fp32"',
    ),
    _one_bit_rule(
        holds=_without,
        equation="one-bit optimizers beside other parallelism, local SGD, offload or adapters are not modelled",
        remedy="cp = tp = pp = ep = 1, sync_every_steps = 1, without offload and peft",
    ),
    PlanRule(
        where="one_bit.interval",
        applies=_one_bit,
        holds=lambda plan: plan.deepspeed.one_bit.kind == "zero_one" or plan.deepspeed.one_bit.interval == 1,
        equation=lambda plan: f"{plan.deepspeed.one_bit.kind} sums in every step; local steps are 0/1 Adam's",
        remedy='one_bit.kind = "zero_one", or one_bit.interval = 1',
    ),
)

_MICS: Final = PlanRule(  # MiCS is DeepSpeed's stage 3 inside groups: dp_shard ranks a group, dp_replicate groups
    where="hierarchical_gather",
    applies=lambda plan: plan.deepspeed.hierarchical_gather,
    holds=lambda plan: _at_stage_3(plan) and plan.dp_replicate > 1,
    equation="only MiCS (DeepSpeed's stage 3 inside groups) gathers in two stages",
    remedy='data_parallel = "deepspeed", zero = 3, dp_shard = the ranks of a group, dp_replicate = the number of groups',
)


def _hooked(plan: Plan) -> bool:
    return plan.ddp.comm_hook.kind != "none"


def _powersgd(plan: Plan) -> bool:
    return plan.ddp.comm_hook.kind == "powersgd"


def _sent(plan: Plan) -> str:
    """What a hook makes buckets travel in."""
    return plan.ddp.comm_hook.dtype or plan.precision.master


_HOOKS: Final = (
    PlanRule(
        where="comm_hook",
        applies=_hooked,
        holds=lambda plan: plan.traits.whole_modules,
        equation=lambda plan: f"communication hooks are DDP's, not {plan.implementation}'s",
        remedy='data_parallel = "ddp", or leave comm_hook out and set reduce_dtype',
    ),
    PlanRule(
        where="reduce_dtype",
        applies=_hooked,
        holds=lambda plan: plan.precision.reduce in (None, _sent(plan)),
        equation=lambda plan: (
            f"{plan.ddp.comm_hook.kind} sends {_sent(plan)}, and reduce_dtype = {plan.precision.reduce}"
        ),
        remedy="leave reduce_dtype out",
    ),
    PlanRule(
        where="comm_hook.start_step",
        applies=_powersgd,
        holds=lambda plan: (
            plan.ddp.comm_hook.start_step >= 2
            or not (plan.ddp.comm_hook.error_feedback or plan.ddp.comm_hook.warm_start)
        ),
        equation=(
            "DDP rebuilds its buckets after the first step, which error feedback and warm start would not survive"
        ),
        remedy="comm_hook.start_step = 2 or more",
    ),
    PlanRule(
        where="comm_hook",
        applies=_powersgd,
        holds=lambda plan: plan.pp <= 1,
        equation="PowerSGD with pipeline parallelism is not modelled",
        remedy='pp = 1, or comm_hook.kind = "fp16_compress"',
    ),
)


_local_steps_rule = partial(PlanRule, where="sync_every_steps", applies=lambda plan: plan.sync_every_steps > 1)
_LOCAL: Final = (
    PlanRule(
        where="outer_optimizer",
        applies=lambda plan: plan.sync_every_steps == 1,
        holds=lambda plan: plan.outer_optimizer == "average",
        equation=lambda plan: (
            f"outer_optimizer = {plan.outer_optimizer} acts on what replicas agree on every so many steps"
        ),
        remedy="sync_every_steps = 2 or more",
    ),
    _local_steps_rule(
        holds=lambda plan: plan.dp_replicate > 1,
        equation=lambda plan: (
            f"{plan.sync_every_steps} steps alone, and dp_replicate = 1: there are no replicas to agree with"
        ),
        remedy="dp_replicate = 2 or more, or sync_every_steps = 1",
    ),
    _local_steps_rule(
        holds=lambda plan: plan.traits.takes_local_steps,
        equation=lambda plan: f"{plan.implementation} reduces gradients in every step",
        remedy='data_parallel = "ddp" or "fsdp2"',
    ),
    _local_steps_rule(
        holds=lambda plan: plan.zero > 0 or plan.cp <= 1,
        equation="ranks of cp hold parts of one sequence and must reduce in every step",
        remedy='zero = 3 (data_parallel = "fsdp2"), or cp = 1',
    ),
    _local_steps_rule(
        holds=lambda plan: plan.pp == 1,
        equation=lambda plan: f"local steps with pp = {plan.pp} are not modelled",
        remedy="pp = 1, or sync_every_steps = 1",
    ),
    _local_steps_rule(
        holds=lambda plan: plan.ep == 1,
        equation=lambda plan: f"local steps with ep = {plan.ep} are not modelled",
        remedy="ep = 1, or sync_every_steps = 1",
    ),
    _local_steps_rule(
        holds=lambda plan: plan.ddp.comm_hook.kind == "none",
        equation=lambda plan: f"local steps with comm_hook = {plan.ddp.comm_hook.kind} are not modelled",
        remedy="leave comm_hook out, or sync_every_steps = 1",
    ),
    _local_steps_rule(
        holds=lambda plan: not plan.offload.any,
        equation="local steps with offload = on are not modelled",
        remedy="leave offload out, or sync_every_steps = 1",
    ),
)

PLAN: Final = (
    PlanRule(
        where="optimizer_in_backward",
        applies=lambda plan: plan.optimizer.in_backward,
        holds=lambda plan: plan.traits.whole_modules and plan.num_devices == 1 and plan.num_micro_batches == 1,
        equation="gradients that go as they appear are neither reduced nor added up",
        remedy="one GPU with zero = 0 and one micro-batch, or optimizer_in_backward = false",
    ),
    PlanRule(
        where="document_len",
        applies=lambda plan: plan.document_len is not None,
        holds=lambda plan: plan.attended_len == plan.document_len,
        equation=lambda plan: f"a document of {plan.document_len} tokens is longer than the sequence of {plan.seq_len}",
        remedy=lambda plan: f"document_len = {plan.seq_len}, or a longer seq_len",
    ),
    PlanRule(
        where="optimizer",
        applies=lambda plan: OPTIMIZERS[plan.optimizer.kind].matrices,
        holds=lambda plan: plan.traits.whole_modules and plan.zero == 0 and plan.tp == 1 and not plan.peft.adds,
        equation=lambda plan: f"{plan.optimizer.kind} steps whole matrices of the model, which each GPU must hold",
        remedy='data_parallel = "ddp", zero = 0, tp = 1, without adapters; or optimizer = "adamw"',
    ),
    PlanRule(
        where="optimizer",
        applies=lambda plan: plan.optimizer.kind == "adafactor",
        holds=lambda plan: not plan.traits.shards_rows and not (plan.traits.whole_modules and plan.zero),
        equation="adafactor needs means over rows and columns, which are on other GPUs",
        remedy='data_parallel = "ddp" with zero = 0, or a flat vector: "fsdp1", "deepspeed"',
    ),
    PlanRule(
        where="optimizer",
        applies=lambda plan: plan.optimizer.kind == "lamb",
        holds=lambda plan: plan.zero == 0 and plan.tp == 1,
        equation="lamb needs norms of whole layers, and parts of them are on other GPUs",
        remedy='zero = 0 and tp = 1, or optimizer = "adamw"',
    ),
    *_ZEROPP,
    *_ONE_BIT,
    _MICS,
    *_HOOKS,
    *_LOCAL,
)
