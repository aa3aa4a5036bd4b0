"""Troubles on purpose, for rehearsals: SHARDWISE_REHEARSE="RANK,PHASE,WHAT;…" makes a rank fail where a phase begins."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

NAME: Final = "SHARDWISE_REHEARSE"
_ROOM_BYTES: Final = 64 * 2**20  # above what the process has: less than what is then asked for
_SLOW_S: Final = 0.02


def meet(phase: str, descriptor: int) -> None:
    """Fail, if this rank is told to in this phase. descriptor: where the rank reports."""
    faults = os.environ.get(NAME)
    for one in faults.split(";") if faults else ():
        rank, where, action = one.split(",")
        if rank.strip() == os.environ.get("RANK", "0") and phase == where:
            FAULTS[action](descriptor)


_corrupt: list[int] = []


def corrupted(tensor: Any) -> Any:  # noqa: ANN401  torch's
    """A result as a broken unit would leave it, one bit of it turned over, where this rank is told to be one."""
    if _corrupt:
        torch = sys.modules["torch"]
        first = tensor.view(-1)[:1].view(torch.uint8)[:1]
        first ^= 4
    return tensor


def _signal(number: signal.Signals) -> Callable[[int], None]:
    return lambda _: os.kill(os.getpid(), number)


def _parent(_: int) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)  # the rank ends with its parent


def _exception(_: int) -> NoReturn:
    raise RuntimeError("rehearsed: a kernel failed")


def _missing(_: int) -> NoReturn:
    raise ModuleNotFoundError("No module named 'rehearsed'")


def _limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _host_memory(_: int) -> None:
    _limit_memory()
    bytearray(16 * _ROOM_BYTES)


def _tensor_memory(_: int) -> None:
    _limit_memory()
    sys.modules["torch"].empty(16 * _ROOM_BYTES)


def _loop(_: int) -> NoReturn:
    while True:
        pass


def _disk(_: int) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"rehearsed")


def _port(_: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(first.getsockname())


def _slow(_: int) -> None:
    """The main thread sleeps most of the time from now on, wherever it is."""

    def sleep(*_: object) -> None:
        time.sleep(_SLOW_S)
        signal.setitimer(signal.ITIMER_REAL, _SLOW_S / 4)

    signal.signal(signal.SIGALRM, sleep)
    signal.setitimer(signal.ITIMER_REAL, _SLOW_S / 4)


FAULTS: Final[Mapping[str, Callable[[int], object]]] = {
    "kill": _signal(signal.SIGKILL),
    "segfault": _signal(signal.SIGSEGV),
    "abort": _signal(signal.SIGABRT),
    "stop": _signal(signal.SIGSTOP),
    "parent": _parent,
    "exit": lambda _: os._exit(7),
    "quit": lambda _: os._exit(0),
    "exception": _exception,
    "missing": _missing,
    "host_memory": _host_memory,
    "tensor_memory": _tensor_memory,
    "hang": lambda _: time.sleep(3600),
    "loop": _loop,
    "disk": _disk,
    "port": _port,
    "garbage": lambda descriptor: os.write(descriptor, b"rehearsed\n"),
    "slow": _slow,
    "corrupt": _corrupt.append,
}
