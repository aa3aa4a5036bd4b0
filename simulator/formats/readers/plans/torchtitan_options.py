"""torchtitan's settings that no field of Plan takes, its model flavors, and older names; as of 0.2 (job_config.py)."""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.plans.reading import Off

FLAVORS: Final = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    **{("qwen3", f"{size}B"): f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
}

OLD_NAMES: Final = {  # 0.1 and before
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
}

# What a step neither waits for nor keeps. Clipping (max_norm) is in every measured stack.
NO_EFFECT: Final = frozenset(
    (
        "job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "validation.", "comm.", "dataloader.",
        "memory_estimation.", "training.dataset", "training.dataset_path", "training.max_norm", "training.steps",
        "training.seed", "training.gc_freq", "training.gc_debug", "training.warmup_steps", "training.dataloader.",
        "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay",
        "optimizer.fused", "model.hf_assets_path", "model.tokenizer_path", "model.norm_type", "model.print_after_conversion",
        "activation_checkpoint.early_stop", "activation_checkpoint.preserve_rng_state",
        "activation_checkpoint.determinism_check", "activation_checkpoint.debug", "activation_checkpoint.memory_budget",
        "activation_checkpoint.visualize_memory_budget_pareto",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns", "compile.backend",
        "parallelism.context_parallel_load_balancer", "parallelism.context_parallel_rotate_method",
        "quantize.linear.float8.", "quantize.linear.mx.", "quantize.grouped_mm.", "float8.", "mx.",
        "experimental.custom_import", "experimental.custom_args_module", "debug.seed", "debug.deterministic_warn_only",
        "debug.moe_force_load_balance", "training.debug_moe_force_load_balance",
        "parallelism.pipeline_parallel_expert_parallel_overlap", "parallelism.expert_tensor_parallel_degree",
        "parallelism.pipeline_parallel_schedule_csv", "fault_tolerance.process_group",
        "fault_tolerance.process_group_timeout_ms", "fault_tolerance.replica_id", "fault_tolerance.group_size",
        "fault_tolerance.min_replica_size",
    )
)  # fmt: skip

OFF: Final = {
    "training.deterministic": Off("deterministic kernels"),
    "debug.deterministic": Off("deterministic kernels"),
    "fault_tolerance.enable": Off("replicas that are kept in step over a slow network"),
    "fault_tolerance.semi_sync_method": Off("replicas that synchronise every so many steps"),
    "parallelism.enable_compiled_autograd": Off("a compiled backward"),
    "training.enable_compiled_autograd": Off("a compiled backward"),
}

KNOWN: Final = frozenset(
    (
        *(f"parallelism.{key}" for key in (
            "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree",
            "data_parallel_shard_degree", "data_parallel_replicate_degree", "expert_parallel_degree",
            "expert_tensor_parallel_degree", "expert_parallel_comm_backend", "disable_loss_parallel", "enable_async_tensor_parallel",
            "context_parallel_rotate_method", "pipeline_parallel_microbatch_size", "pipeline_parallel_schedule",
            "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
            "pipeline_parallel_layers_per_stage", "module_fqns_per_model_part", "pipeline_parallel_schedule_csv",
            "fsdp_reshard_after_forward",
        )),
        *(f"training.{key}" for key in (
            "seq_len", "local_batch_size", "global_batch_size", "enable_cpu_offload", "dtype", "mixed_precision_param",
            "mixed_precision_reduce",
        )),
        "model.name", "model.flavor", "model.converters", "optimizer.name", "optimizer.implementation",
        "optimizer.early_step_in_backward", "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option",
        "compile.enable", "compile.components", "quantize.linear.float8.recipe_name",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
    )
)  # fmt: skip
