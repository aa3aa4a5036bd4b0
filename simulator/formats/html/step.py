"""Data of a prediction page's figures: memory over the step, the timeline, traffic between GPUs."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Final

from simulator.formats.html.timeline import pipeline_of, timeline_of
from simulator.formats.html.traffic import traffic_of
from simulator.memory import History, device_history
from simulator.memory.live_bytes import LiveBytes, live_bytes
from simulator.play.lower import lowered
from simulator.play.lower.host_lead import passes_ahead
from simulator.predict import Prediction
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.model import Model
from simulator.spec.plan import Plan
from simulator.spec.software.stack import Stack

MOST_MOMENTS: Final = 480  # of a step's memory on the page


def drawing_of(
    prediction: Prediction,
    model: Model,
    plan: Plan,
    cluster: Cluster,
    calibration: Calibration | None,
    stack: Stack | None,
) -> dict[str, Any]:
    """Figures of a described plan. The inputs are those of the prediction."""
    lowering = lowered(model, plan, cluster, calibration, stack)
    history = device_history(model, plan, lowering.stack, lowering.device, passes_ahead(lowering))
    return {
        **program_drawing(prediction, history),
        "pipeline": pipeline_of(prediction.timeline) if plan.pp > 1 else None,
        "traffic": traffic_of(lowering, float(prediction.step_s)),
        "record": record_of(cluster.device.name, plan.precision.compute, lowering.stack.name),
    }


def placed_drawing(
    model: Model, plan: Plan, cluster: Cluster, calibration: Calibration | None, stack: Stack | None, step_s: float
) -> dict[str, Any]:
    """Traffic between GPUs under the cluster's rank mapping."""
    return {"traffic": traffic_of(lowered(model, plan, cluster, calibration, stack), step_s)}


def program_drawing(prediction: Prediction, history: History | None = None) -> dict[str, Any]:
    """Figures of any prediction: for a captured program there is no plan to derive traffic from."""
    return {"memory": _memory(prediction, history), "timeline": timeline_of(prediction.timeline)}


def _memory(prediction: Prediction, history: History | None) -> dict[str, Any] | None:
    """The highest moment of each stretch of the step; by category, where the history reaches the predicted peak."""
    samples = prediction.memory_trace.samples
    if not samples:
        return None
    width = -(-len(samples) // MOST_MOMENTS)
    stretches = [range(start, min(start + width, len(samples))) for start in range(0, len(samples), width)]
    shown = live_bytes(history, MOST_MOMENTS) if history is not None else None
    complete = shown is not None and _agrees(shown, prediction)
    at = [max(each, key=lambda one: samples[one].allocated_bytes) for each in stretches]
    labels = list(dict.fromkeys(samples[one].label for one in at))
    places = {label: index for index, label in enumerate(labels)}
    return {
        "num_moments": len(samples),
        "at": at,
        "labels": labels,
        "label": [places[samples[one].label] for one in at],
        "allocated": [samples[one].allocated_bytes for one in at],
        "reserved": [max(samples[one].reserved_bytes for one in each) for each in stretches],
        "categories": shown.by_category if shown is not None and complete else {},
        "phases": [[moment, *phase] for moment, phase in shown.phases] if shown is not None and complete else [],
        "outside": prediction.memory.outside_torch_bytes,
        "capacity": prediction.memory.capacity_bytes,
    }


def _agrees(shown: LiveBytes, prediction: Prediction) -> bool:
    """Whether it is the rank that was predicted: where GPUs differ, another kind's may be the fullest."""
    highest = max(map(sum, zip(*shown.by_category.values(), strict=True)), default=0)
    same_length = shown.num_moments == len(prediction.memory_trace.samples)
    return same_length and highest == prediction.memory.peak_allocated_bytes


_FILE: Final = Path(__file__).parent / "static" / "record.toml"


@functools.cache
def _record() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def record_of(device: str, precision: str, stack: str) -> dict[str, Any] | None:
    """Errors on runs under this software stack, and on this kind of GPU in this precision; None where there are none."""
    rows = [row for row in _record()["row"] if (row["device"], row["precision"]) == (device, precision)]
    under = [row for row in _record()["stack"] if row["name"] == stack]
    stack_rows = [{**row, "runs_of": f"software {stack}", "gpu": "all", "precision": "all"} for row in under]
    found = [*stack_rows, *sorted(rows, key=lambda row: (-row["n"], row["runs_of"]))]
    on = f"on {device} in {precision}" if rows else ""
    like = " and ".join(part for part in (f"under {stack}" if under else "", on) if part)
    return {"like": like, "rows": found} if found else None
