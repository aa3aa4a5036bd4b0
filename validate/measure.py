"""The parent of `calibrate run`: starts the ranks, keeps their deadlines, writes their lines, leaves nothing behind.

It never loads torch. Whatever ends it (Ctrl-C, kill -9, a full disk), the lines written so far are whole lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from simulator.errors import Fault, InputError
from validate.machine import KEEP_FREED_MEMORY, standing_jobs
from validate.phases import phases_of
from validate.samples import machine_id, read_samples, sample_line
from validate.stopwatch import DeviceKind, Setting

START_S = 120.0  # loading torch, joining the group
GRACE_S = 60.0  # beyond a phase's own time: its last item may be long
TERM_S = 2.0  # between asking a process to end and ending it
_LAUNCH_S = 6.0  # of the budget, spent on starting


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked: `minutes` for everything, ranks on this machine, where the lines go."""

    out: Path
    minutes: float
    device: DeviceKind
    num_ranks: int
    threads: int
    resume: bool = False
    tiny: bool = False
    start_s: float = START_S
    grace_s: float = GRACE_S


@dataclass(slots=True)
class Outcome:
    """What came of it. verdict: complete, partial (a phase failed), or interrupted."""

    verdict: str = "complete"
    num_samples: int = 0
    num_failures: int = 0
    problems: list[str] = field(default_factory=list)


class _TroubleError(Exception):
    """A rank died, hung or spoke nonsense; the phase it happened in is skipped."""

    def __init__(self, phase: str, problem: str) -> None:
        super().__init__(problem)
        self.phase, self.problem = phase, problem


def measure(job: Job, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run every phase; a phase that fails is named, kept out, and the rest goes on. Raises InputError before it starts."""
    _refuse(job)
    done, machine = _resumed(job) if job.resume else ((), "")
    outcome = Outcome()
    end_s = time.monotonic() + 60 * job.minutes
    phases = phases_of(job.device, job.num_ranks)
    with job.out.open("ab", buffering=0) as file:
        writer = _Writer(file.fileno(), outcome, machine)
        while phases:
            left = max(3.0, end_s - time.monotonic() - _LAUNCH_S)
            try:
                _attempt(job, phases, left, done, writer, say)
                break
            except _TroubleError as trouble:
                outcome.verdict = "partial"
                outcome.problems.append(f"{trouble.phase or 'start'}: {trouble.problem}")
                writer.line(sample_line(trouble.phase or "start", error=trouble.problem))
                phases = phases[phases.index(trouble.phase) + 1 :] if trouble.phase in phases else ()
            except KeyboardInterrupt:
                outcome.verdict = "interrupted"
                break
            except OSError as exc:
                outcome.verdict = "partial"
                outcome.problems.append(f"{job.out}: {exc.strerror}")
                break
    return outcome


def _refuse(job: Job) -> None:
    faults = standing_jobs() if job.device == "cuda" else []
    if job.out.exists() and job.out.stat().st_size and not job.resume:
        faults.append(Fault(place=str(job.out), problem="holds samples already", remedy="--resume, or another --out"))
    if not job.out.resolve().parent.is_dir():
        faults.append(Fault(place=str(job.out), problem="its folder does not exist", remedy="make it first"))
    if job.minutes <= 0:
        faults.append(Fault(place="--minutes", problem=f"{job.minutes} is not above 0", remedy="8 is enough for a GPU"))
    if faults:
        raise InputError(faults)


def _resumed(job: Job) -> tuple[tuple[str, ...], str]:
    """Keys that every rank has measured, and the machine of the file; a half-written last line is cut off."""
    if not job.out.exists() or not job.out.stat().st_size:
        return (), ""
    with job.out.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
    if b'"time_s"' not in data[:whole]:
        return (), ""
    found = read_samples([job.out])
    ranks: dict[str, set[int]] = {}
    for sample in found.samples:
        ranks.setdefault(sample.key, set()).add(sample.rank)
    every = max(len(have) for have in ranks.values())
    return tuple(sorted(key for key, have in ranks.items() if len(have) == every)), found.machine.id


class _Writer:
    """Appends whole lines; counts what they are; refuses another machine's."""

    def __init__(self, descriptor: int, outcome: Outcome, machine: str) -> None:
        self._descriptor, self._outcome, self._machine = descriptor, outcome, machine

    def line(self, text: str) -> None:
        os.write(self._descriptor, text.encode())
        self._outcome.num_samples += '"time_s"' in text
        self._outcome.num_failures += '"error"' in text

    def machine(self, row: dict[str, object], text: str) -> None:
        identity = machine_id(row)
        if self._machine and identity != self._machine:
            raise _TroubleError("", "the file's samples are of another machine or setting: give another --out")
        self._machine = identity
        self.line(text)


class _Rank:
    """A worker process and its half-read line."""

    def __init__(self, job: Job, setting: Setting) -> None:
        self.rank = setting.rank
        self.rest = b""
        self.done = False
        self.phase = ""
        self.deadline_s = time.monotonic() + job.start_s
        self.process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "validate.bench_worker", json.dumps(asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(job),
            start_new_session=True,
        )

    @property
    def pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def lines(self, data: bytes) -> Iterator[str]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace") + "\n"


def _environment(job: Job) -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[1])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(job.threads)}
    if job.device == "cpu":
        own |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", **KEEP_FREED_MEMORY}
    return {**os.environ, **own}


def _attempt(
    job: Job,
    phases: tuple[str, ...],
    budget_s: float,
    done: tuple[str, ...],
    writer: _Writer,
    say: Callable[[str], None],
) -> None:
    """Start the ranks and play `phases`. Raises _TroubleError naming the phase that failed; no process survives."""
    first = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    local = range(first, first + 1) if "TORCHELASTIC_RUN_ID" in os.environ else range(job.num_ranks)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        setting = Setting(
            device=job.device,
            rank=0,
            num_ranks=job.num_ranks,
            threads=job.threads,
            budget_s=budget_s,
            phases=phases,
            folder=folder,
            out=str(job.out),
            done=done,
            tiny=job.tiny,
        )
        ranks: list[_Rank] = []
        try:
            ranks += [_Rank(job, replace(setting, rank=rank)) for rank in local]
            _listen(job, ranks, writer, say)
        finally:
            end_all(rank.process for rank in ranks)


def _listen(job: Job, ranks: list[_Rank], writer: _Writer, say: Callable[[str], None]) -> None:
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while not all(rank.done for rank in ranks):
            for key, _ in selector.select(timeout=0.2):
                one: _Rank = key.data
                data = os.read(one.pipe, 1 << 16)
                if not data:
                    selector.unregister(one.pipe)
                    if not one.done:
                        raise _TroubleError(one.phase, f"rank {one.rank} died ({_how(one.process)})")
                for line in one.lines(data):
                    _take(job, one, ranks[0], line, writer, say)
            late = [r for r in ranks if not r.done and time.monotonic() > r.deadline_s]
            if late:
                names = ", ".join(str(r.rank) for r in late)
                raise _TroubleError(late[0].phase, f"rank {names} was silent past its deadline")


def _take(job: Job, rank: _Rank, leader: _Rank, line: str, writer: _Writer, say: Callable[[str], None]) -> None:
    try:
        row = json.loads(line)
    except ValueError:
        raise _TroubleError(rank.phase, f"rank {rank.rank} wrote {line[:80]!r}") from None
    kind = row.get("kind")
    if kind == "section":
        rank.phase, rank.done = row["name"], row["state"] == "done"
        rank.deadline_s = time.monotonic() + row["seconds"] + job.grace_s
        if rank is leader and rank.phase:
            say(f"{rank.phase}: {row['seconds']:.0f} s")
            writer.line(line)
    elif kind == "machine":
        if rank is leader:
            writer.machine(row, line)
    else:
        writer.line(line)


def _how(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=1.0)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "its output closed"


def end_all(processes: Iterator[subprocess.Popen[bytes]]) -> None:
    """Ask every process group to end, then end it; returns when none is left."""
    left = list(processes)
    for process in left:
        _signal(process, signal.SIGTERM)
    end_s = time.monotonic() + TERM_S
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.01, end_s - time.monotonic()))
        _signal(process, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the whole group: it outlives its leader where that has children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
