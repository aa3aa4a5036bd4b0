"""A program's real run against its capture: bytes, collectives, and time where a cluster is named. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.base.units import counted
from simulator.formats.readers.capture import read_capture
from simulator.predict.program import predict_program
from simulator.spec.calibration import Calibration
from simulator.spec.cluster import Cluster
from simulator.spec.software.stack import Stack
from validate.compare.line import Z90, Line
from validate.fit.machine import CPU_STACK

_MEMORY = ("start_bytes", "peak_bytes", "end_bytes")


def compare_program(
    record: Mapping[str, Any],
    folder: Path,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    calibration: str | None = None,
) -> dict[str, Any]:
    """Compare a record of `validate run --program`, as plain data. folder: where the files beside it lie.

    Raises InputError where the record lacks what is compared.
    """
    program, captured = record.get("program"), record.get("captured")
    if not isinstance(program, dict):
        raise InputError(Fault(place="run: program", problem="is missing", remedy="shardwise validate run --program"))
    if not isinstance(captured, dict):
        problem = next((note for note in record.get("notes") or () if "not captured" in str(note)), "holds no capture")
        raise InputError(Fault(place="run: captured", problem=str(problem), remedy="docs/guides/capture.md"))
    found: dict[str, Any] = {
        "what": f"{program.get('target')}, {counted(int(record.get('num_ranks') or 1), 'rank')}",
        "mode": "program",
        "verdict": record["verdict"],
        "explains": {},
        "notes": [str(note) for note in record.get("notes") or ()],
    }
    measured = record.get("memory") or {}
    memory = captured.get("memory") or {}
    lines = [
        Line(name=name, predicted=memory[name], measured=measured[name])
        for name in _MEMORY
        if name in memory and name in measured
    ]
    if lines:
        found["memory"] = [line.as_json() for line in lines]
    if record.get("collectives") is not None:
        _compare_collectives(found, captured.get("collectives") or [], record["collectives"])
    if record.get("time"):
        _compare_time(found, record, folder, cluster, nodes, calibration)
    if record["verdict"] != "ok":
        found["notes"].append(f"the run ended early ({record['verdict']}): these are its parts")
    return found


def _compare_collectives(found: dict[str, Any], ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> None:
    """Bytes by kind; whether all are equal in kind, order and bytes, and where the first differs."""
    kinds = list(dict.fromkeys(kind for kind, _ in [*ours, *theirs]))
    sums = [{kind: sum(size or 0 for k, size in side if k == kind) for kind in kinds} for side in (ours, theirs)]
    lines = [Line(name=f"{kind}_bytes", predicted=sums[0][kind], measured=sums[1][kind]) for kind in kinds]
    found["collectives"] = [line.as_json() for line in lines]
    if list(map(list, ours)) == list(map(list, theirs)):
        found["notes"].append(f"{counted(len(ours), 'collective')}, equal in kind, order and bytes")
        return
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if list(a) != list(b)),
        min(len(ours), len(theirs)),
    )
    calls = [f"{side[place][0]} of {side[place][1]} bytes" if place < len(side) else "none" for side in (ours, theirs)]
    found["notes"].append(
        f"collectives differ ({len(ours)} captured, {len(theirs)} played): number {place + 1} is {calls[0]} captured, {calls[1]} played"
    )


def _compare_time(
    found: dict[str, Any],
    record: Mapping[str, Any],
    folder: Path,
    cluster: str | None,
    nodes: int | None,
    calibration: str | None,
) -> None:
    """The step, where the machine that it ran on is named; else a note."""
    machine = None if cluster is None else Cluster.load(cluster, nodes)
    if machine is None:
        reason = "--cluster names the machine that it ran on, --calibration its speeds"
    elif (machine.device.architecture == "cpu") != (record.get("device") == "cpu"):
        reason = f"the program ran on a {record.get('device')}, and {machine.name} has {machine.device.name}"
    else:
        found["time"] = [_step(record, folder, machine, calibration).as_json()]
        return
    found["notes"].append(f"time is not compared: {reason}")


def _step(record: Mapping[str, Any], folder: Path, machine: Cluster, calibration: str | None) -> Line:
    """Seconds of a step, predicted from the capture beside the record."""
    name = (record.get("files") or {}).get("capture")
    if not isinstance(name, str):
        raise InputError(
            Fault(place="run: files.capture", problem="is missing", remedy="validate run --program … -o FILE")
        )
    on_cpu = machine.device.architecture == "cpu"
    numbers = None if calibration is None else _calibration(calibration, machine)
    predicted = predict_program(
        read_capture(folder / name), machine, numbers, Stack.load(CPU_STACK) if on_cpu else None
    )
    time = record["time"]
    late = time["median_s"] > predicted.step_s  # the end on the side of the measurement counts
    return Line(
        name="step_s",
        predicted=predicted.step_s,
        measured=time["median_s"],
        u_input=(predicted.high_s - predicted.step_s if late else predicted.step_s - predicted.low_s) / Z90,
        u_data=time["standard_error_s"],
    )


def _calibration(name: str, machine: Cluster) -> Calibration:
    match name:
        case "ideal":
            return Calibration.ideal()
        case "datasheet":
            return Calibration.datasheet(machine.device)
        case _:
            return Calibration.load(Path(name) if name.endswith(".json") else name)
