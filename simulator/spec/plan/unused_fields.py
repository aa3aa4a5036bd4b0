"""Which of a plan's fields do nothing beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.spec.plan.plan import Plan


def unused_fields(plan: Plan, *, experts: bool) -> dict[str, str]:
    """Fields without effect in this plan, each with what would make it act. experts: the model has some."""
    kind, experts_do = plan.implementation, "a model with experts"
    acts: dict[str, tuple[bool, str]] = {
        "ep": (experts, experts_do),
        "etp": (experts, experts_do),
        "expert_capacity_factor": (experts, experts_do),
        "expert_imbalance": (experts, experts_do),
        "expert_overlap": (experts and plan.ep > 1, "experts and ep above 1"),
        "dispatcher": (experts, experts_do),
        "recompute_modules": (plan.recompute == "selective", 'recompute = "selective"'),
        "recompute_every": (plan.recompute == "every_k" and plan.recompute_every > 1, 'recompute = "every_k"'),
        "gradient_as_bucket_view": (kind in ("ddp", "zero_redundancy"), 'data_parallel = "ddp" or "zero_redundancy"'),
        "bucket_bytes": (kind in ("ddp", "zero_redundancy"), 'data_parallel = "ddp" or "zero_redundancy"'),
        "reduce_bucket_numel": (kind == "deepspeed" and plan.zero > 0, 'data_parallel = "deepspeed" with zero above 0'),
        "prefetch_bucket_numel": (kind == "deepspeed" and plan.zero == 3, 'data_parallel = "deepspeed" with zero = 3'),
        "param_persistence_numel": (
            kind == "deepspeed" and plan.zero == 3,
            'data_parallel = "deepspeed" with zero = 3',
        ),
        "forward_prefetch": (kind in ("fsdp1", "fsdp2"), 'data_parallel = "fsdp1" or "fsdp2"'),
        "backward_prefetch": (kind in ("fsdp1", "fsdp2"), 'data_parallel = "fsdp1" or "fsdp2"'),
        "limit_all_gathers": (kind == "fsdp1", 'data_parallel = "fsdp1"'),
        "sequence_parallel": (plan.tp > 1, "tp above 1"),
        "vocab_parallel": (plan.tp > 1, "tp above 1"),
        "cp_exchange": (plan.cp > 1, "cp above 1"),
    }
    return {name: needs for name, (does, needs) in acts.items() if not does}
