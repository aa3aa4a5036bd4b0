"""DeepSpeed's JSON configuration (0.18). docs/reference/plan-formats.md has the table."""

from __future__ import annotations

import json
from typing import Any, Final

from simulator.spec.plan import Plan
from simulator.spec.plan.compression import ONE_BIT_NAMES, ONE_BIT_SETTINGS

_DEVICES: Final = {"none": "none", "host": "cpu", "nvme": "nvme"}
_DTYPES: Final = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_OPTIMIZERS: Final = {
    "adam": "Adam",
    "sgd": "SGD",
    "sgd_momentum": "SGD",
    "adam8bit": "Adam8bit",
    "lion": "Lion",
    "lamb": "Lamb",
}


def deepspeed_json(plan: Plan) -> str:
    """The configuration; the learning rate and all that changes neither time nor memory is left out."""
    data: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
    }
    if plan.precision.compute in ("bf16", "fp16"):
        data[plan.precision.compute] = {"enabled": True}
    if plan.precision.reduce is not None and plan.gradient_dtype != plan.compute_dtype:
        data["communication_data_type"] = _DTYPES[plan.gradient_dtype]
    data["optimizer"] = {"type": _OPTIMIZERS.get(plan.optimizer.kind, "AdamW"), "params": _optimizer(plan)}
    data["zero_optimization"] = _zero(plan)
    if plan.tp > 1:
        data["tensor_parallel"] = {"autotp_size": plan.tp}
    data |= {"sequence_parallel_size": plan.cp} if plan.cp > 1 else {}
    if (one_bit := plan.deepspeed.one_bit).any:
        params = {word: getattr(one_bit, name) for name, word in ONE_BIT_SETTINGS[one_bit.kind].items()}
        data["optimizer"] = {"type": ONE_BIT_NAMES[one_bit.kind], "params": params}
    return json.dumps(data, indent=2) + "\n"


def _optimizer(plan: Plan) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if plan.optimizer.kind == "adam":
        params["adam_w_mode"] = False
    if plan.optimizer.kind == "sgd_momentum":
        params["momentum"] = 0.9
    if plan.optimizer.impl == "foreach":
        params["torch_adam"] = True
    return params


def _zero(plan: Plan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plan.zero}
    if plan.zero:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
        zero["reduce_bucket_size"] = plan.deepspeed.reduce_bucket_numel
    if plan.zero == 3:
        zero["stage3_prefetch_bucket_size"] = plan.deepspeed.prefetch_bucket_numel
        zero["stage3_param_persistence_threshold"] = plan.deepspeed.param_persistence_numel
        zero |= _hierarchy(plan)
    offload = plan.offload
    if offload.optimizer != "none":
        entry: dict[str, Any] = {"device": _DEVICES[offload.optimizer], "pin_memory": offload.pinned}
        if offload.optimizer == "nvme":
            overlap = offload.overlap
            entry |= {"buffer_count": offload.buffer_count, "pipeline_read": overlap, "pipeline_write": overlap}
        zero["offload_optimizer"] = entry
        zero["sub_group_size"] = offload.sub_group_numel
    if offload.parameters != "none":
        zero["offload_param"] = {"device": _DEVICES[offload.parameters], "pin_memory": offload.pinned}
    return zero


def _hierarchy(plan: Plan) -> dict[str, Any]:
    """ZeRO++ and MiCS, where they act."""
    found: dict[str, Any] = {}
    if plan.deepspeed.zeropp.secondary_ranks > 1:
        found["zero_hpz_partition_size"] = plan.deepspeed.zeropp.secondary_ranks
    if plan.deepspeed.zeropp.quantized_weights:
        found["zero_quantized_weights"] = True
    if plan.deepspeed.zeropp.quantized_gradients:
        found["zero_quantized_gradients"] = True
    if plan.dp_replicate > 1:
        found["mics_shard_size"] = plan.dp_shard
        found |= {"mics_hierarchical_params_gather": True} if plan.deepspeed.hierarchical_gather else {}
    return found
