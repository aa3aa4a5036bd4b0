"""What of a plan torch plays otherwise than it was asked for. What it cannot play, `simulator.parallel.legality` says."""

from __future__ import annotations

from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack
from validate.gpus import built_with_cuda
from validate.task import Mode


def played_otherwise(model: Model, plan: Plan, stack: Stack, mode: Mode, device: str) -> list[str]:
    """What of the plan and its stack this way of playing it cannot have, and has otherwise."""
    notes = []
    decomposed = device == "cpu" or (mode == "fake" and not built_with_cuda())
    if decomposed and model.norm == "rms" and stack.kernels.norm == "fused":
        where = "on a CPU" if device == "cpu" else "where torch has no CUDA"
        notes.append(
            f"stack {stack.name}: rms_norm is one kernel there, and written out as operators that keep more {where}; "
            f'stack = "torch-2.13-fake-{device}" predicts what was played'
        )
    if plan.offload.parameters != "none":
        if device == "cpu":
            notes.append(
                "offload: on a CPU device and host are one memory, so offloaded states are counted with the rest"
            )
        if plan.offload.pinned and (device == "cpu" or mode == "fake"):
            notes.append("offload.pinned: no GPU here to pin memory for; pageable memory was used")
    if plan.cp > 1:
        notes.append("cp: each rank keeps its own rows of the position tables; the prediction counts whole ones")
    if model.experts is not None:
        notes.append("experts: tokens are dealt evenly, and a rank's experts are one batched product each way")
    if plan.pp > 1 and device == "cpu":
        notes.append(
            "pp: bytes are the allocator's own; gloo's finished sends keep what they sent to the schedule's end"
        )
    if plan.memory_fraction < 1 and (device == "cpu" or mode == "fake"):
        notes.append("memory_fraction: there is no caching allocator here to limit")
    return notes
