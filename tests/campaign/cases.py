"""One case: a command line in a process of its own, and what is wrong with how it ended."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tests.campaign.seeds import Seed

HANG_S: Final = 10.0  # of the processor
STUCK_S: Final = 60.0  # of the clock, on a machine that may be busy
MOST_BYTES: Final = 2**30
LONGEST: Final = 2_000  # characters of a line of an error
CODES: Final = frozenset({0, 1, 2, 3, 4, 5, 130, 141})
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    status: int
    seconds: float
    cpu_s: float
    peak_bytes: int
    stdout: bytes
    stderr: bytes


def played(case: Seed, folder: Path) -> Ended:
    """Run the case in a fork of this process, which has loaded what commands need, inside an empty folder."""
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    out, err = folder.with_suffix(".out"), folder.with_suffix(".err")
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(case, folder, out, err)
    status, usage = _waited(pid, started)
    seconds = time.monotonic() - started
    return Ended(
        status=status, seconds=seconds, cpu_s=usage.ru_utime + usage.ru_stime, peak_bytes=usage.ru_maxrss * 1024,
        stdout=out.read_bytes(), stderr=err.read_bytes(),
    )  # fmt: skip


def _child(case: Seed, folder: Path, out: Path, err: Path) -> NoReturn:
    from simulator.cli import main

    status = 70
    try:
        os.chdir(folder)
        for path, descriptor in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * HANG_S), int(2 * HANG_S) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, 4 * MOST_BYTES))
        signal.alarm(int(STUCK_S))
        sys.argv = ["shardwise", *case.argv]
        status = main(list(case.argv))
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  what the interpreter would print
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stderr.flush()
        os._exit(int(status))


def _waited(pid: int, started: float) -> tuple[int, resource.struct_rusage]:
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() - started > STUCK_S + 5:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def wrong(case: Seed, ended: Ended, folder: Path) -> str:
    """What is wrong, in one line; empty where nothing is."""
    return next(filter(None, _faults(case, ended, folder)), "")


def _faults(case: Seed, ended: Ended, folder: Path) -> Iterator[str]:
    """Every fault of a case, worst first."""
    error, refused = ended.stderr, ended.status in (2, 3)
    if b"Traceback (most recent call last)" in error:
        yield f"traceback: {_last_line(error)}"
    if ended.cpu_s > HANG_S or ended.status in (-signal.SIGXCPU, -signal.SIGALRM, -signal.SIGKILL):
        yield f"hang: {ended.cpu_s:.0f} s of the processor, {ended.seconds:.0f} s"
    if ended.status not in CODES:
        yield f"exit status {ended.status}"
    if ended.peak_bytes > MOST_BYTES:
        yield f"memory: {ended.peak_bytes / 2**20:.0f} MiB"
    if b"Warning: " in error and b".py:" in error:
        yield f"warning: {_last_line(error)}"
    if refused and not error.strip():
        yield "an error without a word"
    if refused and (longest := max(map(len, error.splitlines()), default=0)) > LONGEST:
        yield f"an error of {longest} bytes in a line"
    if found := _CONTROL.search(error) or _CONTROL.search(ended.stdout):
        yield f"control character {found.group()!r} on the terminal"
    if ended.status in (0, 4) and "--json" in case.argv and "--help" not in case.argv:
        yield _not_json(ended.stdout)
    yield _damaged(case, folder)


def _last_line(error: bytes) -> str:
    lines = [
        line for line in error.decode("utf-8", "replace").splitlines() if line.strip() and not line.startswith(" ")
    ]
    return (lines or ["?"])[-1][:200]


def _not_json(text: bytes) -> str:
    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as exc:
        return f"stdout is not JSON: {str(exc)[:80]}"
    return ""


def _damaged(case: Seed, folder: Path) -> str:
    for name, data in case.files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            return f"{name} was changed"
    return ""
