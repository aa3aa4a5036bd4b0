"""Step time, phases, parts and exposed communication of a run against its prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from simulator.predict import Prediction
from simulator.work.program import COMPUTE_STREAM
from simulator.work.trace import Span, Timeline
from validate.compare.line import Z90, Line, explains
from validate.compare.run import Run

PHASES: Final = ("forward", "backward", "optimizer")
_SAME_PACE: Final = 0.05  # of the reference product's time: less is its own noise
# A profiler sees kernels, not why they run.
_NOTHING: Final = 1e-9  # of a step: sums of floats that should be zero
_COMMUNICATION: Final = ("exposed", "wait", "interference")
_TIME: Final = {"copies": "elementwise", "stragglers": "host", "overhead": "host", "idle": "host"}


def compare_time(found: dict[str, Any], run: Run, prediction: Prediction, reference_s: float | None = None) -> None:
    """Add "time", "parts", "communication" and what explains most of the step's error to `found`.

    reference_s: the reference product's time at the pace that the calibration holds for (CPU).
    """
    measured = run.record["time"]
    ends = prediction.low_s / prediction.step_s, prediction.high_s / prediction.step_s
    alone = run.record["mode"] == "solo"
    without = _communication_s(prediction) if alone else 0.0
    pace = measured["reference_s"] / reference_s if reference_s and measured.get("reference_s") else 1.0
    if abs(pace - 1) > _SAME_PACE:
        found["notes"].append(
            f"the machine ran {pace:.2f} x slower than while it was calibrated (its reference product before each step): "
            "the prediction is for the calibrated pace"
        )
    if alone:
        found["notes"].append("solo: collectives return at once, so the prediction stands without its communication")
    step = prediction.step_s - without
    lines = [_seconds("step_s", step, measured, ends)]
    phases = predicted_phases(prediction, alone=alone)
    parts = [
        _seconds(f"{name}_s", phases[name], measured["phases"][name], ends)
        for name in PHASES
        if name in measured["phases"]
    ]
    if pace != 1.0:
        calibrated = {name: measured[name] / pace for name in ("median_s", "standard_error_s")}
        lines.append(_seconds("step at the calibrated pace_s", step, calibrated, ends))
    found["time"] = [line.as_json() for line in (*lines, *parts)]
    profile = run.record.get("profile")
    if profile:
        found["communication"] = [] if alone else _communication(prediction, profile)
        parts = _parts(prediction, run, profile, measured["median_s"], alone=alone)
        found["parts"] = [line.as_json() for line in parts]
    found["explains"]["time"] = explains(lines[0].error, {line.name: line.error for line in parts})


def _seconds(name: str, predicted: float, measured: Mapping[str, float], ends: tuple[float, float]) -> Line:
    """A line; ends: of the prediction's 90 % interval over its middle, of which the one on the side of the measurement counts."""
    low, high = ends
    return Line(
        name=name,
        predicted=predicted,
        measured=measured["median_s"],
        u_input=predicted * math.log(high if measured["median_s"] > predicted else 1 / low) / Z90,
        u_data=measured["standard_error_s"],
    )


def _communication_s(prediction: Prediction) -> float:
    """Seconds of the predicted step that exist because collectives take time."""
    names = [name for name in prediction.breakdown if name.split(":")[0] in _COMMUNICATION]
    return sum(prediction.breakdown[name] for name in names)


def _communication(prediction: Prediction, profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exposed seconds a kind of collective, by the same query on both timelines. A profiled step has no repetitions."""
    ours = {kind: exposed for kind, (exposed, _) in prediction.communication.items()}
    theirs = {kind: seconds["exposed_s"] for kind, seconds in profile["communication"].items()}
    lines = [
        Line(name=f"exposed {kind}_s", predicted=ours.get(kind, 0.0), measured=theirs.get(kind, 0.0))
        for kind in dict.fromkeys([*ours, *theirs])
    ]
    total = Line(name="exposed communication_s", predicted=sum(ours.values()), measured=sum(theirs.values()))
    return [line.as_json() for line in (total, *lines)]


def _parts(prediction: Prediction, run: Run, profile: Mapping[str, Any], median_s: float, *, alone: bool) -> list[Line]:
    """The step's seconds by what they were spent on; both columns sum to their step.

    Measured: the profiled step, scaled to the median one (a profiler slows the host). host: when the compute stream had
    nothing to do and no collective ran. Norms that are chains of elementwise operators look like other ones.
    """
    ours: dict[str, float] = {}
    joined = {**_TIME, "norm": "elementwise"} if run.stack.kernels.norm == "eager" else _TIME
    for name, seconds in prediction.breakdown.items():
        kind, _, detail = name.partition(":")
        if alone and kind in _COMMUNICATION:
            continue
        part = f"exposed {detail}" if detail else joined.get(name, name)
        ours[part] = ours.get(part, 0.0) + seconds
    for name, share in _recomputed(prediction, selective=run.plan.recompute.mode == "selective").items():
        part = joined.get(name, name)
        ours[part] = ours.get(part, 0.0) + share * ours.get("recompute", 0.0)
    ours.pop("recompute", None)
    scale = median_s / profile["step_s"] if profile["step_s"] else 0.0
    theirs: dict[str, float] = {}
    for name, seconds in profile["compute_s"].items():
        part = joined.get(name, name)
        theirs[part] = theirs.get(part, 0.0) + seconds * scale
    for kind, waited in profile["communication"].items():
        theirs[f"exposed {kind}"] = waited["exposed_s"] * scale
    theirs["host"] = max(0.0, median_s - sum(theirs.values()))
    names = [n for n in dict.fromkeys([*ours, *theirs]) if max(ours.get(n, 0), theirs.get(n, 0)) > _NOTHING * median_s]
    return [Line(name=f"{name}_s", predicted=ours.get(name, 0.0), measured=theirs.get(name, 0.0)) for name in names]


def _recomputed(prediction: Prediction, *, selective: bool) -> dict[str, float]:
    """What recomputation consists of, in shares: a profiler sees the same kernels again. Selective keeps the products."""
    seconds: dict[str, float] = {}
    for span in prediction.timeline.of():
        if span.label.startswith("forward layer"):
            for name, nominal_s in span.parts:
                if not (selective and name in ("gemm", "attention")):
                    seconds[name] = seconds.get(name, 0.0) + float(nominal_s)
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}


def predicted_phases(prediction: Prediction, *, alone: bool = False) -> dict[str, float]:
    """Seconds of each phase of the predicted step, over all micro-batches; they sum to it.

    A phase ends with its last compute, a backward also with the reductions that follow it. Micro-batches that were
    folded away belong to forward and backward in the shares of those that were played. alone: compute only, and none
    of what collectives cost.
    """
    seconds = _compute_only(prediction.timeline) if alone else _borders(prediction.timeline)
    step_s = prediction.step_s - (_communication_s(prediction) if alone else 0.0)
    rest = step_s - sum(seconds.values())
    played = seconds["forward"] + seconds["backward"]
    for name in ("forward", "backward"):
        seconds[name] += rest * seconds[name] / played if played else 0.0
    return seconds


def _borders(timeline: Timeline) -> dict[str, float]:
    seconds = dict.fromkeys(PHASES, 0.0)
    groups = _grouped(timeline.of())
    begin = 0.0
    for index, (phase, compute_end) in enumerate(groups):
        last = index + 1 == len(groups)
        end = float(timeline.step_s) if last else compute_end
        if phase == "backward" and not last:
            end = _reduced(timeline.of(), compute_end, before=groups[index + 1][1])
        seconds[phase] += end - begin
        begin = end
    return seconds


def _reduced(spans: tuple[Span, ...], compute_end: float, *, before: float) -> float:
    """When the last reduction that a backward has started is over, if that comes before the next phase's end."""
    ends = (
        float(span.end_s)
        for span in spans
        if span.is_collective
        and span.category in ("reduce_scatter", "all_reduce")
        and span.start_s <= compute_end
        and span.end_s <= before
    )
    return max([compute_end, *ends])


def _grouped(spans: tuple[Span, ...]) -> list[tuple[str, float]]:
    """Consecutive compute spans of one phase: (phase, end of the last)."""
    groups: list[tuple[str, float]] = []
    for span in spans:
        if span.stream != COMPUTE_STREAM:
            continue
        phase = phase_of(span)
        if groups and groups[-1][0] == phase:
            groups[-1] = (phase, float(span.end_s))
        else:
            groups.append((phase, float(span.end_s)))
    return groups


def _compute_only(timeline: Timeline) -> dict[str, float]:
    seconds = dict.fromkeys(PHASES, 0.0)
    for span in timeline.of():
        if span.stream == COMPUTE_STREAM:
            seconds[phase_of(span)] += float(span.nominal_s)
    return seconds


def phase_of(span: Span) -> str:
    """The phase that a predicted compute span belongs to, by its label."""
    words = span.label.split()
    if words[0] == "optimizer":
        return "optimizer"
    return "backward" if "backward" in words or words[0] in ("copy-in", "recompute") else "forward"
