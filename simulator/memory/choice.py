"""Whose strategy holds memory around the blocks of a plan's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from simulator.memory.compressed import Hooked, ZeroPlusPlus
from simulator.memory.sharded import Fsdp2, Fsdp2OverGloo
from simulator.memory.step import Strategy, Writer
from simulator.memory.strategies import DeepSpeed, DeepSpeed3, DeepSpeedBf16, Fsdp1, Megatron, MegatronFsdp, Replicated
from simulator.spec.model import Model
from simulator.spec.plan import Plan

Library = Literal["nccl", "gloo"]


def strategy_of(plan: Plan, library: Library = "nccl") -> Callable[[Writer, Model, Plan], Strategy]:
    """The strategy that runs a plan; library: what its collectives are."""
    match plan.implementation:
        case "fsdp2":
            return Fsdp2OverGloo if library == "gloo" else Fsdp2
        case "fsdp1":
            return Fsdp1
        case "deepspeed":
            return _deepspeed(plan)
        case "megatron":
            return MegatronFsdp if plan.zero == 3 else Megatron
        case _:
            narrow = plan.gradient_dtype != plan.master_dtype
            hooked = plan.num_data_parallel > 1 and (narrow or plan.comm_hook.kind == "powersgd")
            return Hooked if hooked else Replicated


def _deepspeed(plan: Plan) -> Callable[[Writer, Model, Plan], Strategy]:
    if plan.zeropp.any:
        return ZeroPlusPlus
    if plan.sums_in_fp32:
        return DeepSpeedBf16
    return DeepSpeed3 if plan.zero == 3 else DeepSpeed
