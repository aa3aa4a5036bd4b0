"""Stack: what the software does with a device. A data file like a GPU is: `topologies/stacks/<name>.toml`.

Two runs with the same model, plan and GPUs differ by 10-50 % with the generation of the attention kernel, eager or
compiled blocks, and the precision of the loss (../docs/background). So a plan names its stack.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from simulator.schema import Strict


class AttentionBackend(Strict):
    """Which attention kernel runs.

    kernel: flash2 / flash3 / cudnn: tiled kernels of 2023 on; flash1_triton: the 2022 Triton kernel;
            math: unfused (two products, softmax and dropout over seq × seq).
    expand_kv_heads: K and V are repeated to all heads before the kernel (no native grouped-query attention).
    forward_efficiency, backward_efficiency: fraction of the device's peak on causal FLOP, by architecture, where the
            kernel is the stack's own and no kernel table has it; empty = the calibration's curves.
    """

    kernel: Literal["flash1_triton", "flash2", "flash3", "cudnn", "math"]
    expand_kv_heads: bool = False
    forward_efficiency: dict[str, float] = {}
    backward_efficiency: dict[str, float] = {}


class Stack(Strict):
    """A software stack: framework, kernels and habits. Every coefficient names its source in `sources`."""

    name: str
    framework: str
    date: str
    attention: AttentionBackend
    # How a block is executed: one kernel an operator, fused by a compiler, or hand-fused (Transformer Engine, apex).
    blocks: Literal["eager", "compiled", "fused"]
    norm: Literal["eager", "fused"] = "fused"  # eager: several kernels and fp32 temporaries; fused: one
    rope: Literal["half", "complex_fp32", "fused"] = "half"
    norm_dtype: Literal["fp32", "compute"] = "compute"
    loss: Literal["fp32_eager", "fp32_compiled", "fused"] = "fp32_eager"
    # autocast: fp32 parameters cast at each use (and the casts cost time and memory), as torch.autocast does
    autocast: bool = False
    early_stop: bool = True  # non-reentrant checkpointing stops the recompute once all saved tensors exist
    host_launch_s: float = Field(ge=0, default=8e-6)  # host time an operator, forward
    host_blocking: bool = False
    nccl: str = ""
    # Share of collectives that the framework leaves exposed whatever the schedule would allow (1 = no overlap at all)
    overlap: bool = True
    gemm_factor: float = Field(gt=0, default=1.0)  # achieved / sustained kernel speed of GEMMs inside real steps
    elementwise_factor: float = Field(gt=0, default=1.0)  # time over the calibrated stream's time
    step_overhead_s: float = Field(ge=0, default=0.0)
    calibration_runs: tuple[str, ...] = ()  # at most 6 row ids the coefficients were fitted on; never scored
    sources: dict[str, str] = {}
