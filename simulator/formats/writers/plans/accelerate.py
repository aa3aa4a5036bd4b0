"""accelerate's YAML configuration (1.12) with its DeepSpeed or FSDP plugin. docs/reference/plan-formats.md has the table."""

from __future__ import annotations

from typing import Any, Final

from simulator.formats.writers.plans import Job
from simulator.spec.plan import Plan

_DEVICES: Final = {"none": "none", "host": "cpu", "nvme": "nvme"}


_KINDS: Final = {"deepspeed": "DEEPSPEED", "fsdp1": "FSDP", "fsdp2": "FSDP"}


def accelerate_yaml(job: Job) -> str:
    """The configuration; addresses and the training script are left to whoever launches."""
    import yaml

    plan = job.plan
    nodes, _ = job.nodes
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _KINDS.get(plan.implementation, "MULTI_GPU"),
        "mixed_precision": "no" if plan.precision.compute in ("fp32", "tf32") else plan.precision.compute,
        "num_machines": nodes,
        "num_processes": plan.num_devices,
    }
    if plan.implementation == "deepspeed":
        data["deepspeed_config"] = _deepspeed(plan)
    elif plan.implementation in ("fsdp1", "fsdp2"):
        data["fsdp_config"] = _fsdp(plan)
    if plan.implementation == "fsdp2" and (plan.tp * plan.cp > 1 or plan.dp_replicate > 1):
        data["parallelism_config"] = _parallelism(plan)
    return str(yaml.safe_dump(data, sort_keys=False))


def _deepspeed(plan: Plan) -> dict[str, Any]:
    return {
        "zero_stage": plan.zero,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "offload_optimizer_device": _DEVICES[plan.offload.optimizer],
        "offload_param_device": _DEVICES[plan.offload.parameters],
    }


def _fsdp(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fsdp_version": 2 if plan.implementation == "fsdp2" else 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute.mode == "full",
        "fsdp_offload_params": plan.offload.parameters == "host",
    }
    if plan.implementation == "fsdp2":
        found["fsdp_reshard_after_forward"] = plan.zero == 3 and plan.fsdp.reshard_after_forward is not False
        return found
    hybrid = plan.zero > 0 and plan.dp_replicate > 1
    names = {0: "NO_SHARD", 2: "HYBRID_SHARD_ZERO2" if hybrid else "SHARD_GRAD_OP"}
    found["fsdp_sharding_strategy"] = names.get(plan.zero, "HYBRID_SHARD" if hybrid else "FULL_SHARD")
    found["fsdp_backward_prefetch"] = "BACKWARD_PRE" if plan.fsdp.backward_prefetch else "NO_PREFETCH"
    found["fsdp_forward_prefetch"] = plan.fsdp.forward_prefetch > 0
    found["fsdp_use_orig_params"] = True
    return found


def _parallelism(plan: Plan) -> dict[str, Any]:
    sizes = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp}
    sizes["sp" if plan.cp_exchange == "all_to_all" else "cp"] = plan.cp
    found: dict[str, Any] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    if plan.cp > 1 and plan.cp_exchange == "ring":
        found["parallelism_config_cp_comm_strategy"] = "alltoall"
    return found
