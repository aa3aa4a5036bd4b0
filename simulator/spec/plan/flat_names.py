"""Flat names of a plan's fields: what flags, `--fix`, tables, journals and reports call them, in their order."""

from __future__ import annotations

from typing import Final

from simulator.base.records import named

FLAT_NAMES: Final = {
    **named("dp_replicate dp_shard cp cp_exchange tp pp ep"),
    "etp": "experts.etp",
    "dispatcher": "experts.dispatcher",
    **named("overlap capacity_factor imbalance imbalance_sigma", "experts", "expert_"),
    **named("rank_order zero data_parallel sharding_strategy"),
    **named(
        "schedule virtual_stages first_stage_layers last_stage_layers stage_layers embedding_as_layer head_as_layer",
        "pipeline",
    ),
    **named("micro_batch_size num_micro_batches seq_len document_len sequence_parallel vocab_parallel"),
    "precision": "precision.compute",
    **named("fp8_recipe fp8_all_gather first_layers_bf16 last_layers_bf16", "precision"),
    "master_dtype": "precision.master",
    "reduce_dtype": "precision.reduce",
    "optimizer": "optimizer.kind",
    "optimizer_impl": "optimizer.impl",
    "optimizer_dtype": "optimizer.dtype",
    "galore_rank": "optimizer.galore_rank",
    "optimizer_in_backward": "optimizer.in_backward",
    "peft": "peft.method",
    **named("rank targets dropout", "peft", "lora_"),
    "prefix_tokens": "peft.prefix_tokens",
    "base_weights": "peft.base",
    "adapter_dtype": "peft.dtype",
    "upcast_frozen": "peft.upcasts",
    "train_modules": "peft.trained",
    "freeze_modules": "peft.frozen",
    "recompute": "recompute.mode",
    "recompute_every": "recompute.every",
    "recompute_modules": "recompute.modules",
    "cuda_graphs": "cuda_graphs",
    **named(
        "reshard_after_forward forward_prefetch backward_prefetch limit_all_gathers mixed_units "
        "shard_sizes shard_reserve_bytes shard_share",
        "fsdp",
    ),
    "sync_every_micro_batch": "sync_every_micro_batch",
    "gradient_as_bucket_view": "ddp.gradient_as_bucket_view",
    "bucket_bytes": "ddp.bucket_bytes",
    **named("reduce_bucket_numel prefetch_bucket_numel param_persistence_numel", "deepspeed"),
    "comm_hook": "ddp.comm_hook",
    "sync_every_steps": "sync_every_steps",
    "outer_optimizer": "outer_optimizer",
    **named("zeropp one_bit hierarchical_gather", "deepspeed"),
    "offload": "offload",
    "memory_fraction": "memory_fraction",
    "memory_policy": "memory.policy",
    "alloc_conf": "memory.alloc_conf",
    **named("block_bytes evict prefetch", "memory", "pool_"),
    **named("alloc_s free_s refill_every compress compress_bytes_per_s", "memory"),
    "stack": "stack",
}
