"""Bytes of a run against its prediction: at the borders of phases, at the peak, and by category there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from simulator.predict import Prediction
from validate.compare.borders import borders
from validate.compare.line import Z90, Line, explains
from validate.compare.run import Run

# A tracker calls gradients temporary until they are reduced or accumulated.
_MEMORY: Final = dict.fromkeys(
    ("activations", "gradients", "loss", "temporaries", "unsharded_gradients"), "activations and gradients"
)


def compare_memory(found: dict[str, Any], run: Run, prediction: Prediction | None) -> None:
    """Add "memory", "categories" and what explains most of the peak's error to `found`."""
    memory = run.record["memory"]
    on_gpu = run.on_gpu
    granularity = 512 if on_gpu else 1  # CUDA's allocator rounds every tensor up, a CPU's none
    tracked = memory.get("tracked", memory)
    if "start_bytes" not in tracked:
        return
    predicted = borders(run.model, run.plan, run.stack, granularity_bytes=granularity)
    names = ("start_bytes", "after_forward_bytes", "after_backward_bytes", "peak_bytes")
    lines = [Line(name=name, predicted=getattr(predicted, name), measured=tracked[name]) for name in names]
    lines += [
        Line(name=f"peak {name}_bytes", predicted=predicted.peak_by_phase_bytes[name], measured=size)
        for name, size in tracked["peak_by_phase_bytes"].items()
        if name in predicted.peak_by_phase_bytes
    ]
    found["memory"] = [line.as_json() for line in lines]
    if on_gpu and prediction is not None:
        found["memory"] += [line.as_json() for line in _allocator_lines(memory, prediction)]
    parts = _categories(predicted.by_category, tracked["by_category"]["peak"])
    found["categories"] = [line.as_json() for line in parts]
    found["explains"]["memory"] = explains(lines[3].error, {line.name: line.error for line in parts})
    if predicted.peak_phase != tracked["peak_phase"]:
        found["notes"].append(f"the peak is predicted in {predicted.peak_phase} and was in {tracked['peak_phase']}")


def _allocator_lines(memory: Mapping[str, Any], prediction: Prediction) -> list[Line]:
    use = prediction.memory
    spread = (use.high_reserved_bytes - use.low_reserved_bytes) / (2 * Z90)
    return [
        Line(name="allocated_bytes", predicted=use.peak_allocated_bytes, measured=memory["peak_allocated_bytes"]),
        Line(
            name="reserved_bytes",
            predicted=use.peak_reserved_bytes,
            measured=memory["peak_reserved_bytes"],
            u_input=spread,
        ),
        Line(name="device used_bytes", predicted=use.used_bytes, measured=memory["device_used_bytes"], u_input=spread),
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
