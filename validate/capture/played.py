"""A program played for real and captured beside, as one record of `validate run`: the parent's side. No torch."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.base.errors import Fault, InputError
from simulator.formats.readers.capture import capture_of, read_capture
from simulator.formats.readers.recording import read_recording
from simulator.memory.history import script_history, step_live_bytes
from simulator.spec.cluster import Cluster
from simulator.work.captured.capture import Capture, Kind
from simulator.work.captured.script import captured_script
from validate.capture.command import CaptureError, Job, captured_json
from validate.capture.written import write_capture
from validate.machine import KEEP_FREED_MEMORY, count_gpus, memory_limit, running_jobs
from validate.records import SCHEMA_VERSION, Record
from validate.run_plan import deadlines, times
from validate.supervise import SupervisedOutcome, scratch_folder, supervise
from validate.torch_rules import MAX_CPU_RANKS


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedProgram:
    """What to play: a script or module:function on `ranks` processes. capture: a file of the same program; None: made now.

    cluster: whose device the capture is told of.
    """

    target: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    device: str = "cpu"
    warm_up: int = 2
    steps: int = 8
    threads: int = 1
    minutes: float = 8.0
    capture: Path | None = None
    cluster: Cluster
    command: str = ""


def play_program(
    request: PlayedProgram, *, files: Path | None = None, progress: Callable[[int, str], None] | None = None
) -> Record:
    """Play and capture. files: stem of the files beside the record; None writes none. Raises InputError before it starts."""
    _check(request)
    beside = files.with_name(f"{files.name}.capture.gz") if files is not None else None
    capture = _capture(request, beside, progress)
    with scratch_folder() as scratch:
        (scratch / "job.json").write_text(json.dumps(_job(request, scratch)), encoding="utf-8")
        outcome = supervise(
            [
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-P",
                    "-m",
                    "validate.capture.player",
                    str(scratch / "job.json"),
                    *request.arguments,
                ]
            ]
            * request.ranks,
            deadlines(request.minutes),
            environments=_environments(request, scratch),
            scratch=scratch,
            memory_bytes=memory_limit() if request.device == "cpu" else None,
            progress=progress,
        )
        trace = scratch / "rank0.json.gz"
        noted = request.ranks == 1 or outcome.results.get(0, {}).get("shapes", True)
        collectives = _collectives(trace, request.warm_up) if trace.is_file() and noted else None
        traceback_file = scratch / f"traceback-{outcome.verdict.rank}.txt"
        traceback = traceback_file.read_text(encoding="utf-8") if traceback_file.is_file() else ""
        files_kept = (
            _keep(files, trace, None if isinstance(capture, str) else request.capture or beside)
            if outcome.verdict.ok
            else {}
        )
    return _record(request, outcome, capture, collectives, files_kept, traceback)


def _check(request: PlayedProgram) -> None:
    faults: list[Fault] = []
    there, noun = (MAX_CPU_RANKS, "processes") if request.device == "cpu" else (count_gpus(), "GPUs that torch sees")
    if request.ranks > there:
        faults.append(Fault(place=f"--ranks {request.ranks}", problem=f"there are {there} {noun} here"))
    if request.device == "cuda":
        faults += running_jobs()
    InputError.raise_for(faults)


def _capture(request: PlayedProgram, beside: Path | None, progress: Callable[[int, str], None] | None) -> Capture | str:
    """The same program captured for as many ranks: what is compared with what it does. beside: where to keep it. Text: why not."""
    if request.capture is not None:
        found = read_capture(request.capture)
        if found.world_size != request.ranks:
            problem = f"was captured for {found.world_size} ranks, and {request.ranks} are played"
            raise InputError(Fault(place=str(request.capture), problem=problem, remedy="--ranks"))
        return found
    job = Job(
        target=request.target, arguments=request.arguments, world_size=request.ranks, gpus_per_node=request.ranks,
        device=request.cluster.device, warm_up=request.warm_up, minutes=request.minutes,
    )  # fmt: skip
    try:
        data = captured_json(job, progress)
    except CaptureError as exc:
        return str(exc.faults[0])
    if beside is not None:
        write_capture(beside, data)
    return capture_of(data, request.target)


def _job(request: PlayedProgram, scratch: Path) -> dict[str, Any]:
    names = ("target", "ranks", "device", "warm_up", "steps", "threads", "command")
    return {**{name: getattr(request, name) for name in names}, "scratch": str(scratch)}


def _environments(request: PlayedProgram, scratch: Path) -> list[dict[str, str]]:
    """As torchrun sets them; gloo stays on this machine."""
    common = {
        "OMP_NUM_THREADS": str(request.threads), "WORLD_SIZE": str(request.ranks), "LOCAL_WORLD_SIZE": str(request.ranks),
        "SHARDWISE_RENDEZVOUS": str(scratch / "rendezvous"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    if request.device == "cpu":
        common |= {
            **KEEP_FREED_MEMORY,
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "CUDA_VISIBLE_DEVICES": "",
        }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(request.ranks)]


# -- what came of it

_WITHOUT_SHAPES = (
    "the program uses torch.func: no shapes are noted, which would keep what it wraps, nor bytes of collectives"
)


def _collectives(trace: Path, step: int) -> list[list[Any]]:
    """[kind, bytes] of each collective of the recorded step, in order."""
    try:
        ops = read_recording(trace, step).ops
    except InputError:
        return []
    sent = [op.carried for op in ops if op.carried is not None]
    return [[one.kind, one.size_bytes] for one in sent if one.group_size != 1]


def captured_collectives(capture: Capture) -> list[list[Any]]:
    """The same of a capture."""
    events = capture.events[capture.steady :]
    return [[capture.names[e[2]], e[4]] for e in events if e[0] == Kind.COLLECTIVE and len(capture.groups[e[3]]) > 1]


def captured_memory(capture: Capture, device: str) -> dict[str, int]:
    """Live bytes of the captured step; CUDA's allocator rounds each storage up, a CPU's does not."""
    script = captured_script(capture)
    live = step_live_bytes(script_history(script.step, script.before), 512 if device == "cuda" else 1)
    return {"start_bytes": live.resident, "peak_bytes": live.peak[0], "end_bytes": live.final}


def _keep(stem: Path | None, trace: Path, capture: Path | None) -> dict[str, str]:
    """The recorded step of the first rank beside the record, to be played again or imported."""
    if stem is None or not trace.is_file():
        return {}
    target = stem.with_name(f"{stem.name}-trace.json.gz")
    try:
        shutil.copyfile(trace, target)
    except OSError as exc:
        target.unlink(missing_ok=True)
        return {"trace.json.gz (lost)": str(exc.strerror)}
    found = {"trace.json.gz": target.name}
    if capture is not None:
        found["capture"] = capture.name if capture.parent == stem.parent else str(capture.resolve())
    return found


def _record(
    request: PlayedProgram,
    outcome: SupervisedOutcome,
    capture: Capture | str,
    collectives: list[list[Any]] | None,
    files_kept: Mapping[str, str],
    traceback: str,
) -> Record:
    """One line of the results file, as `validate.run_plan` writes those of plans."""
    results = [{**outcome.partials.get(r, {}), **outcome.results.get(r, {})} for r in range(request.ranks)]
    verdict = outcome.verdict
    lines = (traceback or outcome.stderr.get(verdict.rank or 0, "")).strip().splitlines()
    trouble = {"rank": verdict.rank, "phase": verdict.phase, "detail": verdict.detail, "stderr": lines[-5:]}
    return {
        "kind": "run",
        "schema_version": SCHEMA_VERSION,
        "date": dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z"),
        "command": request.command,
        "mode": "program",
        "device": request.device,
        "notes": [
            *_notes(request),
            *([f"not captured: {capture}"] if isinstance(capture, str) else []),
            *([] if results[0].get("shapes", True) else [_WITHOUT_SHAPES]),
        ],
        "verdict": verdict.kind,
        "partial": not verdict.ok,
        "trouble": None if verdict.ok else trouble,
        "program": {"target": request.target, "arguments": list(request.arguments), "warm_up": request.warm_up},
        "num_ranks": request.ranks,
        "machine": results[0].get("machine"),
        "time": times([part.get("step_times_s", []) for part in results], {}),
        "memory": results[0].get("memory") or None,
        "memory_by_rank": [(part.get("memory") or {}).get("peak_bytes") for part in results]
        if len(results) > 1
        else None,
        "collectives": collectives,
        "captured": None if isinstance(capture, str) else _as_captured(capture, request.device),
        "files": dict(files_kept),
    }


def _as_captured(capture: Capture, device: str) -> dict[str, Any]:
    return {
        "memory": captured_memory(capture, device),
        "collectives": captured_collectives(capture),
        "answers": dict(capture.answers),
        "torch": capture.torch,
    }


def _notes(request: PlayedProgram) -> list[str]:
    if request.device == "cuda":
        return []
    return ["played on a CPU: CUDA devices are the CPU, NCCL is gloo, and operators are those that torch has for a CPU"]
