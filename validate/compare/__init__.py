"""Prediction against measurement: what differs, whether the difference means anything, and where it comes from.

After ASME V&V 20-2009: the comparison error E = S - D (simulation minus data) is judged against its uncertainty
u_val² = u_num² + u_input² + u_D². |E| <= u_val says that the model's own error is lost in the noise; otherwise it lies
in E ± u_val. Standard uncertainties throughout (one sigma).

u_num    of the solution: the engine and the sums of bytes are exact, so 0
u_input  of what the model was given: the calibration's and the stack's, from the prediction's 90 % interval
u_D      of the data: the standard error of the median step; bytes are counted, so 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.base.errors import InputError
from simulator.predict import Prediction, predict
from simulator.spec.cluster import Cluster
from validate.compare.line import Line
from validate.compare.memory import compare_memory
from validate.compare.run import Run
from validate.compare.time import compare_time, predicted_phases

__all__ = ["Line", "compare_run", "incomparable", "predicted_phases"]

_CLOCKS = (
    "max_sm_clock_mhz",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_limit_w",
    "power_w",
    "temperature_c",
    "throttle_reasons",
)


def compare_run(
    record: Mapping[str, Any],
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    calibration: str | None = None,
) -> dict[str, Any]:
    """Compare one record of a results file with its prediction, as plain data (docs/reference/validate.md).

    cluster, nodes, calibration: instead of the study's own. Where the study's own cluster is another machine than the
    run's, bytes are compared and a note says why time is not. Raises InputError if the record cannot be predicted.
    """
    run = Run.of(record)
    notes: list[str] = [str(note) for note in record.get("notes") or ()]
    found: dict[str, Any] = {
        "what": run.what,
        "mode": record["mode"],
        "verdict": record["verdict"],
        "explains": {},
        "notes": notes,
    }
    machine = run.cluster(cluster, nodes)
    prediction = None
    named = machine is not None and (cluster is not None or nodes is not None)
    reason = "" if named else incomparable(run, machine)
    if reason and record.get("time"):
        notes.append(f"time is not compared: {reason} (--cluster names another)")
    if machine is not None and not reason and (record.get("time") or run.on_gpu):
        prediction = _timed(found, run, machine, calibration, named=named)
    if record.get("memory"):
        compare_memory(found, run, prediction, machine.device if machine is not None else None)
    machine_then = record.get("machine") or {}
    if clocks := {name: machine_then[name] for name in _CLOCKS if machine_then.get(name) not in (None, "")}:
        found["clocks"] = clocks
    if record["verdict"] != "ok":
        notes.append(f"the run ended early ({record['verdict']}): these are its parts")
    return found


def _timed(
    found: dict[str, Any], run: Run, machine: Cluster, calibration: str | None, *, named: bool
) -> Prediction | None:
    """Compare time, where it can be predicted; what cannot is a note, and bytes are compared all the same.

    told: the cluster was asked for, beside the study's: then it must fit.
    """
    try:
        numbers = run.calibration(calibration, machine)
        prediction = predict(run.model, run.plan, machine, numbers, run.stack)
    except InputError as exc:
        if named or calibration is not None:
            raise
        found["notes"] += [f"time is not compared: {fault}" for fault in exc.faults]
        return None
    if run.record.get("time"):
        compare_time(found, run, prediction, numbers.provenance.reference_s if numbers is not None else None)
    return prediction


def incomparable(run: Run, machine: Cluster | None) -> str:
    """Why the study's cluster cannot say how long the run takes; empty where it can. Bytes need no cluster."""
    if machine is None:
        return "the record holds no cluster"
    if run.plan.num_devices != machine.num_devices:
        return (
            f"the plan has {run.plan.num_devices} ranks, and the study's {machine.name} {machine.num_devices} devices"
        )
    if run.record["mode"] == "cpu" and machine.device.architecture != "cpu":
        return f"the plan ran on a CPU, and the study's {machine.name} has {machine.device.name}"
    return ""
