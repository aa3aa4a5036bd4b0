"""What the host costs on a CPU: time of an operator beyond its kernels, and of FSDP2's hooks around a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.base.kernels import launches
from simulator.spec.calibration import Calibration
from simulator.spec.cluster.device import Device
from simulator.spec.model import Model
from simulator.spec.plan import Plan, PrecisionPlan
from simulator.spec.software.stack import Stack
from simulator.work.ops import build_blocks
from validate.samples import Sample

# The block of benches.host.tiny_block: eight tokens, so that its arithmetic is nothing.
_MODEL = {"name": "tiny block", "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16, "vocab_size": 16}
_TOKENS = 8
_COLLECTIVES_PER_GROUP = 3  # two all-gathers and a reduce-scatter a step


@dataclass(slots=True)
class HostCosts:
    """Seconds; None where nobody measured."""

    launch_s: float | None = None
    checkpoint_s: float | None = None
    collective_s: float | None = None
    unit_s: float | None = None
    sources: dict[str, str] = field(default_factory=dict)


def host_costs(samples: Sequence[Sample], device: Device, calibration: Calibration, stack: Stack) -> HostCosts:
    """Of an eager block: what is left after its kernels' own times, over its launches as the simulator counts them."""
    costs = HostCosts()
    forward_s, backward_s, checkpointed_s = (
        _block_s(samples, phase) for phase in ("forward", "backward", "checkpointed")
    )
    if forward_s is not None and backward_s is not None:
        kernel_s, count = _tiny_block(device, calibration, stack)
        costs.launch_s = max(0.0, (forward_s + backward_s - kernel_s) / count)
        costs.sources["host_launch_s"] = f"one eager block of {count} launches that is all overhead"
        if checkpointed_s is not None:
            costs.checkpoint_s = max(0.0, checkpointed_s - 2 * forward_s - backward_s)
            costs.sources["host_checkpoint_s"] = "that block under a checkpoint, less its two forwards and its backward"
    issued = [s.time_s for s in samples if s.kind == "collective_issue"]
    if issued:
        costs.collective_s = float(np.median(issued))
        costs.sources["host_collective_s"] = "asynchronous broadcasts, the caller's part"
    groups = [s for s in samples if s.kind == "fsdp2_group"]
    if groups and calibration.links is not None:
        wire_s = _small_collectives(calibration) + (costs.collective_s or 0.0)
        each = [(s.expected_s - s["alone_s"]) / s["groups"] / _COLLECTIVES_PER_GROUP - wire_s for s in groups]
        costs.unit_s = max(0.0, float(np.mean(each)))
        costs.sources["host_unit_s"] = (
            "FSDP2 over blocks that are all overhead and sweep the caches, less the collectives' latency"
        )
    return costs


def _block_s(samples: Sequence[Sample], phase: str) -> float | None:
    """Median of an eager block's phase."""
    found = [s.time_s for s in samples if s.kind == "eager_block" and s["phase"] == phase]
    return float(np.median(found)) if found else None


def _tiny_block(device: Device, calibration: Calibration, stack: Stack) -> tuple[float, int]:
    """Kernel seconds and launches of the block, forward and backward."""
    plan = Plan(seq_len=_TOKENS, precision=PrecisionPlan(compute="fp32"), stack=stack.name)
    layer = build_blocks(Model.model_validate(_MODEL), stack, plan).layer
    kernels = [kernel for op in layer.ops for kernel in (*op.forward, *op.backward)]
    timer = calibration.timer(device, stack.attention)
    return timer.kernels_s(kernels), sum(map(launches, kernels))


def _small_collectives(calibration: Calibration) -> float:
    """Mean latency of the collectives that FSDP2 makes of a group: two all-gathers and a reduce-scatter."""
    assert calibration.links is not None
    port = calibration.links.ports[0]
    gather, scatter = port.modes["ring/all_gather"].base_s, port.modes["ring/reduce_scatter"].base_s
    return (2 * gather + scatter) / _COLLECTIVES_PER_GROUP
