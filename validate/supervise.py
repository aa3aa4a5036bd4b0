"""The parent that keeps deadlines: it starts ranks, listens to them, and leaves no process and no file behind.

A rank is a process in a session of its own. It reports by JSON lines on an inherited pipe: `{"phase": name}` when a
phase begins, `{"partial": {...}}` for what is already known, `{"result": {...}}` at the end, `{"fault": {...}}` if it
knows what went wrong. Its standard input is a lifeline: it ends when the parent does (`validate.players.rank`).
No torch in here: what is supervised may be anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal[
    "ok", "interrupted", "killed", "out_of_memory", "storage_full", "port_taken", "wrong_world", "bad_plan",
    "device_busy", "missing", "bad_report", "failed", "no_result", "hung", "peer_lost",
]  # fmt: skip
# Which of several ranks' troubles is told: the cause rather than its echo in the others.
_PRIORITY: tuple[Kind, ...] = (
    "killed", "out_of_memory", "storage_full", "port_taken", "wrong_world", "bad_plan", "device_busy", "missing",
    "bad_report", "failed", "no_result", "hung", "peer_lost",
)  # fmt: skip
TOKEN = "SHARDWISE_RUN"  # marks every process of a run, so that none is overlooked
MAX_LINE_BYTES = 8 * 2**20
_TAIL_BYTES = 16 * 2**10
_TICK_S = 0.05
_MEMORY_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds a rank may spend in a phase, by the phase's first word; `other_s` for the rest. total_s: for the run.

    settle_s: after the first trouble, for the other ranks to say theirs. grace_s: between SIGTERM and SIGKILL.
    """

    by_phase_s: Mapping[str, float] = field(default_factory=dict)
    other_s: float = 120.0
    total_s: float = 480.0
    settle_s: float = 1.0
    grace_s: float = 3.0

    def of(self, phase: str) -> float:
        return self.by_phase_s.get(phase.split(" ", maxsplit=1)[0], self.other_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a run. rank: whose trouble it was; None where it was nobody's."""

    kind: Kind
    detail: str = ""
    rank: int | None = None
    phase: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else ""
        where = f"in phase {self.phase!r}" if self.phase else ""
        place = " ".join(part for part in (who, where) if part)
        return f"{self.kind}{f' ({place})' if place else ''}{f': {self.detail}' if self.detail else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run's verdict and what its ranks reported until then: results by rank, and parts of results where none came."""

    verdict: Verdict
    results: Mapping[int, dict[str, Any]]
    partials: Mapping[int, dict[str, Any]]
    stderr: Mapping[int, str]


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One process and what is known of it."""

    index: int
    process: subprocess.Popen[bytes]
    report: int
    phase: str = "start"
    since_s: float = 0.0
    pending: bytes = b""
    tail: bytes = b""
    result: dict[str, Any] | None = None
    partial: dict[str, Any] = field(default_factory=dict)
    trouble: Verdict | None = None
    open_pipes: int = 2


class Interrupted(BaseException):
    """The parent was told to stop by a signal other than Ctrl-C's."""


def supervise(
    commands: Sequence[Sequence[str]],
    deadlines: Deadlines,
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    scratch: Path | None = None,
    memory_bytes: int | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Outcome:
    """Run one process a command to the end, or to the first trouble; nothing of them is left when this returns.

    environments: added to this process's, one a command. scratch: the ranks' folder (TMPDIR), the caller's to remove.
    memory_bytes: what all ranks together may hold resident; more ends the run before the machine suffers.
    progress(rank, phase) is called as phases begin.
    """
    token = uuid.uuid4().hex
    ranks: list[_Rank] = []
    watch = _Watch(ranks, deadlines, memory_bytes, progress)
    try:
        with _stop_signals():
            for index, command in enumerate(commands):
                extra = environments[index] if environments is not None else {}
                try:
                    ranks.append(_start(index, command, {**extra, TOKEN: token}, scratch))
                except OSError as exc:
                    watch.trouble = Verdict(kind="missing", detail=f"{command[0]}: {exc.strerror}", rank=index)
                    break
            verdict = watch.trouble or watch.run()
    except KeyboardInterrupt:
        verdict = Verdict(kind="interrupted", detail="Ctrl-C")
    except Interrupted as exc:
        verdict = Verdict(kind="interrupted", detail=str(exc))
    finally:
        with _deaf():
            _end(ranks, token, deadlines.grace_s)
            watch.drain()
    return Outcome(
        verdict=verdict,
        results={rank.index: rank.result for rank in ranks if rank.result is not None},
        partials={rank.index: rank.partial for rank in ranks if rank.partial},
        stderr={rank.index: rank.tail.decode(errors="replace") for rank in ranks},
    )


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-"))
    try:
        yield folder
    finally:
        with _deaf():
            shutil.rmtree(folder, ignore_errors=True)


# --- listening


class _Watch:
    """Reads what ranks report until all are done, one is in trouble, or time is up."""

    def __init__(
        self,
        ranks: list[_Rank],
        deadlines: Deadlines,
        memory_bytes: int | None,
        progress: Callable[[int, str], None] | None,
    ) -> None:
        self.ranks, self.deadlines, self.memory_bytes, self.progress = ranks, deadlines, memory_bytes, progress
        self.trouble: Verdict | None = None
        self.selector = selectors.DefaultSelector()
        self._next_memory_s = 0.0

    def run(self) -> Verdict:
        started = time.monotonic()
        for rank in self.ranks:
            self._listen(rank, started)
        until = started + self.deadlines.total_s
        settling = False
        while any(rank.open_pipes or rank.process.poll() is None for rank in self.ranks):
            now = time.monotonic()
            if now >= until:
                break
            self._read(min(_TICK_S, until - now))
            self._check(now)
            if not settling and any(rank.trouble for rank in self.ranks):
                settling, until = True, min(until, now + self.deadlines.settle_s)
        return self._verdict(timed_out=not settling and time.monotonic() >= until)

    def _listen(self, rank: _Rank, now: float) -> None:
        rank.since_s = now
        assert rank.process.stderr is not None
        for descriptor in (rank.report, rank.process.stderr.fileno()):
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ, rank)

    def _read(self, timeout_s: float) -> None:
        if not self.selector.get_map():
            time.sleep(timeout_s)
        for key, _ in self.selector.select(timeout_s):
            self._take(key.fd, key.data)

    def _take(self, descriptor: int, rank: _Rank) -> bool:
        """Read once; whether there may be more."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.selector.unregister(descriptor)
            rank.open_pipes -= 1
        elif descriptor == rank.report:
            self._lines(rank, data)
        else:
            rank.tail = (rank.tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def drain(self) -> None:
        """Read what dead ranks left in their pipes, and close everything."""
        for key in list(self.selector.get_map().values()):
            for _ in range(2 * MAX_LINE_BYTES // 65536):
                if not self._take(key.fd, key.data):
                    break
        self.selector.close()
        for rank in self.ranks:
            os.close(rank.report)
            for pipe in (rank.process.stdin, rank.process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _lines(self, rank: _Rank, data: bytes) -> None:
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        for line in lines:
            self._line(rank, line)
        if len(rank.pending) > MAX_LINE_BYTES:
            rank.pending = b""
            self._blame(rank, "bad_report", f"a line of more than {MAX_LINE_BYTES} bytes")

    def _line(self, rank: _Rank, line: bytes) -> None:
        try:
            message = json.loads(line, parse_constant=_refuse)
            ((key, value),) = message.items()
        except (ValueError, AttributeError, RecursionError):
            self._blame(rank, "bad_report", f"not a report: {line[:80]!r}")
            return
        if key == "phase" and isinstance(value, str):
            rank.phase, rank.since_s = value, time.monotonic()
            if self.progress is not None:
                self.progress(rank.index, value)
        elif key == "partial" and isinstance(value, dict):
            rank.partial |= value
        elif key == "result" and isinstance(value, dict) and rank.result is None:
            rank.result = value
        elif key == "fault" and isinstance(value, dict) and value.get("kind") in _PRIORITY:
            self._blame(rank, value["kind"], str(value.get("detail", "")))
        else:
            self._blame(rank, "bad_report", f"not a report: {line[:80]!r}")

    # --- judging

    def _blame(self, rank: _Rank, kind: Kind, detail: str) -> None:
        if rank.trouble is None:
            rank.trouble = Verdict(kind=kind, detail=detail, rank=rank.index, phase=rank.phase)

    def _check(self, now: float) -> None:
        for rank in self.ranks:
            status = rank.process.poll()
            if status is None:
                if now - rank.since_s > self.deadlines.of(rank.phase):
                    self._blame(rank, "hung", f"nothing for {self.deadlines.of(rank.phase):g} s")
            elif status < 0:
                self._blame(rank, "killed", f"by {_signal_name(-status)}{_who_kills(-status)}")
            elif rank.open_pipes == 0 or status != 0:
                self._ended(rank, status)
        if self.memory_bytes is not None and now >= self._next_memory_s:
            self._next_memory_s = now + _MEMORY_EVERY_S
            self._check_memory(self.memory_bytes)

    def _ended(self, rank: _Rank, status: int) -> None:
        while rank.trouble is None and self._take_report(rank):  # a fault may still lie in the pipe
            pass
        if status:
            self._blame(rank, "failed", f"exit status {status}{_last_line(rank.tail)}")
        elif rank.result is None:
            self._blame(rank, "no_result", "ended without a result")

    def _take_report(self, rank: _Rank) -> bool:
        return rank.report in self.selector.get_map() and self._take(rank.report, rank)

    def _check_memory(self, limit: int) -> None:
        held = {rank.index: resident_bytes(rank.process.pid) for rank in self.ranks}
        if sum(held.values()) > limit:
            largest = max(self.ranks, key=lambda rank: held[rank.index])
            self._blame(largest, "out_of_memory", f"the ranks hold {sum(held.values())} of {limit} bytes allowed")

    def _verdict(self, *, timed_out: bool) -> Verdict:
        troubles = [rank.trouble for rank in self.ranks if rank.trouble is not None]
        if troubles:
            return min(troubles, key=lambda trouble: _PRIORITY.index(trouble.kind))
        if timed_out:
            slowest = min(self.ranks, key=lambda rank: (rank.result is not None, rank.since_s))
            detail = f"the run took more than {self.deadlines.total_s:g} s"
            return Verdict(kind="hung", detail=detail, rank=slowest.index, phase=slowest.phase)
        return Verdict(kind="ok")


def _refuse(name: str) -> float:
    msg = f"{name} is no number"
    raise ValueError(msg)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _who_kills(number: int) -> str:
    return " (by hand, or the machine ran out of memory)" if number == signal.SIGKILL else ""


def _last_line(tail: bytes) -> str:
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""


# --- starting and ending


def _start(index: int, command: Sequence[str], extra: Mapping[str, str], scratch: Path | None) -> _Rank:
    reading, writing = os.pipe()
    environment = {**os.environ, **extra, "SHARDWISE_REPORT_FD": str(writing)}
    if scratch is not None:
        environment |= {"TMPDIR": str(scratch), "SHARDWISE_SCRATCH": str(scratch)}
    try:
        process = subprocess.Popen(  # noqa: S603  the caller's own command
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=(writing,),
            start_new_session=True,
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return _Rank(index=index, process=process, report=reading)


def _end(ranks: Sequence[_Rank], token: str, grace_s: float) -> None:
    """End every process of the run: politely, then not; first the ranks' groups, then whoever still bears the token."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)
        for pid in marked(token):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if _gone(ranks, token, patience_s):
            return


def _gone(ranks: Sequence[_Rank], token: str, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        if all(rank.process.poll() is not None for rank in ranks) and not marked(token):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(_TICK_S)


def marked(token: str) -> list[int]:
    """Ids of living processes whose environment bears the run's token (Linux; elsewhere the groups must do)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def resident_bytes(pid: int) -> int:
    """Memory a process holds; 0 if it is gone or cannot be told."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- signals of the parent


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does."""

    def stop(number: int, _frame: object) -> None:
        raise Interrupted(_signal_name(number))

    with _handlers({signal.SIGTERM: stop, signal.SIGHUP: stop}):
        yield


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Cleaning up takes bounded time and is not to be interrupted."""
    with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def _handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
