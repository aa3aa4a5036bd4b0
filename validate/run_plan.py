"""Run one plan for real and keep what came of it: `play(task)` gives a record, `append` adds it to a file.

The parent's side: no torch. Ranks are processes of their own (`validate.players.rank`) under `validate.supervise`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from simulator.base.errors import Fault, InputError, PlanError
from simulator.base.units import format_bytes
from validate.engines import package_notes
from validate.joined import joined
from validate.launch import LOOPBACK, Launch
from validate.machine import KEEP_FREED_MEMORY, allocator_settings, count_gpus, memory_limit, running_jobs
from validate.playable import engine_faults, played_otherwise, unplayable
from validate.records import SCHEMA_VERSION, Record
from validate.slow_ranks import own_s, slow_ranks
from validate.supervise import Deadlines, Peers, SupervisedOutcome, Verdict, scratch_folder, supervise
from validate.task import Task
from validate.torch_releases import installed, release_faults, release_notes
from validate.torch_rules import MAX_CPU_RANKS

COMPILE_S: Final = 900.0  # torch.compile of a block and a loss with cold caches, on a slow core
FILES: Final = {"spans.json.gz": "{}-spans.json.gz", "allocator.json.gz": "trace-{}.json.gz"}

Progress = Callable[[int, str], None]


def deadlines(minutes: float, task: Task | None = None, patience: float = 1.0) -> Deadlines:
    """What each phase may take in a run of at most `minutes`; patience: a factor on each.

    Communicators cost the more the more ranks meet, and blocks that are compiled are compiled in the first step.
    """
    ranks = task.plan.num_devices if task is not None and task.mode in ("full", "cpu") else 1
    compiled = task is not None and (task.stack.traits.compiles_blocks or task.stack.kernels.loss == "fp32_compiled")
    by_phase = {
        "start": 60.0, "load": 120.0, "join": 120.0 + ranks, "build": 240.0, "memory": 300.0,
        "warm-up": COMPILE_S if compiled else 240.0,
    }  # fmt: skip
    by_phase = {name: patience * seconds for name, seconds in by_phase.items()}
    return Deadlines(by_phase_s=by_phase, other_s=patience * 120.0, total_s=60 * minutes)


def play(
    task: Task,
    limits: Deadlines | None = None,
    *,
    files: Path | None = None,
    study: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    patience: float = 1.0,
) -> Record:
    """Play a task to the end or to its first trouble, and say what is known in either case.

    files: stem of the files beside the record (spans, allocator events); None writes none. study: what else the record
    should say of what was asked. Raises PlanError if torch cannot play the plan this way, InputError if the device is
    somebody else's.
    """
    with _joined(task, patience) as peers, scratch_folder() as scratch:
        (scratch / "task.json").write_text(task.model_dump_json(exclude_unset=True), encoding="utf-8")
        outcome = supervise(
            [_command(scratch)] * _num_local(task),
            limits or deadlines(8, task, patience),
            environments=_environments(task, scratch),
            scratch=scratch,
            memory_bytes=None if task.device == "cuda" else memory_limit(task.memory_fraction, _parents_here(task)),
            progress=progress,
            peers=peers,
        )
        if peers is not None:
            outcome = _agreed(peers, outcome)
        outcome = _in_a_launched_job(task, outcome)
        files_kept = _keep_files(scratch, files, outcome)
    return record(task, outcome, files=files_kept, study=study)


def _joined(task: Task, patience: float) -> contextlib.AbstractContextManager[Peers | None]:
    """The other ranks' parents where a launcher started them; raises what `check` does, on all ranks together."""
    refusal = None
    try:
        check(task)
    except InputError as exc:
        refusal = exc
    if not _is_launched(task):
        if refusal is not None:
            raise refusal
        return contextlib.nullcontext()
    task_json = task.model_copy(update={"command": ""}).model_dump_json()
    return joined(refusal, {"study": hashlib.sha256(task_json.encode()).hexdigest()[:12]}, patience)


def _agreed(peers: Peers, outcome: SupervisedOutcome) -> SupervisedOutcome:
    """All ranks' verdict, with the last words of the rank whose trouble it was."""
    words = "\n".join(outcome.stderr.get(0, "").strip().splitlines()[-5:])
    verdict = peers.settle("end", outcome.verdict)
    answers = peers.gather("words", {"stderr": words}, 5.0) if not verdict.ok else {}
    stderr = {rank: one["stderr"] for rank, one in answers.items()}
    return replace(outcome, verdict=verdict, stderr=stderr)


def check(task: Task) -> None:
    """Raise PlanError or InputError with every reason not to start."""
    if task.rank >= task.plan.num_devices:
        problem = f"{task.rank} is none of the plan's {task.plan.num_devices} ranks"
        raise InputError(Fault(place="--rank", problem=problem, remedy=f"0 to {task.plan.num_devices - 1}"))
    inputs = task.model, task.plan, task.stack, task.mode
    if faults := [*unplayable(*inputs), *engine_faults(*inputs)]:
        raise PlanError(faults)
    if older := [*release_faults(task.plan, installed(), task.mode)]:
        raise InputError(older)
    if task.mode == "fake":
        return
    launch = Launch.of_environment()
    busy = running_jobs(task.num_processes) if task.device == "cuda" else []
    faults = busy or _room_faults(task, launch)
    InputError.raise_for(faults)


def _room_faults(task: Task, launch: Launch) -> list[Fault]:
    """Whether there is a device for each rank that would be started here."""
    needed = task.plan.num_devices if task.mode in ("full", "cpu") else 1
    if task.mode == "full" and launch.outside:
        if launch.size == needed:
            return []
        problem = f"the launcher started {launch.size} ranks, and the plan has {needed}"
        return [Fault(place="WORLD_SIZE", problem=problem, remedy="as many ranks as the plan's degrees multiply to")]
    there, noun = (count_gpus(), "GPUs that torch sees") if task.device == "cuda" else (MAX_CPU_RANKS, "processes here")
    if needed <= there:
        return []
    several = "start it under torchrun on as many as the plan has" if there else "--mode fake needs no GPU"
    return [Fault(place=f"--mode {task.mode}", problem=f"needs {needed} of {there} {noun}", remedy=several)]


# --- starting ranks


def _num_local(task: Task) -> int:
    return 1 if _is_launched(task) else task.num_processes


def _parents_here(task: Task) -> int:
    return Launch.of_environment().local_size if _is_launched(task) else 1


def _is_launched(task: Task) -> bool:
    """Whether this process is one rank of several that a launcher started; other modes start their own."""
    return task.mode == "full" and Launch.of_environment().outside


def _in_a_launched_job(task: Task, outcome: SupervisedOutcome) -> SupervisedOutcome:
    """A launcher ends every rank by SIGTERM when one has failed; and what is rank 0 here has its rank from the launcher."""
    verdict = outcome.verdict
    if not _is_launched(task) or verdict.ok:
        return outcome
    if verdict.kind == "interrupted" and verdict.detail == "SIGTERM":
        detail = "the launcher ended this rank: another one failed, or somebody stopped the job"
        return replace(outcome, verdict=replace(verdict, kind="peer_lost", detail=detail))
    return outcome


def _command(scratch: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "validate.players.rank", str(scratch / "task.json")]


def _environments(task: Task, scratch: Path) -> list[dict[str, str]]:
    common = {"OMP_NUM_THREADS": str(task.threads), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    if task.device == "cpu":
        common |= KEEP_FREED_MEMORY
    launch = Launch.of_environment()
    if _is_launched(task):
        return [{**common, **launch.environment, **launch.gloo_interface}]
    count = _num_local(task)
    common |= {"WORLD_SIZE": str(count), "SHARDWISE_RENDEZVOUS": str(scratch / "rendezvous")}
    if task.device == "cpu":
        common["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _keep_files(scratch: Path, stem: Path | None, outcome: SupervisedOutcome) -> dict[str, str]:
    """Copy what ranks left in their folder to beside the record, under the stem's name."""
    names: dict[str, str] = {}
    for name, beside in FILES.items():
        if stem is None or not outcome.verdict.ok or not (scratch / name).is_file():
            continue
        target = stem.with_name(beside.format(stem.name))
        try:
            shutil.copyfile(scratch / name, target)
        except OSError as exc:
            target.unlink(missing_ok=True)
            names[f"{name} (lost)"] = str(exc.strerror)
            continue
        names[name] = target.name
    return names


# --- the record


def record(
    task: Task,
    outcome: SupervisedOutcome,
    *,
    files: Mapping[str, str] | None = None,
    study: Mapping[str, Any] | None = None,
) -> Record:
    """One line of the results file. `partial`: not every rank reached the end, and what stands here is what was known."""
    results = [{**outcome.partials.get(r, {}), **outcome.results.get(r, {})} for r in range(_num_local(task))]
    first = results[0] if results else {}
    results = (
        first.get("by_rank") or results
    )  # under a launcher every rank has a parent of its own, and the ranks tell rank 0
    results = [{"own_s": own_s(part.get("profile")), **part} for part in results]
    slow = slow_ranks(results) if task.mode in ("full", "cpu") else []
    verdict = outcome.verdict
    return {
        "kind": "run",
        "schema_version": SCHEMA_VERSION,
        "date": dt.datetime.now(dt.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z"),
        "command": task.command,
        "mode": task.mode,
        "device": task.device,
        "notes": [
            *played_otherwise(task.model, task.plan, task.stack, task.mode, task.device),
            *release_notes(task.plan, str((first.get("machine") or {}).get("torch", ""))),
            *package_notes(task.plan, (first.get("machine") or {}).get("packages") or {}),
            *_notes(task, first, slow),
        ],
        "verdict": verdict.kind,
        "partial": not verdict.ok,
        "trouble": None if verdict.ok else _trouble(verdict, outcome),
        "model": task.model.model_dump(mode="json"),
        "plan": task.plan.model_dump(mode="json"),
        "stack": task.stack.model_dump(mode="json", exclude_unset=True),
        "study": dict(study or {}),
        "num_ranks": task.plan.num_devices,
        "rank": task.rank,
        "allocator_settings": allocator_settings() if task.device == "cuda" else "",
        "machine": first.get("machine"),
        "time": times(
            [part.get("step_times_s", []) for part in results],
            first.get("phase_times_s", {}),
            [part.get("reference_times_s", []) for part in results],
        ),
        "memory": first.get("memory") or None,
        "memory_by_rank": [_peak(part) for part in results] if len(results) > 1 else None,
        "memory_by_stage": first.get("memory_by_stage"),
        "slow_ranks": slow,
        "profile": first.get("profile"),
        "files": dict(files or {}),
    }


def _notes(task: Task, first: Mapping[str, Any], slow: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What else is to be known: how much memory there was to take, and for whom the others waited."""
    cap = (first.get("memory") or {}).get("cap_bytes")
    if task.device == "cuda" and task.mode != "fake" and cap:
        share = f"--memory-fraction {task.memory_fraction:g} of what was free"
        yield f"memory: the allocator may take {format_bytes(cap)} ({share})"
    for one in slow:
        where = f" on {one['host']}" if one["host"] else ""
        yield f"rank {one['rank']}{where} is slow: its own part of a step takes {one['ratio']:.2f} x the others'"


def _trouble(verdict: Verdict, outcome: SupervisedOutcome) -> dict[str, Any]:
    lines = outcome.stderr.get(verdict.rank, "").strip().splitlines() if verdict.rank is not None else []
    return {
        "rank": verdict.rank,
        "host": verdict.host,
        "phase": verdict.phase,
        "detail": verdict.detail,
        "stderr": lines[-5:],
    }


def _peak(part: Mapping[str, Any]) -> int | None:
    memory = part.get("memory") or {}
    peak = memory.get("peak_allocated_bytes", memory.get("peak_bytes"))
    return int(peak) if peak is not None else None


def times(
    by_rank: Sequence[Sequence[float]],
    phases: Mapping[str, Sequence[float]],
    references: Sequence[Sequence[float]] = (),
) -> dict[str, Any] | None:
    """Statistics of the steps that all ranks have done; a step takes as long as its slowest rank. None without any.

    phases are rank 0's. references: seconds of the reference product before each step (CPU); the median of the slowest
    rank's is kept. p10_s and p90_s are the spread, standard_error_s that of the median.
    """
    count = min((len(steps) for steps in by_rank), default=0)
    if count == 0:
        return None
    slowest = [max(steps[i] for steps in by_rank) for i in range(count)]
    known = min((len(found) for found in references), default=0)
    pace = [max(found[i] for found in references) for i in range(min(count, known))]
    return {
        **spread(slowest),
        "times_s": slowest,
        **({"reference_s": statistics.median(pace), "reference_times_s": pace} if pace else {}),
        "phases": {name: spread(seconds) for name, seconds in phases.items() if seconds},
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and the standard error of the median: 1.253 σ/√n for a normal distribution."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    sigma = statistics.stdev(ordered) if last else 0.0
    return {
        "median_s": statistics.median(ordered),
        "p10_s": ordered[round(0.1 * last)],
        "p90_s": ordered[round(0.9 * last)],
        "standard_error_s": 1.2533 * sigma / len(ordered) ** 0.5,
    }


# --- the results file


def append(path: Path, entry: Record) -> None:
    """Add one line. If it cannot be written whole, the file is left as it was and OSError says why."""
    data = (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            if file.seekable():
                os.fsync(file.fileno())
        except OSError:
            if path.is_file():
                os.ftruncate(file.fileno(), before)
            raise
