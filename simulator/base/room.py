"""A limit on a process's addresses (`ulimit -v`): commands end with a line where it leaves too little."""

from __future__ import annotations

import os
import resource
from typing import Final

LEAST_BYTES: Final = 400 * 2**20  # numpy and scipy take 260 MB with one thread


def limit_bytes() -> int:
    """The addresses that this process may have; 0: as many as it likes."""
    return max(0, resource.getrlimit(resource.RLIMIT_AS)[0])


def load_arrays_within() -> bool:
    """Where there is a limit, load numpy and scipy now, on one thread; whether it leaves room for them.

    OpenBLAS takes 32 MiB a thread when it is loaded, and asks for ever where a process cannot have them.
    """
    if limit_bytes():
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit_bytes() >= LEAST_BYTES:
        import scipy.stats  # noqa: F401
    return not 0 < limit_bytes() < LEAST_BYTES
