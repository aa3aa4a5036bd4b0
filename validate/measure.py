"""The parent of `calibrate run`: starts the ranks under `validate.supervise`, writes what they measure, goes on after trouble.

It never loads torch. Whatever ends it (Ctrl-C, kill -9, a full disk), the lines written so far are whole lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

from simulator.base.errors import Fault, InputError
from validate.joined import joined
from validate.launch import LOOPBACK, Launch
from validate.machine import KEEP_FREED_MEMORY, memory_limit, running_jobs
from validate.phases import phases_of
from validate.samples import machine_id, read_samples, sample_line
from validate.stopwatch import MEMORY_SHARE, DeviceKind, SessionSettings, WrongResultError
from validate.supervise import Deadlines, Peers, Verdict, scratch_folder, supervise

START_S: Final = 120.0  # loading torch, joining the group
GRACE_S: Final = 45.0  # beyond a phase's own time: its last item may be long
LATE_S: Final = 60.0  # past the end: no phase is begun again after this
_LEAST_S: Final = 3.0  # a budget shorter than this measures one item a phase
_LEAST_SHARE: Final = 0.75  # of what is left: measured even where starting took more than the rest
_END_S: Final = 4.0  # of the budget, kept for the last item and for ending

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked: `minutes` for everything, ranks on this machine, where the lines go.

    patience: a factor on every deadline. memory_fraction: of what is free, the most to take.
    """

    out: Path
    minutes: float
    device: DeviceKind
    num_ranks: int
    threads: int
    resume: bool = False
    tiny: bool = False
    start_s: float = START_S
    grace_s: float = GRACE_S
    patience: float = 1.0
    memory_fraction: float = MEMORY_SHARE
    command: str = "shardwise calibrate run"
    only: tuple[str, ...] = ()  # phases; all where it is empty


@dataclass(slots=True)
class MeasureOutcome:
    """What came of it. verdict: complete, partial (a phase failed), or interrupted."""

    verdict: str = "complete"
    num_samples: int = 0
    num_failures: int = 0
    problems: list[str] = field(default_factory=list)


def measure(job: Job, print_line: PrintLine = lambda _: None) -> MeasureOutcome:
    """Run every phase; a phase that fails is named, kept out, and the rest goes on.

    Raises InputError before it starts, or where the file to resume turns out to be another machine's.
    """
    refusal, done, machine = _checked(job)
    outcome = MeasureOutcome()
    try:
        with joined(refusal, patience=job.patience) as peers, job.out.open("ab", buffering=0) as file:
            _play(job, done, _Writer(job.out, file, outcome, machine, print_line), outcome, peers)
    except OSError as exc:
        outcome.verdict = "partial"
        outcome.problems.append(f"{job.out}: {exc.strerror}")
    return outcome


def _play(job: Job, done: tuple[str, ...], writer: _Writer, outcome: MeasureOutcome, peers: Peers | None) -> None:
    """Attempts, until every phase is done or lost. Ranks of a launcher decide together, or some would wait for ever."""
    end_s = time.monotonic() + 60 * job.minutes
    phases, attempt = phases_of(job.device, job.num_ranks, job.only), 0
    while phases:
        try:
            verdict = _attempt(job, phases, end_s, done, writer, attempt, peers)
        except OSError as exc:
            if peers is None:
                raise
            verdict = peers.own(Verdict(kind="storage_full", detail=f"{job.out}: {exc.strerror}"))
        late = time.monotonic() > end_s + LATE_S
        if peers is not None:
            verdict = peers.settle(f"attempt {attempt}", verdict)
            late = any(answer["late"] for answer in peers.gather(f"late {attempt}", {"late": late}).values())
            peers.forget()
        phases, attempt = _after(verdict, phases, outcome, writer), attempt + 1
        if phases and late:
            outcome.problems.append(f"{', '.join(phases)}: no time left")
            return


def _checked(job: Job) -> tuple[InputError | None, tuple[str, ...], str]:
    """Why not to start; else what an interrupted run has measured, and of which machine."""
    faults = running_jobs(job.num_ranks) if job.device == "cuda" else []
    if job.out.exists() and job.out.stat().st_size and not job.resume:
        faults.append(Fault(place=str(job.out), problem="holds samples already", remedy="--resume, or another --out"))
    if not Path(os.path.realpath(job.out)).parent.is_dir():
        faults.append(Fault(place=str(job.out), problem="its folder does not exist", remedy="make it first"))
    if not phases_of(job.device, job.num_ranks, job.only):
        there = ", ".join(phases_of(job.device, job.num_ranks))
        faults.append(Fault(place="--only", problem=f"{', '.join(job.only)} is not measured here", remedy=there))
    if job.minutes <= 0:
        faults.append(Fault(place="--minutes", problem=f"{job.minutes} is not above 0", remedy="8 is enough for a GPU"))
    try:
        done, machine = _resumed(job) if job.resume and not faults else ((), "")
    except InputError as exc:
        return exc, (), ""
    return InputError(faults) if faults else None, done, machine


def _resumed(job: Job) -> tuple[tuple[str, ...], str]:
    """Keys that every rank has measured, and the machine of the file; a half-written last line is cut off."""
    if not job.out.exists() or not job.out.stat().st_size:
        return (), ""
    with job.out.open("rb+") as file:
        data = file.read()
        complete_bytes = data.rfind(b"\n") + 1
        if complete_bytes < len(data):
            file.truncate(complete_bytes)
    if b'"time_s"' not in data[:complete_bytes]:
        return (), ""
    found = read_samples([job.out])
    ranks: dict[str, set[int]] = {}
    for sample in found.samples:
        ranks.setdefault(sample.key, set()).add(sample.rank)
    every = max(len(have) for have in ranks.values())
    return tuple(sorted(key for key, have in ranks.items() if len(have) == every)), found.machine.id


def _after(verdict: Verdict, phases: tuple[str, ...], outcome: MeasureOutcome, writer: _Writer) -> tuple[str, ...]:
    """The phases that are still to be played; trouble is told, and written as a line."""
    if verdict.ok:
        return ()
    if verdict.kind == "interrupted":
        outcome.verdict = "interrupted"
        return ()
    if not verdict.phase:  # no rank's trouble in a phase: a disk is full, or a rank and its parent are gone
        outcome.verdict = "partial"
        outcome.problems.append(str(verdict))
        return ()
    where = verdict.phase if verdict.phase in phases else "start"
    problem = str(replace(verdict, phase=""))
    outcome.verdict = "partial"
    outcome.problems.append(f"{where}: {problem}")
    writer.line(sample_line(where, error=problem))
    return phases[phases.index(where) + 1 :] if where in phases else ()


class _Writer:
    """Appends whole lines; counts what they are; refuses another machine's."""

    def __init__(
        self, path: Path, file: IO[bytes], outcome: MeasureOutcome, machine: str, print_line: PrintLine
    ) -> None:
        self._path, self._file, self._outcome, self._machine, self._print_line = (
            path,
            file,
            outcome,
            machine,
            print_line,
        )
        self._early: list[
            str
        ] = []  # lines of ranks that were quicker than the first one: the machine stands above them

    def line(self, text: str) -> None:
        """Add a line, or raise OSError and leave the file as it was."""
        data, before = text.encode(), os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            if self._path.is_file():  # a device that is always full cannot be cut
                os.ftruncate(self._file.fileno(), before)
            raise
        self._outcome.num_samples += '"time_s"' in text
        self._outcome.num_failures += '"error"' in text

    def take(self, index: int, row: Mapping[str, Any]) -> None:
        """A rank's line. The machine and where phases begin are told by the first rank alone."""
        kind, text = row.get("kind"), json.dumps(row, allow_nan=False) + "\n"
        if kind == "machine" and index == 0:
            self._check(machine_id(row))
            self._print_line(
                f"at most {row['memory_cap_bytes'] / 1e9:.1f} GB of memory a rank"
            ) if "memory_cap_bytes" in row else None
            self.line(text)
        begins = kind == "section" and row.get("state", "begins") == "begins"
        if begins and index == 0:
            self._print_line(f"{row['name']}: {row['seconds']:.0f} s")
        if kind != "machine" and not (begins and index):
            self._early.append(text)
        if str(row.get("error", "")).startswith(WrongResultError.__name__):
            self._outcome.verdict = "partial"
            self._outcome.problems.append(f"{kind} {row.get('op')}, rank {row.get('rank')}: {row['error']}")
        while self._machine and self._early:
            self.line(self._early.pop(0))

    def _check(self, identity: str) -> None:
        if self._machine and identity != self._machine:
            problem = "its samples are of another machine or setting"
            raise InputError(Fault(place=str(self._path), problem=problem, remedy="another --out"))
        self._machine = identity


def _attempt(
    job: Job,
    phases: tuple[str, ...],
    end_s: float,
    done: tuple[str, ...],
    writer: _Writer,
    attempt: int,
    peers: Peers | None,
) -> Verdict:
    """Start the ranks and play `phases` until all are done or one is in trouble; no process survives."""
    launch = Launch.of_environment()
    ranks = (launch.rank,) if launch.outside else range(job.num_ranks)
    start_s, grace_s = job.patience * job.start_s, job.patience * job.grace_s
    total_s = start_s + max(0.0, end_s - time.monotonic()) + len(phases) * grace_s
    limits = Deadlines(by_phase_s={"start": start_s}, other_s=grace_s, total_s=total_s)
    with scratch_folder() as scratch:
        setting = SessionSettings(
            device=job.device,
            rank=0,
            num_ranks=job.num_ranks,
            threads=job.threads,
            until_s=end_s - _END_S,
            least_s=max(_LEAST_S, _LEAST_SHARE * (end_s - time.monotonic())),
            phases=phases,
            folder=str(scratch),
            out=str(job.out),
            done=done,
            tiny=job.tiny,
            command=job.command,
            memory_fraction=job.memory_fraction,
            attempt=attempt,
            join_s=start_s,
        )
        commands = [_command(scratch, replace(setting, rank=rank)) for rank in ranks]
        outcome = supervise(
            commands,
            limits,
            environments=[environment(job.device, job.threads) | {"RANK": str(rank)} for rank in ranks],
            scratch=scratch,
            memory_bytes=memory_limit(job.memory_fraction, launch.local_size) if job.device == "cpu" else None,
            samples=writer.take,
            peers=peers,
        )
    verdict = outcome.verdict
    alone = launch.outside and peers is None and verdict.rank is not None
    return replace(verdict, rank=launch.rank) if alone else verdict


def _command(scratch: Path, setting: SessionSettings) -> list[str]:
    """The setting travels in a file: what an interrupted run has done may be more than a command line holds."""
    path = scratch / f"setting-{setting.rank}.json"
    path.write_text(json.dumps(asdict(setting)), encoding="utf-8")
    return [sys.executable, "-P", "-m", "validate.benches.worker", str(path)]


def environment(device: DeviceKind, threads: int) -> dict[str, str]:
    """What a rank that measures is started with, beside what this process has."""
    own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
    launch = Launch.of_environment()
    if launch.outside:
        own |= {**launch.environment, **launch.gloo_interface}
    elif device == "cpu":
        own["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return own | ({"CUDA_VISIBLE_DEVICES": "", **KEEP_FREED_MEMORY} if device == "cpu" else {})
