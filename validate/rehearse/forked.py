"""Processes forked from this one, which has loaded torch: they do what a fresh `python -m` would, without its seconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from validate.supervise import processes

_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER (linux/prctl.h): orphans become children of this process
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def adopt_orphans() -> None:
    """From now on whoever is left behind by a job becomes this process's child, and is found by `left_behind`."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def left_behind(patience_s: float = 5.0) -> list[int]:
    """Children that are still alive after a job; they are ended."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return []
    found = [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def fork(
    play: Callable[[], int], environment: Mapping[str, str], files: Mapping[int, int], kept_open: Collection[int] = ()
) -> int:
    """A process in a session of its own that plays and ends with the status. files: its descriptors 0, 1, 2."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        for number, descriptor in files.items():
            os.dup2(descriptor, number)
        _close_all_but({0, 1, 2, *kept_open})
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        gc.freeze()  # what the parent has loaded is never collected, and its pages stay shared
        status = play()
    except BaseException:  # noqa: BLE001  as Python ends a process: it tells why
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(status)


def _leave(status: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _close_all_but(kept_open: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, not paths
        if int(name) not in kept_open:
            with contextlib.suppress(OSError):
                os.close(int(name))


class ForkedPopen:
    """What `validate.supervise` uses of a `subprocess.Popen` of `python -m MODULE ARGUMENTS`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Collection[int] = (),
        **_unused: object,
    ) -> None:
        module, *arguments = command[command.index("-m") + 1 :]
        stdin, self._stdin = os.pipe()
        self._stderr, stderr = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        self.pid = fork(lambda: _run(module, arguments), env, {0: stdin, 1: null, 2: stderr}, pass_fds)
        for descriptor in (stdin, stderr, null):
            os.close(descriptor)
        self.stdin, self.stderr = os.fdopen(self._stdin, "wb", 0), os.fdopen(self._stderr, "rb", 0)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run(module: str, arguments: Sequence[str]) -> int:
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # it runs as the main module now
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def ranks_are_forked() -> None:
    """In this process: what `validate.supervise` starts is forked."""
    stand_in: Any = SimpleNamespace(Popen=ForkedPopen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    setattr(processes, "subprocess", stand_in)  # noqa: B010  of a name that the module does not export
