"""Bytes of a run against its prediction: at the borders of phases, at the peak, and by category there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from simulator.base.errors import Fault, InputError
from simulator.memory import MemoryUse, pools, simulate_memory
from simulator.memory.allocator import AllocatorSettings
from simulator.memory.outside import workspace_bytes
from simulator.predict import Prediction
from simulator.spec.cluster.device import Device
from simulator.spec.plan.alloc_conf import parse_alloc_conf
from simulator.work.ops import build_blocks
from validate.compare.borders import Borders, borders
from validate.compare.line import Z90, Line, explains
from validate.compare.run import Run

# A tracker calls gradients temporary until they are reduced or accumulated.
_MEMORY: Final = dict.fromkeys(
    ("activations", "gradients", "loss", "temporaries", "unsharded_gradients"), "activations and gradients"
)


def compare_memory(found: dict[str, Any], run: Run, prediction: Prediction | None, device: Device | None) -> None:
    """Add "memory", "categories" and what explains most of the peak's error to `found`.

    A tracker counts tensors; where it could not follow (compiled blocks), the allocator's account also has the
    libraries' workspaces.
    """
    memory = run.record["memory"]
    measured = memory.get("tracked", memory)
    if "start_bytes" not in measured:
        return
    granularity = 512 if run.device == "cuda" else 1  # CUDA's allocator rounds every tensor up, a CPU's none
    predicted = borders(
        run.model, run.plan, run.stack, granularity_bytes=granularity, library=run.library, stage=run.stage
    )
    beside = sum(workspace_bytes(device)) if run.on_gpu and measured is memory and device is not None else 0
    lines = [*_border_lines(predicted, measured, beside), *_stage_lines(run, granularity, beside)]
    found["memory"] = [line.as_json() for line in lines]
    if prediction is not None and device is not None and run.on_gpu:
        use = prediction.memory
        if run.allocator_settings:
            found["notes"].append(f"the allocator ran with {run.allocator_settings}")
            use = _memory_use(run, device)
        found["memory"] += [line.as_json() for line in _allocator_lines(memory, use)]
    if "by_category" in measured:  # by a tracker, which sees no copies of gloo's
        tracked = borders(run.model, run.plan, run.stack, granularity_bytes=granularity, stage=run.stage)
        parts = _categories(tracked.by_category, measured["by_category"]["peak"])
        found["categories"] = [line.as_json() for line in parts]
        found["explains"]["memory"] = explains(lines[3].error, {line.name: line.error for line in parts})
    if predicted.peak_phase != measured["peak_phase"]:
        found["notes"].append(f"the peak is predicted in {predicted.peak_phase} and was in {measured['peak_phase']}")


def _border_lines(predicted: Borders, measured: Mapping[str, Any], beside: int) -> list[Line]:
    names = ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes")
    lines = [Line(name=name, predicted=getattr(predicted, name) + beside, measured=measured[name]) for name in names]
    lines += [
        Line(name=f"peak {name}_bytes", predicted=predicted.peak_by_phase_bytes[name] + beside, measured=size)
        for name, size in measured["peak_by_phase_bytes"].items()
    ]
    return lines


def _stage_lines(run: Run, granularity: int, beside: int) -> list[Line]:
    """The peak of the first rank of each pipeline stage but the first, whose rank the rest is about; on fake tensors of each phase.

    A rank that was asked for stands for itself.
    """
    if run.stage == 0 and (by_stage := run.record.get("memory_by_stage")):
        return [
            Line(name=f"{name} of stage {stage}_bytes", predicted=ours + beside, measured=theirs)
            for stage, one in enumerate(by_stage[1:], 1)
            for name, ours, theirs in _peaks(_of_stage(run, granularity, stage), one)
        ]
    peaks, stages = run.record.get("memory_by_rank") or [], run.plan.pp
    if stages == 1 or len(peaks) != run.plan.num_devices:
        return []
    ranks = [(stage, stage * (len(peaks) // stages)) for stage in range(1, stages)]
    return [
        Line(name=f"peak of stage {stage}_bytes", predicted=found.peak_bytes + beside, measured=peaks[rank])
        for stage, rank in ranks
        if peaks[rank] is not None
        for found in (_of_stage(run, granularity, stage),)
    ]


def _peaks(predicted: Borders, measured: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    yield "peak", predicted.peak_bytes, measured["peak_bytes"]
    for phase, size in measured["peak_by_phase_bytes"].items():
        yield f"peak {phase}", predicted.peak_by_phase_bytes[phase], size


def _of_stage(run: Run, granularity: int, stage: int) -> Borders:
    return borders(run.model, run.plan, run.stack, granularity_bytes=granularity, library=run.library, stage=stage)


def _memory_use(run: Run, device: Device) -> MemoryUse:
    """The prediction's memory once more, under the allocator settings of the run. Raises InputError if it has no such."""
    blocks = build_blocks(run.model, run.stack, run.plan)
    use, _ = simulate_memory(run.model, run.plan, run.stack, blocks, device, allocator_settings(run.allocator_settings))
    return use


def allocator_settings(text: str) -> AllocatorSettings:
    """What PYTORCH_CUDA_ALLOC_CONF says. Raises InputError with what it cannot say, or what is not simulated.

    A run limits what torch may take (validate run's memory fraction), so its garbage is collected.
    """
    try:
        return pools.allocator_settings(parse_alloc_conf(text), limited=True)
    except ValueError as exc:
        raise InputError(Fault(place="PYTORCH_CUDA_ALLOC_CONF", problem=str(exc), remedy="a run without it")) from None


def _allocator_lines(memory: Mapping[str, Any], use: MemoryUse) -> list[Line]:
    spread = (use.high_reserved_bytes - use.low_reserved_bytes) / (2 * Z90)
    pairs = {
        "allocated": (use.peak_allocated_bytes, memory["peak_allocated_bytes"], 0.0),
        "reserved": (use.reserved_bytes, memory["peak_reserved_bytes"], spread),
        "device used": (use.used_bytes, memory["device_used_bytes"], spread),
    }
    return [
        Line(name=f"{name}_bytes", predicted=ours, measured=theirs, u_input=uncertainty)
        for name, (ours, theirs, uncertainty) in pairs.items()
    ]


def _categories(predicted: Mapping[str, int], measured: Mapping[str, int]) -> list[Line]:
    joined: list[dict[str, int]] = []
    for side in (predicted, measured):
        sums: dict[str, int] = {}
        for name, size in side.items():
            name = _MEMORY.get(name, name)  # noqa: PLW2901  the name under which both sides are summed
            sums[name] = sums.get(name, 0) + size
        joined.append(sums)
    ours, theirs = joined
    names = sorted(ours.keys() | theirs.keys())
    return [Line(name=f"{name}_bytes", predicted=ours.get(name, 0), measured=theirs.get(name, 0)) for name in names]
