"""A user's own run, from a profiler's trace and a memory snapshot, as a record that `compare` takes. No torch."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.kineto import KinetoTrace
from simulator.formats.readers.snapshot import read_snapshot
from simulator.formats.study import Study, read_study
from simulator.predict import predict
from simulator.spec.software.stack import Stack
from simulator.studies.replay import replay
from simulator.work.program import COMPUTE_STREAM
from validate.compare import compare_run
from validate.compare.line import Z90, Line
from validate.records import SCHEMA_VERSION, Record
from validate.run_plan import append, times


def compare(trace: KinetoTrace, study: Path, snapshot: Path | None, out: Path | None) -> dict[str, Any]:
    """Predict the study and compare; keep the run in `out`. Raises InputError."""
    loaded = read_study(study, {}, {}, ())
    memory = _peaks(trace, snapshot)
    record = run_record(trace, loaded, memory)
    found = compare_run(record)
    if memory is not None:
        found["memory"] = [line.as_json() for line in _memory_lines(loaded, memory)]
    if out is not None:
        try:
            append(out, record)
        except OSError as exc:
            raise InputError(Fault(place=str(out), problem=f"cannot be written: {exc.strerror}")) from None
    return found


def run_record(trace: KinetoTrace, study: Study, memory: dict[str, int] | None) -> Record:
    """The traced step as `validate run` would have written it; phases of a step are not in a trace."""
    durations = [step.duration_s for step in trace.steps] or [float(trace.timeline.step_s)]
    stack = study.stack or Stack.of(study.plan)
    return {
        "kind": "run",
        "schema_version": SCHEMA_VERSION,
        "date": dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z"),
        "command": f"import {trace.name}",
        "mode": "imported",
        "verdict": "ok",
        "partial": False,
        "trouble": None,
        "model": study.model.model_dump(mode="json"),
        "plan": study.plan.model_dump(mode="json"),
        "stack": stack.model_dump(mode="json", exclude_unset=True),
        "study": {"cluster": study.cluster.model_dump(mode="json"), "calibration": study.inputs()["calibration"]},
        "num_ranks": study.plan.num_devices,
        "machine": None,
        "time": times([durations], {}),
        "memory": memory,
        "memory_by_rank": None,
        "profile": _profile(trace),
        "files": {},
    }


def _profile(trace: KinetoTrace) -> dict[str, Any]:
    timeline = trace.timeline
    compute: dict[str, float] = {}
    for span in timeline.of():
        if span.stream == COMPUTE_STREAM:
            compute[span.category] = compute.get(span.category, 0.0) + float(span.end_s - span.start_s)
    kinds = dict.fromkeys(span.category for span in timeline.of() if span.is_collective)
    return {
        "step_s": float(timeline.step_s),
        "compute_s": compute,
        "communication": {
            kind: {"exposed_s": float(timeline.exposed(kind)), "hidden_s": float(timeline.hidden(kind))}
            for kind in kinds
        },
    }


def _peaks(trace: KinetoTrace, snapshot: Path | None) -> dict[str, int] | None:
    """Peaks from the snapshot's replay, or else from the profiler's own account."""
    if snapshot is not None:
        peaks = replay(read_snapshot(snapshot)).peaks
        return {f"peak_{name}": peaks[name] for name in ("allocated_bytes", "reserved_bytes")}
    if trace.memory is None:
        return None
    return {
        "peak_allocated_bytes": trace.memory.peak.allocated_bytes,
        "peak_reserved_bytes": max(sample.reserved_bytes for sample in trace.memory.samples),
    }


def _memory_lines(study: Study, memory: dict[str, int]) -> list[Line]:
    use = predict(study.model, study.plan, study.cluster, study.calibration, study.stack).memory
    spread = (use.high_reserved_bytes - use.low_reserved_bytes) / (2 * Z90)
    return [
        Line(name="allocated_bytes", predicted=use.peak_allocated_bytes, measured=memory["peak_allocated_bytes"]),
        Line(
            name="reserved_bytes",
            predicted=use.reserved_bytes,
            measured=memory["peak_reserved_bytes"],
            u_input=spread,
        ),
    ]
