"""Memory that the caching allocator does not see, and the workspaces that libraries take through it."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.base.kernels import DTYPE_BYTES, fp4_bytes
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

# Device-wide use minus what torch reserved, without any communicator: 0.75-0.82 GiB on 19 plans on an H200
# (experiments/measured/h200-2026-11-20): CUDA context, cuBLAS and cuDNN kernels loaded as they are needed.
CONTEXT_BYTES = 841_000_000
# Before CUDA 11.7, which loads kernels as they are needed (PyTorch asks for it from 1.13, 2022-10, on), all of a
# library's kernels were loaded with it: 1687 MiB with one small tensor, torch 1.8 on an RTX 3090, 2 of them reserved
# (github.com/pytorch/pytorch/issues/55277; issues 49877 and 107667 agree).
EAGER_CONTEXT_BYTES = 1685 * 2**20
_LAZY_SINCE = "2022-10"
# Buffers of one NCCL communicator: users report 544 and 688 MB a group (github.com/NVIDIA/nccl/issues/964), and growth
# by whole groups from there (issue 864: 1.6 to 6 GB with three and more). The mean of the two reports.
COMMUNICATOR_BYTES = 616_000_000
# PyTorch's default cuBLAS workspace, one for the forward's thread and one for autograd's: 4096 KiB × 8 on Hopper and
# later, 4096 KiB × 2 + 16 KiB × 8 before (aten/src/ATen/cuda/CublasHandlePool.cpp).
_LARGE_WORKSPACE_BYTES = 4096 * 1024 * 8
_GROUPED_STREAMS = 4
_SMALL_WORKSPACE_BYTES = (4096 * 2 + 16 * 8) * 1024


def num_communicators(plan: Plan) -> int:
    """Process groups with traffic: one for each mesh axis longer than 1, one for a smaller group to reshard to."""
    axes = sum(degree > 1 for degree in (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp, plan.ep))
    axes += plan.ep > 1 and plan.num_expert_ranks > plan.ep * plan.experts.etp  # the experts' replicas
    # inside the nodes, and between them
    hops = plan.deepspeed.zeropp.quantized_gradients or plan.deepspeed.hierarchical_gather
    return axes + (plan.reshard_ranks is not None) + 2 * hops


def outside_torch_bytes(
    device: Device, plan: Plan, communicators: int | None = None, *, stack: Stack | None = None
) -> int:
    """Bytes the driver counts beside the allocator's: context, libraries, communicators (None: the plan's own).

    stack: None: one of today, whose context is the smaller one.
    """
    if device.architecture == "cpu":
        return 0
    count = num_communicators(plan) if communicators is None else communicators
    eager = stack is not None and stack.date < _LAZY_SINCE
    return (EAGER_CONTEXT_BYTES if eager else CONTEXT_BYTES) + count * COMMUNICATOR_BYTES


# Windows that Transformer Engine opens for a layer, each of all tokens: those that hold what is gathered (in fp8 where
# products are), and those that hold what is scattered (pytorch/module/base.py, initialize_ub: 6 and 4 names).
_GATHER_WINDOWS, _SCATTER_WINDOWS = 6, 4


def window_bytes(model: Model, plan: Plan, stack: Stack) -> int:
    """Memory of a rank that its tensor-parallel peers read, outside the allocator: none but where products run in pieces.

    torch keeps one workspace: the rank's part of the tokens, or two parts that peers fetch in turn
    (distributed/_symmetric_memory: get_symm_mem_workspace).
    """
    if plan.tp == 1 or not plan.sequence_parallel:
        return 0
    numel = plan.micro_batch_size * plan.seq_len // plan.cp * model.d_model
    wide = DTYPE_BYTES[plan.compute_dtype]
    if stack.overlap.tp == "userbuffers" and stack.traits.userbuffers:
        gathered = (
            fp4_bytes(numel)
            if plan.precision.compute == "nvfp4"
            else numel * (1 if plan.precision.compute == "fp8" else wide)
        )
        return _GATHER_WINDOWS * gathered + numel * _SCATTER_WINDOWS * wide
    symmetric = stack.overlap.tp == "symmetric_memory" and stack.traits.symmetric_memory
    return 2 * numel * wide // plan.tp if symmetric else 0


def capacity_bytes(device: Device, plan: Plan, outside_bytes: int) -> int:
    """What allocator and outside-torch bytes may take together: all but the hypervisor's, or less by the plan's fraction.

    A memory fraction (`torch.cuda.set_per_process_memory_fraction`) limits the allocator alone.
    """
    visible = device.usable_bytes - device.hypervisor_bytes
    fraction = min(plan.memory_fraction, plan.memory.conf.memory_fraction or 1.0)
    if fraction == 1.0:
        return visible
    return min(visible, int(fraction * visible) + outside_bytes)


def grouped_workspaces(stack: Stack, workspaces: Sequence[int]) -> tuple[int, ...]:
    """Workspaces (cuBLAS) of the streams on which Transformer Engine runs experts' products, each as large as the first.

    transformer_engine/pytorch/module/base.py: get_multi_stream_cublas_workspace.
    """
    return (
        (workspaces[0],) * _GROUPED_STREAMS
        if workspaces and stack.traits.grouped_streams and stack.kernels.grouped_gemm == "one_each"
        else ()
    )


def workspace_bytes(device: Device) -> tuple[int, ...]:
    """Workspaces that live in the allocator from the first product on."""
    if device.architecture == "cpu":
        return ()
    return (_LARGE_WORKSPACE_BYTES if device.architecture in ("hopper", "blackwell") else _SMALL_WORKSPACE_BYTES,) * 2
