"""Flat names of a stack's fields: what `--set stack.KEY`, sources and reports call them, in their order."""

from __future__ import annotations

from typing import Final

from simulator.base.records import named

FLAT_NAMES: Final = {
    **named("name framework date describes attention"),
    **named(
        "blocks norm rope latent_rope gated_activation activation_backward norm_dtype loss gathers_logits "
        "holds_logits gathers_each fills_outputs weight_gradients squared_relu dequantised quantised_keeps_input "
        "adapters loss_metrics dropout autocast selective_keeps fp8_transposes grouped_gemm",
        "kernels",
    ),
    "grouped_factor": "fitted.grouped_factor",
    **named("expert_rows expert_shards router_product routing_launches early_stop", "kernels"),
    **named(
        "launch_s module_s layer_s dtensor_s redistribute_s view_s node_s dispatch_s wrap_s layout_s "
        "adapter_s hook_s parameter_s message_s",
        "host",
        "host_",
    ),
    **named("activation_tensors parameter_calls step_calls", "host"),
    "host_kernel_s": "host.kernel_s",
    "host_blocking": "host.blocking",
    "reads_loss": "host.reads_loss",
    "host_waits_for_blocks": "host.waits_for_blocks",
    "host_collective_s": "host.collective_s",
    "collective_wait_s": "fitted.collective_wait_s",
    "host_unit_s": "host.unit_s",
    "nccl": "nccl.version",
    "nccl_env": "nccl.env",
    "overlap": "overlap.communication",
    "late_gradients": "overlap.late_gradients",
    "late_parameters": "overlap.late_parameters",
    "tp_overlap": "overlap.tp",
    **named("tp_whole records_streams all_reduce_combine", "overlap"),
    **named("gemm_factor elementwise_factor step_overhead_s sigma experts_sigma calibration_runs", "fitted"),
    **named("engine known sources"),
}
