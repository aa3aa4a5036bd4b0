"""Limits on a process's addresses (`ulimit -v`) and a user's processes (`-u`): commands end with a line where they leave too little."""

from __future__ import annotations

import errno
import os
import resource
import threading
from typing import Final

LEAST_BYTES: Final = 400 * 2**20  # numpy and scipy take 260 MB with one thread


def limit_bytes() -> int:
    """The addresses that this process may have; 0: as many as it likes."""
    return max(0, resource.getrlimit(resource.RLIMIT_AS)[0])


def few_threads() -> bool:
    """The user may have so few processes and threads that OpenBLAS, with one a core, may not get its own: it ends the process then."""
    return 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < 1 << 14


def must_start(count: int, what: str) -> None:
    """Raises OSError where so many threads or processes cannot be started: a pool that lacks one waits for ever."""
    enough, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count if few_threads() else 0):
            started.append(threading.Thread(target=enough.wait))
            started[-1].start()
    except RuntimeError:
        problem = f"{len(started) - 1} more processes and threads may be started (ulimit -u), and {what} take {count}"
        raise OSError(errno.EAGAIN, problem) from None
    finally:
        enough.set()


def load_arrays_within() -> bool:
    """Where there is a limit, load numpy and scipy now, on one thread; whether it leaves room for them.

    OpenBLAS takes 32 MiB a thread when it is loaded, and asks for ever where a process cannot have them.
    """
    if limit_bytes() or few_threads():
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit_bytes() >= LEAST_BYTES:
        import scipy.stats  # noqa: F401
    return not 0 < limit_bytes() < LEAST_BYTES
