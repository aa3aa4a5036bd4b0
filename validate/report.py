"""A rank's side of supervision: what it tells its parent, and its end when the parent is gone."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from validate import faults


class RankReport:
    """Writes the lines that `validate.supervise` reads. Without a parent (no descriptor) they go to stderr."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor if descriptor is not None else 2

    @classmethod
    def to_parent(cls) -> RankReport:
        """The report of a supervised process, which dies with its parent."""
        descriptor = os.environ.get("SHARDWISE_REPORT_FD")
        if descriptor is None:
            return cls()
        threading.Thread(target=_hold_lifeline, daemon=True).start()
        report = cls(int(descriptor))
        if hasattr(faulthandler, "register"):
            with contextlib.suppress(OSError, ValueError):  # a standard error that is no file
                faulthandler.register(signal.SIGUSR1, all_threads=False)
                report._write("answers", True)  # noqa: FBT003  a JSON value
        return report

    def phase(self, name: str, seconds: float | None = None) -> None:
        """A phase begins; its deadline counts from now. seconds: what it plans to take, before the usual deadline."""
        self._write("phase", name if seconds is None else {"name": name, "seconds": seconds})
        faults.meet(name, self.descriptor)

    def sample(self, row: Mapping[str, Any]) -> None:
        """Something measured, to be kept at once."""
        self._write("sample", row)

    def partial(self, **parts: object) -> None:
        """Parts of the result that are known already."""
        self._write("partial", parts)

    def result(self, result: dict[str, Any]) -> None:
        """The end."""
        self._write("result", result)

    def fault(self, kind: str, detail: str) -> None:
        """What went wrong, as far as it is known."""
        self._write("fault", {"kind": kind, "detail": detail})

    def _write(self, key: str, value: object) -> None:
        data = (json.dumps({key: value}, allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self.descriptor, data) :]


def _hold_lifeline() -> None:
    """Standard input closes when the parent ends, however it ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    scratch = os.environ.get("SHARDWISE_SCRATCH")
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


_WORDS = {  # what libraries say -> what it is
    "port_taken": ("eaddrinuse", "address already in use"),
    "storage_full": ("no space left on device", "enospc"),
    "out_of_memory": ("out of memory", "can't allocate memory", "cannot allocate memory"),
    "wrong_world": ("world size", "world_size"),
    "peer_lost": (
        "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed",
        "connection was likely closed", "did not join",
    ),
}  # fmt: skip


def kind_of(error: BaseException) -> str:
    """Which kind of trouble an exception is."""
    if isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "storage_full"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "port_taken"
    if isinstance(error, ModuleNotFoundError):
        return "missing"
    text = f"{type(error).__name__}: {error}".lower()
    return next((kind for kind, words in _WORDS.items() if any(word in text for word in words)), "failed")


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__
