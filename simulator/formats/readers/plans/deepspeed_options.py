"""DeepSpeed's settings that no field of Plan takes, as of 0.18 (deepspeed/runtime/constants.py, zero/config.py)."""

from __future__ import annotations

from typing import Final

from simulator.formats.readers.plans.reading import Off

_ZERO: Final = "zero_optimization."

# What a step neither waits for nor keeps. Clipping is in every measured stack; contiguous gradients, reduce-scatter and
# the sizes that bound gathered parameters are what the simulated stages do.
NO_EFFECT: Final = frozenset(
    (
        "optimizer.params.", "optimizer.legacy_fusion", "scheduler.", "steps_per_print", "wall_clock_breakdown",
        "dump_state", "gradient_clipping", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "tensorboard.", "wandb.", "csv_monitor.", "comet.", "monitor_config.", "comms_logger.", "flops_profiler.",
        "checkpoint.", "nebula.", "dataloader_drop_last", "autotuning.", "aio.", "timers.", "memory_breakdown",
        "vocabulary_size", "disable_allgather", "use_data_before_expert_parallelism", "seed", "train_iters",
        "gradient_predivide_factor", "prescale_gradients", "bf16.check_overflow", "bf16.immediate_grad_update",
        "fp16.auto_cast", "fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
        "fp16.consecutive_hysteresis", "fp16.min_loss_scale", "seq_parallel_communication_data_type",
        f"{_ZERO}contiguous_gradients", f"{_ZERO}reduce_scatter", f"{_ZERO}allgather_partitions",
        f"{_ZERO}load_from_fp32_weights", f"{_ZERO}elastic_checkpoint", f"{_ZERO}ignore_unused_parameters",
        f"{_ZERO}stage3_gather_16bit_weights_on_model_save", f"{_ZERO}stage3_gather_fp16_weights_on_model_save",
        f"{_ZERO}gather_16bit_weights_on_model_save", f"{_ZERO}stage3_max_live_parameters",
        f"{_ZERO}max_live_parameters", f"{_ZERO}max_reuse_distance", f"{_ZERO}model_persistence_threshold",
        f"{_ZERO}stage3_max_reuse_distance", f"{_ZERO}stage3_model_persistence_threshold",
        f"{_ZERO}override_module_apply", f"{_ZERO}log_trace_cache_warnings", f"{_ZERO}enable_sanity_checks",
        f"{_ZERO}pipeline_loading_checkpoint", f"{_ZERO}offload_optimizer.nvme_path",
        f"{_ZERO}offload_optimizer.fast_init", f"{_ZERO}offload_param.nvme_path", f"{_ZERO}allgather_bucket_size",
        f"{_ZERO}offload_optimizer.cpuadam_cores_perc", f"{_ZERO}use_multi_rank_bucket_allreduce",
        f"{_ZERO}legacy_stage1", f"{_ZERO}cpu_offload_use_pin_memory",
    )
)  # fmt: skip

OFF: Final = {
    "amp.": Off("NVIDIA's apex casts"),
    "torch_autocast.": Off("casts at each operator"),
    "fp16.fp16_master_weights_and_grads": Off("masters in fp16; see --master-dtype"),
    "bf16.bf16_master_weights_and_grads": Off("masters in bf16; see --master-dtype"),
    "sparse_gradients": Off("sparse gradients"),
    "sparse_attention.": Off("attention is dense here"),
    "activation_checkpointing.partition_activations": Off("checkpoints are kept whole on each rank"),
    "activation_checkpointing.cpu_checkpointing": Off("checkpoints in host memory; see --set plan.offload.activations"),
    "activation_checkpointing.contiguous_memory_optimization": Off("checkpoints in one buffer"),
    "activation_checkpointing.number_checkpoints": Off("how many checkpoints"),
    "activation_checkpointing.synchronize_checkpoint_boundary": Off("the device waits at each checkpoint"),
    "activation_checkpointing.profile": Off("timers"),
    "elasticity.": Off("batches that change with the number of GPUs"),
    "curriculum_learning.": Off("lengths that change"),
    "data_efficiency.": Off("tokens that are left out"),
    "progressive_layer_drop.": Off("layers that are left out"),
    "compression_training.": Off("compressed weights"),
    "weight_quantization.": Off("quantised weights"),
    "eigenvalue.": Off("eigenvalues"),
    "hybrid_engine.": Off("generation between steps"),
    "pipeline.": Off("DeepSpeed's pipeline stands in the script; see --pp"),
    "compile.": Off("compiled modules; see --stack"),
    "graph_harvesting": Off("launches from a graph"),
    "tensor_parallel.": Off("AutoTP's own settings", (False, None, 0, 1, "")),
    "zero_optimization.round_robin_gradients": Off("another order of reductions"),
    "zero_optimization.stage3_module_granularity_threshold": Off("modules gathered as one"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": Off("all-reduces that gather"),
    "zero_optimization.memory_efficient_linear": Off("another linear layer", (True, None)),
    "zero_optimization.zeropp_loco_param.": Off("ZeRO++'s error feedback"),
    "zero_optimization.zenflow.": Off("ZenFlow's delayed updates"),
    "zero_optimization.offload_optimizer.super_offload": Off("SuperOffload"),
    "zero_optimization.offload_param.buffer_count": Off("buffers of parameters", (5,)),
    "zero_optimization.offload_param.buffer_size": Off("buffers of parameters", (10**8,)),
    "zero_optimization.offload_param.max_in_cpu": Off("parameters kept in host memory", (10**9,)),
}
