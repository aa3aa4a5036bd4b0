"""Processes of a run: started each in a session of its own, ended to the last one, and the parent's own signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validate.supervise.verdict import Verdict

MARK = "SHARDWISE_RUN"  # in the environment of every process of a run, so that none is overlooked
TICK_S = 0.05
_HOME = str(Path(__file__).resolve().parents[2])


@dataclass(slots=True, kw_only=True)
class Rank:
    """One process and what is known of it."""

    index: int
    process: subprocess.Popen[bytes]
    report: int
    phase: str = "start"
    since_s: float = 0.0
    own_s: float = 0.0  # what the rank itself said that the phase would take
    pending: bytearray = field(default_factory=bytearray)  # of a line that has not ended
    tail: bytes = b""
    result: dict[str, Any] | None = None
    partial: dict[str, Any] = field(default_factory=dict)
    trouble: Verdict | None = None
    open_pipes: int = 2
    answers: bool = False  # to SIGUSR1, with its stack


class Interrupted(BaseException):
    """The parent was told to stop by a signal other than Ctrl-C's."""


def start(index: int, command: Sequence[str], extra: Mapping[str, str], scratch: Path | None) -> Rank:
    """Start a rank with its pipes; it finds our own modules, then those on the user's path. Raises OSError."""
    reading, writing = os.pipe()
    path = os.pathsep.join(filter(None, [_HOME, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **extra, "SHARDWISE_REPORT_FD": str(writing)}
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
    return Rank(index=index, process=process, report=reading)


def end(ranks: Sequence[Rank], token: str, grace_s: float) -> None:
    """End every process of the run: politely, then not; first the ranks' groups, then whoever still bears the token."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)
                os.killpg(rank.process.pid, signal.SIGCONT)  # a stopped process hears SIGTERM only when it goes on
        for pid in marked(token):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if _gone(ranks, token, patience_s):
            return


def _gone(ranks: Sequence[Rank], token: str, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        if all(rank.process.poll() is not None for rank in ranks) and not marked(token):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(TICK_S)


def marked(token: str) -> list[int]:
    """Ids of living processes whose environment bears the run's token (Linux; elsewhere the groups must do)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def resident_bytes(pid: int) -> int:
    """Memory a process holds; 0 if it is gone or cannot be told."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does."""

    def stop(number: int, _frame: object) -> None:
        raise Interrupted(signal_name(number))

    with _handlers({signal.SIGTERM: stop, signal.SIGHUP: stop}):
        yield


def ignore_sigterm() -> None:
    """To this process's end: a launcher ends all ranks when one has failed, and what they know is written and printed first.

    It kills those that take long.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
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
