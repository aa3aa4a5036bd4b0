"""Fields that do nothing beside the others, each with what would make it act."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from simulator.spec.plan import NOTHING_OFFLOADED, Plan
from simulator.spec.plan.compression import NO_HOOK, NO_ONE_BIT
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


def _in_stage_3(plan: Plan) -> bool:
    return plan.traits.zero_engine and plan.zero == 3


def _in_forms(plan: Plan) -> bool:
    found = OPTIMIZERS[plan.optimizer.kind]
    on_host = plan.traits.zero_engine and plan.offload.optimizer != "none"
    return (bool(found.foreach) or not found.loops) and not on_host


def _in_dtype(plan: Plan) -> bool:
    found = OPTIMIZERS[plan.optimizer.kind]
    return found.moments > 0 and not found.bits and plan.offload.optimizer == "none"


def _whole_states(plan: Plan) -> bool:
    return OPTIMIZERS[plan.optimizer.kind].bits == 8 and plan.zero == 0


_ROWS: Final = ("expert_capacity_factor", "expert_imbalance", "expert_imbalance_sigma")
_FSDP: Final = 'data_parallel = "fsdp1" or "fsdp2"'
_PAIRS: Final = 'peft = "lora", "qlora" or "dora"'
_OFFLOADED: Final = "offload.optimizer, offload.parameters or offload.activations"

_RULES: Final[tuple[tuple[str, Callable[[Plan], bool], str], ...]] = (
    ("recompute_modules", lambda p: p.recompute.mode == "selective", 'recompute = "selective"'),
    ("recompute_every", lambda p: p.recompute.mode == "every_k" and p.recompute.every > 1, 'recompute = "every_k"'),
    ("schedule embedding_as_layer head_as_layer", lambda p: p.pp > 1, "pp above 1"),
    ("sync_every_micro_batch", lambda p: p.num_micro_batches > 1, "num_micro_batches above 1"),
    (
        "gradient_as_bucket_view bucket_bytes",
        lambda p: p.traits.whole_modules,
        'data_parallel = "ddp" or "zero_redundancy"',
    ),
    ("comm_hook", lambda p: p.ddp.comm_hook == NO_HOOK or p.ddp.comm_hook.kind != "none", "comm_hook.kind"),
    ("one_bit", lambda p: p.deepspeed.one_bit == NO_ONE_BIT or p.deepspeed.one_bit.any, "one_bit.kind"),
    ("offload", lambda p: p.offload == NOTHING_OFFLOADED or p.offload.any, _OFFLOADED),
    ("reduce_bucket_numel", lambda p: p.traits.zero_engine and p.zero > 0, 'data_parallel = "deepspeed", zero above 0'),
    ("prefetch_bucket_numel param_persistence_numel", _in_stage_3, 'data_parallel = "deepspeed" with zero = 3'),
    ("reshard_after_forward forward_prefetch", lambda p: p.traits.hooks_modules, _FSDP),
    ("backward_prefetch", lambda p: p.traits.hooks_modules and p.zero == 3, f"{_FSDP} with zero = 3"),
    ("limit_all_gathers", lambda p: p.traits.wraps_adapters, 'data_parallel = "fsdp1"'),
    ("mixed_units", lambda p: p.traits.wraps_adapters and p.peft.adds, 'data_parallel = "fsdp1" with peft = "lora"'),
    ("shard_reserve_bytes", lambda p: p.fsdp.shard_sizes == "by_memory", 'shard_sizes = "by_memory"'),
    ("lora_rank lora_dropout adapter_dtype adapter_master_dtype", lambda p: p.peft.pairs, _PAIRS),
    ("lora_targets", lambda p: p.peft.pairs or p.peft.method == "ia3", _PAIRS),
    ("prefix_tokens", lambda p: p.peft.method == "prefix", 'peft = "prefix"'),
    ("upcast_frozen", lambda p: p.peft.any, "peft, or freeze_modules"),
    ("optimizer_impl", _in_forms, "an optimizer that has such forms: adamw, adam, sgd, muon, lamb"),
    ("optimizer_dtype", _in_dtype, "an optimizer on the GPU, with moments of more than 8 bits"),
    ("galore_rank", lambda p: p.optimizer.kind == "galore", 'optimizer = "galore"'),
    ("wide_embedding", _whole_states, "an optimizer with states of 8 bits, and zero = 0"),
    ("sequence_parallel vocab_parallel", lambda p: p.tp > 1, "tp above 1"),
    ("pool_block_bytes", lambda p: p.memory.policy == "fixed", 'memory_policy = "fixed"'),
    ("pool_evict pool_prefetch", lambda p: p.memory.tiered, 'memory_policy = "tiered", "unified" or "overcommit"'),
    ("compress_bytes_per_s", lambda p: bool(p.memory.compress), "compress"),
    ("cp_exchange", lambda p: p.cp > 1, "cp above 1"),
)

EFFECTS: Final = (
    *(Effect(where=name, experts=True, needs="a model with experts") for name in ("ep", "etp", "dispatcher", *_ROWS)),
    Effect(
        where="expert_overlap",
        experts=True,
        acts=lambda plan: plan.ep > 1 and plan.num_micro_batches > 1,
        needs="experts, ep above 1 and num_micro_batches above 1",
    ),
    *(Effect(where=name, acts=acts, needs=needs) for names, acts, needs in _RULES for name in names.split()),
)


def unused(plan: Plan, *, experts: bool) -> dict[str, str]:
    """Fields without effect in this plan, each with what would make it act. experts: the model has some."""
    return {effect.where: effect.needs for effect in EFFECTS if effect.idle(plan, experts=experts)}


def idle_details(plan: Plan) -> dict[str, str]:
    """The same of the details of what leaves HBM."""
    offload = plan.offload
    comes = "nvme" in (offload.optimizer, offload.parameters) or offload.activations != "none"
    grouped = plan.zero == 3 and plan.traits.zero_engine and offload.optimizer != "none"
    acts = {
        "prefetch": (comes or offload.prefetch == 0, "something on NVMe, or activations"),
        "sub_group_numel": (grouped, 'data_parallel = "deepspeed" with zero = 3, and offload.optimizer'),
        **dict.fromkeys(("buffer_count", "overlap"), (offload.optimizer == "nvme", 'offload.optimizer = "nvme"')),
    }
    return {name: needs for name, (does, needs) in acts.items() if offload.any and not does}
