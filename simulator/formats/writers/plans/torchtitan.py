"""torchtitan's job file (0.2) as TOML. docs/reference/plan-formats.md has the table."""

from __future__ import annotations

import json
from typing import Any, Final

from simulator.formats.writers.plans import Job
from simulator.parallel.pipeline.layers import stage_layers
from simulator.spec.plan import Plan

_SCHEDULES: Final = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "dualpipe_v": "DualPipeV"}
_DTYPES: Final = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


def torchtitan_toml(job: Job, flavor: tuple[str, str]) -> str:
    """The job file. flavor: torchtitan's names of the model and of its size."""
    plan = job.plan
    compiled = job.stack.traits.compiles_blocks
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": flavor[0], "flavor": flavor[1]},
        "optimizer": {
            "name": {"adam": "Adam"}.get(plan.optimizer.kind, "AdamW"),
            "implementation": {"loop": "for-loop"}.get(plan.optimizer.impl, plan.optimizer.impl),
        },
        "training": _training(plan),
        "parallelism": _parallelism(job),
        "activation_checkpoint": _recompute(plan),
        "compile": {"enable": compiled},
    }
    if plan.precision.compute == "fp8":
        recipe = plan.precision.fp8_recipe or "tensorwise"
        name = f"quantize.linear.{'mx' if recipe == 'mxfp8' else 'float8'}"
        tables["model"]["converters"] = [name]
        tables[name] = {"filter_fqns": ["output"]} | ({} if recipe == "mxfp8" else {"recipe_name": recipe})
        if plan.precision.fp8_all_gather:
            tables[name]["enable_fsdp_float8_all_gather"] = True
    if compiled and job.stack.overlap.tp == "symmetric_memory" and plan.tp > 1:
        tables["parallelism"]["enable_async_tensor_parallel"] = True
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _training(plan: Plan) -> dict[str, Any]:
    """In a pipeline the local batch is what is cut into micro-batches."""
    in_stages = plan.num_micro_batches if plan.pp > 1 else 1
    found: dict[str, Any] = {
        "local_batch_size": plan.micro_batch_size * in_stages,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.seq_len,
        "dtype": _DTYPES[plan.precision.master],
        "mixed_precision_param": _DTYPES[plan.compute_dtype],
    }
    if plan.implementation == "fsdp2":
        found["mixed_precision_reduce"] = _DTYPES[plan.gradient_dtype]
    if plan.offload.parameters == "host":
        found["enable_cpu_offload"] = True
    return found


def _parallelism(job: Job) -> dict[str, Any]:
    plan = job.plan
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.dp_replicate,
        "data_parallel_shard_degree": plan.dp_shard,
        "tensor_parallel_degree": plan.tp,
        "context_parallel_degree": plan.cp,
        "pipeline_parallel_degree": plan.pp,
    }
    if plan.ep > 1:
        found["expert_parallel_degree"] = plan.ep
    if plan.experts.etp > 1:
        found["expert_tensor_parallel_degree"] = plan.experts.etp
    if plan.experts.dispatcher == "deep_ep":
        found["expert_parallel_comm_backend"] = "deepep"
    if plan.cp > 1:
        found["context_parallel_rotate_method"] = "alltoall"
    if plan.implementation == "fsdp2":
        keeps_gathered = plan.zero == 2 or plan.fsdp.reshard_after_forward is False
        always = plan.fsdp.reshard_after_forward is True
        in_pipeline = "always" if plan.pp > 1 else "default"
        found["fsdp_reshard_after_forward"] = "never" if keeps_gathered else "always" if always else in_pipeline
    if plan.pp > 1:
        found["pipeline_parallel_schedule"] = _SCHEDULES.get(plan.pipeline_schedule, plan.pipeline_schedule)
        found["pipeline_parallel_microbatch_size"] = plan.micro_batch_size
        found["module_fqns_per_model_part"] = _parts(job)
    return found


def _parts(job: Job) -> list[list[str]]:
    """The modules of each part, in the model's order: the embedding in the first, norm and output in the last."""
    plan = job.plan
    stages = stage_layers(
        job.model.num_layers, plan.pp, plan.pipeline.virtual_stages, split=plan.split, schedule=plan.pipeline_schedule
    )
    layer_counts = sorted(
        (layers for chunks in stages for layers in chunks), key=lambda layers: (layers.start, layers.stop)
    )
    parts = [[f"layers.{number}" for number in layers] for layers in layer_counts]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _recompute(plan: Plan) -> dict[str, Any]:
    match plan.recompute.mode:
        case "selective":
            return {"mode": "selective", "selective_ac_option": "op"}
        case "every_k":
            return {"mode": "selective", "selective_ac_option": str(plan.recompute.every)}
        case mode:
            return {"mode": mode}
