"""Fields that do nothing beside the others, each with what would make it act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from simulator.spec.plan import Plan
from simulator.spec.plan.optimizers import OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effect:
    """When a field acts.

    acts: asked of the plan. experts: it also needs a model that has some. needs: what would make it act, in words.
    """

    where: str
    needs: str
    acts: Callable[[Plan], bool] = lambda _: True
    experts: bool = False

    def idle(self, plan: Plan, *, experts: bool) -> bool:
        """The field does nothing in this plan. experts: the model has some."""
        return (self.experts and not experts) or not self.acts(plan)


def _in_buckets(plan: Plan) -> bool:
    return plan.traits.whole_modules


def _prefetches(plan: Plan) -> bool:
    return plan.traits.hooks_modules


def _in_stage_3(plan: Plan) -> bool:
    return plan.traits.zero_engine and plan.zero == 3


def _in_forms(plan: Plan) -> bool:
    found = OPTIMIZERS[plan.optimizer.kind]
    return bool(found.foreach) or not found.loops


def _whole_states(plan: Plan) -> bool:
    return OPTIMIZERS[plan.optimizer.kind].bits == 8 and plan.zero == 0


_EXPERTS: Final = "a model with experts"
_DDP: Final = 'data_parallel = "ddp" or "zero_redundancy"'
_FSDP: Final = 'data_parallel = "fsdp1" or "fsdp2"'
_TIERED: Final = 'memory_policy = "tiered", "unified" or "overcommit"'
_PAIRS: Final = 'peft = "lora", "qlora" or "dora"'
_STAGE_3: Final = 'data_parallel = "deepspeed" with zero = 3'

EFFECTS: Final = (
    Effect(where="ep", experts=True, needs=_EXPERTS),
    Effect(where="etp", experts=True, needs=_EXPERTS),
    Effect(where="expert_capacity_factor", experts=True, needs=_EXPERTS),
    Effect(where="expert_imbalance", experts=True, needs=_EXPERTS),
    Effect(where="expert_overlap", experts=True, acts=lambda plan: plan.ep > 1, needs="experts and ep above 1"),
    Effect(where="dispatcher", experts=True, needs=_EXPERTS),
    Effect(
        where="recompute_modules", acts=lambda plan: plan.recompute.mode == "selective", needs='recompute = "selective"'
    ),
    Effect(
        where="recompute_every",
        acts=lambda plan: plan.recompute.mode == "every_k" and plan.recompute.every > 1,
        needs='recompute = "every_k"',
    ),
    Effect(where="gradient_as_bucket_view", acts=_in_buckets, needs=_DDP),
    Effect(where="bucket_bytes", acts=_in_buckets, needs=_DDP),
    Effect(
        where="reduce_bucket_numel",
        acts=lambda plan: plan.traits.zero_engine and plan.zero > 0,
        needs='data_parallel = "deepspeed" with zero above 0',
    ),
    Effect(where="prefetch_bucket_numel", acts=_in_stage_3, needs=_STAGE_3),
    Effect(where="param_persistence_numel", acts=_in_stage_3, needs=_STAGE_3),
    Effect(where="forward_prefetch", acts=_prefetches, needs=_FSDP),
    Effect(where="backward_prefetch", acts=_prefetches, needs=_FSDP),
    Effect(
        where="limit_all_gathers",
        acts=lambda plan: plan.traits.hooks_modules and not plan.traits.shards_rows,
        needs='data_parallel = "fsdp1"',
    ),
    Effect(
        where="mixed_units",
        acts=lambda plan: plan.traits.wraps_adapters and plan.peft.adds,
        needs='data_parallel = "fsdp1" and peft = "lora" or "dora"',
    ),
    Effect(where="lora_rank", acts=lambda plan: plan.peft.pairs, needs=_PAIRS),
    Effect(where="lora_targets", acts=lambda plan: plan.peft.pairs or plan.peft.method == "ia3", needs=_PAIRS),
    Effect(where="lora_dropout", acts=lambda plan: plan.peft.pairs, needs=_PAIRS),
    Effect(where="adapter_dtype", acts=lambda plan: plan.peft.pairs, needs=_PAIRS),
    Effect(where="adapter_master_dtype", acts=lambda plan: plan.peft.pairs, needs=_PAIRS),
    Effect(where="prefix_tokens", acts=lambda plan: plan.peft.method == "prefix", needs='peft = "prefix"'),
    Effect(
        where="optimizer_impl", acts=_in_forms, needs="an optimizer that has such forms: adamw, adam, sgd, muon, lamb"
    ),
    Effect(where="wide_embedding", acts=_whole_states, needs="an optimizer with states of 8 bits, and zero = 0"),
    Effect(where="sequence_parallel", acts=lambda plan: plan.tp > 1, needs="tp above 1"),
    Effect(where="vocab_parallel", acts=lambda plan: plan.tp > 1, needs="tp above 1"),
    Effect(where="pool_block_bytes", acts=lambda plan: plan.memory.policy == "fixed", needs='memory_policy = "fixed"'),
    Effect(where="pool_evict", acts=lambda plan: plan.memory.tiered, needs=_TIERED),
    Effect(where="pool_prefetch", acts=lambda plan: plan.memory.tiered, needs=_TIERED),
    Effect(where="compress_bytes_per_s", acts=lambda plan: bool(plan.memory.compress), needs="compress"),
    Effect(where="cp_exchange", acts=lambda plan: plan.cp > 1, needs="cp above 1"),
)


def unused(plan: Plan, *, experts: bool) -> dict[str, str]:
    """Fields without effect in this plan, each with what would make it act. experts: the model has some."""
    return {effect.where: effect.needs for effect in EFFECTS if effect.idle(plan, experts=experts)}
