"""A limit on a process's addresses (`ulimit -v`): commands end with a line where it leaves too little."""

from __future__ import annotations

import os
import resource
from typing import Final

LEAST_BYTES: Final = 400 * 2**20  # numpy and scipy take 260 MB with one thread


def limit_bytes() -> int | None:
    """The addresses that this process may have; None: as many as it likes."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def load_arrays_within() -> bool:
    """Where there is a limit, load numpy and scipy now, on one thread; whether it leaves room for them.

    OpenBLAS takes 32 MiB a thread when it is loaded, and asks for ever where a process cannot have them.
    """
    limit = limit_bytes()
    if limit is None:
        return True
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if limit >= LEAST_BYTES:
        import scipy.optimize
        import scipy.stats  # noqa: F401
    return limit >= LEAST_BYTES
